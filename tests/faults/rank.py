"""A rank of ``isobit train`` that meets its end: ``python rank.py PLACE CALL SIGNAL train ..``: in
the given call of what the place names, rank 1 sends itself the signal.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

from isobit.cli.main import main
from isobit.rollout.native.engine import NativeEngine
from isobit.run.grading import RecordedGrading
from isobit.training.trainer import Trainer

PLACES: dict[str, tuple[Any, str]] = {
    "rollout": (NativeEngine, "step"),
    "grading": (RecordedGrading, "__call__"),
    "training": (Trainer, "_step"),
}


def meet(place: str, call: int, signal: int) -> None:
    """Count the calls, and send the signal in one."""
    owner, name = PLACES[place]
    function: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal)
        return function(*arguments)

    setattr(owner, name, counted)


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        meet(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    sys.exit(main(sys.argv[4:]))
