"""``isobit replay``: steps of a recorded run done again, and compared with what it has recorded.

    find the source      the recipe, the steps, a checkpoint (``isobit.run.redo``)
    for each step        sample, grade, learn, evaluate as the run did (``isobit.run.loop``), in
                         a directory of its own; compare (``isobit.run.redo_compare``)
    after the last       the trained model, file by file

Rewards are asked for anew, unless those of ``rewards.jsonl`` are wanted: a reward that does not
repeat (a judge, a clock) is a difference, and the weights that follow from it are one, too.  After
a step that has left other weights nothing more is done: all that follows would differ.

Nothing is written into the run's directory, and none of its files is held.

The checkpoints of a run whose steps are done again (``isobit.run.redo``).

A checkpoint counts where its files are what its manifest says, and masters and moments what the
step's line says: one whose manifest was changed with it is found by that.  One that does not count
is a difference of its step, and the one before it is used.

What ``isobit replay`` does again: the run's recipe, the steps, and where they begin.

    --step K     from the newest checkpoint before K, or from the start
    no step      all that digests.jsonl has, from the start

A run that was resumed with something else allowed (``--allow-change``) is another one from there
on: its steps are done again from a checkpoint of that time, with the recipe of now.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isobit.config.load import apply_overrides, build, parse_overrides
from isobit.config.recipes import RunConfig
from isobit.config.tables import CheckConfig, CheckpointConfig, TrackingConfig
from isobit.models.folder import write_model
from isobit.observe.console import silent
from isobit.parallel.world import ALONE, World, broadcast
from isobit.run.grading import Interruption
from isobit.run.loop import take_step
from isobit.run.redo_compare import Comparer, different_files
from isobit.run.run import check_recipes, start_run
from isobit.run.setup import RlRun, prepare_rl
from isobit.store.checkpoint import (
    MASTERS,
    OPTIMISER,
    Checkpoint,
    folders_by_step,
    read_checkpoint,
)
from isobit.store.compatible import REPLAYING, check_compatible, is_allowed
from isobit.store.directory import RunDirectory, is_held, read_lines
from isobit.store.resume import Say, begin_again
from isobit.store.reward_record import KnownRewards, RewardRecord
from isobit.store.state import StepDigests, checkpoint_digest, read_digests
from isobit.util.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True)
class Difference:
    """Between what was recorded of a step and what is found now."""

    step: int
    what: str
    """A sentence without its end."""


class CheckedCheckpoints:
    """The checkpoints of a run, each looked at once."""

    def __init__(
        self,
        directory: RunDirectory,
        digests: Mapping[int, StepDigests | None],
        say: Say,
        world: World,
    ) -> None:
        self._digests, self._say, self._world = digests, say, world
        self._folders = {
            step: Path(folder)
            for step, folder in broadcast(
                world,
                lambda: [
                    [step, str(folder)]
                    for step, folder in sorted(folders_by_step(directory.checkpoints).items())
                ],
            )
        }
        self.differences: list[Difference] = []

    def before(self, step: int, earliest: int) -> Checkpoint | None:
        """The newest that is usable of those before a step; its own is looked at, too."""
        if step in self._folders:
            self._usable(step)
        for one in reversed(self._folders):
            if earliest <= one < step and (checkpoint := self._usable(one)) is not None:
                return checkpoint
        return None

    def first(self, earliest: int) -> Checkpoint | None:
        """The first that is usable, where not all begins at the start; all are looked at."""
        found = [one for one in map(self._usable, self._folders) if one is not None]
        return next((one for one in found if 0 < earliest <= one.step), None)

    def _usable(self, step: int) -> Checkpoint | None:
        """A checkpoint that is what the run wrote; None of another, which is noted and said."""
        folder = self._folders[step]
        try:
            checkpoint = read_checkpoint(folder, self._world)
        except CheckpointError as error:
            return self._refuse(step, f"checkpoint {folder.name} is damaged: {error}")
        recorded = self._digests.get(step)
        if recorded is None:
            return checkpoint
        found = broadcast(self._world, lambda: checkpoint_digest(checkpoint))
        for name, file in (("masters", MASTERS), ("moments", OPTIMISER)):
            if found[name] != recorded.by_name()[name]:
                return self._refuse(
                    step,
                    f"checkpoint {folder.name}: {folder / file} does not hold the {name} that "
                    "digests.jsonl has of this step, though its manifest says so",
                )
        return checkpoint

    def _refuse(self, step: int, what: str) -> None:
        self.differences.append(Difference(step, what))
        self._say(f"step {step}: {what}")


@dataclass(slots=True)
class ReplaySource:
    """A recorded run, of which steps are to be done again."""

    directory: RunDirectory
    manifest: Mapping[str, Any]
    config: RunConfig
    """The run's own, but for what changes no step."""
    digests: Mapping[int, StepDigests | None]
    checkpoint: Checkpoint | None
    """Where it begins; None: at the start."""
    last: int
    """The last step that is done again."""
    allowed: Sequence[str]
    differences: list[Difference] = field(default_factory=list)
    """Of checkpoints."""

    @property
    def first(self) -> int:
        """The first step that is done again."""
        return self.checkpoint.step + 1 if self.checkpoint else 1


def find_source(
    root: Path,
    step: int | None,
    overrides: Sequence[str],
    allowed: Sequence[str],
    say: Say,
    world: World,
) -> ReplaySource:
    """Read what a run has recorded, and check its checkpoints; all ranks together, nothing is
    written.

    Raises ConfigError for a directory without a run of ``isobit train`` with digests, for one that
    a process is writing into, for overrides that would change a step, and for steps that cannot be
    done again.
    """
    directory = RunDirectory(root)
    manifest = json.loads(broadcast(world, lambda: json.dumps(_read_manifest(directory))))
    config = _config(directory, manifest, overrides)
    digests = read_digests(root)
    since, changed = _went_on_as_another(manifest)
    why = _describe_change(since, changed, digests)
    last = _last_step(directory, config, digests)
    earliest = max(min(digests) - 1, since)
    if step is not None and not earliest < step <= last:
        raise ConfigError(
            f"--step is {step}, but of {root} steps {earliest + 1} to {last} can be done again"
            + (f": {why}" if step <= earliest else "")
        )
    if step is None and earliest:
        say(f"no step up to {earliest} is done again: {why}")
    checked = CheckedCheckpoints(directory, digests, say, world)
    checkpoint = checked.before(step, earliest) if step else checked.first(earliest)
    if checkpoint is None and earliest:
        raise ConfigError(
            f"{root} has no checkpoint from which step {step or earliest + 1} could be done again; "
            f"there is no way from the start, since {why}"
        )
    if checkpoint is not None and checkpoint.step == since:
        allowed = [*allowed, *changed]
    return ReplaySource(
        directory, manifest, config, digests, checkpoint, step or last, allowed, checked.differences
    )


def _read_manifest(directory: RunDirectory) -> dict[str, Any]:
    """``run.json`` of a run that stands still."""
    if not directory.manifest.is_file():
        raise ConfigError(
            f"{directory.root} holds no run (there is no run.json); name the directory that "
            "`isobit train` wrote"
        )
    if is_held(directory.root):
        raise ConfigError(
            f"{directory.root} is in use by another process, which writes into it; wait for it, or "
            "stop it"
        )
    try:
        manifest = json.loads(directory.manifest.read_text(encoding="utf-8"))
        is_rl = "algorithm" in manifest["config"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{directory.manifest} cannot be read ({error}), and has the recipe; put back a copy"
        ) from None
    if not is_rl:
        raise ConfigError(
            f"{directory.root} is a run of `isobit sft`, which draws nothing and leaves no "
            "digests; replay is for runs of `isobit train`"
        )
    return manifest


def _config(
    directory: RunDirectory, manifest: Mapping[str, Any], overrides: Sequence[str]
) -> RunConfig:
    """The recipe, in one process where nothing else is asked for: who computes changes no byte."""
    path = str(directory.manifest)
    values = {**manifest["config"], "output": str(directory.root), "cluster": {}}
    before = build(RunConfig, values, path)
    config = build(RunConfig, apply_overrides(values, parse_overrides(overrides)), path)
    saved, now = before.model_dump(mode="json"), config.model_dump(mode="json")
    check_compatible(saved, now, config.training.steps, doing=REPLAYING)
    return config


def _went_on_as_another(manifest: Mapping[str, Any]) -> tuple[int, list[str]]:
    """The step after which the run last went on with something allowed to be other, and what; 0
    where it never did.
    """
    for resumed in reversed(manifest.get("resumed", [])):
        changed = [
            name
            for name in resumed.get("changed", {})
            if is_allowed(name, resumed.get("allowed", ()))
        ]
        if changed:
            return resumed["step"], changed
    return 0, []


def _describe_change(
    since: int, changed: Sequence[str], digests: Mapping[int, StepDigests | None]
) -> str:
    """Why not all steps follow from the start; as a sentence of its own it means nothing where they
    do.
    """
    if since:
        return (
            f"the run went on after step {since} with another {', '.join(changed)} "
            "(--allow-change), and its recipe is the one of then"
        )
    return f"the first step with digests is {min(digests, default=0)}"


def _last_step(
    directory: RunDirectory, config: RunConfig, digests: Mapping[int, StepDigests | None]
) -> int:
    """That the run has done: of a finished one its last, whether it still has a line or not."""
    if not digests:
        raise ConfigError(
            f"{directory.root} has no digests of its steps (digests.jsonl): no step was finished, "
            "or an Isobit wrote it that recorded none; there is nothing to compare a replay with"
        )
    finished = config.training.steps if directory.summary.is_file() else 0
    return max(*digests, finished)


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What came of it."""

    first: int
    last: int
    """Steps that were done again."""
    differences: tuple[Difference, ...]
    """In the order of their steps."""

    @property
    def exit_code(self) -> int:
        """1 where anything differs."""
        return int(bool(self.differences))


def replay(
    root: Path,
    step: int | None = None,
    say: Say = print,
    overrides: Sequence[str] = (),
    allowed: Sequence[str] = (),
    recorded_rewards: bool = False,
    world: World = ALONE,
) -> ReplayResult:
    """Do a step of the run in ``root`` again, or all, by all ranks of ``world`` together; ``say``
    is given a line for each step, and for each difference.  With ``recorded_rewards`` completions
    that the run has graded are not graded anew; ``allowed`` are inputs that may be others.

    Raises ConfigError as ``find_source`` does and for inputs or a class of bits that are others,
    and what a run raises.
    """
    say = say if world.rank == 0 else silent().line
    source = find_source(root, step, overrides, allowed, say, world)
    start = f"the checkpoint of step {source.first - 1}" if source.checkpoint else "the start"
    say(f"replaying {describe_steps(source.first, source.last)} of {root} from {start}")
    with _place(world) as place:
        config = _config_at(source, place)
        check_recipes(world, config)
        interruption = Interruption(world)
        with (
            interruption.open_to_requests(),
            begin_again(
                config,
                source.directory,
                source.manifest,
                source.checkpoint,
                _rewards(source, recorded_rewards, say, world),
                say,
                world,
                source.allowed,
                interruption.check,
            ) as start,
            start_run(
                config, lambda: prepare_rl(config, world), start, silent(), interruption
            ) as run,
        ):
            return _Replay(source, run, say).steps()


def describe_steps(first: int, last: int) -> str:
    """Numbers of steps, in words."""
    return f"steps {first} to {last}" if last > first else f"step {first}"


class _Replay:
    """The steps, one after the other."""

    def __init__(self, source: ReplaySource, run: RlRun, say: Say) -> None:
        self._source, self._run, self._say = source, run, say
        self._world = run.world
        self._found = list(source.differences)
        assert run.evaluator is not None, "reinforcement learning always generates"
        requests = run.evaluator.requests.values()
        self._comparer = Comparer(
            source.directory,
            source.digests,
            run.log.directory,
            {request.prompt.id for asked in requests for request in asked},
        )

    def steps(self) -> ReplayResult:
        """Until the last one that is wanted, or that can be compared."""
        source, done = self._source, self._source.first - 1
        if not done:
            self._compare(0)
        for step in range(source.first, source.last + 1):
            take_step(self._run, step)
            done = step
            if self._compare(step):
                self._say(f"step {step} has left other weights: no step after it is done")
                break
        else:
            if _is_the_end(source):
                self._compare_model(done)
        found = sorted(self._found, key=lambda one: one.step)
        return ReplayResult(source.first, done, tuple(found))

    def _compare(self, step: int) -> bool:
        """-> Whether all later steps differ, too."""
        found = broadcast(self._world, lambda: self._comparer.differences(step))
        self._note(step, found)
        if step and not found:
            self._say(f"step {step}: tokens, log-probabilities, rewards and weights are equal")
        return broadcast(self._world, lambda: self._comparer.parted)

    def _compare_model(self, step: int) -> None:
        """The model folder, whose files are made again."""
        recorded, again = self._source.directory.model, self._run.log.directory.model
        write_model(self._run.model, again)
        found = broadcast(self._world, lambda: list(different_files(recorded, again)))
        self._note(step, found)
        if not found:
            self._say(f"{recorded}: every file is equal")

    def _note(self, step: int, found: Sequence[str]) -> None:
        for what in found:
            self._found.append(Difference(step, what))
            self._say(f"step {step}: {what}" if step else f"before the first step: {what}")


def _rewards(source: ReplaySource, recorded_rewards: bool, say: Say, world: World) -> RewardRecord:
    """An empty record, or the rewards that the run has recorded."""
    if not recorded_rewards:
        return RewardRecord(say)
    path = source.directory.rewards
    return KnownRewards(say, broadcast(world, lambda: list(filter(None, read_lines(path)))))


@contextmanager
def _place(world: World) -> Iterator[Path]:
    """A directory for the files of the steps, the same for all ranks; gone afterwards."""
    place = Path(broadcast(world, lambda: tempfile.mkdtemp(prefix="isobit-replay-")))
    try:
        yield place
    finally:
        if world.rank == 0:
            shutil.rmtree(place, ignore_errors=True)


def _config_at(source: ReplaySource, place: Path) -> RunConfig:
    """The recipe without what would be saved or sent elsewhere; where the run was to stop, a line
    is enough.
    """
    check = source.config.check
    return source.config.model_copy(
        update={
            "output": place,
            "checkpoint": CheckpointConfig(keep_last=0),
            "tracking": TrackingConfig(),
            "check": CheckConfig.model_validate(
                {**check.model_dump(), "on_mismatch": "ignore", "on_no_signal": "ignore"}
            ),
        }
    )


def _is_the_end(source: ReplaySource) -> bool:
    """Whether the run was finished after the last step that is done again: then it has written
    ``model/``.
    """
    return source.last == source.config.training.steps and source.directory.summary.is_file()
