"""``isobit replay``: steps of a recorded run done a second time in a directory of their own, which
is then compared with the run file by file (``isobit.commands.diff``).

    --step K     from the newest checkpoint before K, or from the start
    no step      all that digests.jsonl has, from the start

A checkpoint is used where its files are what its manifest says, and its masters and moments what
digests.jsonl says of its step, which also finds a checkpoint whose manifest was changed with it.
Another one is a difference of its step, and the one before it is used.

Rewards are asked for anew, unless those of ``rewards.jsonl`` are wanted: a reward that does not
repeat (a judge, a clock) is a difference, and so are the weights that follow from it.  After a step
that has left other weights nothing more is done, since everything that follows would differ.

A run that was resumed with something else allowed (``--allow-change``) is another run from there
on: only the steps after that can be done again, from a checkpoint, with the run's last recipe.

Nothing is written into the run's directory.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from isobit.commands.diff import OF_AN_EVALUATION, FileDifference, RunComparison, compare, read_run
from isobit.config.load import build, build_with
from isobit.config.recipes import RunConfig, recorded_recipe
from isobit.config.tables import CheckConfig, CheckpointConfig, TrackingConfig
from isobit.observe.console import silent
from isobit.parallel.world import ALONE, World, broadcast
from isobit.run.agreement import check_recipes
from isobit.run.interruption import Interruption
from isobit.run.loop import take_step
from isobit.run.open_run import start_run
from isobit.run.resolved import resolve
from isobit.run.rl_run import RlPlan, RlRun, read_rl
from isobit.run.run import Surroundings
from isobit.store.checkpoint import Checkpoint, folders_by_step, read_checkpoint
from isobit.store.compatible import REPLAYING, check_compatible, is_allowed
from isobit.store.directory import RunDirectory, check_unused
from isobit.store.journals import read_lines, whole_lines
from isobit.store.resume import Say, begin_again
from isobit.store.reward_record import AnswerRecord, KnownAnswers, KnownRewards, RewardRecord
from isobit.store.schedule_record import ScheduleRecord
from isobit.store.state import StepDigests, checkpoint_digest, read_digests
from isobit.util.errors import CheckpointError, ConfigError

_LEFT = {"weights", "masters", "moments"}
"""Digests of what a step leaves to the next one."""


@dataclass(frozen=True, slots=True)
class ReplaySource:
    """A recorded run, of which steps are to be done again."""

    directory: RunDirectory
    manifest: Mapping[str, Any]
    config: RunConfig
    """The run's own recipe, but for what changes no step."""
    digests: Mapping[int, StepDigests | None]
    checkpoint: Checkpoint | None
    """The checkpoint that it begins at; None for the start."""
    steps: range
    """Steps that are done again."""
    allowed: Sequence[str]
    damaged: Sequence[FileDifference]
    """Checkpoints that are not what the run wrote."""


def replay(
    root: Path,
    step: int | None = None,
    say: Say = print,
    overrides: Sequence[str] = (),
    allowed: Sequence[str] = (),
    recorded_rewards: bool = False,
    world: World = ALONE,
    output: Path | None = None,
) -> RunComparison:
    """Do the steps of the run in ``root`` up to ``step`` again, or all, by all ranks of ``world``
    together, and compare the files; ``say`` is given a line for each step and each file.  With
    ``recorded_rewards`` completions that the run has graded are not graded anew; ``allowed`` are
    inputs that may be others.  The files of the second run stay in ``output``, where it is given.

    Raises ConfigError as ``find_source`` does, for inputs or a class of bits that are others and
    for an ``output`` that is in use, and what a run raises.
    """
    say = say if world.rank == 0 else silent().line
    source = find_source(root, step, overrides, allowed, say, world)
    begins = f"the checkpoint of step {source.steps[0] - 1}" if source.checkpoint else "the start"
    say(f"replaying {describe_steps(source.steps)} of {root} from {begins}")
    with ExitStack() as stack:
        place = Path(broadcast(world, lambda: _make_place(output, stack)))
        last = _run_again(source, place, recorded_rewards, say, world)
        steps = range(source.steps[0] if source.checkpoint else 0, last + 1)

        def compared() -> list[Sequence[Any]]:
            found = compare(source.directory, RunDirectory(place), steps)
            return [found.equal, [asdict(one) for one in found.differences]]

        equal, differing = broadcast(world, compared)
    found = [FileDifference(**one) for one in differing]
    for line in (*equal, *map(str, found)):
        say(line)
    found = sorted([*source.damaged, *found], key=lambda one: one.step)
    return RunComparison(equal, found, steps=steps)


def describe_steps(steps: range) -> str:
    """Numbers of steps, in words, without the evaluation before the first (0)."""
    first, last = max(1, steps[0]), steps[-1]
    return f"steps {first} to {last}" if last > first else f"step {first}"


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
    manifest = json.loads(broadcast(world, lambda: json.dumps(read_run(directory))))
    config = _config(directory, manifest, overrides)
    digests = read_digests(root)
    if not digests:
        raise ConfigError(
            f"{root} has no digests of its steps (digests.jsonl): no step was finished, or an "
            "Isobit wrote it that recorded none; there is nothing to compare a replay with"
        )
    # a finished run has done its last step, whether that still has a line or not
    last = max(*digests, config.training.steps if directory.summary.is_file() else 0)
    since, changed = _went_on_as_another(manifest)
    why = f"the first step with digests is {min(digests)}"
    if since:
        why = (
            f"the run went on after step {since} with another {', '.join(changed)} "
            "(--allow-change), and its recipe is the one of then"
        )
    earliest = max(min(digests) - 1, since)
    if step is not None and not earliest < step <= last:
        raise ConfigError(
            f"--step is {step}, but of {root} steps {earliest + 1} to {last} can be done again"
            + (f": {why}" if step <= earliest else "")
        )
    if step is None and earliest:
        say(f"no step up to {earliest} is done again: {why}")
    checkpoint, damaged = _find_checkpoint(directory, digests, step, earliest, last, say, world)
    if checkpoint is None and earliest:
        raise ConfigError(
            f"{root} has no checkpoint from which step {step or earliest + 1} could be done again; "
            f"there is no way from the start, since {why}"
        )
    if checkpoint is not None and checkpoint.step == since:
        allowed = [*allowed, *changed]
    steps = range(checkpoint.step + 1 if checkpoint else 1, (step or last) + 1)
    return ReplaySource(directory, manifest, config, digests, checkpoint, steps, allowed, damaged)


def _config(
    directory: RunDirectory, manifest: Mapping[str, Any], overrides: Sequence[str]
) -> RunConfig:
    """The recipe, in one process where nothing else is asked for, which samples itself in place of
    servers: who computes changes no byte.
    """
    if "algorithm" not in manifest["config"]:
        raise ConfigError(
            f"{directory.root} is a run of `isobit sft`, which draws nothing and leaves no "
            "digests; replay is for runs of `isobit train`"
        )
    path = str(directory.manifest)
    values = {**recorded_recipe(manifest["config"]), "output": str(directory.root), "cluster": {}}
    before = build(RunConfig, values, path)
    config = build_with(RunConfig, values, overrides, path)
    saved, now = before.model_dump(mode="json"), config.model_dump(mode="json")
    check_compatible(saved, now, config.training.steps, doing=REPLAYING)
    if config.rollout.engine != "http":
        return config
    own = {"engine": "native", "servers": (), "server_key": None}
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=own)})


def _went_on_as_another(manifest: Mapping[str, Any]) -> tuple[int, list[str]]:
    """The step after which the run last went on with something allowed to be other, and what; 0
    where it never did.
    """
    for resumed in reversed(manifest.get("resumed", [])):
        allowed = resumed.get("allowed", ())
        changed = [name for name in resumed.get("changed", {}) if is_allowed(name, allowed)]
        if changed:
            return resumed["step"], changed
    return 0, []


def _find_checkpoint(
    directory: RunDirectory,
    digests: Mapping[int, StepDigests | None],
    step: int | None,
    earliest: int,
    last: int,
    say: Say,
    world: World,
) -> tuple[Checkpoint | None, list[FileDifference]]:
    """The checkpoint to begin from, None for the start, and those that are damaged.

    For a ``step`` it is the newest one before it, and ``step``'s own is checked, too.  Else all are
    checked, and it is the first one that is not before ``earliest``, where that is not the start,
    and before the ``last`` step.
    """
    folders = broadcast(
        world,
        lambda: sorted((n, str(one)) for n, one in folders_by_step(directory.checkpoints).items()),
    )
    if step is not None:
        folders = [(n, folder) for n, folder in reversed(folders) if earliest <= n <= step]
    usable, damaged = None, list[FileDifference]()
    for n, folder in folders:
        try:
            checkpoint = read_checkpoint(Path(folder), world)
            _check_digests(checkpoint, digests.get(n), world)
        except CheckpointError as error:
            name = f"{directory.checkpoints.name}/{Path(folder).name}"
            damaged.append(FileDifference(n, name, f"it is damaged: {error}"))
            say(str(damaged[-1]))
            continue
        begins = n < step if step is not None else 0 < earliest <= n < last
        if begins and usable is None:
            usable = checkpoint
        if begins and step is not None:
            break
    return usable, damaged


def _check_digests(checkpoint: Checkpoint, recorded: StepDigests | None, world: World) -> None:
    """Raise CheckpointError for other masters or moments than digests.jsonl has of the step."""
    found = broadcast(world, lambda: checkpoint_digest(checkpoint)) if recorded else {}
    for name, digest in found.items():
        if recorded is not None and digest != recorded.by_name()[name]:
            raise CheckpointError(
                f"{checkpoint.folder} does not hold the {name} that digests.jsonl has of this "
                "step, though its manifest says so"
            )


def _run_again(
    source: ReplaySource, place: Path, recorded_rewards: bool, say: Say, world: World
) -> int:
    """Do the steps again in ``place``.  -> The last one that was done."""
    config = _config_at(source.config, place)
    check_recipes(world, config)
    rewards, answers = RewardRecord(say), AnswerRecord(say)
    if recorded_rewards:
        rewards = KnownRewards(say, broadcast(world, lambda: _lines(source.directory.rewards)))
        answers = KnownAnswers(say, broadcast(world, lambda: _lines(source.directory.answers)))
    metrics = broadcast(world, lambda: _lines(source.directory.metrics))
    evaluated = [line.get("step") for line in metrics if OF_AN_EVALUATION in line]
    interruption, recipe = Interruption(world), resolve(config)

    def prepare(around: Surroundings) -> RlRun:
        return _SecondRun(read_rl(recipe), evaluated, world, around)

    with (
        interruption.open_to_requests(),
        begin_again(
            config,
            source.directory,
            source.manifest,
            source.checkpoint,
            rewards,
            answers,
            _schedule_of(source, say, world),
            say,
            world,
            source.allowed,
            interruption.check,
        ) as start,
        start_run(recipe, prepare, RlRun.open_log, start, silent(), interruption) as opened,
    ):
        for step in source.steps:
            made, recorded = take_step(opened, step).by_name(), source.digests.get(step)
            then = recorded.by_name() if recorded is not None else made
            differing = [name for name, digest in made.items() if then[name] != digest]
            names = f"{', '.join(differing)} differ" if differing else "all equal"
            say(f"step {step}: {names if recorded else 'no whole line'} in digests.jsonl")
            if _LEFT & set(differing):
                say(f"step {step} has left other weights: no step after it is done")
                return step
        if source.steps[-1] == config.training.steps and source.directory.summary.is_file():
            opened.save_model()
    return source.steps[-1]


def _schedule_of(source: ReplaySource, say: Say, world: World) -> ScheduleRecord:
    """The run's own schedule of the steps."""
    lines = broadcast(
        world, lambda: [line.decode() for line in whole_lines(source.directory.schedule, 0)]
    )
    steps = [line.encode() for line in lines if json.loads(line).get("step") in source.steps]
    return ScheduleRecord(say, steps)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(path) if line is not None]


class _SecondRun(RlRun):
    """Evaluates when the recorded run has, which may have had another ``evaluation.every``."""

    def __init__(
        self, plan: RlPlan, evaluated: Collection[Any], world: World, around: Surroundings
    ) -> None:
        super().__init__(plan, world, around=around)
        self._evaluated = frozenset(evaluated)

    def evaluates_after(self, step: int) -> bool:
        return step in self._evaluated


def _make_place(output: Path | None, stack: ExitStack) -> str:
    """The directory of the second run: the user's, or one that is removed with ``stack``."""
    if output is None:
        place = TemporaryDirectory(prefix="isobit-replay-", ignore_cleanup_errors=True)
        return stack.enter_context(place)
    check_unused(output)
    output.mkdir(parents=True, exist_ok=True)
    return str(output)


def _config_at(config: RunConfig, place: Path) -> RunConfig:
    """The recipe without what would be saved or sent elsewhere; where the run was to stop, a line
    is enough.
    """
    check = {**config.check.model_dump(), "on_mismatch": "ignore", "on_no_signal": "ignore"}
    return config.model_copy(
        update={
            "output": place,
            "checkpoint": CheckpointConfig(keep_last=0),
            "tracking": TrackingConfig(),
            "check": CheckConfig.model_validate(check),
        }
    )
