"""Stands in for pycosat, which comes as C source only, on a machine that cannot compile it.

reasoning-gym imports pycosat whenever it is imported, and calls it for one task, ``zebra_puzzles``.
With this module every other task works; that one says what it lacks.
"""

from collections.abc import Iterator, Sequence


def itersolve(clauses: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Always raises ImportError."""
    raise ImportError(
        "zebra_puzzles needs pycosat, a C extension: install a C compiler and Python's headers, "
        "then run `make clean setup`"
    )
