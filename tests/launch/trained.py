"""A rank with a world, for the launcher: ``python trained.py CASE``."""

import os
import signal
import sys
import time

import torch

from isobit.launch.own_rank import as_rank
from isobit.parallel.black_box import end_with_launcher
from isobit.parallel.world import World, run_on_all
from isobit.util.errors import DataError

CASE = sys.argv[1]
FRAMES = [f"frame #{n}: <unknown function> + 0x27 (0x7f in libc.so.6)" for n in range(40)]
FAULTS = {
    "fault": ZeroDivisionError("no such file"),
    "fault, then frames": ZeroDivisionError("\n".join(["no such file", *FRAMES])),
}


def nothing(world: World) -> None:
    """All is well."""


def fail(world: World) -> None:
    if CASE == "all":
        world.barrier("all, of which none is lost before it has failed by itself")
    if world.rank == 1 or CASE == "all":
        raise FAULTS.get(CASE, DataError("no such file"))


def agreed(world: World) -> None:
    run_on_all(world, lambda: fail(world))


def stopped(world: World) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def asleep(world: World) -> None:
    if world.rank == 1:
        world.pulse.beat("rollout")  # which it has been through
        time.sleep(3600)


def parted(world: World) -> None:
    if world.rank == 1:
        world.all_gather_rows([torch.zeros(3)], [[0, 1, 3]])
        world.barrier("the others, who are elsewhere")


def dies(world: World) -> None:
    if world.rank == int(CASE[0]):
        os.kill(os.getpid(), signal.SIGKILL)
    with world.pulse.waiting("what NCCL would wait for"):
        time.sleep(3600)


def dies_in_a_collective(world: World) -> None:
    """In which the other waits for it, and loses the connection."""
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


CASES = {
    "all": fail,
    "alone": fail,
    "agreed": agreed,
    **dict.fromkeys(FAULTS, agreed),
    "stopped": stopped,
    "asleep": asleep,
    "parted": parted,
    "0 dies": dies,
    "1 dies": dies,
    "1 dies in a collective": dies_in_a_collective,
    "fine": nothing,
}
FOUND_BY_THE_WATCH = (stopped, asleep, parted, dies, dies_in_a_collective)


def main() -> None:
    """What the case says, on rank 1 or on both."""
    case = CASES[CASE]
    with as_rank(end_with_launcher()) as world:
        for phase in ("rollout", "training"):
            world.pulse.beat(phase)
            if case in FOUND_BY_THE_WATCH:
                world.barrier(phase)
                time.sleep(1.5)  # until the watch has seen it
        case(world)
        assert [one + 1 for one in world.all_gather(world.rank)] == [1, 2]


if __name__ == "__main__":
    main()
