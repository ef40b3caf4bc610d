"""The loop of fine-tuning, on completions or on preferences.

    take examples -> pack, loss, backward, update, publish -> log -> evaluate, save when due

What can be refused without the weights is refused before they are loaded, a GPU without the memory
too; everything else before the run's directory is made.  ``SftLog`` writes metrics, console lines
and the summary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from isobit.config.recipes import SftConfig
from isobit.config.rules import check_sft
from isobit.config.training import OptimisationConfig, TrainingConfig
from isobit.memory.retry import measured_within_memory, within_memory
from isobit.models.tensor_parallel import check_cut
from isobit.observe.console import Console, silent
from isobit.observe.metrics import check_packages, check_services
from isobit.parallel.world import ALONE, World
from isobit.rewards.grading import Grading
from isobit.run.data import Lesson, SftData, evaluation_requests, load_examples
from isobit.run.evaluation import Evaluation, OnProgress
from isobit.run.frozen_models import describe_teacher
from isobit.run.open_run import OpenRun, begin_run, start_run
from isobit.run.plan import Plan
from isobit.run.resolved import ResolvedRecipe, as_begun, resolve, settled
from isobit.run.reward_models import plan_reward_models
from isobit.run.run import Run, Surroundings
from isobit.run.sft_log import HeldOut, SftLog, SftSummary
from isobit.run.sft_objectives import SFT_OBJECTIVES, Figures, SftObjective
from isobit.store.resume import Start
from isobit.training.comparison import UpdateMetrics
from isobit.training.supervised import DistilFigures, PairFigures
from isobit.util.terminal import counted

_SHORTER_EXAMPLES = "leave out the longest examples, or lower data.max_tokens"
SftPlan: TypeAlias = Plan[SftConfig, SftData]


class SftRun(Run[SftConfig, SftData]):
    """A run of fine-tuning; with a reward the policy's own completions of held-out prompts are
    graded, too.
    """

    saves_model_when_interrupted = True

    def __init__(
        self, plan: SftPlan, world: World = ALONE, around: Surroundings | None = None
    ) -> None:
        super().__init__(plan, world, around)
        self.objective: SftObjective[Any] = SFT_OBJECTIVES[self.config.objective]

    def next_examples(self) -> list[Lesson]:
        """The examples of the next step, in the sampler's order."""
        return [self.data.train[prompt.id] for prompt, _ in self.sampler.next()]

    def learn(self, examples: Sequence[Lesson]) -> UpdateMetrics:
        """Learn from examples in one update, in smaller micro-batches where the memory runs out."""
        objective = self.objective

        def attempt(tokens: int) -> UpdateMetrics:
            batches = objective.pack(self.trainer, examples, tokens)
            return self.trainer.update(batches, objective.loss)

        lengths = [example.tokens for example in examples]
        return within_memory(self.trainer, lengths, attempt, _SHORTER_EXAMPLES)

    def measure(self, examples: Sequence[Lesson]) -> tuple[float, Figures]:
        """The mean loss of examples that are not learnt from, and what else is measured; the
        engine gives its memory back for it.
        """
        self.turns.release_engine()
        objective = self.objective
        return measured_within_memory(
            self.trainer,
            [example.tokens for example in examples],
            self.trainer.budget.at(self.trainer.updates),
            lambda tokens: objective.measure(
                self.trainer, objective.pack(self.trainer, examples, tokens)
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
            loss, more = self.measure(examples)
            pairs = more if isinstance(more, PairFigures) else None
            distance = more if isinstance(more, DistilFigures) else None
            figures[name] = HeldOut(len(examples), loss, result, pairs, distance), groups
        return figures

    def open_log(self, start: Start) -> SftLog:
        """The log, which makes the run's directory, or takes an old one back to where the run
        stands.
        """
        return SftLog(
            self,
            start,
            self.console,
            self.clock,
            objective=self.objective,
            noun=self.data.noun,
            turns=self.turns,
        )


def prepare_sft(
    recipe: ResolvedRecipe[SftConfig], world: World = ALONE, around: Surroundings | None = None
) -> SftRun:
    """Load and check a run, on each rank of a world.  Raises an ``IsobitError`` that names what
    cannot be used; writes nothing.
    """
    check_services(recipe.config.tracking.services())
    return SftRun(read_sft(recipe), world, around)


def read_sft(recipe: ResolvedRecipe[SftConfig]) -> SftPlan:
    """Read everything but the weights, and but for data that the recipe has already.  Raises an
    ``IsobitError`` for what cannot be used.
    """
    config = recipe.config
    source = recipe.source
    weights = recipe.with_weights
    check_packages(config.tracking.services())
    check_sft(config)
    check_cut(source.described.config, config.cluster.rollout_tp)
    data: SftData = recipe.data or load_examples(config, source.described)
    evaluation = {}
    if config.reward is not None:
        prompts = {name: [one.prompt for one in data.sets[name]] for name in data.sets}
        evaluation = evaluation_requests(
            prompts, config.evaluation, config.rollout, source.described
        )
    training = config.training
    return Plan(
        config=config,
        source=source,
        data=data,
        training=trainer_config(training, generates=config.reward is not None),
        updates=training.steps,
        longest=data.longest,
        learning=(
            data.describe(training),
            *data.notes,
            f"steps: {training.steps} of {counted(training.prompts_per_step, data.noun)}; "
            f"{'pairs' if data.objective == 'preference' else 'sequences'} of at most "
            f"{data.longest} tokens",
        ),
        evaluation=evaluation,
        reward_models=recipe.reward_models,
        frozen=(
            *describe_teacher(config, source.described, data.longest, weights),
            *plan_reward_models(config.reward, recipe.reward_models),
        ),
    )


def trainer_config(training: OptimisationConfig, generates: bool) -> TrainingConfig:
    """The ``training`` table of fine-tuning as the trainer and the memory plan read it: a prompt
    has one completion, and moments stay on the device where no engine ever generates.
    """
    config = TrainingConfig.model_validate(training.model_dump())
    offload = training.offload_moments and generates
    return config.model_copy(update={"samples_per_prompt": 1, "offload_moments": offload})


def sft(
    config: SftConfig,
    console: Console | None = None,
    resume: bool = False,
    world: World = ALONE,
    allowed: Sequence[str] = (),
) -> SftSummary:
    """Fine-tune a model as ``config`` says and leave it, with all figures, in ``config.output``.
    With ``resume`` the run found there goes on; settings and inputs listed in ``allowed`` may
    differ from what it had.

    With a ``world`` of several processes each of them calls this, with the same configuration.

    A resumed run leaves the files that it would have left without the interruption, times aside.

    Raises an ``IsobitError``, before anything is written, for input that cannot be used; during the
    run NonFiniteError where the model's output or too many updates in a row are not finite,
    OutOfMemoryError where no smaller micro-batch helps, and StorageError where the disk is full.
    SIGTERM and Ctrl-C raise Interrupted.  In each case the last checkpoint has what the run has
    learnt, and so has ``model/``, if it could still be written.
    """
    with open_run(config, console, resume, world, allowed) as opened:
        for step in opened.steps():
            update_once(opened, step, opened.run.evaluates_after(step))
            opened.evaluate_if_due(step)
            opened.save_if_due(step)
        opened.save_model()
        return opened.log.finish()


OpenSftRun: TypeAlias = OpenRun[SftRun, SftLog]


def update_once(opened: OpenSftRun, step: int, evaluates: bool) -> None:
    """Learn from the next examples, log it, and note the boundary; ``evaluates``: an evaluation
    follows.
    """
    with opened.learning(engine_is_next=evaluates):
        examples = opened.run.next_examples()
        update = opened.run.learn(examples)
    opened.log.step(step, examples, update)
    opened.end_step(step)


@contextmanager
def open_run(
    config: SftConfig, console: Console | None, resume: bool, world: World, allowed: Sequence[str]
) -> Iterator[OpenSftRun]:
    """A block with all steps of a run, which begins or is resumed (``isobit.run.open_run``)."""
    console = console or (Console() if world.rank == 0 else silent())
    recipe = settled(as_begun(resolve(config), resume, world), read_sft, console.line)

    def prepare(around: Surroundings) -> SftRun:
        return prepare_sft(recipe, world, around)

    with (
        begin_run(recipe, console, resume, world, allowed) as begun,
        start_run(recipe, prepare, SftRun.open_log, *begun) as opened,
    ):
        yield opened
