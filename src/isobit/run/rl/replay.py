"""``isobit replay``: steps of a recorded run done again, and compared with what it has recorded.

    find the source      the recipe, the steps, a checkpoint (``isobit.run.rl.replay_source``)
    for each step        sample, grade, learn, evaluate as the run did (``isobit.run.rl.loop``), in
                         a directory of its own; compare (``isobit.run.rl.replay_compare``)
    after the last       the trained model, file by file

Rewards are asked for anew, unless those of ``rewards.jsonl`` are wanted: a reward that does not
repeat (a judge, a clock) is a difference, and the weights that follow from it are one, too.  After
a step that has left other weights nothing more is done: all that follows would differ.

Nothing is written into the run's directory, and none of its files is held.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from isobit.config.check import CheckConfig
from isobit.config.checkpoint import CheckpointConfig
from isobit.config.recipe import Recipe
from isobit.config.run import RunConfig
from isobit.config.tracking import TrackingConfig
from isobit.models.config import ModelConfig
from isobit.models.folder import read_config
from isobit.models.loaded import model_folder, write_model
from isobit.observe.console import silent
from isobit.parallel.broadcast import told
from isobit.parallel.world import ALONE, World
from isobit.run.course import Begins, Course, course
from isobit.run.rl.log import RlLog
from isobit.run.rl.loop import take_step
from isobit.run.rl.replay_checkpoints import Difference
from isobit.run.rl.replay_compare import Comparer, different_files
from isobit.run.rl.replay_source import ReplaySource, find_source
from isobit.run.rl.setup import RlRun, prepare_rl
from isobit.store.checkpoint.again import begin_again
from isobit.store.checkpoint.start import Start
from isobit.store.checkpoint.usable import Say
from isobit.store.recorded_lines import read_lines
from isobit.store.reward_record import KnownRewards, RewardRecord

RlCourse = Course[RlRun, RlLog]


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
        shape = read_config(model_folder(config.model))
        begins = _begins(source, recorded_rewards, say)
        with course(
            config,
            shape,
            prepare_rl,
            RlLog,
            silent(),
            world=world,
            allowed=source.allowed,
            begins=begins,
        ) as training:
            return _Replay(source, training, say).steps()


def describe_steps(first: int, last: int) -> str:
    """Numbers of steps, in words."""
    return f"steps {first} to {last}" if last > first else f"step {first}"


class _Replay:
    """The steps, one after the other."""

    def __init__(self, source: ReplaySource, training: RlCourse, say: Say) -> None:
        self._source, self._training, self._say = source, training, say
        self._world = training.world
        self._found = list(source.differences)
        requests = training.run.evaluator.requests.values()
        self._comparer = Comparer(
            source.directory,
            source.digests,
            training.log.directory,
            {request.prompt.id for asked in requests for request in asked},
        )

    def steps(self) -> ReplayResult:
        """Until the last one that is wanted, or that can be compared."""
        source, training, done = self._source, self._training, self._source.first - 1
        if not done:
            self._compare(0)
        for step in range(source.first, source.last + 1):
            take_step(training, step)
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
        found = told(self._world, lambda: self._comparer.differences(step))
        self._note(step, found)
        if step and not found:
            self._say(f"step {step}: tokens, log-probabilities, rewards and weights are equal")
        return told(self._world, lambda: self._comparer.parted)

    def _compare_model(self, step: int) -> None:
        """The model folder, whose files are made again."""
        recorded, again = self._source.directory.model, self._training.log.directory.model
        write_model(self._training.run.model, again)
        found = told(self._world, lambda: list(different_files(recorded, again)))
        self._note(step, found)
        if not found:
            self._say(f"{recorded}: every file is equal")

    def _note(self, step: int, found: Sequence[str]) -> None:
        for what in found:
            self._found.append(Difference(step, what))
            self._say(f"step {step}: {what}" if step else f"before the first step: {what}")


def _begins(source: ReplaySource, recorded_rewards: bool, say: Say) -> Begins:
    """What stands in for ``isobit.store.checkpoint.start.begin``."""

    def begins(
        config: Recipe,
        shape: ModelConfig,
        resume: bool,
        quiet: Say,
        extra_bytes: int,
        world: World,
        allowed: Sequence[str],
        check: Callable[[], None],
    ) -> AbstractContextManager[Start]:
        rewards = RewardRecord(say)
        if recorded_rewards:
            path = source.directory.rewards
            rewards = KnownRewards(say, told(world, lambda: list(filter(None, read_lines(path)))))
        return begin_again(
            config,
            source.directory,
            source.manifest,
            source.checkpoint,
            rewards,
            say,
            world,
            allowed,
            check,
        )

    return begins


@contextmanager
def _place(world: World) -> Iterator[Path]:
    """A directory for the files of the steps, the same for all ranks; gone afterwards."""
    place = Path(told(world, lambda: tempfile.mkdtemp(prefix="isobit-replay-")))
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
