"""A rank of ``isobit train`` that meets its end: ``python rank.py PLACE CALL SIGNAL train ..``: in
the given call of what the place names, rank 1 sends itself the signal.

Of ``PLACE,PLACE`` with ``CALL,CALL`` each start meets the next, and those after the last none; how
many have begun is the size of the file ``STARTS``.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isobit.cli.main import main
from isobit.rollout.native import NativeEngine
from isobit.run.grading import RecordedGrading
from isobit.run.rollouters import Rollouters
from isobit.training.trainer import Trainer

PLACES: dict[str, tuple[Any, str]] = {
    "rollout": (NativeEngine, "step"),
    "grading": (RecordedGrading, "__call__"),
    "training": (Trainer, "_step"),
    "idle": (Rollouters, "wait"),
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


def begun() -> int:
    """Starts before this one."""
    starts = os.environ.get("STARTS")
    if starts is None:
        return 0
    with Path(starts).open("ab") as file:
        file.write(b".")
        return file.tell() - 1


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        ends = list(zip(sys.argv[1].split(","), sys.argv[2].split(","), strict=True))
        for place, call in ends[begun() :][:1]:
            meet(place, int(call), int(sys.argv[3]))
    sys.exit(main(sys.argv[4:]))
