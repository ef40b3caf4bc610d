"""Counts of what graders met: answers out of bounds, code that ran too long, and so on.

A score says that an answer was wrong, a count says in which unusual way.  Graders call ``count``;
whoever runs them calls ``take`` after each grading and adds up what he gets.

A reward's own code may call ``count`` with what it likes: what leaves its process is bounded in
kinds, characters and numbers, and is bounded again where it arrives.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

MOST_KINDS = 32
"""Told apart; the rarest of more are added up as ``OTHER_KINDS``."""
LONGEST_KIND = 60
"""Characters."""
MOST = 10**9
OTHER_KINDS = "other kinds"

_COUNTS: Counter[str] = Counter()


def count(kind: str) -> None:
    """Note one ``kind``, as in ``"code: time limit"``: the grader's name, then what happened."""
    _COUNTS[kind] += 1


def take() -> dict[str, int]:
    """What was counted in this process since the last call, by kind, bounded."""
    taken = bounded(_COUNTS)
    _COUNTS.clear()
    return taken


def bounded(counts: Mapping[Any, Any]) -> dict[str, int]:
    """The counts from the most frequent kind on: at most ``MOST_KINDS`` of them, in at most
    ``LONGEST_KIND`` printable characters of ASCII that JSON need not escape, each at most ``MOST``.
    What is no count of a kind is left out.
    """
    found: Counter[str] = Counter()
    for kind, number in counts.items():
        if isinstance(kind, str) and type(number) is int and number > 0:
            found[_plain(kind)] += number
    others = found.pop(OTHER_KINDS, 0)
    ordered = sorted(found.items(), key=lambda one: (-one[1], one[0]))
    kept = dict(ordered[: MOST_KINDS - 1])
    others += sum(number for _, number in ordered[MOST_KINDS - 1 :])
    if others:
        kept[OTHER_KINDS] = others
    return {kind: min(number, MOST) for kind, number in kept.items()}


def _plain(kind: str) -> str:
    return "".join(
        one if " " <= one <= "~" and one not in '"\\' else "?" for one in kind[:LONGEST_KIND]
    )
