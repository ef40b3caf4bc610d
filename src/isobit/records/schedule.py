"""Which step learns from which group, and which weights draw which token, where sampling runs as
far ahead of learning as ``async.max_staleness`` = k allows.

A group is *open* from the moment at which it is submitted to an engine until a step learns from it.
Let a step learn from n groups, and let ``begun_after`` be the steps that the weights had behind
them when a group was begun.  Two rules keep it:

    begin   a group begins while fewer than (k + 1) n are open, those that are learnt from included,
            and in the order of the prompts
    learn   step t learns from the first n whole groups in that order, unless the others could then
            not all be learnt from in time, by step ``begun_after + 1 + k``; else it waits

So a step is never late: whenever the first n open groups are whole, learning from them keeps the
second rule, as the deadlines do not decrease in the order of the prompts, and at most (k + 1) n are
open.  With k = 0 step t learns from the t-th n prompts, sampled by its own weights: the synchronous
run.  A token is at most k steps older than the step that learns from it.

What depends on time is a line a step of ``schedule.jsonl``, from which the run can be repeated:

    {"step": 7, "learns": [["train/7", 0], ..], "drawn": [["train/9", 0, [12, 40]], ..],
     "compared": [["train/9", 0, 1, 25], ..]}

``learns`` are the groups of the step, by prompt and visit.  ``drawn`` are the groups that are open
after it, with the tokens that each of their samples had when the weights changed: what a version
of the weights drew is what has come since the line before.  ``compared`` are the samples whose
tokens by these weights were compared with the trainer's, with their lengths at that moment.

Imports no torch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from isobit.util.strict_json import json_line

Name = tuple[str, int]
"""A group: the id of its prompt, and its visit."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The rules above, for a run of so many ``steps``."""

    max_staleness: int
    """k, in steps."""
    per_step: int
    """n, in groups."""
    steps: int

    def most_begun(self, done: int) -> int:
        """Groups that may have begun, since the start of the run, before another step than the
        ``done`` ones is.
        """
        return min(self.steps, done + self.max_staleness + 1) * self.per_step

    def chosen(self, step: int, open_groups: Sequence[tuple[int, bool]]) -> list[int] | None:
        """The places of the groups that ``step`` learns from, among the open ones in the order of
        the prompts: each with ``begun_after``, and whether it is whole.  None: the step waits.
        """
        whole = [place for place, (_, is_whole) in enumerate(open_groups) if is_whole]
        chosen = whole[: self.per_step]
        if len(chosen) < self.per_step:
            return None
        taken = set(chosen)
        others = [begun for place, (begun, _) in enumerate(open_groups) if place not in taken]
        for place, begun_after in enumerate(others):
            if begun_after + 1 + self.max_staleness < step + 1 + place // self.per_step:
                return None
        return chosen


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A line of ``schedule.jsonl``."""

    step: int
    learns: tuple[Name, ...]
    drawn: Mapping[Name, tuple[int, ...]]
    """Tokens of each sample of the groups that stay open."""
    compared: tuple[tuple[str, int, int, int], ...] = ()
    """Prompt, visit, sample, and tokens of it."""

    def line(self) -> bytes:
        content = {
            "step": self.step,
            "learns": self.learns,
            "drawn": [[*name, counts] for name, counts in self.drawn.items()],
            "compared": self.compared,
        }
        return json_line(content, ascii=True)

    @classmethod
    def of_line(cls, line: bytes) -> Self:
        """Raises KeyError, TypeError and ValueError for a line that is none of these."""
        content: dict[str, Any] = json.loads(line)
        return cls(
            int(content["step"]),
            tuple((str(prompt), int(visit)) for prompt, visit in content["learns"]),
            {
                (str(prompt), int(visit)): tuple(map(int, counts))
                for prompt, visit, counts in content["drawn"]
            },
            tuple(
                (str(prompt), int(visit), int(sample), int(tokens))
                for prompt, visit, sample, tokens in content["compared"]
            ),
        )
