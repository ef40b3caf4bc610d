"""What a run was given from outside, one line a time, in their order.

``rewards.jsonl``: every reward, a line a grading

    {"weights_version": 3, "prompts": [["train/7", 0], ..], "completions": SHA-256 of their tokens,
    "rewards": [[1.0, null], ..], "parts": {"format": [[0.5, null], ..], ..}, ..}

``parts`` is present where a run has several rewards, ``counts`` where graders met something unusual
(``isobit.rewards.grade``).

``environment.jsonl``, of a run with an environment: what tools have said, a line a rollout

    {"weights_version": 3, "prompts": [["train/7", 0], ..], "answers": [[KEY, {"results":
    [["ok", "12"], ..], "reward": null, "turn_reward": 0.5, "failure": null}], ..]}

where KEY is a prompt, its visit, the sample, the turn, and a digest of the tokens up to there, and
``turn_reward`` is present where the environment gives one.  With ``async.max_staleness`` there is a
line a step, whose prompts are those of all groups that may be open in it.

A run is a pure function of its configuration, its data and these files, while a reward function (a
judge, a clock) or a tool need not be.  A resumed run therefore takes what repeated steps were given
from here.  The digests prove that the completions are the same.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from isobit.environments.pool import TurnAnswer
from isobit.records.text import Group
from isobit.rewards.grading import Grading
from isobit.rewards.tally import GradeStats
from isobit.util.disk_space import LineFile
from isobit.util.strict_json import json_line

Say = Callable[[str], None]
_DAMAGED = (
    "the recorded line of this step is damaged: from here on what was recorded is asked for anew"
)
_IDENTITY = ("weights_version", "prompts", "completions")  # what identifies a grading


class LineRecord:
    """The lines of a file, of which those of steps that are repeated come again."""

    _dropped: ClassVar[str]
    """What is said where they do not."""

    def __init__(self, say: Say, lines: Sequence[bytes] = (), position: int = 0) -> None:
        """Continue at byte ``position`` of an older record, which has ``lines`` from there on.
        Nothing is written before ``open``, and then only by ``write``.
        """
        self._say = say
        self._lines = deque(lines)
        self._size = position
        self._unwritten: list[bytes] = []
        self._file: LineFile | None = None
        self._follows = False

    def follow(self) -> None:
        """Keep the same state as a record that another rank writes, and write nothing."""
        self._follows = True
        self._size = self.position
        self._unwritten.clear()

    def open(self, path: Path) -> None:
        """Write to ``path``, first what was given before."""
        self._file = LineFile(path)
        self._file.cut(self._size + sum(map(len, self._lines)))
        self.write()

    def write(self) -> None:
        """Write new lines to the file; what fails is kept for later.  Raises StorageError."""
        while self._file is not None and self._unwritten:
            self._file.write(self._unwritten[0])
            self._size += len(self._unwritten.pop(0))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def is_ahead(self) -> bool:
        """Whether what comes next may be recorded, so that nothing should be asked in advance."""
        return bool(self._lines)

    @property
    def lines_ahead(self) -> list[bytes]:
        """The recorded lines that have not been repeated yet."""
        return list(self._lines)

    def forget_ahead(self) -> None:
        """Drop the recorded lines that have not been repeated: others will be given."""
        self._lines.clear()

    def cut_ahead(self) -> None:
        """Cut them from the file as well: nothing will repeat them."""
        if self._lines:
            self._lines.clear()
            if self._file is not None:
                self._file.cut(self._size)

    def append(self, lines: Sequence[bytes]) -> None:
        """Lines that were made elsewhere, in their order: repeated or new."""
        for line in lines:
            if self._lines and self._lines[0] == line:
                self._size += len(self._lines.popleft())
                continue
            if self._lines:
                self._drop()
            self._add(line)

    @property
    def position(self) -> int:
        """Bytes of the record up to the end of the last line."""
        return self._size + sum(map(len, self._unwritten))

    def _next(
        self, identity: dict[str, Any], check: Callable[[dict[str, Any]], object]
    ) -> dict[str, Any] | None:
        """The next recorded line if it has this identity, and ``check`` raises no KeyError,
        TypeError or ValueError; else the rest is dropped.
        """
        if not self._lines:
            return None
        recorded = json.loads(self._lines[0])
        if any(recorded.get(key) != value for key, value in identity.items()):
            self._drop()
        elif not _is_whole(recorded, check):
            self._drop(_DAMAGED)
        else:
            self._size += len(self._lines.popleft())
            return recorded
        return None

    def _drop(self, said: str | None = None) -> None:
        self._say(said or self._dropped)
        self._lines.clear()
        if self._file is not None:
            self._file.cut(self._size)

    def _add(self, line: bytes) -> None:
        if self._follows:
            self._size += len(line)
        else:
            self._unwritten.append(line)


class SentLines(LineRecord):
    """A record whose lines are sent to the ranks that write it."""

    def __init__(self, say: Say, lines: Sequence[bytes]) -> None:
        super().__init__(say, lines)
        self.sent: list[bytes] = []  # those made or repeated since the start

    def append(self, lines: Sequence[bytes]) -> None:
        super().append(lines)
        self.sent += lines


class RewardRecord(LineRecord):
    """Grades groups from the record where it has them, otherwise by asking, and records them."""

    _dropped = (
        "the completions of this step are not those that were graded before the interruption: "
        "they are graded anew"
    )

    def grade(self, groups: Sequence[Group], grading: Grading) -> GradeStats:
        """Fill the rewards of groups, from the record where it has these completions, else by
        ``grading``.  Raises what that raises, and records nothing then.
        """
        identity = _identity(groups)
        recorded = self._next(identity, partial(_check_rewards, groups))
        if recorded is not None:
            return _replay(groups, recorded)
        stats = grading(groups)
        names = groups[0].reward_parts
        parts = {name: [group.reward_parts[name] for group in groups] for name in names}
        content = {
            **identity,
            "rewards": [group.rewards for group in groups],
            **({"parts": parts} if parts else {}),
            "failures": stats.failures,
            "first_error": stats.first_error,
            **({"counts": stats.counts} if stats.counts else {}),
        }
        self._add(json_line(content, ascii=True))
        return stats


class SentRecord(RewardRecord):
    """A record whose gradings are sent to the ranks that write it."""

    def __init__(self, say: Say, lines: Sequence[bytes]) -> None:
        super().__init__(say, lines)
        self.gradings: list[bytes] = []  # those made or repeated since the start

    def _next(
        self, identity: dict[str, Any], check: Callable[[dict[str, Any]], object]
    ) -> dict[str, Any] | None:
        ahead = self.lines_ahead
        recorded = super()._next(identity, check)
        if recorded is not None:
            self.gradings.append(ahead[0])
        return recorded

    def _add(self, line: bytes) -> None:
        self.gradings.append(line)


class KnownRewards(RewardRecord):
    """A record that looks every grading up, in any order, and does not write what it finds."""

    def __init__(self, say: Say, lines: Iterable[Mapping[str, Any]]) -> None:
        """``lines`` are those of ``rewards.jsonl``."""
        super().__init__(say)
        self._known = {_key(line): dict(line) for line in lines}

    @property
    def is_ahead(self) -> bool:
        return True

    def _next(
        self, identity: dict[str, Any], check: Callable[[dict[str, Any]], object]
    ) -> dict[str, Any] | None:
        recorded = self._known.get(_key(identity))
        if recorded is not None and not _is_whole(recorded, check):
            self._drop(_DAMAGED)
            return None
        return recorded


class AnswerRecord(LineRecord):
    """What tools have said (``isobit.environments.pool.AnswerLog``): a line a rollout, sorted,
    as answers come in any order.
    """

    _dropped = (
        "the prompts of this step, or the answers of an environment that it uses, are not those of "
        "before the interruption: what else was recorded is asked for anew"
    )

    def __init__(self, say: Say, lines: Sequence[bytes] = (), position: int = 0) -> None:
        super().__init__(say, lines, position)
        self._identity: dict[str, Any] = {}
        self._known: dict[str, Mapping[str, Any]] = {}

    def begin(self, weights_version: int, prompts: Sequence[tuple[str, int]]) -> None:
        """A rollout by weights of this version, of prompts with their visits."""
        names = [list(name) for name in prompts]
        self._identity = {"weights_version": weights_version, "prompts": names}
        self._known.clear()
        recorded = self._look_up(self._identity)
        if recorded is None:
            return
        if _is_whole(recorded, _check_answers):
            self._known = {json.dumps(key): content for key, content in recorded["answers"]}
        else:
            self._drop(_DAMAGED)

    def find(self, key: Sequence[Any]) -> Mapping[str, Any] | None:
        return self._known.get(json.dumps(list(key)))

    def end(self, answers: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> None:
        """The rollout's line is repeated, or new."""
        ordered = sorted(answers, key=lambda answer: list(answer[0]))
        line = json_line({**self._identity, "answers": ordered}, ascii=True)
        self.append([line])

    def _look_up(self, identity: dict[str, Any]) -> dict[str, Any] | None:
        recorded = json.loads(self._lines[0]) if self._lines else None
        if recorded is None or any(recorded.get(key) != value for key, value in identity.items()):
            return None
        return recorded


class SentAnswers(SentLines, AnswerRecord):
    """Answers that are sent to the ranks that write them."""


class KnownAnswers(AnswerRecord):
    """A record that looks every rollout up, in any order, and does not write what it finds."""

    def __init__(self, say: Say, lines: Iterable[Mapping[str, Any]]) -> None:
        """``lines`` are those of ``environment.jsonl``."""
        super().__init__(say)
        self._rollouts = {_key(line): dict(line) for line in lines}

    def _look_up(self, identity: dict[str, Any]) -> dict[str, Any] | None:
        return self._rollouts.get(_key(identity))


def _is_whole(recorded: dict[str, Any], check: Callable[[dict[str, Any]], object]) -> bool:
    """Whether ``check`` finds all that a line should have."""
    try:
        check(recorded)
    except (KeyError, TypeError, ValueError):
        return False
    return True


def _check_rewards(groups: Sequence[Group], recorded: dict[str, Any]) -> None:
    """Raise KeyError, TypeError or ValueError for a line that does not grade these groups."""
    parts, counts = recorded.get("parts", {}), recorded.get("counts", {})
    by_name = parts, counts, recorded["failures"]
    if not all(isinstance(one, dict) for one in by_name):
        raise TypeError
    for rewards in (recorded["rewards"], *parts.values()):
        for group, of_group in zip(groups, rewards, strict=True):
            for _, reward in zip(group.completions, of_group, strict=True):
                if reward is not None and type(reward) not in (int, float):
                    raise TypeError
    numbers = (*recorded["failures"].values(), *counts.values())
    if any(type(count) is not int for count in numbers):
        raise TypeError
    if not isinstance(recorded["first_error"], str | None):
        raise TypeError


def _check_answers(recorded: dict[str, Any]) -> None:
    """Raise KeyError, TypeError or ValueError for a line without a rollout's answers."""
    for _, content in recorded["answers"]:
        TurnAnswer.of(content)


def _key(line: Mapping[str, Any]) -> str:
    return json.dumps([line.get(name) for name in _IDENTITY])


def _identity(groups: Sequence[Group]) -> dict[str, Any]:
    """The prompts with visits, the version of the weights, and a digest of the answers' tokens."""
    tokens = [[completion.token_ids for completion in group.completions] for group in groups]
    return {
        "weights_version": max(
            int(completion.sequence.weights_versions.max())
            for group in groups
            for completion in group.completions
        ),
        "prompts": [[group.prompt.id, group.visit] for group in groups],
        "completions": hashlib.sha256(json.dumps(tokens).encode()).hexdigest(),
    }


def _replay(groups: Sequence[Group], recorded: dict[str, Any]) -> GradeStats:
    parts = recorded.get("parts", {})
    for index, group in enumerate(groups):
        group.rewards = list(recorded["rewards"][index])
        group.reward_parts = {name: list(rewards[index]) for name, rewards in parts.items()}
    failed = sum(reward is None for group in groups for reward in group.rewards)
    completions = sum(len(group.completions) for group in groups)
    return GradeStats(
        completions - failed,
        failed,
        recorded["failures"],
        recorded["first_error"],
        recorded.get("counts", {}),
    )
