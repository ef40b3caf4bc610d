"""Counts of what graders met: answers out of bounds, code that ran too long, and so on.

A score says that an answer was wrong, a count says in which unusual way.  Graders call ``count``;
whoever runs them calls ``take`` after each grading and adds up what he gets.
"""

from collections import Counter

_COUNTS: Counter[str] = Counter()


def count(kind: str) -> None:
    """Note one ``kind``, as in ``"code: time limit"``: the grader's name, then what happened."""
    _COUNTS[kind] += 1


def take() -> dict[str, int]:
    """What was counted in this process since the last call, by kind."""
    taken = dict(_COUNTS)
    _COUNTS.clear()
    return taken
