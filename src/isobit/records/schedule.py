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

Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
