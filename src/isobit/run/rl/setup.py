"""Everything a run of reinforcement learning needs, made and checked before its directory exists:
what can be refused is refused here.

The cheap refusals come first: a KL penalty is reported before any file is read, and a prompt that
is too long before any weight.  Nothing is written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from isobit.algorithms.objective import Algorithm
from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import PpoConfig
from isobit.config.rules import check_run
from isobit.config.run import RunConfig
from isobit.data.sampler import PromptSampler
from isobit.models.config import ModelConfig
from isobit.models.function import is_one_function
from isobit.observe.console import describe_policy
from isobit.observe.eval_result import EvalResult
from isobit.observe.wandb_tracker import check_package, check_tracking
from isobit.parallel.world import ALONE, World
from isobit.precision.compare import describe_flow
from isobit.records.text import SamplingParams
from isobit.rewards.grade import Grading
from isobit.rollout.engine import RolloutEngine
from isobit.rollout.request import Request
from isobit.run.calibration import build_calibration, describe_shadow
from isobit.run.evaluate import Evaluation, Evaluator, OnProgress, evaluation_requests
from isobit.run.grading import RecordedGrading
from isobit.run.inputs import digests
from isobit.run.model_source import describe_source
from isobit.run.outline import Outline, check_requests
from isobit.run.parts import PreparedRun, build_parts
from isobit.run.reference import checkpoint_bytes, describe_reference, load_reference
from isobit.run.reward_models import plan_reward_models
from isobit.run.rl.apart import Apart
from isobit.run.rl.apart import evaluate as evaluate_apart
from isobit.run.rl.collected import Collected
from isobit.run.rl.data import RlData, load_prompts
from isobit.run.rl.pending import Pending, pending_bytes
from isobit.store.training_run import Extra
from isobit.training.calibration import Calibration
from isobit.training.judge import Judge
from isobit.training.reference import Reference
from isobit.training.replay import ReplayBuffer
from isobit.training.step import Learner, StepMetrics

VALUE_HEAD_RATE = 10.0
"""Of a value head over the policy's, where the recipe does not say: it starts from nothing."""


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
    apart: Apart | None
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
        if self.apart is None:
            return self.evaluator.run(progress, grading)
        assert isinstance(grading, RecordedGrading)
        return evaluate_apart(self.apart, self.model.policy, self.evaluator, grading)


def prepare_rl(
    config: RunConfig, world: World = ALONE, apart: Apart | None = None, learns: bool = True
) -> RlRun:
    """Load and check a run, on each rank of a world; ``apart`` has those who sample for it, and one
    that never ``learns`` is one of them.  Raises an ``IsobitError`` that names what cannot be used;
    writes nothing.
    """
    check_tracking(config.tracking)
    made = read_rl(config)
    parts = build_parts(made.outline, world, learns)
    assert parts.engine is not None, "reinforcement learning always generates"
    check_requests(made.requests, parts.engine.check, parts.model.context)
    if apart is not None:
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
        apart,
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
