"""A rank's own view, from joining the others to its exit code.

The reason why a run ended is reported once, whoever has started the ranks:

    an error that a user can meet    by the launcher, or by the first rank that has this text
    a fault                          the rank's own traceback
    ``PeerError``                    nothing: the other rank, or the watch, reports it
    a signal                         by rank 0
"""

import hashlib
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from isobit.parallel.black_box import BlackBox
from isobit.parallel.restart_page import RestartPage
from isobit.util.errors import Interrupted, IsobitError, PeerError
from isobit.util.terminal import say, settle

if TYPE_CHECKING:
    from isobit.parallel.processes import Processes
    from isobit.parallel.world import World


_REPORT_S = 3.0
"""Seconds in which another rank, or the watch, reports why a connection was lost."""


@contextmanager
def as_rank(box: BlackBox | None) -> "Iterator[World]":
    """A block with the world of this process, which is one of several; ``box`` is the launcher's,
    where that is ours.

    A rank that fails ends here, as a process: others may wait for it, and libraries that are left
    in order would wait for the others.
    """
    from isobit.parallel.processes import Processes, joined  # with torch, of which a launcher
    from isobit.parallel.watch import Watch  # has no need

    page = RestartPage.inherited()
    world: Processes | None = None
    watch: Watch | None = None
    try:
        with joined(page) as whole:
            assert isinstance(whole, Processes)
            world = whole
            if box is not None:
                world.pulse.on_phase = lambda phase: box.write(phase=phase)
            watch = Watch(world, box)
            watch.start()
            yield world
            watch.close()
        watch.stop()
    except BaseException as error:
        if world is None and box is None:
            raise  # nobody has found the others
        code = _tell(error, world, box)
        if watch is not None:
            watch.leave()
        settle()
        os._exit(code)


@contextmanager
def watched() -> "Iterator[World]":
    """A block with the world of this process for a function of Python.  What is raised in it passes
    through, and the process lives on; but where another rank has failed alone, is lost or hangs,
    the watch ends those that wait for it.
    """
    from isobit.parallel.processes import Processes, joined
    from isobit.parallel.watch import Watch

    watch: Watch | None = None
    try:
        with joined() as world:
            if isinstance(world, Processes):
                watch = Watch(world, None)
                watch.start()
            yield world
            if watch is not None:
                watch.close()
    except BaseException:
        if watch is not None:
            watch.leave()
        raise
    if watch is not None:
        watch.stop()


def _tell(error: BaseException, world: "Processes | None", box: BlackBox | None) -> int:
    """Say it where it is this rank's to say; -> the exit code."""
    match error:
        case PeerError() if error.rank is not None:
            return error.exit_code
        case IsobitError():
            text, code = str(error), error.exit_code
            if box is not None:
                known = "lost" if isinstance(error, PeerError) else "error"
                box.write(**{known: text}, code=code, at=time.monotonic())
            elif isinstance(error, PeerError) and world is not None and _is_reported(world):
                pass
            elif world is not None and _is_first(text, world):
                say(f"error: rank {world.rank} ({world.host}): {text}")
            return code
        case KeyboardInterrupt():
            stopped = isinstance(error, Interrupted)
            if box is None and world is not None and world.rank == 0:
                say(str(error) if stopped else "interrupted")
            return error.exit_code if stopped else 130
        case SystemExit():
            return error.code if isinstance(error.code, int) else 1
        case _:
            say("".join(traceback.format_exception(error)).rstrip())
            if box is not None:
                box.write(fault=f"{type(error).__name__}: {error}", at=time.monotonic())
            return 1


def _is_reported(world: "Processes") -> bool:
    """Whether a rank that left, or the watch that found one gone, has reported why, or does so
    within moments.  A connection to a rank that is killed is lost before the watch looks again.
    """
    until = time.monotonic() + _REPORT_S
    try:
        board = world.watch_board(_REPORT_S)
        while all(board.read(name) is None for name in ("failed", "verdict")):
            if time.monotonic() >= until:
                return False
            time.sleep(0.05)
    except PeerError:
        return False
    return True


def _is_first(text: str, world: "World") -> bool:
    """Whether no other rank has said the same; also where the store is gone, which keeps count."""
    try:
        digest = hashlib.sha256(text.encode()).hexdigest()
        return world.board.add(f"said {digest[:16]}", 1) == 1
    except PeerError:
        return True
