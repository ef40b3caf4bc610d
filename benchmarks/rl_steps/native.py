"""Isobit's whole step on one card, as ``isobit train`` does it: engine and trainer take turns in
its memory, and share the weights.

Before the timed step: an update over made-up completions of full length, in micro-batches of every
size that the timed one has, so that the moments are there and every kernel is compiled; and
rollouts of a few tokens, at both ends of a sequence, since decoding behind many tokens is another
kernel.  That the engine makes its KV cache and captures its graphs again after the trainer's turn
is part of the rollout, as in a run; that the moments come from the host and go back, where they do,
of the training phase. Rewards are random.  In an exact flow the recorded log-probabilities are the
old ones, so there is no second forward; the trainer compares each of them with its own.

With a reference model, whose weights are random too, and others than the policy's, every completion
is also scored by it before the update, and a KL term joins the loss.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch

from benchmarks.comparison.card import measure_card
from benchmarks.comparison.device import allocate_in_pages, card_planner
from benchmarks.comparison.native import native_versions
from benchmarks.comparison.rows import Row, RowWriter
from benchmarks.passes.phases import Phases
from benchmarks.passes.timing import measured
from benchmarks.rl_steps.cases import CASES, WARM_UP_TOKENS, Case
from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import GrpoConfig
from isobit.config.tables import PrecisionConfig, RolloutConfig, TrainingConfig
from isobit.memory.activations import FrozenModel
from isobit.memory.turns import DeviceTurns
from isobit.models.config import ModelConfig, model_shape
from isobit.models.decoder import decoder_shape
from isobit.models.frozen import FrozenPolicy
from isobit.models.function import is_one_function
from isobit.models.policy import Policy, random_masters, random_policy
from isobit.parallel.world import ALONE, World
from isobit.precision.flow import build_flow
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt, SamplingParams
from isobit.rollout.engine import Request
from isobit.rollout.native import NativeEngine
from isobit.rollout.shared import generate_shared
from isobit.training.judge import Judge
from isobit.training.step import Learner, StepMetrics
from isobit.training.trainer import Trainer

LEARNING_RATE = 5e-5
"""Far above what a run takes: a step then changes several percent of the random weights' E4M3
bytes.
"""
ROLLOUT = RolloutConfig(max_sequences=256, max_batched_tokens=16384)
KL_COEFFICIENT = 1e-3
ReferencePlace = Literal["none", "resident", "offload"]
"""Where the weights of a reference model are: there is none; on the card; in main memory except
while they score.
"""
_MADE_UP_LOG_PROB = -12.0


def run_native(
    mode: str,
    shape: str,
    names: Sequence[str],
    settings: dict[str, Any],
    out: Path,
    reference: ReferencePlace = "none",
) -> None:
    """One timed step of each case; ``settings`` are keys of ``training`` beside those that the
    benchmark fixes.
    """
    writer = RowWriter(out, "native", mode, shape, measure_card(), native_versions())
    longest = max(CASES[name].length for name in names)
    loop = Loop(mode, model_shape(shape), settings, longest, reference=reference)
    for name in names:
        row = measured(lambda name=name: loop.time(CASES[name]))
        writer.write(kind="rl", part="whole", case=name, reference=reference, **settings, **row)


def requests_of(case: Case, vocab_size: int, visit: int) -> list[Request]:
    """What a step asks an engine for."""
    sampling = SamplingParams(max_new_tokens=case.new_tokens)
    return [
        Request(Prompt(f"bench/{i}", "", tuple(ids)), visit, case.samples, sampling)
        for i, ids in enumerate(case.random_prompts(vocab_size))
    ]


class Loop:
    """A policy, its engine and its trainer, for sequences of at most ``longest`` tokens."""

    def __init__(
        self,
        mode: str,
        shape: ModelConfig,
        settings: dict[str, Any],
        longest: int,
        device: str = "cuda",
        reference: ReferencePlace = "none",
        world: World = ALONE,
    ) -> None:
        precision = PrecisionConfig.model_validate(mode)
        flow, offload = build_flow(precision, decoder_shape(shape)), reference == "offload"
        frozen = FrozenModel("reference model", shape, flow, "reference", offload)
        training = TrainingConfig.model_validate(
            {"moments": "bf16", "learning_rate": LEARNING_RATE, **settings}
        )
        rollout, plan = ROLLOUT, None
        if device != "cpu":
            planner = replace(card_planner(shape, mode), processes=world.size)
            if reference != "none":
                planner = replace(planner, frozen=(frozen,))
            plan = planner.plan(rollout, training, longest)
            if world.rank == 0:
                print("\n".join(plan.describe()), flush=True)
            rollout = rollout.model_copy(update={"kv_pages": plan.pages})
            allocate_in_pages()
        own = world.own_device(torch.device(device))
        self._world, self._policy = world, random_policy(shape, precision, 0, own, world=world)
        assert self._policy.flow.exact
        self._engine = NativeEngine(self._policy, rollout, None, seed=0)
        self._phases = Phases(on_gpu=device != "cpu")
        self._trainer = Trainer(self._policy, training, total_updates=1000, timing=self._phases)
        self._turns = None if plan is None else DeviceTurns(plan, self._engine, self._trainer)
        self._learner = Learner(self._judge(precision, reference))
        self._random = Random(0)  # noqa: S311 (no secret)
        self._visit = 0

    def _judge(self, precision: PrecisionConfig, reference: ReferencePlace) -> Judge:
        """GRPO, with a KL term where there is a reference model."""
        policy, frozen = self._policy, None
        if reference != "none":
            masters = random_masters(policy.config, seed=1, device=policy.device)
            frozen = FrozenPolicy.publish(policy.config, precision, masters, policy.device)
        if frozen is not None and reference == "offload":
            frozen.offload()
        config = GrpoConfig(kl_coefficient=0.0 if frozen is None else KL_COEFFICIENT)
        exact = is_one_function(self._engine.function, self._trainer.function)
        longest = self._trainer.config.tokens_per_microbatch
        return Judge(
            self._trainer, build_algorithm(config), config, exact, longest, reference=frozen
        )

    def time(self, case: Case) -> Row:
        """The figures of a row."""
        self.warm_up_training(case)
        self._generate(replace(case, new_tokens=WARM_UP_TOKENS))
        self._generate(Case(1, case.sequences, case.length - WARM_UP_TOKENS, WARM_UP_TOKENS))
        with self._training_turn():  # takes the engine's memory away
            pass
        phases = self._phases
        phases.start()
        with phases("rollout"):
            groups = self._generate(case)
        stats = asdict(self._stats)
        step = self.learn(groups)
        seconds = phases.stop()
        return {
            "seconds": sum(seconds.values()),
            "phases_s": seconds,
            "rollout_tokens_per_s": case.sequences * case.new_tokens / seconds["rollout"],
            "tokens_compared": step.comparison.tokens_compared,
            "tokens_differing": step.comparison.tokens_differing,
            "weight_bytes_changed": step.updates[0].metrics["weight_bytes_changed"],
            "microbatch_tokens_at_the_end": self._trainer.budget.at(self._trainer.updates),
            "memory": {}
            if self._turns is None
            else {name: asdict(memory) for name, memory in self._turns.summary().items()},
            "stats": stats,
        }

    @property
    def policy(self) -> Policy:
        """That learns."""
        return self._policy

    def step(self, case: Case) -> Row:
        """One step, untimed: what it drew and compared."""
        groups = self._generate(case)
        step = self.learn(groups)
        drawn = [one.sequence for group in groups for one in group.completions]
        text = json.dumps([[one.token_ids.tolist(), one.log_probs.tolist()] for one in drawn])
        return {
            "completions": hashlib.sha256(text.encode()).hexdigest(),
            "tokens_compared": step.comparison.tokens_compared,
            "tokens_differing": step.comparison.tokens_differing,
        }

    def _training_turn(self) -> AbstractContextManager[None]:
        return nullcontext() if self._turns is None else self._turns.training(self._phases)

    def warm_up_training(self, case: Case) -> None:
        """An update that leaves moments, and kernels for all sizes of the case."""
        self.learn([self._made_up(case)])

    def learn(self, groups: list[Group]) -> StepMetrics:
        """The trainer's turn of a step."""
        with self._training_turn():
            step = self._learner.learn(groups, step=1)
        assert not step.skip_reasons, step.skip_reasons
        return step

    def _generate(self, case: Case) -> list[Group]:
        self._visit += 1
        requests = requests_of(case, self._policy.config.vocab_size, self._visit)
        drawn = generate_shared(self._world, self._engine, requests)
        completions, self._stats = drawn.completions, drawn.stats
        assert all(
            len(sample.token_ids) == case.new_tokens
            for samples in completions
            for sample in samples
        )
        return [
            self._graded(request.prompt, samples)
            for request, samples in zip(requests, completions, strict=True)
        ]

    def _made_up(self, case: Case) -> Group:
        """Completions of full length for a whole micro-batch and one as large as the last of the
        step.
        """
        whole = max(1, self._trainer.config.tokens_per_microbatch // case.length)
        count = min(case.sequences, whole + (case.sequences % whole or whole))
        vocabulary = range(self._policy.config.vocab_size)
        log_probs = (_MADE_UP_LOG_PROB,) * case.new_tokens
        versions = (self._policy.version,) * case.new_tokens
        prompt = Prompt(
            "made up", "", tuple(self._random.choices(vocabulary, k=case.prompt_tokens))
        )
        answers = [tuple(self._random.choices(vocabulary, k=case.new_tokens)) for _ in range(count)]
        return self._graded(
            prompt,
            [
                Completion(
                    TokenSequence.of_answer(prompt.token_ids, ids, log_probs, versions),
                    "",
                    "length",
                )
                for ids in answers
            ],
        )

    def _graded(self, prompt: Prompt, completions: list[Completion]) -> Group:
        return Group(prompt, self._visit, completions, [self._random.random() for _ in completions])
