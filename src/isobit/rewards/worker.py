"""A process that grades: ``python -m isobit.rewards.worker``, started by ``isobit.rewards.pool``
and supervised by its parent (``isobit.rewards.supervisor``).

A fork of the grader that returns from a reward ends instead of grading on.

Messages (``isobit.rewards.messages``) to the grader: first ``GraderStart``, then (part, prompt,
completions) each time. From the grader:

    {"ready": {part: [mode, description, columns]}} or {"refused": message}
    {"item": i, "value": 1.0} or {"item": i, "kind": .., "message": ..} for each completion; with
        "last" the process ends after it, since its state is unknown; "counts" are what graders
        counted since the last answer, by kind
    {"fatal": message} if the reward says that nothing can be graded
"""

import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from isobit.rewards.counts import take
from isobit.rewards.messages import line, read_frame, write_all
from isobit.rewards.supervisor import limit_memory, supervised

ENDS_AFTER = frozenset({"MemoryError", "SystemExit"})
"""Failures after which a process is replaced, since memory may be lost or the code exits."""


@dataclass(frozen=True, slots=True)
class GraderStart:
    """The first message to a grader."""

    rewards: Mapping[str, tuple[str, Mapping[str, Any]]]
    """The function's name and its options, by part."""
    given: Mapping[str, bytes]
    """Functions passed from Python, by name (``isobit.rewards.python_rewards``)."""
    memory_bytes: int


class Grader:
    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = requests, replies
        self._pid = os.getpid()
        self._pipe = os.fstat(replies).st_ino

    def run(self) -> None:
        """Load the rewards and grade until the trainer closes the pipe; does not return."""
        try:
            start: GraderStart = read_frame(self._requests)
            rewards = self._load(start)
            while True:
                part, prompt, completions = read_frame(self._requests)
                self._grade(rewards[part], prompt, completions)
        except EOFError:
            os._exit(0)
        except BaseException as error:  # from unpickling, or a descriptor that a reward closed
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stderr.flush()
            os._exit(1)

    def _load(self, start: GraderStart) -> dict[str, Any]:
        import faulthandler

        faulthandler.enable()  # reports where a segmentation fault was
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit_memory(start.memory_bytes)
        from isobit.rewards.load import load_reward
        from isobit.rewards.python_rewards import unpack_reward
        from isobit.util.errors import RewardError

        try:
            self._given = [unpack_reward(name, packed) for name, packed in start.given.items()]
            rewards = {
                part: load_reward(name, options) for part, (name, options) in start.rewards.items()
            }
        except RewardError as error:
            self._refuse(str(error))
        except BaseException as error:  # such as a KeyboardInterrupt that the module raises
            self._refuse(f"a reward cannot be loaded: {type(error).__name__}: {error}")
        take()  # counts made while loading belong to no answer
        ready = {
            part: [reward.mode, reward.describe()[:400], reward.columns()]
            for part, reward in rewards.items()
        }
        self._reply({"ready": ready})
        return rewards

    def _refuse(self, message: str) -> NoReturn:
        self._reply({"refused": message}, text="refused")
        os._exit(1)

    def _grade(self, reward: Any, prompt: Any, completions: Any) -> None:
        from isobit.rewards.grade import Failure, failure_of
        from isobit.util.errors import RewardError

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
        """Send a message, if this is still the grader and its pipe is unchanged."""
        if os.getpid() != self._pid:
            os._exit(1)
        if os.fstat(self._replies).st_ino != self._pipe:
            os._exit(1)
        write_all(self._replies, line(content, text))


if __name__ == "__main__":
    supervised(lambda requests, replies: Grader(requests, replies).run())
