"""``digests.jsonl``: of each step what it drew, was given and left, one line each, by which
``isobit replay`` tells a step that is done again from the one that was recorded.

    {"step": 7, "tokens": SHA-256, "log_probs": SHA-256, "rewards": SHA-256,
     "weights": checksum, "masters": checksum, "moments": checksum}

The first three are of the groups that the step learnt from (``isobit.records.digests``), the others
of what its update left (``isobit.store.state_digest``), or of what it left alone.  A line does not
depend on the number of processes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from isobit.records.digests import group_digests
from isobit.records.json_line import json_line
from isobit.records.text import Group
from isobit.store.directory import RunDirectory
from isobit.store.recorded_lines import read_lines
from isobit.store.state_digest import StateDigest


@dataclass(frozen=True, slots=True)
class StepDigests:
    """A line."""

    step: int
    tokens: str
    log_probs: str
    rewards: str
    left: StateDigest

    @classmethod
    def of(cls, step: int, groups: Sequence[Group], left: StateDigest) -> Self:
        """Of the graded groups of a step and what its update left."""
        return cls(step, **group_digests(groups), left=left)

    def line(self) -> bytes:
        """With its end."""
        return json_line({"step": self.step, **self.by_name()})

    def by_name(self) -> dict[str, str]:
        """All digests, in the order in which a step makes what they are of."""
        return {
            "tokens": self.tokens,
            "log_probs": self.log_probs,
            "rewards": self.rewards,
            **asdict(self.left),
        }

    @classmethod
    def of_line(cls, content: Mapping[str, Any]) -> Self:
        """Raises KeyError and TypeError for what is none."""
        names = ("tokens", "log_probs", "rewards", "weights", "masters", "moments")
        digests = [content[name] for name in names]
        if not isinstance(content["step"], int) or not all(isinstance(d, str) for d in digests):
            raise TypeError
        tokens, log_probs, rewards, *left = digests
        return cls(content["step"], tokens, log_probs, rewards, StateDigest(*left))


def read_digests(root: Path) -> dict[int, StepDigests | None]:
    """By step, of the run in a directory; None of a line that is damaged, whose step is the one
    after the line before it, or before the line after it.
    """
    found: dict[int, StepDigests | None] = {}
    damaged = 0
    for content in read_lines(RunDirectory(root).digests):
        line = None if content is None else _of_line(content)
        if line is None and not found:
            damaged += 1
        elif line is None:
            found[max(found) + 1] = None
        else:
            found |= dict.fromkeys(range(line.step - damaged, line.step))
            found[line.step], damaged = line, 0
    return found


def _of_line(content: Mapping[str, Any]) -> StepDigests | None:
    try:
        return StepDigests.of_line(content)
    except (KeyError, TypeError):
        return None
