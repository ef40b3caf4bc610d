"""The loop of fine-tuning, on completions or on preferences.

    take examples -> pack, loss, backward, update, publish -> log -> evaluate, save when due

What can be refused without the weights is refused before they are loaded, a GPU without the memory
too; everything else before the run's directory is made.  ``SftLog`` writes metrics, console lines
and the summary.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any, TypeAlias

from isobit.config.recipes import SftConfig
from isobit.config.rules import check_sft
from isobit.config.training import OptimisationConfig, TrainingConfig
from isobit.memory.turns import measured_within_memory, within_memory
from isobit.observe.console import (
    Console,
    Part,
    describe_gain,
    describe_moment,
    describe_policy,
    describe_result,
    metric_parts,
    shares_right,
    silent,
    time_left,
)
from isobit.observe.metrics import check_package, check_tracking
from isobit.observe.training_log import RunSummary, TrainingLog
from isobit.parallel.world import ALONE, World
from isobit.precision.flow import describe_flow
from isobit.records.metrics import Metrics, listed
from isobit.rewards.grading import Grading
from isobit.run.data import settled, with_date_of_run
from isobit.run.evaluate import Evaluation, OnProgress, evaluation_requests
from isobit.run.frozen_models import describe_teacher, plan_reward_models
from isobit.run.lessons import LESSONS, Figures, HeldOut, Item, Lesson, SftData, load_examples
from isobit.run.plan import Plan, describe_source, source_config
from isobit.run.run import Run, begin_run, start_run
from isobit.store.resume import Start
from isobit.training.comparison import UpdateMetrics
from isobit.training.supervised import DistilFigures, PairFigures
from isobit.util.terminal import Clock


@dataclass(frozen=True, slots=True)
class SftSetSummary:
    """One held-out set before and after the run; losses in nats a token, accuracies as mean
    rewards, None without a reward.  For preferences losses are in nats a pair, accuracies the
    shares of pairs that are ranked right.
    """

    examples: int
    loss_before: float
    loss_after: float
    accuracy_before: float | None
    accuracy_after: float | None
    interval_before: tuple[float, float] | None
    interval_after: tuple[float, float] | None
    right: tuple[float, float] | None = None
    """The shares of completions that are exactly right; None where every reward was 0 or 1."""


@dataclass(frozen=True, slots=True)
class SftSummary(RunSummary):
    """The figures of a finished run.  Losses and accuracies on top are those of the first held-out
    set, None without one.
    """

    loss_before: float | None
    loss_after: float | None
    accuracy_before: float | None
    accuracy_after: float | None
    tokens_trained: int
    """Of completions, over all steps; of whole conversations for preferences."""
    skipped_updates: int
    train_seconds: float
    """Wall seconds of the steps, without evaluation and loading."""
    evaluation_seconds: float
    evaluations: Mapping[str, SftSetSummary]


def summarise_set(before: HeldOut, after: HeldOut) -> SftSetSummary:
    """The figures of one set at both ends of a run."""
    first, last = before.result, after.result
    return SftSetSummary(
        examples=after.examples,
        loss_before=before.loss,
        loss_after=after.loss,
        accuracy_before=before.accuracy,
        accuracy_after=after.accuracy,
        interval_before=first.interval if first else None,
        interval_after=last.interval if last else None,
        right=shares_right(first, last) if first and last else None,
    )


def describe_summary(summary: SftSummary, unit: str, noun: str) -> list[str]:
    """What a finished run of fine-tuning prints last; losses are in nats a ``unit``, and ``noun``
    are measured on.
    """
    lines = []
    for name, figures in summary.evaluations.items():
        text = (
            f"{name}: loss {figures.loss_before:.4f} -> {figures.loss_after:.4f} nats a {unit} on "
            f"{figures.examples} {noun}"
        )
        before, after = figures.accuracy_before, figures.accuracy_after
        if before is not None and after is not None:
            text += f", {describe_gain((before, after), figures.right)}"
        lines.append(text)
    files = directory_files(summary.directory)
    return [
        *lines,
        *summary.describe_memory(),
        f"time: {summary.train_seconds:.1f} s for {summary.steps} steps, "
        f"{summary.evaluation_seconds:.1f} s for evaluation",
        f"model: {summary.model}",
        f"files: {summary.directory} ({', '.join(files)})",
        f"figures as a page: isobit report {summary.directory}",
    ]


def directory_files(directory: Path) -> list[str]:
    """What the run left there beside the model."""
    return sorted(
        f"{path.name}/" if path.is_dir() else path.name
        for path in directory.iterdir()
        if path.name != "model" and path.name[0] != "."
    )


class SftLog(TrainingLog[HeldOut]):
    """The log of supervised fine-tuning: figures and lines of its steps."""

    phases = ("training",)
    counts = ("tokens", "skipped")

    def __init__(self, run: "SftRun", start: Start, console: Console, clock: Clock) -> None:
        self._run = run
        super().__init__(run, start, console, clock)

    def step(self, step: int, examples: Sequence[Item], update: UpdateMetrics) -> None:
        """The figures of one step: a line of metrics and a line on the console."""
        spent = self._take_seconds()
        seconds = spent["training"]
        metrics = {
            **listed(update.metrics, self._run.lesson.kind),
            "updates/skipped": int(update.skipped is not None),
            **{f"time/{name}_s": value for name, value in spent.items()},
            "tokens_per_s/training": sum(example.tokens for example in examples) / seconds,
        }
        metrics |= self._run.turns.figures()
        metrics |= self._waiting_figures()
        self._add_metrics(step, metrics)
        self._write()
        self._totals["tokens"] += self._run.lesson.tokens(examples, update)
        self._totals["skipped"] += update.skipped is not None
        self._console.parts(describe_step(step, self._run, metrics, self._time_left.after(step)))
        if update.skipped is not None:
            self._console.notes([f"the update was skipped: {update.skipped}"])

    def finish(self) -> SftSummary:
        """Write ``summary.json``, print the last lines, and return what the run achieved."""
        sets = {name: summarise_set(*ends) for name, ends in self._first_and_last().items()}
        first = next(iter(sets.values()), None)
        summary = SftSummary(
            directory=self.directory.root,
            preset=self._run.config.precision.preset,
            precision=self._run.config.precision.name,
            steps=self._run.config.training.steps,
            loss_before=first.loss_before if first else None,
            loss_after=first.loss_after if first else None,
            accuracy_before=first.accuracy_before if first else None,
            accuracy_after=first.accuracy_after if first else None,
            tokens_trained=self._totals["tokens"],
            skipped_updates=self._totals["skipped"],
            train_seconds=self._seconds["training"],
            evaluation_seconds=self._seconds["evaluation"],
            evaluations=sets,
            gpu_memory=self._run.turns.summary(),
        )
        self._write_summary(summary)
        self._console.lines(describe_summary(summary, self._run.lesson.unit, self._run.data.noun))
        return summary

    def _say_evaluation(self, step: int, results: Mapping[str, HeldOut]) -> None:
        when = describe_moment(step)
        for name, held_out in results.items():
            self._console.line(
                f"{when}: {name} loss {held_out.loss:.4f} nats a {self._run.lesson.unit} on "
                f"{held_out.examples} {self._run.data.noun}"
            )
            if (distance := held_out.distance) is not None:
                self._console.line(
                    f"{when}: {name} divergence {distance.kl:.3g} nats a token, perplexity "
                    f"{exp(distance.nll):.4f}, the teacher's {exp(distance.teacher_nll):.4f}"
                )
            if held_out.pairs is not None:
                self._console.line(
                    f"{when}: {name} accuracy {100 * held_out.pairs.accuracy:.1f}% of pairs, "
                    f"margin {held_out.pairs.margin:.3f}"
                )
            if held_out.result is not None:
                self._console.line(f"{when}: {describe_result(name, held_out.result)}")

    def _result(self, content: Mapping[str, Any]) -> HeldOut:
        return HeldOut.from_json(content)


def describe_step(step: int, run: "SftRun", metrics: Metrics, seconds_left: float) -> list[Part]:
    """What the objective shows of one step of fine-tuning, its rate and seconds, and how long the
    run will still take.
    """
    steps = run.config.training.steps
    return [
        Part(f"step {step:>{len(str(steps))}}/{steps}"),
        *metric_parts(metrics, run.lesson.kind).values(),
        Part(f"{metrics['time/training_s']:.1f} s"),
        time_left(seconds_left),
    ]


_SHORTER_EXAMPLES = "leave out the longest examples, or lower data.max_tokens"


SftPlan: TypeAlias = Plan[SftConfig, SftData]


class SftRun(Run[SftConfig, SftData, SftLog]):
    """A run of fine-tuning; with a reward the policy's own completions of held-out prompts are
    graded, too.
    """

    saves_model_when_interrupted = True

    @property
    def lesson(self) -> Lesson[Any]:
        """The objective."""
        return LESSONS[self.config.objective]

    def describe(self) -> list[str]:
        """The first lines: the model, the data, how often it is gone through, the flow, the plan of
        the memory.
        """
        config, policy = self.config, self.model.policy
        return [
            describe_policy("from scratch" if config.from_scratch else config.model, policy),
            self.data.describe(config.training),
            *self.data.notes,
            *self.describe_teacher(),
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

    def measure(self, examples: Sequence[Item]) -> tuple[float, Figures]:
        """The mean loss of examples that are not learnt from, and what else is measured; the
        engine gives its memory back for it.
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
            loss, more = self.measure(examples)
            pairs = more if isinstance(more, PairFigures) else None
            distance = more if isinstance(more, DistilFigures) else None
            figures[name] = HeldOut(len(examples), loss, result, pairs, distance), groups
        return figures

    def open_log(self, start: Start) -> SftLog:
        return SftLog(self, start, self.console, self.clock)


def prepare_sft(config: SftConfig, world: World = ALONE, data: SftData | None = None) -> SftRun:
    """Load and check a run, on each rank of a world, with ``data`` that were read already.  Raises
    an ``IsobitError`` that names what cannot be used; writes nothing.
    """
    check_tracking(config.tracking)
    return SftRun(read_sft(config, data=data), world)


def read_sft(config: SftConfig, *, weights: bool = True, data: SftData | None = None) -> SftPlan:
    """Read everything but the weights, which without ``weights`` are not even fetched from the hub,
    and but for ``data`` that were read already.  Raises an ``IsobitError`` for what cannot be used.
    """
    check_sft(config)
    check_package(config.tracking)
    source = describe_source(config.model, config.from_scratch, config.objective, weights)
    source = source.with_lora(config.lora)
    data = data or load_examples(config.data, source.described, config.objective)
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
            f"steps: {training.steps} of {training.prompts_per_step} {data.noun}; "
            f"{'pairs' if data.objective == 'preference' else 'sequences'} of at most "
            f"{data.longest} tokens",
        ),
        evaluation=evaluation,
        frozen=(
            *describe_teacher(config, source.described, data.longest, weights),
            *plan_reward_models(config.reward, weights),
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
    with open_run(config, console, resume, world, allowed) as run:
        for step in run.steps():
            update_once(run, step, run.evaluates_after(step))
            run.evaluate_if_due(step)
            run.save_if_due(step)
        run.save_model()
        return run.log.finish()


def update_once(run: SftRun, step: int, evaluates: bool) -> None:
    """Learn from the next examples, log it, and note the boundary; ``evaluates``: an evaluation
    follows.
    """
    with run.learning(engine_is_next=evaluates):
        examples = run.next_examples()
        update = run.learn(examples)
    run.log.step(step, examples, update)
    run.end_step(step)


@contextmanager
def open_run(
    config: SftConfig,
    console: Console | None,
    resume: bool,
    world: World,
    allowed: Sequence[str],
) -> Iterator[SftRun]:
    """A block with all steps of a run, which begins or is resumed (``isobit.run.run``)."""
    console = console or (Console() if world.rank == 0 else silent())
    config, data = settled(with_date_of_run(config, resume, world), read_sft, console.line)
    shape = source_config(config.model, config.from_scratch, config.objective, lora=config.lora)
    with (
        begin_run(config, shape, console, resume, world, allowed) as begun,
        start_run(config, lambda: prepare_sft(config, world, data), *begun) as run,
    ):
        yield run
