"""Where a run begins: at step 0 in a new directory, or after the step of the newest usable
checkpoint of an old one (``begin``); and where steps of a run are done again, in a directory of
their own (``begin_again``).

Of several processes rank 0 holds the directory, looks and decides; the others are told, and touch
no file but their part of a checkpoint.
"""

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from isobit.config.recipes import Recipe, RunConfig
from isobit.models.config import ModelConfig
from isobit.parallel.world import ALONE, World, broadcast, run_on_all, write_on_first
from isobit.store import state
from isobit.store.budget_record import keep_changes, read_changes
from isobit.store.checkpoint import Checkpoint, folders_by_step
from isobit.store.compatible import (
    REPLAYING,
    RESUMING,
    Changes,
    Doing,
    Recorded,
    changed_keys,
    check_compatible,
    compare,
    draws_others,
    grades_others,
    is_allowed,
    notes,
    orders_others,
    recorded,
    refused_bits,
    run_manifest,
)
from isobit.store.directory import (
    RunDirectory,
    check_unused,
    drop_completions,
    holds_run,
    write_json,
)
from isobit.store.directory_watch import DirectoryWatch
from isobit.store.disk_plan import plan_disk
from isobit.store.journals import rewind, whole_lines
from isobit.store.lock import locked
from isobit.store.manifest import environment, manifest, processes
from isobit.store.newest import Say, newest_usable, tidy
from isobit.store.reward_record import AnswerRecord, RewardRecord
from isobit.store.schedule_record import ScheduleRecord
from isobit.store.shared_disk import check_shared
from isobit.store.training_run import DrawnAhead, Dropped, TrainingRun
from isobit.store.waiting_writer import WaitingWriter
from isobit.training.budget import BudgetChange
from isobit.util.disk_space import disk_errors
from isobit.util.errors import IsobitError

_GIVEN = ("rewards", "answers", "schedule")
"""What a run was given from outside and is given again (``isobit.store.reward_record``,
``isobit.store.schedule_record``)."""


@dataclass(frozen=True, slots=True)
class Start:
    """A directory, held by this process from ``open`` on (an old one from the beginning), and where
    its run stands.
    """

    directory: RunDirectory
    rewards: RewardRecord
    answers: AnswerRecord
    schedule: ScheduleRecord
    world: World
    hosts: Sequence[str]
    """The host of each rank."""
    writer: WaitingWriter
    """Writes all files from ``open`` on."""
    _lock: ExitStack
    _say: Say
    old_manifest: Mapping[str, Any] | None = None
    """``run.json`` of a run that is resumed."""
    checkpoint: Checkpoint | None = None
    changed: dict[str, Any] = field(default_factory=dict)
    """Permitted changes since then, with both values: settings; and inputs once ``restore`` has
    compared them.
    """
    budget_changes: Sequence[BudgetChange] = ()
    """Changes recorded after the checkpoint."""
    allowed: Sequence[str] = ()
    """Names of what the user lets change."""
    doing: Doing = RESUMING
    """The undertaking that is refused where inputs or bits differ."""
    went_on_with: Collection[str] | None = None
    """Names of what the run has changed after the checkpoint, where its steps are done again."""
    watch: DirectoryWatch = field(default_factory=DirectoryWatch)
    """Follows the directory where it is moved; used by the rank that writes."""

    @property
    def writes(self) -> bool:
        """Whether this rank writes the run's files, all but its part of a checkpoint."""
        return self.world.rank == 0

    @property
    def step(self) -> int:
        """Steps of the run that are done already; 0 of a new one."""
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def log(self) -> Mapping[str, Any] | None:
        """The state of the run's log at the checkpoint that it goes on from; None of a new run."""
        return self.checkpoint.state["log"] if self.checkpoint else None

    @property
    def has_evaluated(self) -> bool:
        """Whether the evaluation after ``step`` steps has been made, and is in the log."""
        return self.log is not None and str(self.step) in self.log["evaluations"]

    def restore(self, run: TrainingRun) -> None:
        """Put a prepared run where it stood, on the threads that it had; what is recorded of the
        steps after that comes again, and what was drawn for them is learnt from, except where a
        change that is ``allowed`` says that others would be given or drawn.

        All ranks together.  Raises ConfigError with a table where data, reward code, tokenizer or
        class of bits are others and not ``allowed``, and as ``state.restore`` does.
        """
        if self.old_manifest is not None:
            world, device = run.model.policy.world, run.model.policy.device
            old, now = recorded(self.old_manifest, self.checkpoint), environment(device)
            resumed = self.old_manifest.get("resumed", [])
            settings = {
                *self.changed,
                *(name for one in resumed for name in one.get("changed", ())),
            }
            more = run_on_all(
                world,
                lambda: compare(
                    old, run.config, run.inputs, now, self.allowed, settings, self.doing
                ),
            )
            self.changed.update(more)
            self._say_changes(old, now)
            _same_threads(run.config, self.old_manifest, self._say)
        if self.checkpoint is not None:
            self._restore_state(run, self.checkpoint)
        was, _ = self.changed.get("training.tokens_per_microbatch", (None, None))
        run.trainer.budget.go_on(run.trainer.updates, self.budget_changes, was)

    def _say_changes(self, old: Recorded, now: Mapping[str, Any]) -> None:
        """Lines on what is not as it was; what is recorded of others is forgotten."""
        differs = [f"{name} has changed" for name in self.changed if is_allowed(name, self.allowed)]
        for line in notes(old, differs, now):
            self._say(line)
        draws = self.doing is RESUMING and draws_others(self.changed)
        if draws or grades_others(self.changed):
            self.rewards.forget_ahead()
        if draws or any(is_allowed(name, ["environment"]) for name in self.changed):
            self.answers.forget_ahead()
        if draws:
            self.schedule.forget_ahead()

    def _restore_state(self, run: TrainingRun, checkpoint: Checkpoint) -> None:
        """Restore the checkpoint, with what it holds for steps to come as far as it may be learnt
        from: graded again after another reward, dropped where others would be drawn.
        """
        ahead = {name: one for name, one in run.extras.items() if isinstance(one, DrawnAhead)}
        changed = self.changed if self.went_on_with is None else self.went_on_with
        reasons, rewards = draws_others(changed), grades_others(changed)
        if rewards and not all(one.can_regrade for one in ahead.values()):
            reasons += rewards
        again = not orders_others(changed)
        prompts = 0
        if reasons:
            checkpoint, prompts = self._without_ahead(run, checkpoint, ahead, reasons, again)
        state.restore(checkpoint, run, state.TRAINED_ON in self.changed)
        run.sampler.give_again(prompts)
        if rewards:
            for one in ahead.values():
                one.regrade()

    def _without_ahead(
        self,
        run: TrainingRun,
        checkpoint: Checkpoint,
        ahead: Mapping[str, DrawnAhead],
        reasons: Sequence[str],
        again: bool,
    ) -> tuple[Checkpoint, int]:
        """The checkpoint without what was drawn ahead of it, which is told, and the prompts that
        are to come ``again``.
        """
        states: dict[str, Any] = dict(checkpoint.state["extras"])

        def drop() -> dict[str, Dropped]:
            files = checkpoint.extras()
            return {
                name: one.dropped(states[name], files.get(name, {}), checkpoint.step, again)
                for name, one in ahead.items()
                if name in states
            }

        parts = run_on_all(run.model.policy.world, drop)
        states |= {name: one.state for name, one in parts.items()}
        dropped = parts.values()
        if samples := sum(one.samples for one in dropped):
            tokens, have = sum(one.tokens for one in dropped), "have" if reasons[1:] else "has"
            self._say(
                f"dropped: {samples} samples with {tokens:,} tokens that were drawn ahead of the "
                f"checkpoint, since {', '.join(reasons)} {have} changed"
            )
        prompts = sum(one.prompts for one in dropped)
        return replace(checkpoint, state={**checkpoint.state, "extras": states}), prompts

    def open(self, run: TrainingRun) -> None:
        """Make the directory, or take an old one back to where the run stands; from now on files
        are written.  All ranks together.
        """
        write_on_first(self.world, lambda: self._open(run))
        if not self.writes:
            for record in (self.rewards, self.answers, self.schedule):
                record.follow()

    def _open(self, run: TrainingRun) -> None:
        root = self.directory.root
        with disk_errors(root, "the run's directory"):
            if self.old_manifest is None:
                root.mkdir(parents=True, exist_ok=True)
                self._lock.enter_context(locked(root))
                check_unused(root)  # another process may have been and gone since
                self._hold(root)
                write_json(self.directory.manifest, manifest(run, self.hosts))
            else:
                self._hold(root)
                tidy(self.directory, self.step, self._say)
                path, done = self.directory.budget, self.checkpoint
                if self.doing is RESUMING:
                    rewind(self.directory, done.state["files"] if done else {})
                drop_completions(self.directory, self.step)
                changes = run.trainer.budget.changes[len(done.state["budget"]) if done else 0 :]
                keep_changes(path, position_at(done, path), changes, self.step + 1)
                resumed = {
                    "step": self.step,
                    **environment(run.model.policy.device),
                    **processes(self.hosts),
                    "changed": self.changed,
                    "allowed": list(self.allowed),
                }
                history = [*self.old_manifest.get("resumed", []), resumed]
                write_json(
                    self.directory.manifest,
                    {
                        **(self.old_manifest if done else manifest(run, self.hosts)),
                        "config": run.config.model_dump(mode="json"),
                        "inputs": dict(run.inputs),
                        "engine": run.engine_figures(),
                        "resumed": history,
                    },
                )
            self._open_records(run.config)

    def _open_records(self, config: Recipe) -> None:
        """Those that the recipe has; of others the lines behind the checkpoint go."""
        acts = isinstance(config, RunConfig) and config.environment is not None
        is_free = isinstance(config, RunConfig) and config.asynchrony.max_staleness is not None
        for record, path, has_it in (
            (self.rewards, self.directory.rewards, config.reward is not None),
            (self.answers, self.directory.answers, acts),
            (self.schedule, self.directory.schedule, is_free),
        ):
            if has_it:
                record.open(path)
                self._lock.callback(record.close)
            elif path.is_file():
                os.truncate(path, position_at(self.checkpoint, path))

    def end(self) -> None:
        """The last step is done: cut what is recorded of others.  All ranks together."""

        def cut() -> None:
            for record in (self.rewards, self.answers, self.schedule):
                record.cut_ahead()

        self.writer.write_on_first(cut)

    def _hold(self, root: Path) -> None:
        self.watch.hold(root)
        self._lock.callback(self.watch.release)


@contextmanager
def begin(
    config: Recipe,
    shape: ModelConfig,
    resume: bool,
    say: Say,
    extra_bytes: int = 0,
    world: World = ALONE,
    allowed: Sequence[str] = (),
    check: Callable[[], None] = lambda: None,
    device: Callable[[], torch.device] | None = None,
) -> Iterator[Start]:
    """Find out where the run of a model of ``shape`` begins, whose checkpoints hold at most
    ``extra_bytes`` of extras; nothing is written or moved before ``Start.open``.  Settings that
    are ``allowed`` by name may be others than the run's.  All ranks together, with the same answer
    on all.  ``check`` raises Interrupted where a signal has come while a full disk is waited for.
    Where settings are refused, the bits of the ``device`` are compared for the same message.

    Raises ConfigError for a directory that is used (without ``resume``), holds no run, is in use
    by another process, or is not the same on all hosts, and for a configuration that is not the
    run's; CheckpointError where no checkpoint of several can be used; StorageError for a disk
    without room for what the run will write.
    """
    directory, hosts = RunDirectory(config.output), world.all_gather(world.host)
    writer = WaitingWriter(world, directory.root, config.checkpoint.wait_for_space_s, say, check)
    if config.checkpoint.keep_last or resume:
        check_shared(world, directory.root)
    with ExitStack() as lock:
        if not broadcast(world, lambda: _lock(directory, resume, say, lock)):
            broadcast(world, lambda: plan_disk(config, shape, (), extra_bytes).check())
            records = RewardRecord(say), AnswerRecord(say), ScheduleRecord(say)
            yield Start(directory, *records, world, hosts, writer, lock, say)
            return
        checkpoint = newest_usable(directory, say, world)
        given = config, shape, checkpoint, extra_bytes, allowed, say, device
        found = json.loads(broadcast(world, lambda: _decide(directory, *given)))
        rewards, answers, schedule = ([line.encode() for line in found[name]] for name in _GIVEN)
        say(
            f"resuming {directory.root} after step {checkpoint.step if checkpoint else 0} of "
            f"{config.training.steps}" + ("" if checkpoint else ": there is no checkpoint yet")
        )
        yield Start(
            directory,
            RewardRecord(say, rewards, position_at(checkpoint, directory.rewards)),
            AnswerRecord(say, answers, position_at(checkpoint, directory.answers)),
            ScheduleRecord(say, schedule, position_at(checkpoint, directory.schedule)),
            world,
            hosts,
            writer,
            lock,
            say,
            found["old"],
            checkpoint,
            found["changed"],
            [BudgetChange(**change) for change in found["budget"]],
            allowed,
        )


def _lock(directory: RunDirectory, resume: bool, say: Say, lock: ExitStack) -> bool:
    """Whether a run is to be resumed in ``directory``, which ``lock`` holds then; a directory for a
    new run must be unused.
    """
    if resume and holds_run(directory.root):
        with disk_errors(directory.root, "the lock"):
            lock.enter_context(locked(directory.root))
        return True
    check_unused(directory.root)
    if resume:
        say(f"nothing to resume in {directory.root}: this is a new run")
    return False


def _decide(
    directory: RunDirectory,
    config: Recipe,
    shape: ModelConfig,
    checkpoint: Checkpoint | None,
    extra_bytes: int,
    allowed: Sequence[str],
    say: Say,
    device: Callable[[], torch.device] | None,
) -> str:
    """Whether the run can go on from a checkpoint, and all that every rank must know of it, as
    JSON.
    """
    old = run_manifest(directory, checkpoint)
    step = checkpoint.step if checkpoint else 0
    changed = _check_settings(old, config, checkpoint, allowed, device)
    on_disk = [done for done in folders_by_step(directory.checkpoints) if done <= step]
    plan_disk(config, shape, on_disk, extra_bytes).check()
    files = directory.rewards, directory.answers, directory.schedule
    paths = dict(zip(_GIVEN, files, strict=True))
    given = {name: whole_lines(one, position_at(checkpoint, one)) for name, one in paths.items()}
    budget = read_changes(directory.budget, position_at(checkpoint, directory.budget), say)
    return json.dumps(
        {
            "old": old,
            "changed": changed,
            **{name: [line.decode() for line in lines] for name, lines in given.items()},
            "budget": [asdict(change) for change in budget],
        }
    )


def _check_settings(
    old: Mapping[str, Any],
    config: Recipe,
    checkpoint: Checkpoint | None,
    allowed: Sequence[str],
    device: Callable[[], torch.device] | None,
) -> Changes:
    def bits() -> Changes:
        if device is None:
            return {}
        with suppress(IsobitError):  # a device that cannot be used is refused where it is taken
            return refused_bits(recorded(old, checkpoint), environment(device()), allowed)
        return {}

    now = config.model_dump(mode="json")
    # a checkpoint records no processes, which is all there is where run.json was lost
    saved = {"cluster": now["cluster"], **old["config"]}
    step = checkpoint.step if checkpoint else 0
    return check_compatible(saved, now, step, allowed, bits=bits)


def preview(
    config: Recipe,
    inputs: Mapping[str, str],
    device: torch.device,
    allowed: Sequence[str],
    say: Say,
) -> None:
    """Say where a resumed run would go on, and write nothing.  Raises what it would raise."""
    directory = RunDirectory(config.output)
    if not holds_run(directory.root):
        check_unused(directory.root)
        say(f"nothing to resume in {directory.root}: this would be a new run")
        return
    checkpoint = newest_usable(directory, say)
    old, step = run_manifest(directory, checkpoint), checkpoint.step if checkpoint else 0
    changed = _check_settings(old, config, checkpoint, allowed, lambda: device)
    before = recorded(old, checkpoint)
    more = compare(before, config, inputs, environment(device), allowed, changed)
    for name in (*changed, *more):
        say(f"changed since the run began, and may: {name}")
    for line in notes(before, (), environment(device)):
        say(line)
    say(f"--resume would go on after step {step} of {config.training.steps}")


def position_at(checkpoint: Checkpoint | None, path: Path) -> int:
    """Bytes of a file of the run at a checkpoint; ``rewind`` fills up one that has lost some."""
    return checkpoint.state["files"].get(path.name, 0) if checkpoint else 0


def _went_on_with(manifest: Mapping[str, Any], checkpoint: Checkpoint | None) -> list[str]:
    """What the run whose ``run.json`` holds ``manifest`` has changed after a checkpoint."""
    if checkpoint is None:
        return []
    before, now = checkpoint.manifest["inputs"], manifest["inputs"]
    inputs = [name for name, value in before.items() if now.get(name) != value]
    return [*changed_keys(checkpoint.manifest["config"], manifest["config"]), *inputs]


def _same_threads(config: Recipe, old: Mapping[str, Any], say: Say) -> None:
    """Gradients repeat at a fixed number of threads: where the configuration leaves it open, the
    run keeps the one it had.
    """
    threads = old.get("device", {}).get("threads")
    if config.threads is None and threads and threads != torch.get_num_threads():
        say(
            f"going on with {threads} threads, as before, rather than {torch.get_num_threads()}: "
            "gradients repeat at a fixed number"
        )
        torch.set_num_threads(threads)


@contextmanager
def begin_again(
    config: Recipe,
    source: RunDirectory,
    manifest: Mapping[str, Any],
    checkpoint: Checkpoint | None,
    rewards: RewardRecord,
    answers: AnswerRecord,
    schedule: ScheduleRecord,
    say: Say,
    world: World = ALONE,
    allowed: Sequence[str] = (),
    check: Callable[[], None] = lambda: None,
) -> Iterator[Start]:
    """The start of a repetition: steps of the run in ``source``, whose ``run.json`` holds
    ``manifest``, are done again from one of its checkpoints or from the beginning.  Only the empty
    directory ``config.output`` is written to.  Rewards come from ``rewards``, what tools say from
    ``answers``, who learns from what from ``schedule``, changes of the budget from the run.
    ``check`` is as in ``begin``.

    ``Start.restore`` raises ConfigError for inputs or a class of bits that are others than the
    run's and not ``allowed``.
    """
    directory, hosts = RunDirectory(config.output), world.all_gather(world.host)
    recorded = broadcast(
        world,
        lambda: [
            asdict(change)
            for change in read_changes(source.budget, position_at(checkpoint, source.budget), say)
        ],
    )
    changes = [BudgetChange(**change) for change in recorded]
    writer = WaitingWriter(world, directory.root, config.checkpoint.wait_for_space_s, say, check)
    with ExitStack() as lock:
        yield Start(
            directory,
            rewards,
            answers,
            schedule,
            world,
            hosts,
            writer,
            lock,
            say,
            manifest,
            checkpoint,
            budget_changes=changes,
            allowed=allowed,
            doing=REPLAYING,
            went_on_with=_went_on_with(manifest, checkpoint),
        )
