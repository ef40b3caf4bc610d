"""A process that is killed, for tests of what it leaves behind."""

from typing import Any

import pytest

from isobit.store.keeper import CheckpointKeeper


class Death(BaseException):
    """Stands for kill -9: nothing catches it, nothing is cleaned up, nothing more is written."""


def lie_still(patch: pytest.MonkeyPatch) -> None:
    """Have no checkpoint be written for a process that is dead."""
    leave = CheckpointKeeper.__exit__

    def unless_dead(self: CheckpointKeeper, kind: Any, *rest: Any) -> None:
        if kind is None or not issubclass(kind, Death):
            leave(self, kind, *rest)

    patch.setattr(CheckpointKeeper, "__exit__", unless_dead)
