"""Whole steps of reinforcement learning for ``benchmarks.end_to_end``: Isobit's, and those of the
baseline, vLLM's rollout and transformers' training, each alone on the card.

Isobit takes turns on one card as ``isobit train`` does: engine and trainer share the weights.  The
warm-up has an update with every size of micro-batch that the timed step has, and rollouts of a few
tokens at both ends of a sequence.  Making the KV cache and capturing graphs again after the
trainer's turn counts as rollout; moments that come from the host count as training.  In an exact
flow the recorded log-probabilities are the old ones, so there is no second forward.  A reference
model with random weights of its own scores every completion before the update.

vLLM samples in BF16 with prefix caching, which is reset between warm-up and timing, and without
log-probabilities, since this baseline computes them again.  To its advantage it keeps 88% of the
card, and neither waking it nor updating its weights is counted.

transformers trains in BF16 on random completions of full length:

    old log-probabilities    a forward over the batch without gradients, since the rollout is
                             another function
    forward, backward        the clipped ratio times the advantage
    optimiser, publish       ``training.PeerOptimiser``

in the fastest setting that fits, found by trying micro-batches with and without recomputation.
``sequences`` measures a part of the batch and scales the three passes.  A small step with every
shape of the timed one comes first, so that cuDNN has its plans and torch its memory.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch

from benchmarks.cases import STEP_CASES, WARM_UP_TOKENS, StepCase, make_requests, precision_of
from benchmarks.common import (
    Row,
    RowWriter,
    allocate_in_pages,
    card_memory_gib,
    card_planner,
    measure_card,
)
from benchmarks.passes import (
    Phases,
    free_memory,
    measured,
    peak_gib,
    transformers_versions,
)
from benchmarks.rollout_engines import (
    native_versions,
    peer_engine,
    peer_seconds,
    peer_versions,
)
from benchmarks.training import PeerModel, PeerOptimiser, fastest_attention
from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import GrpoConfig
from isobit.config.precision import PrecisionConfig
from isobit.config.rollout import RolloutConfig
from isobit.config.training import Recompute, TrainingConfig
from isobit.memory.activations import FrozenModel
from isobit.memory.sharing import DeviceSharing
from isobit.models.config import ModelConfig
from isobit.models.decoder import decoder_shape
from isobit.models.frozen import FrozenPolicy
from isobit.models.function import is_one_function
from isobit.models.policy import Policy, random_masters, random_policy
from isobit.models.shapes import model_shape
from isobit.parallel.world import ALONE, World
from isobit.precision.flow import build_flow
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.rollout.shared import generate_shared
from isobit.training.advantage_estimator import AdvantageEstimator
from isobit.training.step import Learner, StepMetrics
from isobit.training.trainer import Trainer
from isobit.util.errors import ConfigError

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
    speculation: int | None = None,
) -> None:
    """One timed step of each case; ``settings`` are keys of ``training`` beside those that the
    benchmark fixes, and ``speculation`` is that of ``rollout``.
    """
    writer = RowWriter(out, "native", mode, shape, measure_card(), native_versions())
    longest = max(STEP_CASES[name].length for name in names)
    rollout = ROLLOUT.model_copy(update={"speculation": speculation})
    loop = Loop(mode, model_shape(shape), settings, longest, reference=reference, rollout=rollout)
    for name in names:
        row = measured(lambda name=name: loop.time(STEP_CASES[name]))
        told = {"kind": "rl", "part": "whole", "case": name, "reference": reference}
        writer.write(**told, speculation=speculation, **settings, **row)


def requests_of(case: StepCase, vocab_size: int, visit: int) -> list[Request]:
    """The requests of a step."""
    return make_requests(case.random_prompts(vocab_size), case.new_tokens, case.samples, visit)


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
        rollout: RolloutConfig = ROLLOUT,
    ) -> None:
        precision = precision_of(mode)
        flow, offload = build_flow(precision, decoder_shape(shape)), reference == "offload"
        frozen = FrozenModel("reference model", shape, flow, "reference", offload)
        training = TrainingConfig.model_validate(
            {"moments": "bf16", "learning_rate": LEARNING_RATE, **settings}
        )
        plan = None
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
        self._turns = None if plan is None else DeviceSharing(plan, self._engine, self._trainer)
        self._learner = Learner(self._judge(precision, reference))
        self._random = Random(0)  # noqa: S311 (no secret)
        self._visit = 0

    def _judge(self, precision: PrecisionConfig, reference: ReferencePlace) -> AdvantageEstimator:
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
        return AdvantageEstimator(
            self._trainer, build_algorithm(config), config, exact, longest, reference=frozen
        )

    def time(self, case: StepCase) -> Row:
        self.warm_up_training(case)
        self._generate(replace(case, new_tokens=WARM_UP_TOKENS))
        self._generate(StepCase(1, case.sequences, case.length - WARM_UP_TOKENS, WARM_UP_TOKENS))
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
            **_compared(step),
            "weight_bytes_changed": step.updates[0].metrics["weight_bytes_changed"],
            "microbatch_tokens_at_the_end": self._trainer.budget.at(self._trainer.updates),
            "memory": {}
            if self._turns is None
            else {name: asdict(memory) for name, memory in self._turns.summary().items()},
            "stats": stats,
        }

    @property
    def policy(self) -> Policy:
        """The policy that is trained."""
        return self._policy

    def step(self, case: StepCase) -> Row:
        """Run one step without timing it; returns what it drew and compared."""
        groups = self._generate(case)
        step = self.learn(groups)
        drawn = [one.sequence for group in groups for one in group.completions]
        text = json.dumps([[one.token_ids.tolist(), one.log_probs.tolist()] for one in drawn])
        return {"completions": hashlib.sha256(text.encode()).hexdigest(), **_compared(step)}

    def _training_turn(self) -> AbstractContextManager[None]:
        return nullcontext() if self._turns is None else self._turns.training(self._phases)

    def warm_up_training(self, case: StepCase) -> None:
        """An update that leaves moments, and kernels for all sizes of the case."""
        self.learn([self._made_up(case)])

    def learn(self, groups: list[Group]) -> StepMetrics:
        """The trainer's turn of a step."""
        with self._training_turn():
            step = self._learner.learn(groups, step=1)
        assert not step.skip_reasons, step.skip_reasons
        return step

    def _generate(self, case: StepCase) -> list[Group]:
        self._visit += 1
        requests = requests_of(case, self._policy.config.vocab_size, self._visit)
        completions, _, self._stats = generate_shared(self._world, self._engine, requests)
        drawn = [sample for samples in completions for sample in samples]
        assert all(len(sample.token_ids) == case.new_tokens for sample in drawn)
        pairs = zip(requests, completions, strict=True)
        return [self._graded(request.prompt, samples) for request, samples in pairs]

    def _made_up(self, case: StepCase) -> Group:
        """Completions of full length for a whole micro-batch and one as large as the last of the
        step.
        """
        whole = max(1, self._trainer.config.tokens_per_microbatch // case.length)
        count = min(case.sequences, whole + (case.sequences % whole or whole))
        vocabulary = range(self._policy.config.vocab_size)
        log_probs = (_MADE_UP_LOG_PROB,) * case.new_tokens
        versions = (self._policy.version,) * case.new_tokens
        ids = tuple(self._random.choices(vocabulary, k=case.prompt_tokens))
        answers = [tuple(self._random.choices(vocabulary, k=case.new_tokens)) for _ in range(count)]
        sequences = [TokenSequence.of_answer(ids, one, log_probs, versions) for one in answers]
        completions = [Completion(sequence, "", "length") for sequence in sequences]
        return self._graded(Prompt("made up", "", ids), completions)

    def _graded(self, prompt: Prompt, completions: list[Completion]) -> Group:
        return Group(prompt, self._visit, completions, [self._random.random() for _ in completions])


def _compared(step: StepMetrics) -> Row:
    names = ("tokens_compared", "tokens_differing")
    return {name: getattr(step.comparison, name) for name in names}


def run_rollouts(shape: str, names: Sequence[str], out: Path) -> None:
    writer = RowWriter(out, "vllm", "bf16", shape, measure_card(), peer_versions())
    length = max(STEP_CASES[name].length for name in names)
    with peer_engine("bf16", shape, length, enable_prefix_caching=True) as llm:
        for name in names:
            case, seconds = STEP_CASES[name], 0.0
            prompts = case.random_prompts(model_shape(shape).vocab_size)
            for new_tokens in (WARM_UP_TOKENS, case.new_tokens):
                assert llm.reset_prefix_cache(), "vLLM would find the prompts in its cache"
                seconds = peer_seconds(llm, prompts, new_tokens, n=case.samples)
            writer.write(
                kind="rl",
                part="rollout",
                case=name,
                seconds=seconds,
                phases_s={"rollout": seconds},
                rollout_tokens_per_s=case.sequences * case.new_tokens / seconds,
                memory={"rollout": {"peak_gib": card_memory_gib()}},
            )


FORWARD_TOKENS = 16384
"""Tokens of a forward without gradients, approximately."""
SETTINGS: dict[Recompute, tuple[int, ...]] = {"none": (4, 2, 1), "full": (8, 4, 2, 1)}
"""Sequences of a micro-batch that are tried, by recomputation."""
PASSES = ("old_log_probs", "forward", "backward")


@dataclass(frozen=True, slots=True)
class Batch:
    ids: torch.Tensor  # int64 [S, L]
    advantages: torch.Tensor  # float32 [S]
    first: int  # the position that predicts the first token of a completion
    tokens: int  # of all completions of the step: the loss is their mean

    def part(self, sequences: int) -> "Batch":
        return replace(self, ids=self.ids[:sequences], advantages=self.advantages[:sequences])


def run_training(shape: str, names: Sequence[str], sequences: int | None, out: Path) -> None:
    writer = RowWriter(out, "transformers", "bf16", shape, measure_card(), transformers_versions())
    allocate_in_pages()
    trainer = PeerTrainer(model_shape(shape))
    for name in names:
        row = measured(lambda name=name: trainer.time(STEP_CASES[name], sequences))
        writer.write(kind="rl", part="training", case=name, **row)


class PeerTrainer:
    """A model of transformers and its optimiser, whose moments are there."""

    def __init__(self, config: ModelConfig, device: str = "cuda") -> None:
        self._device, self._vocab_size = device, config.vocab_size
        self._peer = PeerModel(config, device)
        self._optimiser = PeerOptimiser(self._peer.model, TrainingConfig(moments="bf16"))
        self._phases = Phases(on_gpu=device != "cpu")
        self._peer.log_probs(torch.zeros((1, 8), dtype=torch.int64, device=device)).sum().backward()
        self._optimiser.step(self._phases)

    def time(self, case: StepCase, sequences: int | None) -> Row:
        """The figures of a row, from so many sequences (by default all)."""
        (size, recompute), tried = self._fastest(case)
        count = case.sequences
        if sequences is not None:
            count = min(count, ceil(sequences / size) * size)
        batch, phases = self._batch(case, count), self._phases
        self._warm_up(batch, size, recompute)
        phases.start()
        old = self._old_log_probs(batch)
        self._gradients(batch, old, size, recompute)
        self._optimiser.step(phases)
        seconds = {
            name: value * (case.sequences / count if name in PASSES else 1.0)
            for name, value in phases.stop().items()
        }
        return {
            "seconds": sum(seconds.values()),
            "phases_s": seconds,
            "recompute": recompute,
            "tokens_per_microbatch": size * case.length,
            "sequences_measured": count,
            "tried": tried,
            "memory": {"training": {"peak_gib": peak_gib()}},
        }

    def _warm_up(self, batch: Batch, size: int, recompute: Recompute) -> None:
        """A step with every shape of the one to be timed: a full forward and the one that is left
        over, a micro-batch, the optimiser.

        What torch then keeps of freed memory stays with it.
        """
        count, full = batch.ids.shape[0], _forward_sequences(batch)
        self._old_log_probs(batch.part(full + count % full))
        self._gradients(batch.part(size), None, size, recompute)
        self._optimiser.step(self._phases)

    def _fastest(self, case: StepCase) -> tuple[tuple[int, Recompute], list[Row]]:
        """The setting with the most tokens a second, and what all of them did."""
        tried: list[Row] = []
        rates: dict[tuple[int, Recompute], float] = {}
        for recompute, sizes in SETTINGS.items():
            for size in sizes:
                row = measured(
                    lambda size=size, recompute=recompute: self._try(case, size, recompute)
                )
                tried.append({"sequences": size, "recompute": recompute} | row)
                if "error" not in row:
                    rates[size, recompute] = row["tokens_per_s"]
        self._peer.model.zero_grad()
        free_memory()
        if not rates:
            raise ConfigError(
                f"no micro-batch of sequences of {case.length} tokens fits: tried {tried}"
            )
        return max(rates, key=lambda setting: rates[setting]), tried

    def _try(self, case: StepCase, size: int, recompute: Recompute) -> Row:
        batch, seconds = self._batch(case, size), 0.0
        for _ in range(2):
            self._phases.start()
            self._gradients(batch, None, size, recompute)
            seconds = sum(self._phases.stop().values())
        return {"tokens_per_s": size * case.length / seconds}

    def _batch(self, case: StepCase, sequences: int) -> Batch:
        generator, device = torch.Generator().manual_seed(0), self._device
        ids = torch.randint(self._vocab_size, (sequences, case.length), generator=generator)
        advantages = torch.randn(sequences, generator=generator)
        tokens = case.sequences * case.new_tokens
        return Batch(ids.to(device), advantages.to(device), case.prompt_tokens - 1, tokens)

    @torch.no_grad()
    def _old_log_probs(self, batch: Batch) -> torch.Tensor:
        """FP32 [S, completion tokens]."""
        self._peer.recompute("none")
        with self._phases("old_log_probs"), fastest_attention():
            found = [
                self._peer.log_probs(ids, batch.first)
                for ids in batch.ids.split(_forward_sequences(batch))
            ]
            return torch.cat(found).view(batch.ids.shape[0], -1)

    def _gradients(
        self, batch: Batch, old: torch.Tensor | None, size: int, recompute: Recompute
    ) -> None:
        """Forward and backward of all micro-batches; without ``old`` the ratio is 1."""
        self._peer.recompute(recompute)
        with fastest_attention():
            for first in range(0, batch.ids.shape[0], size):
                part = slice(first, first + size)
                with self._phases("forward"):
                    log_probs = self._peer.log_probs(batch.ids[part], batch.first).view(
                        -1, batch.ids.shape[1] - 1 - batch.first
                    )
                    base = log_probs.detach() if old is None else old[part]
                    ratio = torch.exp(log_probs - base)
                    loss = -(ratio * batch.advantages[part, None]).sum() / batch.tokens
                with self._phases("backward"):
                    loss.backward()


def _forward_sequences(batch: Batch) -> int:
    """Sequences of a forward without gradients; the last forward may have fewer."""
    return max(1, FORWARD_TOKENS // batch.ids.shape[1])
