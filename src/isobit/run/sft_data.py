"""Everything a run of fine-tuning needs, made and checked before its directory exists.
Nothing is written.

What can be refused without the weights is refused before they are loaded, a GPU without the memory
too.

What is measured on a held-out set: the loss of its completions, and with a reward how often the
policy's own are right; or how a reward model ranks its pairs.

The two objectives of fine-tuning, as a run of either asks for them: how examples become
micro-batches, what is minimised, and what is measured on examples that are not learnt from.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

from isobit.algorithms.objective import Objective
from isobit.config import recipes
from isobit.config.recipes import SftConfig
from isobit.config.rules import check_sft
from isobit.config.tables import OptimisationConfig, TrainingConfig
from isobit.data.examples import Example, Pair
from isobit.data.sampler import PromptSampler
from isobit.observe.console import describe_policy
from isobit.observe.evaluation import EvalResult
from isobit.observe.metrics import check_package, check_tracking
from isobit.parallel.world import ALONE, World
from isobit.precision.flow import describe_flow
from isobit.records.batch import PackedBatch
from isobit.records.metrics import Kind, Metrics
from isobit.rewards.grading import Grading
from isobit.rollout.engine import Request
from isobit.run.data import Item, SftData, load_examples
from isobit.run.evaluate import Evaluation, Evaluator, OnProgress, evaluation_requests
from isobit.run.plan import Outline, check_requests, describe_source
from isobit.run.reward_models import plan_reward_models
from isobit.run.setup import PreparedRun, build_parts, digests
from isobit.training.figures import UpdateMetrics
from isobit.training.out_of_memory import measured_within_memory, within_memory
from isobit.training.supervised import (
    PairFigures,
    PreferenceObjective,
    SupervisedObjective,
    mean_loss,
    measure_pairs,
    pack_pairs,
    pack_preferences,
)
from isobit.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What was measured on one held-out set."""

    examples: int
    loss: float
    """Nats a completion token, over all of them together; nats a pair for preferences."""
    result: EvalResult | None
    """Of the policy's own completions; None without a reward."""
    pairs: PairFigures | None = None
    """Of a reward model; None where completions are learnt."""

    def scalars(self, name: str) -> Metrics:
        """The figures for the metrics file, under ``eval/NAME/``."""
        return {
            f"eval/{name}/loss": self.loss,
            **(self.result.scalars(name) if self.result else {}),
            **(self._of_pairs(name, self.pairs) if self.pairs else {}),
        }

    @property
    def accuracy(self) -> float | None:
        """The mean reward of the policy's completions, or the share of pairs that a reward model
        ranks right; None where neither was measured.
        """
        if self.pairs is not None:
            return self.pairs.accuracy
        return self.result.accuracy if self.result else None

    @staticmethod
    def _of_pairs(name: str, pairs: PairFigures) -> Metrics:
        return {f"eval/{name}/accuracy": pairs.accuracy, f"eval/{name}/margin": pairs.margin}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """The record from what ``dataclasses.asdict`` and JSON made of it."""
        result, pairs = content["result"], content.get("pairs")
        return cls(
            content["examples"],
            content["loss"],
            None if result is None else EvalResult.from_json(result),
            None if pairs is None else PairFigures(**pairs),
        )


Taught = TypeVar("Taught", bound=Item)


class Lesson(ABC, Generic[Taught]):
    """One objective of fine-tuning."""

    objective: ClassVar[Objective]
    unit: ClassVar[str]
    """What the loss is a mean over."""
    kind: ClassVar[Kind]
    """Which metrics it writes (``isobit.records.metrics``)."""

    @abstractmethod
    def pack(
        self, trainer: Trainer, examples: Sequence[Taught], tokens_per_microbatch: int
    ) -> list[PackedBatch]:
        """Examples -> packed micro-batches of at most so many tokens."""

    @abstractmethod
    def measure(
        self, trainer: Trainer, batches: Sequence[PackedBatch]
    ) -> tuple[float, PairFigures | None]:
        """The loss of examples that are not learnt from, and what else is measured of pairs; both
        do not depend on the cut into batches.
        """

    @abstractmethod
    def tokens(self, examples: Sequence[Taught], update: UpdateMetrics) -> int:
        """The tokens that an update has learnt from."""


class _Supervised(Lesson[Example]):
    """The completions' tokens are learnt."""

    objective = SupervisedObjective()
    unit = "token"
    kind: ClassVar[Kind] = "sft"

    def pack(
        self, trainer: Trainer, examples: Sequence[Example], tokens_per_microbatch: int
    ) -> list[PackedBatch]:
        """See ``pack_examples``."""
        return pack_examples(examples, tokens_per_microbatch)

    def measure(
        self, trainer: Trainer, batches: Sequence[PackedBatch]
    ) -> tuple[float, PairFigures | None]:
        """See ``mean_loss``."""
        return mean_loss(trainer, batches), None

    def tokens(self, examples: Sequence[Example], update: UpdateMetrics) -> int:
        """Of completions."""
        return update.tokens


class _Preference(Lesson[Pair]):
    """Which of two answers is preferred is learnt."""

    objective = PreferenceObjective()
    unit = "pair"
    kind: ClassVar[Kind] = "preference"

    def pack(
        self, trainer: Trainer, examples: Sequence[Pair], tokens_per_microbatch: int
    ) -> list[PackedBatch]:
        """See ``pack_preferences``."""
        pairs = [pair.learnt for pair in examples]
        return pack_preferences(pairs, tokens_per_microbatch, trainer.policy.config.pad_token_id)

    def measure(
        self, trainer: Trainer, batches: Sequence[PackedBatch]
    ) -> tuple[float, PairFigures | None]:
        """See ``measure_pairs``."""
        figures = measure_pairs(trainer.scorer, batches, trainer.policy.world)
        return figures.loss, figures

    def tokens(self, examples: Sequence[Pair], update: UpdateMetrics) -> int:
        """Of both conversations of each pair: every token has a part in its score."""
        return sum(pair.tokens for pair in examples)


LESSONS: Mapping[recipes.Objective, Lesson[Any]] = {
    "supervised": _Supervised(),
    "preference": _Preference(),
}


def pack_examples(examples: Sequence[Example], tokens_per_microbatch: int) -> list[PackedBatch]:
    """Examples -> packed micro-batches of at most so many tokens."""
    return pack_pairs(
        [(example.prompt.token_ids, example.completion_ids) for example in examples],
        tokens_per_microbatch,
    )


_SHORTER_EXAMPLES = "leave out the longest examples, or lower data.max_tokens"


@dataclass(frozen=True, slots=True)
class SftMaterial:
    """What a run is made from, as far as it is known without the weights."""

    outline: Outline
    data: SftData
    evaluation: Mapping[str, Sequence[Request]]
    """What the engine is asked for on each held-out set, where a reward grades it."""

    @property
    def inputs(self) -> dict[str, str]:
        """Digests of what is read beside the recipe."""
        return digests(self.outline, self.data.digests())

    @property
    def requests(self) -> tuple[Sequence[Request]]:
        """What the engine may be asked for: all of an evaluation."""
        return ([one for asked in self.evaluation.values() for one in asked],)


@dataclass(frozen=True, slots=True)
class SftRun(PreparedRun):
    """The parts of a run, ready to start."""

    config: SftConfig
    data: SftData
    evaluator: Evaluator | None
    """Completes and grades the held-out prompts, where a reward is configured."""

    @property
    def lesson(self) -> Lesson[Any]:
        """The objective."""
        return LESSONS[self.config.objective]

    def data_figures(self) -> dict[str, Any]:
        """How many examples there are to learn from and to be measured on, for the manifest."""
        return self.data.figures()

    def describe(self) -> list[str]:
        """The first lines: the model, the data, how often it is gone through, the flow, the plan of
        the memory.
        """
        config, policy = self.config, self.model.policy
        return [
            describe_policy("from scratch" if config.from_scratch else config.model, policy),
            self.data.describe(config.training),
            *(f"  {line}" for line in describe_flow(policy.flow)),
            *self.turns.describe(),
        ]

    def next_examples(self) -> list[Item]:
        """The examples of the next step, in the sampler's order."""
        return [self.data.train[prompt.id] for prompt, _ in self.sampler.next()]

    def learn(self, examples: Sequence[Item]) -> UpdateMetrics:
        """Learn from examples in one update, in smaller micro-batches where the memory runs out."""
        lesson = self.lesson

        def attempt(tokens: int) -> UpdateMetrics:
            batches = lesson.pack(self.trainer, examples, tokens)
            return self.trainer.update(batches, lesson.objective)

        lengths = [example.tokens for example in examples]
        return within_memory(self.trainer, lengths, attempt, _SHORTER_EXAMPLES)

    def measure(self, examples: Sequence[Item]) -> tuple[float, PairFigures | None]:
        """The mean loss of examples that are not learnt from, and what else is measured of pairs;
        the engine gives its memory back for it.
        """
        self.turns.release_engine()
        lesson = self.lesson
        return measured_within_memory(
            self.trainer,
            [example.tokens for example in examples],
            self.trainer.budget.at(self.trainer.updates),
            lambda tokens: lesson.measure(
                self.trainer, lesson.pack(self.trainer, examples, tokens)
            ),
            "the held-out loss",
            _SHORTER_EXAMPLES,
        )

    def evaluate(self, progress: OnProgress | None, grading: Grading) -> Evaluation[HeldOut]:
        """Every held-out set under the current policy, by name, with the policy's own completions
        where a reward grades them.
        """
        graded = self.evaluator.run(progress, grading) if self.evaluator else {}
        figures = {}
        for name, examples in self.data.sets.items():
            result, groups = graded.get(name, (None, []))
            loss, pairs = self.measure(examples)
            figures[name] = HeldOut(len(examples), loss, result, pairs), groups
        return figures


def prepare_sft(config: SftConfig, world: World = ALONE) -> SftRun:
    """Load and check a run, on each rank of a world.  Raises an ``IsobitError`` that names what
    cannot be used; writes nothing.
    """
    check_tracking(config.tracking)
    made = read_sft(config)
    parts = build_parts(made.outline, world)
    sampler = PromptSampler(
        made.data.prompts, config.training.prompts_per_step, config.seed, config.data.shuffle
    )
    evaluator = None
    if parts.engine is not None:
        check_requests(made.requests, parts.engine.check, parts.model.context)
        evaluator = Evaluator(parts.engine, made.evaluation, world)
    return SftRun(parts, sampler, made.inputs, config, made.data, evaluator)


def read_sft(config: SftConfig) -> SftMaterial:
    """Read everything but the weights.  Raises an ``IsobitError`` for what cannot be used."""
    check_sft(config)
    check_package(config.tracking)
    source = describe_source(config.model, config.from_scratch, config.objective)
    data = load_examples(config.data, source.described, config.objective)
    evaluation = {}
    if config.reward is not None:
        prompts = {name: [one.prompt for one in data.sets[name]] for name in data.sets}
        evaluation = evaluation_requests(
            prompts, config.evaluation, config.rollout, source.described
        )
    training = config.training
    outline = Outline(
        config,
        source,
        trainer_config(training, generates=config.reward is not None),
        training.steps,
        data.longest,
        learning=(
            data.describe(training),
            f"steps: {training.steps} of {training.prompts_per_step} {data.noun}; "
            f"{'pairs' if data.objective == 'preference' else 'sequences'} of at most "
            f"{data.longest} tokens",
        ),
        frozen=plan_reward_models(config.reward),
    )
    return SftMaterial(outline, data, evaluation)


def trainer_config(training: OptimisationConfig, generates: bool) -> TrainingConfig:
    """The ``training`` table of fine-tuning as the trainer and the memory plan read it: a prompt
    has one completion, and moments stay on the device where no engine ever generates.
    """
    config = TrainingConfig.model_validate(training.model_dump())
    offload = training.offload_moments and generates
    return config.model_copy(update={"samples_per_prompt": 1, "offload_moments": offload})
