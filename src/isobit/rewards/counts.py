"""Counts of unusual answers, such as code that ran too long, by kind.

A grader calls ``count`` for such an answer, and its caller calls ``take`` after each grading. A
user's reward may count anything, so counts are bounded in number, length and value before they are
sent and again when they are received.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

MOST_KINDS = 32
"""Kinds that are distinguished; the rarest are added up as ``OTHER_KINDS``."""
LONGEST_KIND = 60
"""Characters."""
MOST = 10**9
OTHER_KINDS = "other kinds"
_COUNTS: Counter[str] = Counter()


def count(kind: str) -> None:
    """Count one ``kind``, as in ``"code: time limit"``: the grader's name, then what happened."""
    _COUNTS[kind] += 1


def take() -> dict[str, int]:
    """Counts in this process since the last call, by kind, bounded."""
    taken = bounded(_COUNTS)
    _COUNTS.clear()
    return taken


def bounded(counts: Mapping[Any, Any]) -> dict[str, int]:
    """The ``MOST_KINDS`` most frequent kinds, in at most ``LONGEST_KIND`` printable ASCII
    characters that JSON need not escape, each counted at most ``MOST``. Invalid entries are left
    out.
    """
    counted: Counter[str] = Counter()
    for kind, number in counts.items():
        if isinstance(kind, str) and type(number) is int and number > 0:
            counted[_plain(kind)] += number
    others = counted.pop(OTHER_KINDS, 0)
    ordered = sorted(counted.items(), key=lambda one: (-one[1], one[0]))
    kept = dict(ordered[: MOST_KINDS - 1])
    others += sum(number for _, number in ordered[MOST_KINDS - 1 :])
    if others:
        kept[OTHER_KINDS] = others
    return {kind: min(number, MOST) for kind, number in kept.items()}


def _plain(kind: str) -> str:
    return "".join(
        character if " " <= character <= "~" and character not in '"\\' else "?"
        for character in kind[:LONGEST_KIND]
    )
