"""Everything a run of reinforcement learning needs, made and checked before its directory exists:
what can be refused is refused here.

The cheap refusals come first: a KL penalty is reported before any file is read, and a prompt that
is too long before any weight.  Nothing is written.

What a run reads beside its recipe, as digests by name.  Every checkpoint records them, and a
resume compares (``isobit.store.compatible``): with another reward, other data or another
tokenizer the rest of a run would be another run, in silence.

    data.train.content            prompts: ids, tokens, and columns that a reward may read; of
                                  fine-tuning what is learnt, too
    data.eval.NAME.content        likewise
    model.config                  bytes of config.json, but of a model from scratch
    model.tokenizer               of all files of the tokenizer
    model.generation              of generation_config.json
    reward.function.source        of code of the user's own (``isobit.util.user_code``), of parts
                                  reward.parts.NAME.function.source
    algorithm.source.content      of an objective of the user's own

Weights are not among them: a checkpoint holds the policy's, and digests of all others that still
are those of their folders (``isobit.store.manifest.Extra``).

The parts that every training has, built in one place: the policy on its device, the engine, the
trainer, and who of the two has the memory when.

Memory that a device has for itself is planned before anything is in it.  The plan says how many
pages the KV cache gets: this is the only place where what the engine reads differs from what the
recipe says.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from isobit.algorithms.objective import Algorithm
from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import PpoConfig
from isobit.config.data import DataConfig, DataSource
from isobit.config.recipes import Recipe, RunConfig
from isobit.config.reward import WHOLE
from isobit.config.rules import check_run
from isobit.data.prompts import (
    TooLong,
    build_prompts,
    describe_too_long,
    drop_evaluated,
    prompts_sha256,
)
from isobit.data.sampler import PromptSampler
from isobit.kernels.backend import support
from isobit.memory.turns import DeviceTurns, NoTurns, Turns, allocate_in_pages
from isobit.models.config import ModelConfig
from isobit.models.folder import DescribedModel, LoadedModel
from isobit.models.function import is_one_function
from isobit.observe.console import describe_policy
from isobit.observe.evaluation import EvalResult
from isobit.observe.metrics import check_package, check_tracking
from isobit.parallel.slots import Slots
from isobit.parallel.world import ALONE, World
from isobit.precision.flow import describe_flow
from isobit.records.text import Prompt, SamplingParams
from isobit.rewards.graders import GRADERS
from isobit.rewards.grading import Grading, ModelScores
from isobit.rollout.engine import Request, RolloutEngine
from isobit.rollout.native import NativeEngine
from isobit.run.evaluate import Evaluation, Evaluator, OnProgress, evaluation_requests
from isobit.run.grading import RecordedGrading
from isobit.run.pending import Collected, Pending, pending_bytes
from isobit.run.plan import Outline, check_requests, describe_source, plan_device_memory
from isobit.run.reward_models import ModelRewards, plan_reward_models
from isobit.run.rollouters import Rollouters
from isobit.run.rollouters import evaluate as evaluate_by_rollouters
from isobit.store.manifest import Extra
from isobit.training.calibration import Calibration, build_calibration, describe_shadow
from isobit.training.judge import Judge
from isobit.training.reference import (
    Reference,
    checkpoint_bytes,
    describe_reference,
    load_reference,
)
from isobit.training.replay_buffer import ReplayBuffer
from isobit.training.step import Learner, StepMetrics
from isobit.training.trainer import Trainer
from isobit.util.files import file_sha256
from isobit.util.user_code import source_sha256

_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
)
_ABSENT = "absent"


def digests(outline: Outline, content: Mapping[str, str]) -> dict[str, str]:
    """Of a training whose data has the digests ``content``, by set.  Raises OSError for a file that
    cannot be read.
    """
    folder = outline.model.folder
    config = {} if outline.source.from_scratch else {"model.config": ("config.json",)}
    files = {
        **config,
        "model.tokenizer": _TOKENIZER,
        "model.generation": ("generation_config.json",),
    }
    return {
        **{f"data.{name}.content": digest for name, digest in content.items()},
        **{name: _files_sha256(folder, patterns) for name, patterns in files.items()},
        **dict(_sources(outline.config)),
    }


def _sources(config: Recipe) -> Iterator[tuple[str, str]]:
    parts = {} if config.reward is None else config.reward.named()
    for name, part in parts.items():
        if part.function is not None and part.function not in GRADERS:
            key = "reward" if name == WHOLE else f"reward.parts.{name}"
            yield f"{key}.function.source", source_sha256(part.function) or _ABSENT
    own = config.algorithm if isinstance(config, RunConfig) else None
    if own is not None and own.name == "custom":
        yield "algorithm.source.content", source_sha256(own.source) or _ABSENT


def _files_sha256(folder: Path, patterns: tuple[str, ...]) -> str:
    """Of the names and bytes of the files that match."""
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    if not paths:
        return _ABSENT
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.name}\n{file_sha256(path)}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Parts:
    """Policy, engine and trainer, ready to start."""

    model: LoadedModel
    engine: NativeEngine | None
    """None where nothing is ever generated."""
    trainer: Trainer
    turns: Turns
    reward_models: ModelRewards


def build_parts(outline: Outline, world: World = ALONE, learns: bool = True) -> Parts:
    """Load the policy and build around it what the outline asks for, on each rank of a world.  One
    that never learns keeps no masters.

    Raises an ``IsobitError`` for weights that cannot be used, and for a plan that does not fit the
    device.
    """
    config, rollout = outline.config, outline.config.rollout
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = world.own_device(outline.choose_device())
    slots, plan = Slots.of(outline.training.slots, world), None
    if support(device.type).has_own_memory:
        here = world.all_gather(world.host).count(world.host)
        plan = plan_device_memory(outline, device, world.size, here, learns, slots.hosts)
        allocate_in_pages(device)
        rollout = rollout.model_copy(update={"kv_pages": plan.pages})
    model = outline.source.load(config.precision, config.seed, device, world, learns, slots)
    engine = None
    if outline.generates:
        engine = NativeEngine(model.policy, rollout, model.tokenizer, config.seed)
    trainer = Trainer(
        model.policy,
        outline.training,
        outline.updates,
        config.seed,
        head_rate=outline.head_rate,
    )
    turns = NoTurns() if plan is None else DeviceTurns(plan, engine, trainer)
    return Parts(model, engine, trainer, turns, ModelRewards(config.reward, device))


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A training whose parts are built; each kind adds what it learns from.  As the store knows it
    (``isobit.store.manifest``).
    """

    parts: Parts
    sampler: PromptSampler
    """The order of what is learnt from."""
    inputs: Mapping[str, str]
    """Digests of what is read beside the recipe (``isobit.run.setup``)."""

    @property
    def model(self) -> LoadedModel:
        """The policy that learns, with its folder and tokenizer."""
        return self.parts.model

    @property
    def trainer(self) -> Trainer:
        """The optimiser, its counters and its budget."""
        return self.parts.trainer

    @property
    def turns(self) -> Turns:
        """Who has the device's memory when."""
        return self.parts.turns

    @property
    def extras(self) -> Mapping[str, Extra]:
        """What else has a state."""
        return self.reward_extras()

    def reward_extras(self) -> dict[str, Extra]:
        """The reward models, where there are any."""
        models = self.parts.reward_models
        return {"reward_models": models} if len(models) else {}

    @property
    def model_scores(self) -> ModelScores:
        """What scores the rewards that are models, once the engine has made room."""
        return self.parts.reward_models.scores(self.turns.release_engine)

    def engine_figures(self) -> dict[str, Any] | None:
        """The sizes that its engine has, whatever the recipe asked for; None without an engine."""
        if self.parts.engine is None:
            return None
        limits = self.parts.engine.limits
        return {"kv_pages": limits.num_pages, "page_tokens": limits.page_tokens}


VALUE_HEAD_RATE = 10.0
"""Of a value head over the policy's, where the recipe does not say: it starts from nothing."""


@dataclass(frozen=True, slots=True)
class RlData:
    """All prompts of a run of reinforcement learning."""

    prompts: Sequence[Prompt]
    """Those to learn from, none of which stands in an evaluation set."""
    dropped: int
    """Training prompts left out because an evaluation set holds them too."""
    sets: Mapping[str, Sequence[Prompt]]
    """The problems of each evaluation set."""
    too_long: Mapping[str, TooLong] = field(default_factory=dict)
    """What was too long in each set, and what became of it."""

    def figures(self) -> dict[str, Any]:
        """How many there are of each, for the manifest."""
        return {
            "training_prompts": len(self.prompts),
            "dropped_prompts": self.dropped,
            "evaluation_problems": {name: len(prompts) for name, prompts in self.sets.items()},
            "too_long": {name: found.describe() for name, found in self.too_long.items()},
        }

    def digests(self) -> dict[str, str]:
        """SHA-256 of each set."""
        return {
            "train": prompts_sha256(self.prompts),
            **{f"eval.{name}": prompts_sha256(prompts) for name, prompts in self.sets.items()},
        }

    def describe(self, prompts_per_step: int) -> str:
        """One line: how many training prompts and evaluation problems there are, what was left out
        or cut, and whether a step has a prompt more than once.
        """
        sets = ", ".join(f"{len(prompts)} in {name}" for name, prompts in self.sets.items())
        dropped = (
            f" ({self.dropped} more also stand in an evaluation set: dropped)"
            if self.dropped
            else ""
        )
        return (
            f"data: {len(self.prompts)} training prompts{dropped}; evaluation problems: "
            f"{sets or 'none'}{describe_too_long(self.too_long)}" + self._repeated(prompts_per_step)
        )

    def _repeated(self, prompts_per_step: int) -> str:
        if prompts_per_step <= len(self.prompts):
            return ""
        times = -(-prompts_per_step // len(self.prompts))
        return (
            f"; warning: a step takes {prompts_per_step} prompts (training.prompts_per_step), so "
            f"that it has the same prompt up to {times} times"
        )


def load_prompts(data: DataConfig, model: DescribedModel) -> RlData:
    """Read and tokenise all sets.  Raises DataError for what cannot be used."""
    too_long: dict[str, TooLong] = {}

    def prompts_of(name: str, source: DataSource) -> list[Prompt]:
        counts = too_long[name] = TooLong(data.too_long)
        context = model.config.max_positions
        return build_prompts(name, source, model.tokenizer, data, context, counts)

    train = prompts_of("train", data.train)
    sets = {name: prompts_of(name, source) for name, source in data.eval.items()}
    prompts, dropped = drop_evaluated(train, sets.values())
    return RlData(prompts, dropped, sets, {n: one for n, one in too_long.items() if one.describe()})


@dataclass(frozen=True, slots=True)
class RlMaterial:
    """What a run is made from, as far as it is known without the weights."""

    outline: Outline
    data: RlData
    algorithm: Algorithm
    sampling: SamplingParams
    evaluation: Mapping[str, Sequence[Request]]
    """What the engine is asked for on each evaluation set."""
    training: Sequence[Request]
    """A sample of each training prompt."""

    @property
    def inputs(self) -> dict[str, str]:
        """Digests of what is read beside the recipe."""
        return digests(self.outline, self.data.digests())

    @property
    def requests(self) -> tuple[Sequence[Request], Sequence[Request]]:
        """What the engine may be asked for: all of an evaluation, or prompts to learn from."""
        return [one for asked in self.evaluation.values() for one in asked], self.training


@dataclass(frozen=True, slots=True)
class RlRun(PreparedRun):
    """The parts of a run, ready to start."""

    config: RunConfig
    figures: Mapping[str, Any]
    """How many prompts there are to learn from and to be measured on."""
    about_data: str
    """The same in a line."""
    algorithm: Algorithm
    sampling: SamplingParams
    engine: RolloutEngine
    evaluator: Evaluator
    reference: Reference | None
    """What the policy is held close to; None without a penalty."""
    pending: Pending
    """The batches between sampling and learning."""
    rollouters: Rollouters | None
    """Who samples, where these processes only train."""
    replay: ReplayBuffer | None
    """None where nothing is learnt from again."""
    calibration: Calibration | None
    """None where the clip stays as configured."""

    @property
    def exact(self) -> bool:
        """Whether what the engine records and what the trainer computes are one function."""
        return is_one_function(self.engine.function, self.trainer.function)

    def data_figures(self) -> dict[str, Any]:
        """How many training prompts and evaluation problems there are, for the manifest."""
        return dict(self.figures)

    def describe(self) -> list[str]:
        """The first lines: the model, the data, the flow, the plan of the memory."""
        policy = self.model.policy
        return [
            describe_policy(self.config.model, policy),
            self.about_data,
            *(f"  {line}" for line in describe_flow(policy.flow)),
            *self.turns.describe(),
        ]

    def next_requests(self, count: int) -> list[Request]:
        """The next ``count`` prompts, as the engine takes them."""
        samples = self.config.training.samples_per_prompt
        return [
            Request(prompt, visit, samples, self.sampling)
            for prompt, visit in self.sampler.next(count)
        ]

    def learn(self, step: int) -> tuple[Collected, StepMetrics]:
        """Learn from the batch whose turn it is; -> the batch, and what was done with it."""
        self.pending.compare(self.trainer)
        batch = self.pending.front()
        trained = self.learner.learn(batch.groups, step)
        self.pending.drop_front()
        if batch.comparison is not None:
            trained = replace(trained, comparison=batch.comparison, mismatch=batch.mismatch)
        return batch, trained

    @property
    def learner(self) -> Learner:
        """What learns from each step's groups."""
        config = self.config
        judge = Judge(
            self.trainer,
            self.algorithm,
            config.algorithm,
            self.exact,
            config.rollout.max_new_tokens,
            config.training.old_log_probs,
            config.corrections,
            None if self.reference is None else self.reference.frozen,
        )
        return Learner(judge, self.replay, self.calibration, config.check.repeat_every)

    def refresh_reference(self, step: int) -> None:
        """Let the reference model catch up with the policy, where it is time."""
        if self.reference is not None:
            self.reference.refresh_if_due(step)

    @property
    def extras(self) -> Mapping[str, Extra]:
        """Reward models, the reference model, the replay buffer, the clip's bounds and the batches
        that wait, as far as there are any.
        """
        found = {
            "reference": self.reference,
            "replay": self.replay,
            "calibration": self.calibration,
            "pending": self.pending if self.config.asynchrony.lag else None,
        }
        made = {name: extra for name, extra in found.items() if extra is not None}
        return {**self.reward_extras(), **made}

    def evaluate(self, progress: OnProgress, grading: Grading) -> Evaluation[EvalResult]:
        """Every evaluation set under the current policy."""
        if self.rollouters is None:
            return self.evaluator.run(progress, grading)
        assert isinstance(grading, RecordedGrading)
        return evaluate_by_rollouters(self.rollouters, self.model.policy, self.evaluator, grading)


def prepare_rl(
    config: RunConfig,
    world: World = ALONE,
    rollouters: Rollouters | None = None,
    learns: bool = True,
) -> RlRun:
    """Load and check a run, on each rank of a world; ``rollouters`` has those who sample for
    it, and one that never ``learns`` is one of them.  Raises an ``IsobitError`` that names what
    cannot be used; writes nothing.
    """
    check_tracking(config.tracking)
    made = read_rl(config)
    parts = build_parts(made.outline, world, learns)
    assert parts.engine is not None, "reinforcement learning always generates"
    check_requests(made.requests, parts.engine.check, parts.model.context)
    if rollouters is not None:
        parts.engine.release()  # it is asked for nothing
    return RlRun(
        parts,
        PromptSampler(
            made.data.prompts, config.training.prompts_per_step, config.seed, config.data.shuffle
        ),
        made.inputs,
        config,
        made.data.figures(),
        made.data.describe(config.training.prompts_per_step),
        made.algorithm,
        made.sampling,
        parts.engine,
        Evaluator(parts.engine, made.evaluation, world),
        load_reference(config, parts.model.policy) if learns else None,
        Pending(config.asynchrony.lag, config.training.steps, made.data.prompts),
        rollouters,
        ReplayBuffer(config.replay, config.seed) if config.replay.fraction > 0 else None,
        build_calibration(config, made.algorithm, parts.trainer),
    )


def read_rl(config: RunConfig) -> RlMaterial:
    """Read everything but the weights.  Raises an ``IsobitError`` for what cannot be used."""
    check_run(config)
    check_package(config.tracking)
    algorithm = build_algorithm(config.algorithm, config.rollout.max_new_tokens)
    source = describe_source(config.model)
    if algorithm.needs_values:
        source = source.with_value_head()
    model = source.described
    data = load_prompts(config.data, model)
    sampling = model.sampling(config.rollout)
    evaluation = evaluation_requests(data.sets, config.evaluation, config.rollout, model)
    samples = [Request(prompt, 0, 1, sampling) for prompt in data.prompts]
    longest = max(request.max_length(model.config.max_positions) for request in samples)
    training = config.training
    updates = training.updates_per_batch * training.epochs
    frozen = describe_reference(config, model, longest), describe_shadow(config, model.config)
    outline = Outline(
        config,
        source,
        training,
        training.steps * updates,
        longest,
        learning=(
            data.describe(training.prompts_per_step),
            f"steps: {training.steps} of "
            f"{training.prompts_per_step * training.samples_per_prompt} samples, {updates} updates "
            f"each; sequences of at most {longest} tokens",
        ),
        frozen=(
            *(one for one in frozen if one is not None),
            *plan_reward_models(config.reward),
        ),
        extra_bytes=extra_bytes(config, model.config),
        head_rate=_head_rate(config),
    )
    return RlMaterial(outline, data, algorithm, sampling, evaluation, samples)


def extra_bytes(config: RunConfig, model: ModelConfig) -> int:
    """The most that a checkpoint holds beside policy and optimiser."""
    replay = config.replay.max_mib * (1 << 20) if config.replay.fraction > 0 else 0
    return checkpoint_bytes(config, model) + int(replay) + pending_bytes(config)


def _head_rate(config: RunConfig) -> float:
    """The learning rate of a value head over that of the policy."""
    algorithm = config.algorithm
    if not isinstance(algorithm, PpoConfig) or algorithm.value_learning_rate is None:
        return VALUE_HEAD_RATE
    return algorithm.value_learning_rate / config.training.learning_rate
