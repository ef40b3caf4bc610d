"""The course of a training, whatever it learns from: begin or resume, evaluate, take steps, log,
save, stop where a signal asks for it, finish.

    with course(...) as training:
        for step in training.steps():
            ...                              what this kind of training does in a step
            training.log.step(step, ...)
            training.end_step(step)          maybe evaluate, maybe save, maybe stop
        training.save_model()
        return training.log.finish()

Everything that can be refused is refused by ``begin`` and ``prepare``, and the first evaluation has
run, before the run's directory is made: a reward that fails on everything leaves nothing behind.

Whether all ranks of a run are one program on machines of one kind: where they are not, they part
without a word, or the bits depend on who computed what.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from isobit.config.recipes import Recipe, RunConfig, SftConfig
from isobit.memory.turns import Turns
from isobit.models.config import ModelConfig
from isobit.observe.console import Console, silent
from isobit.observe.training_log import TrainingLog
from isobit.parallel.world import ALONE, World, raised_on_all, run_on_all
from isobit.records.text import Group
from isobit.rewards.grading import Graders, GradeStats, Grading, ModelScores
from isobit.run.evaluate import Evaluation, OnProgress
from isobit.run.grading import Interruption, RecordedGrading
from isobit.store.keeper import CheckpointKeeper
from isobit.store.manifest import TrainingRun, environment
from isobit.store.resume import Say, Start, begin
from isobit.util.errors import ConfigError
from isobit.util.files import disk_errors
from isobit.util.secrets import secret_notes
from isobit.util.terminal import Clock


def check_recipes(world: World, config: Recipe) -> None:
    """Refuse ranks that were started with other recipes, naming the first key that differs."""
    differs = _first_difference(world.all_gather(config.model_dump(mode="json")))
    if differs is not None:
        rank, key, theirs, firsts = differs
        raise raised_on_all(
            ConfigError(
                f"rank {rank} was started with {key} = {theirs!r}, rank 0 with {firsts!r}; start "
                "all with the same recipe and overrides"
            )
        )


def check_machines(world: World, device: torch.device) -> None:
    """Refuse ranks with other versions, other GPUs or classes of bits, or on CPUs another number of
    threads.
    """
    found = environment(device)
    # of a CPU it is compared what the instructions compute (isobit.store.manifest), not their name
    del found["device"]["instructions" if device.type == "cpu" else "threads"]
    every = world.all_gather({"host": world.host, **found})
    hosts = [one.pop("host") for one in every]
    differs = _first_difference(every)
    if differs is not None:
        rank, key, theirs, firsts = differs
        raise raised_on_all(
            ConfigError(
                f"rank {rank} on {hosts[rank]} has {key} {theirs!r}, rank 0 on {hosts[0]} "
                f"{firsts!r}, and the bits of a run would depend on which rank computes what; make "
                "them alike"
                + (" (the key threads of the recipe)" if key == "device.threads" else "")
            )
        )


def _first_difference(
    every: list[Mapping[str, Any]],
) -> tuple[int, str, Any, Any] | None:
    """Rank, key, its value there, and on rank 0."""
    firsts = dict(_flat(every[0]))
    for rank, one in enumerate(every):
        values = dict(_flat(one))
        for key in sorted(firsts.keys() | values.keys()):
            if values.get(key) != firsts.get(key):
                return rank, key, values.get(key), firsts.get(key)
    return None


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


class Runnable(TrainingRun, Protocol):
    """A prepared training of either kind, as its course needs it."""

    @property
    def turns(self) -> Turns:
        """Who has the device's memory when."""
        ...

    @property
    def model_scores(self) -> ModelScores:
        """What scores completions for the rewards that are models."""
        ...

    def describe(self) -> Sequence[str]:
        """The first lines: the model, the data, the flow, the plan of the memory."""
        ...

    def evaluate(self, progress: OnProgress, grading: Grading) -> Evaluation[Any]:
        """Every evaluation set under the current policy."""
        ...


Config = TypeVar("Config", RunConfig, SftConfig)
Run = TypeVar("Run", bound=Runnable)
Log = TypeVar("Log", bound=TrainingLog[Any])
Begins = Callable[
    [Recipe, ModelConfig, bool, Say, int, World, Sequence[str], Callable[[], None]],
    AbstractContextManager[Start],
]
"""``isobit.store.resume.begin``, or what stands in for it."""
MakeLog = Callable[[Run, Start, Console, Clock], Log]


@dataclass(frozen=True, slots=True)
class Sampling(Generic[Run]):
    """What sampling and grading know of a training under way."""

    run: Run
    console: Console
    clock: Clock
    interruption: Interruption
    grading: RecordedGrading
    """From the record of rewards or by the graders."""
    world: World
    """Who else takes part."""

    def submit(self, group: Group) -> None:
        """Begin to grade a group whose completions are all there, beside whatever follows."""
        self.grading.submit(group)

    def grade(self, groups: Sequence[Group], homes: Sequence[int]) -> GradeStats:
        """Fill the groups' rewards, those already recorded of this step from the record, the others
        on the rank in ``homes`` that each was submitted on.  Raises Interrupted where a signal
        comes.
        """
        with self.clock("grading"), self.console.busy("grading"):
            return self.grading(groups, homes)


@dataclass(frozen=True, slots=True)
class Course(Sampling[Run], Generic[Run, Log]):
    """A training under way: its run, its log, and what surrounds both."""

    log: Log
    steps_done: int
    """When this process began."""
    checkpoints: CheckpointKeeper

    def steps(self) -> range:
        """The steps still to do, counted from 1."""
        return range(self.steps_done + 1, self.run.config.training.steps + 1)

    @contextmanager
    def learning(self, engine_is_next: bool = True) -> Iterator[None]:
        """A block in which the trainer may take all the memory that it needs; the engine must not
        be asked for anything in it.  ``engine_is_next`` says whether it has the turn after.

        Raises Interrupted before anything is learnt, where a signal has come.
        """
        self.interruption.agree(self.checkpoints.check_place)
        turn = self.run.turns.training(self.clock, engine_is_next)
        with self.clock("training"), self.console.busy("training"), turn:
            yield

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation follows the step."""
        return evaluation_is_due(self.run.config, step)

    def end_step(self, step: int) -> None:
        """Evaluate and save, as far as either is due, and save where a signal asks for it.  Raises
        Interrupted where one has come to stop, and StorageError where the directory is gone.
        """
        self.interruption.agree(self.checkpoints.check_place)
        if self.evaluates_after(step):
            self.log.evaluation(
                step,
                evaluate(
                    self.run, self.console, self.clock, self.grading, self.interruption, self.world
                ),
            )
        self.checkpoints.save_if_due(step)
        if self.interruption.agree():
            self.checkpoints.save_now()

    def save_model(self) -> None:
        """The policy as a model folder in the run's directory."""
        self.checkpoints.save_model()


@contextmanager
def course(
    config: Config,
    shape: ModelConfig,
    prepare: Callable[[Config, World], Run],
    make_log: MakeLog[Run, Log],
    console: Console | None = None,
    resume: bool = False,
    model_when_interrupted: bool = False,
    extra_bytes: int = 0,
    world: World = ALONE,
    allowed: Sequence[str] = (),
    begins: Begins = begin,
) -> Iterator[Course[Run, Log]]:
    """Begin, or with ``resume`` go on with, the training of a model of ``shape`` that ``prepare``
    makes from ``config`` on each rank of ``world``; entered for all of its steps.  A checkpoint
    holds at most ``extra_bytes`` beside policy and optimiser.  What is ``allowed`` by name may be
    other than in the run that is resumed.  ``begins`` finds out where the run begins.

    A signal to stop leaves a checkpoint, and with ``model_when_interrupted`` the model folder too;
    SIGUSR1 a checkpoint, and the run goes on.
    """
    console = console or (Console() if world.rank == 0 else silent())
    clock = Clock(world.pulse.beat)
    check_recipes(world, config)
    interruption = Interruption(world)
    with (
        interruption.open_to_requests(),
        begins(
            config, shape, resume, console.line, extra_bytes, world, allowed, interruption.check
        ) as start,
        open_graders(config) as graders,
    ):
        with console.busy("loading"):
            run = prepare(config, world)
            with run.turns.training(clock):
                start.restore(run)
            rewards = graders.describe() if graders is not None else []
        check_machines(world, run.model.policy.device)
        console.lines([*run.describe(), *rewards])
        console.notes(secret_notes(config.reward))
        with (
            interruption,
            disk_errors(config.output, "the files of the run"),
        ):
            grading = RecordedGrading(
                start.rewards, graders, run.model_scores, interruption, world, start.writer
            )
            due = evaluation_is_due(config, start.step) and not start.has_evaluated
            first = evaluate(run, console, clock, grading, interruption, world) if due else None
            with (
                make_log(run, start, console, clock) as log,
                CheckpointKeeper(run, start, log, console, model_when_interrupted) as checkpoints,
            ):
                run.trainer.budget.on_change = log.budget_changed
                if first is not None:
                    log.evaluation(start.step, first)
                yield Course(
                    run, console, clock, interruption, grading, world, log, start.step, checkpoints
                )


def evaluate(
    run: Runnable,
    console: Console,
    clock: Clock,
    grading: Grading,
    interruption: Interruption,
    world: World,
) -> Evaluation[Any]:
    """Every evaluation set under the current policy.  Raises Interrupted where a signal came."""
    with clock("evaluation"), console.generating("evaluation") as progress:
        figures = run.evaluate(interruption.watched(progress), grading)
    run_on_all(world, interruption.check)
    return figures


def open_graders(config: Recipe) -> AbstractContextManager[Graders | None]:
    """The graders of a training, which begin to load their rewards; None without a reward."""
    return Graders(config.reward) if config.reward is not None else nullcontext()


def evaluation_is_due(config: Recipe, step: int) -> bool:
    """Before the first step, after every ``evaluation.every`` steps, and after the last."""
    every = config.evaluation.every
    return step in (0, config.training.steps) or (every > 0 and step % every == 0)
