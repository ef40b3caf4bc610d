"""From a recipe to a run whose directory is open, and what surrounds each of its steps.

    with open_run(...) as opened:               isobit.run.loop, isobit.run.sft
        for step in opened.steps():
            with opened.learning():             the trainer has the device's memory
                ...                             what this kind of training does in a step
            opened.log.step(step, ...)
            opened.end_step(step)
            opened.evaluate_if_due(step)
            opened.save_if_due(step)
        opened.save_model()
        return opened.log.finish()

How a run begins, in this order.  Whatever can be refused is refused before the run's directory is
made, so that a reward that fails on everything leaves nothing behind.

    check_recipes        all ranks have the same recipe
    begin                the directory is free, or a resumed run is in it (isobit.store.resume)
    open_graders         the processes that grade begin to load their rewards
    open_environments    those of an environment, where there is one
    Run                  plan, weights, engine, trainer, order of prompts
    Start.restore        weights, moments and counters of the checkpoint, where the run goes on
    Run.check_machines   all ranks have the same versions and the same kind of device
    first evaluation     signals are heard from here on
    log, checkpoints     the directory is made, or taken back to where the run stands
    Run.prove            before the first step of all: what no comparison of a step would show

Training, resuming, replaying and experiments all begin by ``start_run``.  What a run does before
its first step belongs there, and nowhere else: a replay that left it out would find differences in
equal runs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path, PurePath
from typing import Any, Generic, TypeVar

import torch

from isobit.config.recipes import Recipe, RunConfig
from isobit.environments.pool import Environments
from isobit.kernels.backend import choose_device, name_fallbacks, use_back_end
from isobit.models.folder import model_needs
from isobit.observe.console import Console
from isobit.observe.model_card import write_card
from isobit.observe.run_record import read_run
from isobit.observe.training_log import TrainingLog
from isobit.parallel.world import World
from isobit.rewards.grading import Graders
from isobit.rollout.requests import Handle
from isobit.run.acting import open_environments
from isobit.run.agreement import check_recipes
from isobit.run.evaluation import Evaluation
from isobit.run.interruption import Interruption
from isobit.run.resolved import ResolvedRecipe
from isobit.run.run import Run, Surroundings
from isobit.store.keeper import CheckpointKeeper
from isobit.store.resume import Start, begin
from isobit.store.state import Boundary, take_boundary
from isobit.util.disk_space import disk_errors
from isobit.util.option_secrets import secret_notes

AnyRun = TypeVar("AnyRun", bound=Run[Any, Any])
Log = TypeVar("Log", bound=TrainingLog[Any])


class OpenRun(Generic[AnyRun, Log]):
    """A run whose directory is open: its log, its checkpoints, and the steps still to do."""

    def __init__(self, run: AnyRun, log: Log, start: Start) -> None:
        """``log`` has opened the directory.  To be entered for the steps of the run."""
        self.run, self.log = run, log
        self._steps_before, self._end = start.step, start.end
        self.checkpoints = CheckpointKeeper(
            run,
            start,
            self._boundary(start.step),
            log.evaluation_figures,
            run.console,
            run.saves_model_when_interrupted,
            self._write_card,
        )
        run.trainer.budget.on_change = lambda change: log.budget_changed(
            self.checkpoints.boundary.step + 1, change
        )

    def steps(self) -> range:
        """The steps still to do, counted from 1."""
        return range(self._steps_before + 1, self.run.config.training.steps + 1)

    @contextmanager
    def learning(self, engine_is_next: bool = True) -> Iterator[None]:
        """A block in which the trainer may take all the memory that it needs; the engine must not
        be asked for anything in it.  ``engine_is_next`` says whether it has the turn after.

        Raises Interrupted before anything is learnt, where a signal has come.
        """
        run = self.run
        run.interruption.agree(self.checkpoints.check_place)
        turn = run.turns.training(run.clock, engine_is_next)
        with run.clock("training"), run.console.busy("training"), turn:
            yield

    def end_step(self, step: int) -> None:
        """Note the boundary after a step that is in the log, or after its evaluation: everything
        that a checkpoint of this moment holds beside the tensors.
        """
        self.checkpoints.boundary = self._boundary(step)

    def _boundary(self, step: int) -> Boundary:
        figures = self.log.evaluation_figures().get(step, {})
        return take_boundary(step, self.run, self.log.state(), self.log.positions(), figures)

    def evaluate_if_due(self, step: int) -> None:
        """Evaluate and log it.  Raises Interrupted where a signal to stop has come, StorageError
        where the directory is gone.
        """
        self.run.interruption.agree(self.checkpoints.check_place)
        if self.run.evaluates_after(step):
            self.log_evaluation(step, self.run.evaluate_now())

    def log_evaluation(self, step: int, figures: Evaluation[Any]) -> None:
        """Log an evaluation that was made after a step."""
        self.log.evaluation(step, figures)
        self.end_step(step)

    def save_if_due(self, step: int) -> None:
        """Write a checkpoint where one is due, or where a signal has asked for it.  Raises
        Interrupted where a signal to stop has come.
        """
        self.checkpoints.save_if_due(step)
        if self.run.interruption.agree():
            self.checkpoints.save_now()

    def save_model(self) -> None:
        """The last step is done: write the policy as a model folder in the run's directory, and
        cut what is recorded of steps that the run has not.
        """
        self._end()
        self.checkpoints.save_model()

    def _write_card(self, folder: Path) -> None:
        """The card of the model in a folder of the run's directory."""
        model, step = self.run.model, self.checkpoints.boundary.step
        name = f"{PurePath(self.run.config.model).name.partition('@')[0]}-isobit"
        write_card(folder, name, model.policy.config, read_run(folder.parent), step, model.folder)


@contextmanager
def begin_run(
    recipe: ResolvedRecipe[Any],
    console: Console,
    resume: bool,
    world: World,
    allowed: Sequence[str],
    extra_bytes: int = 0,
) -> Iterator[tuple[Start, Console, Interruption]]:
    """A block for a run: where it begins, which is in ``config.output`` or where the run found
    there stands, its console, and the signals that it hears.  A checkpoint holds at most
    ``extra_bytes`` beside policy and optimiser.
    """
    config = recipe.config
    check_recipes(world, config)
    interruption = Interruption(world)
    with (
        interruption.open_to_requests(),
        begin(
            config,
            recipe.shape,
            resume,
            console.line,
            extra_bytes,
            world,
            allowed,
            interruption.check,
            lambda: _device(recipe),
        ) as start,
    ):
        yield start, console, interruption


def _device(recipe: ResolvedRecipe[Any]) -> torch.device:
    """The device that the run would compute on, without a word on others."""
    config = recipe.config
    use_back_end(config.back_end)
    return choose_device(config.device, model_needs(recipe.shape, config.precision.preset)).device


@contextmanager
def start_run(
    recipe: ResolvedRecipe[Any],
    prepare: Callable[[Surroundings], AnyRun],
    open_log: Callable[[AnyRun, Start], Log],
    start: Start,
    console: Console,
    interruption: Interruption,
    samples: bool = True,
) -> Iterator[OpenRun[AnyRun, Log]]:
    """A block with all steps of the run that ``prepare`` makes, from where ``start`` says;
    ``open_log`` makes the run's directory, or takes an old one back to where the run stands.
    ``samples`` is False where other processes sample for this one.

    A signal to stop leaves a checkpoint; SIGUSR1 leaves one, and the run goes on.
    """
    config = recipe.config
    with open_graders(config) as graders, environments_of(recipe, samples) as environments:
        with console.busy("loading"):
            records = start.rewards, start.answers, start.schedule, start.writer
            run = prepare(Surroundings(console, interruption, graders, *records, environments))
            with run.turns.training(run.clock):
                start.restore(run)
            rewards = graders.describe() if graders is not None else []
            if graders is not None:
                graders.check_columns(run.data.graded)
        run.check_machines()
        name_fallbacks(run.model.policy.backend, run.model.policy.flow)
        console.lines([*run.describe(), *rewards, *run.describe_crests()])
        console.notes(config.precision.notes)
        console.notes(secret_notes(config.reward))
        with interruption, disk_errors(config.output, "the files of the run"):
            due = run.evaluates_after(start.step) and not start.has_evaluated
            first = run.evaluate_now() if due else None
            with open_log(run, start) as log:
                opened = OpenRun(run, log, start)
                with opened.checkpoints:
                    if first is not None:
                        opened.log_evaluation(start.step, first)
                    if start.step == 0:
                        run.prove()
                    yield opened


def open_graders(config: Recipe) -> AbstractContextManager[Graders | None]:
    """The graders of a training, which begin to load their rewards; None without a reward."""
    return Graders(config.reward) if config.reward is not None else nullcontext()


def environments_of(
    recipe: ResolvedRecipe[Any], samples: bool = True
) -> AbstractContextManager[Environments[Handle] | None]:
    """The processes of a recipe's environment; None without one, or where nothing is sampled."""
    config = recipe.config
    if not samples or not isinstance(config, RunConfig) or config.environment is None:
        return nullcontext()
    return open_environments(config.environment, recipe.source.described.tokenizer)
