"""``rewards.jsonl``: every reward that the run was given, one line a grading, in the order of the
gradings.

    {"weights_version": 3, "prompts": [["train/7", 0], ..], "completions": SHA-256 of their tokens,
    "rewards": [[1.0, null], ..], ..}

A run is a pure function of its configuration, its data and these rewards.  A reward function need
not be one (a judge, a clock): a resumed run therefore takes the rewards of the steps that it does
again from here, instead of asking once more.  The completions come out as they were, and their
digest proves it.
"""

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from isobit.records.text import Group
from isobit.rewards.function import RewardFunction
from isobit.rewards.grade import GradeStats, grade
from isobit.store.journal import whole_lines

Say = Callable[[str], None]


class RewardRecord:
    """Grades groups, from the record where it goes on, with the reward function and into the record
    otherwise.
    """

    def __init__(self, say: Say, path: Path | None = None, position: int = 0) -> None:
        """Go on at byte ``position`` of an older record, if there is one.  Nothing is written
        before ``open``.
        """
        self._say = say
        self._lines = (
            deque(whole_lines(path, position)) if path is not None and path.is_file() else deque()
        )
        self._size = position
        self._unwritten: list[bytes] = []
        self._path: Path | None = None

    def open(self, path: Path) -> None:
        """Write to ``path`` from now on, and first what was graded before."""
        with path.open("ab") as file:
            file.truncate(self._size + sum(map(len, self._lines)))
        self._path = path
        for line in self._unwritten:
            self._write(line)
        self._unwritten.clear()

    def grade(
        self, groups: Sequence[Group], reward: RewardFunction, max_failed_fraction: float = 1.0
    ) -> GradeStats:
        """Fill the rewards of groups: from the record where it has these completions, else with the
        reward function.  Raises RewardError as ``isobit.rewards.grade.grade`` does.
        """
        identity = _identity(groups)
        recorded = self._next(identity)
        if recorded is not None:
            return _replay(groups, recorded)
        stats = grade(groups, reward, max_failed_fraction)
        content = {
            **identity,
            "rewards": [group.rewards for group in groups],
            "failures": stats.failures,
            "first_error": stats.first_error,
        }
        self._write((json.dumps(content, allow_nan=False) + "\n").encode())
        return stats

    @property
    def position(self) -> int:
        """Bytes of the record up to and with the last grading."""
        return self._size + sum(map(len, self._unwritten))

    def _next(self, identity: dict[str, Any]) -> dict[str, Any] | None:
        """The next recorded grading if it is of these completions; a record of others is dropped,
        and that is said.
        """
        if not self._lines:
            return None
        recorded = json.loads(self._lines[0])
        if all(recorded.get(key) == value for key, value in identity.items()):
            self._size += len(self._lines.popleft())
            return recorded
        self._say(
            "the completions of this step are not those that were graded before the interruption: "
            "they are graded anew"
        )
        self._lines.clear()
        if self._path is not None:
            os.truncate(self._path, self._size)
        return None

    def _write(self, line: bytes) -> None:
        if self._path is None:
            self._unwritten.append(line)
            return
        with self._path.open("ab") as file:
            file.write(line)
        self._size += len(line)


def _identity(groups: Sequence[Group]) -> dict[str, Any]:
    """What was graded: the prompts with their visits, the weights that answered, and a digest of
    the answers' tokens.
    """
    tokens = [[completion.token_ids for completion in group.completions] for group in groups]
    return {
        "weights_version": max(
            version
            for group in groups
            for completion in group.completions
            for version in completion.sequence.weights_versions
        ),
        "prompts": [[group.prompt.id, group.visit] for group in groups],
        "completions": hashlib.sha256(json.dumps(tokens).encode()).hexdigest(),
    }


def _replay(groups: Sequence[Group], recorded: dict[str, Any]) -> GradeStats:
    for group, rewards in zip(groups, recorded["rewards"], strict=True):
        group.rewards = list(rewards)
    failed = sum(recorded["failures"].values())
    completions = sum(len(group.completions) for group in groups)
    return GradeStats(completions - failed, failed, recorded["failures"], recorded["first_error"])
