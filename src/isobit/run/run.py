"""A run and everything that it owns, whatever it learns from.

    with open_run(...) as run:                  isobit.run.loop, isobit.run.sft
        for step in run.steps():
            with run.learning():                the trainer has the device's memory
                ...                             what this kind of training does in a step
            run.log.step(step, ...)
            run.end_step(step)
            run.evaluate_if_due(step)
            run.save_if_due(step)
        run.save_model()
        return run.log.finish()

How a run begins, in this order.  Whatever can be refused is refused before ``start`` makes the
run's directory, so that a reward that fails on everything leaves nothing behind.

    check_recipes     all ranks have the same recipe
    begin             the directory is free, or a resumed run is found in it (isobit.store.resume)
    open_graders      the processes that grade begin to load their rewards
    Run               plan, weights, engine, trainer, order of prompts
    Run.restore       weights, moments and counters of the checkpoint, where the run goes on
    check_machines    all ranks have the same versions and the same kind of device
    Run.start         signals are heard; first evaluation; directory, log and checkpoints
    Run.prove         before the first step of all: what no comparison of a step would show

Training, resuming, replaying and experiments all begin by ``start_run``.  What a run does before
its first step belongs there and in ``Run.start``, and nowhere else: a replay that left it out would
find differences in equal runs.

On a device with a memory of its own the memory is planned before anything is in it.  The plan says
how many pages the KV cache gets: this is the only place where what the engine reads differs from
what the recipe says.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path, PurePath
from typing import Any, Generic, TypeVar

import torch

from isobit.config.recipes import Recipe, RunConfig, SftConfig
from isobit.config.rollout import RolloutConfig, RunRolloutConfig
from isobit.data.sampler import Mapped, PromptSampler
from isobit.kernels.backend import support
from isobit.memory.cache_size import choose_num_pages
from isobit.memory.turns import DeviceTurns, Turns, allocate_in_pages
from isobit.models.config import ModelConfig
from isobit.models.folder import LoadedModel
from isobit.observe.console import Console, silent
from isobit.observe.model_card import write_card
from isobit.observe.report.source import read_run
from isobit.observe.training_log import TrainingLog
from isobit.parallel.gradient_sum import Slots
from isobit.parallel.world import ALONE, World, raised_on_all, run_on_all
from isobit.rewards.grading import Graders
from isobit.rollout.engine import RolloutEngine
from isobit.rollout.native import NativeEngine
from isobit.run.data import RlData
from isobit.run.evaluate import Evaluation, Evaluator, OnProgress
from isobit.run.flows import notice_crests
from isobit.run.frozen_models import ModelRewards, load_teacher, teacher_table
from isobit.run.grading import Interruption, RecordedGrading
from isobit.run.lessons import SftData
from isobit.run.plan import Plan, check_requests, plan_device_memory
from isobit.store.disk import WaitingWriter
from isobit.store.keeper import CheckpointKeeper, check_hook
from isobit.store.manifest import Extra, environment
from isobit.store.resume import Start, begin
from isobit.store.reward_record import RewardRecord
from isobit.store.state import Boundary, take_boundary
from isobit.training.trainer import Trainer
from isobit.util.errors import ConfigError
from isobit.util.files import disk_errors
from isobit.util.terminal import Clock
from isobit.util.user_code import ENVIRONMENT, secret_notes

Config = TypeVar("Config", RunConfig, SftConfig)
Data = TypeVar("Data", RlData, SftData)
Log = TypeVar("Log", bound=TrainingLog[Any])


class Run(ABC, Generic[Config, Data, Log]):
    """A training with all of its parts, on each rank of ``world``."""

    log: Log
    """From ``start`` on, as are the next two."""
    checkpoints: CheckpointKeeper
    grading: RecordedGrading
    """From the record of rewards where an interrupted run is repeated, else by the graders."""
    saves_model_when_interrupted = False
    """Whether a signal to stop leaves the model folder too, beside a checkpoint."""

    def __init__(self, plan: Plan[Config, Data], world: World = ALONE, learns: bool = True) -> None:
        """Load the policy and build the engine and the trainer around it, on each rank of a world.
        A run that never ``learns`` keeps no masters.  Writes nothing.

        Raises an ``IsobitError`` for weights that cannot be used, for a plan that does not fit the
        device, and for prompts that the engine or the model's context cannot take.
        """
        config, rollout = plan.config, plan.config.rollout
        run_on_all(world, lambda: check_hook(config.checkpoint) if world.rank == 0 else None)
        self.config, self.data, self.world = config, plan.data, world
        self.console, self.clock = silent(), Clock(world.pulse.beat)
        self.interruption = Interruption(world)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        device = world.own_device(plan.choose_device())
        slots, device_plan = Slots.of(plan.training.slots, world), None
        if support(device.type).has_own_memory:
            here = world.all_gather(world.host).count(world.host)
            device_plan = plan_device_memory(plan, device, world.size, here, learns, slots.hosts)
            allocate_in_pages(device)
            rollout = rollout.model_copy(update={"kv_pages": device_plan.pages})
        self.model = plan.source.load(config.precision, config.seed, device, world, learns, slots)
        self._engine: RolloutEngine | None = None
        if plan.generates:
            self._engine = make_engine(self.model, rollout, config.seed)
        self.teacher = load_teacher(config, self.model.policy) if learns else None
        self.trainer = Trainer(
            self.model.policy,
            plan.training,
            plan.updates,
            config.seed,
            head_rate=plan.head_rate,
            teacher=None if self.teacher is None else self.teacher.divergence,
        )
        self.turns: Turns = Turns()
        if device_plan is not None:
            self.turns = DeviceTurns(device_plan, self._engine, self.trainer)
        self.reward_models = ModelRewards(config.reward, device, config.data.date)
        self.evaluator: Evaluator | None = None
        if self._engine is not None:
            check_requests(plan.requests, self._engine.check, self.model.context)
            self.evaluator = Evaluator(self._engine, plan.evaluation, world)
        per_step = config.training.prompts_per_step
        self.sampler = PromptSampler(plan.data.prompts, per_step, config.seed, config.data.shuffle)
        self.inputs: Mapping[str, str] = plan.inputs
        self.extras: dict[str, Extra] = {}
        """What else a checkpoint holds, by the name of its file."""
        if self.teacher is not None:
            self.extras["teacher"] = self.teacher
        if len(self.reward_models):
            self.extras["reward_models"] = self.reward_models

    # What each kind of training says of itself.

    @abstractmethod
    def describe(self) -> Sequence[str]:
        """The first lines: the model, the data, the flow, the plan of the memory."""

    @abstractmethod
    def evaluate(self, progress: OnProgress, grading: RecordedGrading) -> Evaluation[Any]:
        """Every evaluation set under the current policy."""

    @abstractmethod
    def open_log(self, start: Start) -> Log:
        """The log, which makes the run's directory, or takes an old one back to where the run
        stands.
        """

    def acting(self, start: Start) -> AbstractContextManager[None]:
        """A block in which completions may call tools."""
        return nullcontext()

    def check_machines(self) -> None:
        """Refuse ranks whose machines would compute other bits."""
        check_machines(self.world, self.model.policy.device)

    def prove(self) -> None:
        """What is tried once, between the first evaluation and the first step.  It may publish the
        weights, and ends with those that it began with.  All ranks together.
        """

    def data_figures(self) -> dict[str, Any]:
        """What it learns from and is measured on, in numbers, for the manifest."""
        return self.data.figures()

    def engine_figures(self) -> dict[str, Any] | None:
        """The sizes that its engine has, for the manifest; None where nothing is generated."""
        if self._engine is None:
            return None
        return self._engine.figures()

    @property
    def engine(self) -> RolloutEngine:
        """What samples by the policy."""
        assert self._engine is not None, "nothing is generated"
        return self._engine

    # How a run begins.

    def restore(
        self,
        start: Start,
        graders: Graders | None,
        console: Console,
        interruption: Interruption,
    ) -> None:
        """Put the run where ``start`` says."""
        self.console, self.interruption = console, interruption
        with self.turns.training(self.clock):
            start.restore(self)
        self.grade_by(graders, start.rewards, start.writer)

    def grade_by(
        self, graders: Graders | None, record: RewardRecord, writer: WaitingWriter | None = None
    ) -> None:
        """Take rewards from ``record`` where it still has some, else from ``graders``."""
        models = self.reward_models.scores(self.turns.release_engine)
        self.grading = RecordedGrading(
            record, graders, models, self.interruption, self.world, writer
        )

    @contextmanager
    def start(self, start: Start, rewards: Sequence[str]) -> Iterator[None]:
        """A block with all steps of the run: what stands before the first step is evaluated and
        proved, and the run's directory made or taken back.  ``rewards`` are lines on who grades.

        A signal to stop leaves a checkpoint; SIGUSR1 leaves one, and the run goes on.
        """
        self.check_machines()
        self.console.lines([*self.describe(), *rewards, *self._describe_crests()])
        self.console.notes(secret_notes(self.config.reward))
        with self.interruption, disk_errors(self.config.output, "the files of the run"):
            due = self.evaluates_after(start.step) and not start.has_evaluated
            first = self.evaluate_now() if due else None
            with (
                self.open_log(start) as self.log,
                CheckpointKeeper(
                    self,
                    start,
                    self._boundary(start.step),
                    self.log.evaluation_figures,
                    self.console,
                    self.saves_model_when_interrupted,
                    self._write_card,
                ) as self.checkpoints,
            ):
                self.trainer.budget.on_change = lambda change: self.log.budget_changed(
                    self.checkpoints.boundary.step + 1, change
                )
                self._steps_done = start.step
                if first is not None:
                    self._log_evaluation(start.step, first)
                if start.step == 0:
                    self.prove()
                yield

    def describe_teacher(self) -> list[str]:
        """A line on who is learnt from; none without a teacher."""
        table = teacher_table(self.config)
        if table is None:
            return []
        name, kl = table.model or self.config.model, f"{table.kl} KL over the vocabulary"
        if table.kl == "sampled":
            kl = "reverse KL by the sampled tokens"
        elif table.top_k:
            kl = f"{table.kl} KL over its {table.top_k} likeliest tokens and the rest"
        return [f"teacher: {name}, {table.precision}; {kl}"]

    def _describe_crests(self) -> list[str]:
        """A line on what INT8 finds hard in the first prompts, on the rank that prints."""
        if self.world.rank > 0:
            return []
        return notice_crests(
            self.model.policy, Mapped(self.data.prompts, lambda prompt: prompt.token_ids)
        )

    def _write_card(self, folder: Path) -> None:
        """The card of the model in a folder of the run's directory."""
        record, step = read_run(folder.parent), self.checkpoints.boundary.step
        name = f"{PurePath(self.config.model).name.partition('@')[0]}-isobit"
        write_card(folder, name, self.model.policy.config, record, step, self.model.folder)

    # What surrounds a step.

    def steps(self) -> range:
        """The steps still to do, counted from 1."""
        return range(self._steps_done + 1, self.config.training.steps + 1)

    @contextmanager
    def learning(self, engine_is_next: bool = True) -> Iterator[None]:
        """A block in which the trainer may take all the memory that it needs; the engine must not
        be asked for anything in it.  ``engine_is_next`` says whether it has the turn after.

        Raises Interrupted before anything is learnt, where a signal has come.
        """
        self.interruption.agree(self.checkpoints.check_place)
        turn = self.turns.training(self.clock, engine_is_next)
        with self.clock("training"), self.console.busy("training"), turn:
            yield

    def end_step(self, step: int) -> None:
        """Note the boundary after a step that is in the log, or after its evaluation: everything
        that a checkpoint of this moment holds beside the tensors.
        """
        self.checkpoints.boundary = self._boundary(step)

    def _boundary(self, step: int) -> Boundary:
        figures = self.log.evaluation_figures().get(step, {})
        return take_boundary(step, self, self.log.state(), self.log.positions(), figures)

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation follows the step."""
        return evaluation_is_due(self.config, step)

    def evaluate_if_due(self, step: int) -> None:
        """Evaluate and log it.  Raises Interrupted where a signal to stop has come, StorageError
        where the directory is gone.
        """
        self.interruption.agree(self.checkpoints.check_place)
        if self.evaluates_after(step):
            self._log_evaluation(step, self.evaluate_now())

    def _log_evaluation(self, step: int, figures: Evaluation[Any]) -> None:
        self.log.evaluation(step, figures)
        self.end_step(step)

    def evaluate_now(self) -> Evaluation[Any]:
        """Every evaluation set under the current policy.  Raises Interrupted where a signal to stop
        has come.
        """
        with self.clock("evaluation"), self.console.generating("evaluation") as progress:
            figures = self.evaluate(self.interruption.watched(progress), self.grading)
        run_on_all(self.world, self.interruption.check)
        return figures

    def save_if_due(self, step: int) -> None:
        """Write a checkpoint where one is due, or where a signal has asked for it.  Raises
        Interrupted where a signal to stop has come.
        """
        self.checkpoints.save_if_due(step)
        if self.interruption.agree():
            self.checkpoints.save_now()

    def save_model(self) -> None:
        """Write the policy as a model folder in the run's directory."""
        self.checkpoints.save_model()


def make_engine(model: LoadedModel, rollout: RolloutConfig, seed: int) -> RolloutEngine:
    """What ``rollout.engine`` names.  Raises ConfigError where it cannot be had."""
    if not isinstance(rollout, RunRolloutConfig) or rollout.engine == "native":
        return NativeEngine(model.policy, rollout, model.tokenizer, seed)
    if rollout.engine == "http":
        from isobit.rollout.http_engine import HttpEngine

        bits = environment(model.policy.device)["bits"]
        return HttpEngine(model.policy, rollout, _server_key(rollout), model.tokenizer, seed, bits)
    if rollout.servers:
        from isobit.rollout.vllm_server import VllmServers

        key = _server_key(rollout)
        return VllmServers(model.policy, rollout, key, model.tokenizer, model.folder)
    from isobit.rollout.vllm_engine import VllmEngine

    pages = choose_num_pages(model.policy, rollout)
    return VllmEngine(model.policy, rollout, model.tokenizer, seed, pages)


def _server_key(rollout: RunRolloutConfig) -> str | None:
    if rollout.server_key is None:
        return None
    name = rollout.server_key.removeprefix(ENVIRONMENT)
    if not (key := os.environ.get(name, "").strip()):
        raise ConfigError(
            f"rollout.server_key is {rollout.server_key!r}, but the environment has no variable "
            f"{name} with a key; export it before the run, also before --resume"
        )
    return key


AnyRun = TypeVar("AnyRun", bound=Run[Any, Any, Any])


@contextmanager
def begin_run(
    config: RunConfig | SftConfig,
    shape: ModelConfig,
    console: Console | None,
    resume: bool,
    world: World,
    allowed: Sequence[str],
    extra_bytes: int = 0,
) -> Iterator[tuple[Start, Console, Interruption]]:
    """A block for a run of a model of ``shape``: where it begins, which is in ``config.output`` or
    where the run found there stands, its console, and the signals that it hears.  A checkpoint
    holds at most ``extra_bytes`` beside policy and optimiser.
    """
    console = console or (Console() if world.rank == 0 else silent())
    check_recipes(world, config)
    interruption = Interruption(world)
    with (
        interruption.open_to_requests(),
        begin(
            config, shape, resume, console.line, extra_bytes, world, allowed, interruption.check
        ) as start,
    ):
        yield start, console, interruption


@contextmanager
def start_run(
    config: Recipe,
    prepare: Callable[[], AnyRun],
    start: Start,
    console: Console,
    interruption: Interruption,
) -> Iterator[AnyRun]:
    """A block with all steps of the run that ``prepare`` makes, from where ``start`` says."""
    with open_graders(config) as graders:
        with console.busy("loading"):
            run = prepare()
            run.restore(start, graders, console, interruption)
            rewards = graders.describe() if graders is not None else []
        with run.acting(start), run.start(start, rewards):
            yield run


def open_graders(config: Recipe) -> AbstractContextManager[Graders | None]:
    """The graders of a training, which begin to load their rewards; None without a reward."""
    return Graders(config.reward) if config.reward is not None else nullcontext()


def evaluation_is_due(config: Recipe, step: int) -> bool:
    """Before the first step, after every ``evaluation.every`` steps, and after the last."""
    every = config.evaluation.every
    return step in (0, config.training.steps) or (every > 0 and step % every == 0)


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
    check_alike(world.all_gather({"host": world.host, **found}))


def check_alike(every: Sequence[dict[str, Any]]) -> None:
    """Refuse machines, by rank, of which one differs in anything but its ``host``."""
    every = [dict(one) for one in every]
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
    every: Sequence[Mapping[str, Any]],
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
