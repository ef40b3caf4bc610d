"""When what a step learns from is sampled, and by which weights: the schedule of a run, in which
sampling runs at most k steps ahead of learning.

It is written beforehand (``async.lag`` = k; synchronous with k = 0), or recorded as it happens
(``async.max_staleness`` = k).  A step learns from n groups.  In both, before step t is done,

    begin    the first (t + k) n groups may have begun, in the order of the prompts

Written, all that may begin is drawn to its end before the weights change: batch t, the t-th n
groups, wholly by the weights after step max(t - 1 - k, 0), and step t learns from batch t.  Where
groups are replaced, batches are counted and not groups.

Recorded, a step learns as soon as enough groups are whole, and half-done samples go on with the
next weights.  A group is *open* from the moment at which it is submitted to an engine until a step
learns from it; ``begun_after`` are the steps that the weights had behind them when it was begun.

    learn   step t learns from the first n whole groups in the order of the prompts, unless the
            others could then not all be learnt from in time, by step ``begun_after + 1 + k``; else
            it waits

So a step is never late: whenever the first n open groups are whole, learning from them keeps the
rule, as the deadlines do not decrease in the order of the prompts, and at most (k + 1) n are open.
Where a resumed run has a smaller k, groups that began under the larger one may be late, and the
first n are learnt from as soon as they are whole.
With k = 0 step t learns from the t-th n prompts, sampled by its own weights: the synchronous run.
A token is at most k steps older than the step that learns from it.

Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Name = tuple[str, int]
"""A group: the id of its prompt, and its visit."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The rules above, for a run of so many ``steps``."""

    ahead: int
    """k, in steps."""
    per_step: int
    """n, in groups."""
    steps: int

    def batches_begun(self, done: int) -> int:
        """Batches that may have begun, since the start of the run, before another step than the
        ``done`` ones is.
        """
        return min(self.steps, done + self.ahead + 1)

    def groups_begun(self, done: int) -> int:
        """The same in groups."""
        return self.batches_begun(done) * self.per_step

    def chosen(self, step: int, open_groups: Sequence[tuple[int, bool]]) -> list[int] | None:
        """The places of the groups that ``step`` learns from, among the open ones in the order of
        the prompts: each with ``begun_after``, and whether it is whole.  None: the step waits.
        """
        whole = [place for place, (_, is_whole) in enumerate(open_groups) if is_whole]
        chosen = whole[: self.per_step]
        if len(chosen) < self.per_step:
            return None
        if chosen[-1] < self.per_step:
            return chosen  # the first ones: no other choice leaves more time to the others
        taken = set(chosen)
        others = [begun for place, (begun, _) in enumerate(open_groups) if place not in taken]
        for place, begun_after in enumerate(others):
            if begun_after + 1 + self.ahead < step + 1 + place // self.per_step:
                return None
        return chosen
