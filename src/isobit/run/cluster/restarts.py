"""Ranks that were lost, and the run that goes on without a hand (``cluster.restarts``)."""

from collections.abc import Callable, Sequence

from isobit.run.cluster.deaths import RankError
from isobit.terminal import say

RESUME = "--resume"


def with_restarts(
    start: Callable[[Sequence[str], bool], None], arguments: Sequence[str], restarts: int
) -> None:
    """``start(arguments, False)``, and again as ``start(.., True)`` with ``--resume`` where a rank
    has died, at most so often.

    A rank that stopped for a reason it knew (a disk that is full, a key that is wrong) would do so
    again: its RankError is raised at once, as everything else is.
    """
    words = list(arguments)
    for left in reversed(range(restarts + 1)):
        try:
            start(words, left < restarts)
        except RankError as error:
            if not error.died or not left:
                raise
            say(f"{error}\nstarted again with {RESUME}; restarts left: {left - 1}")
        else:
            return
        if RESUME not in words:
            words.append(RESUME)
