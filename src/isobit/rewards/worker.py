"""A process that grades: ``python -m isobit.rewards.worker``, as ``process`` starts it.

It splits in two before it has loaded anything: one half grades, the other (``keeper``) watches over
it.  The half that grades has

    limits       of its memory (``memory_limit``, ``reward.memory_mib``); no core files
    its output   as a pipe of its own, so that a reward that prints reaches nobody's standard output
    a pid guard  what a reward forked and let return is no second grader: it ends there
    deaf ears    signals to the run that reach all of its processes, as Slurm and systemd send them,
                 are the trainer's to answer

Messages (``wire``), to here: first ``Start``, then (part, prompt, completions) at a time.  From
here:

    {"ready": {part: [mode, description]}} or {"refused": message}
    {"item": i, "value": 1.0} or {"item": i, "kind": .., "message": ..}, one a completion; with
        "last" the process ends after it, since what it ran may have left it in any state; with
        "counts" graders have met something unusual since the last answer, how often by kind
    {"fatal": message}, where the reward says that nothing can be graded
"""

import os
import resource
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from isobit.rewards.counts import take
from isobit.rewards.keeper import adopt_orphans, die_with_parent, keep
from isobit.rewards.memory_limit import limit_memory
from isobit.rewards.wire import line, read_frame, write_all

ENDS_AFTER = frozenset({"MemoryError", "SystemExit"})
"""Kinds of failures after which a process is replaced: what is left of its memory may be too little
for all that follow, and what wanted to exit is not asked to go on.
"""

FOR_THE_TRAINER = (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGXCPU)


@dataclass(frozen=True, slots=True)
class Start:
    """What a grader is to be."""

    rewards: Mapping[str, tuple[str, Mapping[str, Any]]]
    """By part: the function's name and its options."""
    given: Mapping[str, bytes]
    """Functions that were given from Python, by name (``isobit.rewards.given``)."""
    memory_bytes: int
    """That it may take (``memory_limit``)."""


def main() -> None:
    """Become a grader and its keeper."""
    trainer = os.getppid()
    requests, replies = os.dup(0), os.dup(1)
    output, printed = os.pipe()
    adopt_orphans()
    keeper = os.getpid()
    _leave_to_trainer()
    grader = os.fork()
    if grader:
        os.close(printed)
        keep(grader, trainer, requests, replies, output)
    die_with_parent(keeper)
    _leave_to_trainer()
    os.close(output)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, standard in ((nothing, 0), (printed, 1), (printed, 2)):
        os.dup2(descriptor, standard)
    os.close(nothing)
    os.close(printed)
    Grader(requests, replies).run()


def _leave_to_trainer() -> None:
    """Do nothing on signals to the run.  What a reward starts ends by them as anything does: they
    are not ignored, which programs inherit, and a fork of this process passes them on to itself.
    """
    own = os.getpid()

    def hear(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in FOR_THE_TRAINER:
        signal.signal(number, hear)


class Grader:
    """The half that runs the rewards."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = requests, replies
        self._pid = os.getpid()
        self._pipe = os.fstat(replies).st_ino

    def run(self) -> None:
        """Load the rewards and grade until the trainer has no more; does not return."""
        try:
            start: Start = read_frame(self._requests)
            rewards = self._load(start)
            while True:
                part, prompt, completions = read_frame(self._requests)
                self._grade(rewards[part], prompt, completions)
        except EOFError:
            os._exit(0)
        except BaseException as error:  # of unpickling, of a descriptor that a reward closed, ...
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stderr.flush()
            os._exit(1)

    def _load(self, start: Start) -> dict[str, Any]:
        import faulthandler

        faulthandler.enable()  # where a segmentation fault was
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit_memory(start.memory_bytes)
        from isobit.errors import RewardError
        from isobit.rewards.function import load_reward
        from isobit.rewards.given import unpack_reward

        try:
            self._given = [unpack_reward(name, packed) for name, packed in start.given.items()]
            rewards = {
                part: load_reward(name, options) for part, (name, options) in start.rewards.items()
            }
        except RewardError as error:
            self._refuse(str(error))
        except BaseException as error:  # a KeyboardInterrupt of the module's own
            self._refuse(f"a reward cannot be loaded: {type(error).__name__}: {error}")
        take()  # what they met while they were loaded is no answer's
        self._reply(
            {"ready": {part: [one.mode, one.describe()[:300]] for part, one in rewards.items()}}
        )
        return rewards

    def _refuse(self, message: str) -> NoReturn:
        self._reply({"refused": message}, text="refused")
        os._exit(1)

    def _grade(self, reward: Any, prompt: Any, completions: Any) -> None:
        from isobit.errors import RewardError
        from isobit.rewards.outcome import Failure, failure_of

        missing, leaves = list(range(len(completions))), False
        one_by_one = reward.mode == "each"
        try:
            for index, outcome in reward.grade(prompt, completions):
                missing.remove(index)
                if isinstance(outcome, Failure):
                    leaves |= outcome.kind in ENDS_AFTER
                    self._fail(index, outcome, leaves and (one_by_one or not missing))
                else:
                    self._answer({"item": index, "value": outcome})
        except RewardError as error:
            self._reply({"fatal": str(error)}, text="fatal")
        except OSError:
            raise
        except BaseException as error:  # a KeyboardInterrupt that the reward raised
            failed = missing[:1] if one_by_one else missing
            for index in failed:
                self._fail(index, failure_of(error), last=index == failed[-1])

    def _fail(self, index: int, failure: Any, last: bool) -> None:
        content = {"item": index, "kind": failure.kind, "message": failure.message}
        self._answer(content | ({"last": True} if last else {}))
        if last:
            os._exit(0)

    def _answer(self, content: dict[str, Any]) -> None:
        counts = take()
        self._reply(content | ({"counts": counts} if counts else {}))

    def _reply(self, content: dict[str, Any], text: str = "message") -> None:
        """Tell the trainer, if this is still the grader and its pipe still the pipe."""
        if os.getpid() != self._pid:
            os._exit(1)
        if os.fstat(self._replies).st_ino != self._pipe:
            os._exit(1)
        write_all(self._replies, line(content, text))


if __name__ == "__main__":
    main()
