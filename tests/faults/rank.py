"""A rank of ``isobit train`` that meets its end: ``python rank.py PLACE CALL SIGNAL train ..``: in
the given call of what the place names, rank 1, or the one that the variable VICTIM names, sends
itself the signal; from the places of rank 0, that one sends it.

Of ``PLACE,PLACE`` with ``CALL,CALL`` each start meets the next, and those after the last none; how
many have begun is the size of the file ``STARTS``.  Of ``SIGNAL,SIGNAL`` too, where there is more
than one.

The file that the variable ``EDITED`` names has a line more from the second start on.  With ``ACTS``
the turns of a random model are calls of tools; with ``UNGRADED`` the first start of the victim
waits in vain for the rewards of the group about which it asks first.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isobit.cli.main import main
from isobit.models.policy import Policy
from isobit.models.published import PublishedWeights
from isobit.parallel import processes
from isobit.parallel.parts import Parts
from isobit.records.schedule import Name
from isobit.records.text import Group
from isobit.rollout import episodes
from isobit.rollout.native import NativeEngine
from isobit.run import loop, rollouter_process
from isobit.run.grading import RecordedGrading
from isobit.run.rl_run import RlRun
from isobit.run.rollouters import Rollouters
from isobit.training.trainer import Trainer
from tests.run import acting

PLACES: dict[str, tuple[Any, str]] = {
    "rollout": (NativeEngine, "step"),
    "grading": (RecordedGrading, "__call__"),
    "training": (Trainer, "_step"),
    "idle": (Rollouters, "wait"),
    "loading": (rollouter_process, "prepare_rl"),
    "meeting": (Parts, "_meet"),
    "joining": (processes, "_own_connection"),
    "weights": (Policy, "pass_on"),
    "rows": (PublishedWeights, "gather"),
    "evaluation": (RlRun, "evaluate_now"),
    "comparing": (rollouter_process, "compared"),
    "opening": (rollouter_process, "compared_sequences"),
}
OF_TRAINER: dict[str, tuple[Any, str]] = {
    "learning": (loop, "learn"),
    "learnt": (loop, "state_digest"),
    "end": (loop.OpenRun, "save_model"),
}


def meet(at: tuple[Any, str], call: int, strike: Callable[[], None]) -> None:
    """Count the calls, and strike in one."""
    owner, name = at
    function: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            strike()
        return function(*arguments, **options)

    setattr(owner, name, counted)


def begun(process: int) -> int:
    """Starts before this one."""
    starts = os.environ.get("STARTS")
    if starts is None:
        return 0
    Path(f"{starts}.process").write_text(str(process))
    with Path(starts).open("ab") as file:
        file.write(b".")
        return file.tell() - 1


def leave_first_ungraded() -> None:
    """A group that is asked about before all others is never found to be graded."""
    is_done, first = RecordedGrading.is_done, list[Name]()

    def asked(self: RecordedGrading, group: Group) -> bool:
        name = group.prompt.id, group.visit
        if not first:
            first.append(name)
        return name not in first and is_done(self, group)

    kind: Any = RecordedGrading
    kind.is_done = asked


def kill_victim(number: int) -> None:
    """By another rank."""
    os.kill(int(Path(f"{os.environ['STARTS']}.process").read_text()), number)


def edit(start: int) -> None:
    edited = os.environ.get("EDITED")
    if edited is not None and start > 0:
        with Path(edited).open("a", encoding="utf-8") as file:
            file.write("# edited\n")


if __name__ == "__main__":
    ends = list(zip(sys.argv[1].split(","), map(int, sys.argv[2].split(",")), strict=True))
    numbers = [int(number) for number in sys.argv[3].split(",")]
    if "ACTS" in os.environ:
        episodes.read_turn = acting.reading(acting.parse)
    if os.environ["RANK"] == os.environ.get("VICTIM", "1"):
        start = begun(os.getpid())
        edit(start)
        if start == 0 and "UNGRADED" in os.environ:
            leave_first_ungraded()
        number = (numbers * len(ends) if len(numbers) == 1 else numbers)[start : start + 1]
        for place, call in ends[start : start + 1]:
            if place in PLACES:
                meet(PLACES[place], call, lambda: os.kill(os.getpid(), *number))
    if os.environ["RANK"] == "0":
        for place, call in ends:
            if place in OF_TRAINER:
                meet(OF_TRAINER[place], call, lambda: kill_victim(numbers[0]))
    sys.exit(main(sys.argv[4:]))
