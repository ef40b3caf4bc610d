"""The watch: a thread of every rank that posts a sign on the board about once a second and reads
the signs of others.  Rank 0 looks at all ranks; the others look at rank 0 and at the verdict.

A rank that waits in a collective is well: another one is late.  These are not:

    ended      its process is gone without having announced it
    silent     no sign for a minute; or it neither shows progress nor waits, for three times as long
               as it ever took in this phase, and at least a minute
    parted     all ranks wait, for different things: their programs have diverged
    stuck      all wait for the same thing, for ten minutes: the connection

Rollouters that our launcher starts again (``isobit.parallel.restart_page``) end no other rank: one
that is silent is killed alone, by the launcher where it runs on another host, and one that has
ended is the launcher's to find.

The rank that finds one prints it once and posts a verdict.  The rank that it names is killed by any
rank on its host.  The others may be in a collective that never ends, where no error and no signal
reaches them: their watch ends them once they wait.  A rank that still computes or writes continues
until then.

A phase that is new to a rank may take half an hour without progress: it loads a model, or compiles.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from isobit.parallel.black_box import BlackBox
from isobit.parallel.processes import Processes
from isobit.parallel.world import Pulse
from isobit.util.errors import PeerError
from isobit.util.terminal import say

_VARIABLE = "ISOBIT_SILENCE_S"
"""Variable that tests set to a shortest silence instead of a minute, in seconds; all other times
are in proportion.
"""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds."""

    tick: float = 1.0  # between two signs
    leave: float = 5.0  # that a waiting rank is left alone after a verdict
    silent: float = 60.0
    stuck: float = 600.0
    first: float = 1800.0  # of a phase that is new to a rank
    factor: float = 3.0  # of the slowest progress so far, without unit

    @classmethod
    def usual(cls) -> "Limits":
        ratio = float(os.environ.get(_VARIABLE, "60")) / 60
        return cls(min(1.0, 5 * ratio), 5 * ratio, 60 * ratio, 600 * ratio, 1800 * ratio)


@dataclass(frozen=True, slots=True)
class Sign:
    """What a rank posts on the board."""

    host: str
    machine: str  # equal where process numbers mean the same processes
    process: int
    number: int  # of this sign
    beats: int
    phase: str
    knows_phase: bool  # whether the rank has been through this phase before
    slowest: float  # the longest time without progress in this phase, in seconds
    waits_for: str | None
    has_left: bool = False  # it is about to end by itself, and has printed why
    start: int = 0  # of a rollouter: how many starts came before its own


@dataclass(frozen=True, slots=True)
class Verdict:
    text: str
    rank: int | None = None  # the rank at fault, if it is one
    process: int = 0
    machine: str = ""
    is_to_end: bool = False  # whether that rank still runs and must be killed


class Diagnosis:
    """Finds what is wrong from the signs."""

    def __init__(self, limits: Limits, ranks: Collection[int]) -> None:
        self._limits, self._ranks = limits, ranks
        self._began_at: float | None = None
        self._signs: dict[int, Sign] = {}
        self._heard_at: dict[int, float] = {}
        self._moved_at: dict[int, float] = {}

    def look(
        self,
        now: float,
        signs: Mapping[int, Sign],
        ended: Collection[int],
        starting: Collection[int] = (),
    ) -> Verdict | None:
        """The verdict on the newest signs and on the ranks whose process is gone.  Of those that
        the launcher is ``starting`` again no sign is expected.
        """
        for rank, sign in signs.items():
            before = self._signs.get(rank)
            if before is not None and (sign.process, sign.start) != (before.process, before.start):
                before = None  # it was started again
            if before is None or sign.number != before.number:
                self._heard_at[rank] = now
            moved = (sign.beats, sign.phase, sign.waits_for)
            if before is None or moved != (before.beats, before.phase, before.waits_for):
                self._moved_at[rank] = now
            self._signs[rank] = sign
        here = {rank: sign for rank, sign in signs.items() if not sign.has_left}
        for rank in ended:
            if rank in here:
                return _verdict(rank, here[rank], "has ended in {phase} without a word", False)
        return (
            self._mute(now, starting) or self._silent(now, here) or self._parted(now, signs, here)
        )

    def _mute(self, now: float, starting: Collection[int]) -> Verdict | None:
        self._began_at = now if self._began_at is None else self._began_at
        missing = [rank for rank in self._ranks if rank not in {*self._signs, *starting}]
        if not missing or now - self._began_at < self._limits.silent:
            return None
        return Verdict(f"rank {missing[0]} has given no sign since the start", missing[0])

    def _silent(self, now: float, here: Mapping[int, Sign]) -> Verdict | None:
        for rank in sorted(here, key=lambda rank: self._heard_at[rank]):
            if now - self._heard_at[rank] >= self._limits.silent:
                return self._silence(now - self._heard_at[rank], rank, here[rank])
        # Where one rank hangs, others may hang in the same collective and look the same.
        for rank in sorted(here, key=lambda rank: self._moved_at[rank]):
            silence = now - self._moved_at[rank]
            if here[rank].waits_for is None and silence >= self._longest(here[rank], here):
                return self._silence(silence, rank, here[rank])
        return None

    def _silence(self, seconds: float, rank: int, sign: Sign) -> Verdict:
        text = f"has been silent in {{phase}} for {seconds:.0f} s: ended"
        return _verdict(rank, sign, text, True)

    def _longest(self, sign: Sign, here: Mapping[int, Sign]) -> float:
        """How long a rank may go without progress; more than a missing sign needs."""
        limits = self._limits
        if not sign.knows_phase:
            return limits.first
        slowest = max(one.slowest for one in here.values() if one.phase == sign.phase)
        return max(limits.silent + 2 * limits.tick, limits.factor * slowest)

    def _parted(
        self, now: float, signs: Mapping[int, Sign], here: Mapping[int, Sign]
    ) -> Verdict | None:
        is_partial = len(self._ranks) == 1  # of one rank that waits, others know why
        if is_partial or not here or any(sign.waits_for is None for sign in here.values()):
            return None
        seconds = now - max(self._moved_at.values())
        left = [rank for rank, sign in signs.items() if sign.has_left]
        if len({sign.waits_for for sign in here.values()}) == 1 and not left:
            if seconds < self._limits.stuck:
                return None
            what = next(iter(here.values())).waits_for
            return Verdict(f"all ranks have waited for {what} for {seconds:.0f} s: ended")
        if seconds < self._limits.silent:
            return None
        waits = [f"rank {rank} ({sign.host}) for {sign.waits_for}" for rank, sign in here.items()]
        waits += [f"rank {rank} has left" for rank in left]
        text = f"the ranks have come apart, and wait since {seconds:.0f} s: {', '.join(waits)}"
        return Verdict(text)


class Watch:
    """The watch of one rank; ``box`` is that of our launcher, if it started the rank."""

    def __init__(self, world: Processes, box: BlackBox | None) -> None:
        self._world, self._box = world, box
        self._limits = Limits.usual()
        self._board = world.watch_board(self._limits.silent)
        start = 0 if world.page is None else world.page.start
        self._signing = _Signing(world.host, world.pulse, start)
        self._number = world.numbers[world.rank]
        self._ranks = range(world.size) if self._number == 0 else (0,)
        replaced = 0 if world.page is None else world.page.rollouters
        self._replaced = range(world.run_size - replaced, world.run_size)
        """The ranks that the launcher starts again: their end is not the watch's to find."""
        self._diagnosis = Diagnosis(self._limits, self._ranks)
        self._signs: dict[int, Sign] = {}
        self._silent: list[int] | None = None
        """The rank and start that were killed last."""
        self._is_over = False  # whether no rollouters come back, as of the last look
        self._is_to_end = False  # whether to end this rank once it waits
        self._is_closing = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begin, with a first sign.  Raises PeerError where the board is gone already."""
        self._post()
        self._thread.start()

    def close(self) -> None:
        """The run is done: ranks that end, and the board with them, are no fault any more."""
        self._is_closing = True

    def stop(self) -> None:
        """Stop the thread, which must not outlive the interpreter inside a library."""
        self._over.set()
        self._thread.join(self._limits.silent)

    def leave(self) -> None:
        """This rank ends by itself, with an error that it or another has printed."""
        self.stop()
        try:
            self._post(has_left=True)
            if self._number not in self._replaced:
                self._board.post("failed", b"")
            self._let_others_leave()
        except PeerError:
            pass  # the board is gone, and no rank reads it

    def _let_others_leave(self) -> None:
        """Rank 0 may keep the board, where ending ranks ask whether the error has been printed."""
        left = self._board.add("left", 1)
        until = time.monotonic() + self._limits.leave
        while (
            self._box is None
            and self._number == 0
            and left < self._world.size
            and time.monotonic() < until
        ):
            time.sleep(_POLL_S)
            left = self._board.add("left", 0)

    def _run(self) -> None:
        try:
            while not self._over.wait(self._limits.tick):
                self._look()
        except Exception:  # a fault here is none of the run's
            traceback.print_exc()

    def _look(self) -> None:
        now = time.monotonic()
        self._signing.look(now)
        self._break_off()
        try:
            self._post()
            self._signs |= self._read()
            verdict = self._verdict() or self._diagnose(now)
            self._is_to_end |= self._board.read("failed") is not None
        except PeerError as error:
            verdict = self._without_board(error)
        if verdict is not None:
            self._obey(verdict)
        if self._is_to_end:
            self._end_if_idle(now)

    def _post(self, has_left: bool = False) -> None:
        sign = self._signing.sign(has_left)
        self._board.post(f"sign {self._number}", json.dumps(asdict(sign)).encode())

    def _read(self) -> dict[int, Sign]:
        notes = {rank: self._board.read(f"sign {rank}") for rank in self._ranks}
        return {rank: Sign(**json.loads(note)) for rank, note in notes.items() if note is not None}

    def _verdict(self) -> Verdict | None:
        note = self._board.read("verdict")
        return Verdict(**json.loads(note)) if note is not None else None

    def _break_off(self) -> None:
        """End what waits for rollouters that are gone.  Those that do not come back may have said
        why before they ended: what is under way has until the next look.
        """
        page, meeting = self._world.page, self._world.meeting
        if page is None or meeting is None:
            return
        if page.read("starts") > meeting.start or self._is_over:
            meeting.break_off()
        self._is_over = bool(page.read("over"))

    def _diagnose(self, now: float) -> Verdict | None:
        """This rank's verdict, posted for all unless another rank was faster."""
        if self._is_closing:
            return None
        machine = self._signing.machine
        gone = {
            rank
            for rank, sign in self._signs.items()
            if sign.machine == machine and not _runs(sign.process)
        }
        newest = 0 if self._world.page is None else self._world.page.read("starts")
        signs = {
            rank: sign
            for rank, sign in self._signs.items()
            if rank not in self._replaced or (rank not in gone and sign.start >= newest)
        }
        starting = [rank for rank in self._replaced if newest and rank not in signs]
        verdict = self._diagnosis.look(now, signs, sorted(gone & signs.keys()), starting)
        if verdict is None:
            return None
        if verdict.rank is not None and verdict.is_to_end and self._comes_back(verdict.rank):
            self._kill_alone(verdict, [verdict.rank, self._signs[verdict.rank].start])
            return None
        if self._board.add("verdicts", 1) > 1:
            return None
        self._board.post("verdict", json.dumps(asdict(verdict)).encode())
        self._say(verdict)
        return verdict

    def _without_board(self, error: PeerError) -> Verdict | None:
        """The verdict where the board, which rank 0 or a launcher keeps, does not answer."""
        if self._is_closing or self._is_to_end:
            return None
        keeper = self._signs.get(0)
        who = f" (rank 0, {keeper.host}, process {keeper.process}, or a launcher)" if keeper else ""
        text = f"who keeps the board of the run{who} gives no answer: {error}"
        verdict = Verdict(text)
        if keeper is not None and _runs(keeper.process):
            verdict = Verdict(text, 0, keeper.process, keeper.machine, True)
        self._say(verdict)
        return verdict

    def _say(self, verdict: Verdict) -> None:
        if self._box is None:
            say(f"error: {verdict.text}")
        elif verdict.rank is None or verdict.is_to_end:  # a launcher notices ended ranks itself
            self._box.write(verdict=[verdict.rank, verdict.text], at=time.monotonic())

    def _kill_alone(self, verdict: Verdict, named: list[int]) -> None:
        """Or let the launcher do so, which starts it again."""
        if named == self._silent:
            return
        self._silent = named
        say(f"isobit: {verdict.text}")
        self._kill(verdict)
        if self._box is not None and verdict.machine != self._signing.machine:
            self._box.write(silent=named)

    def _comes_back(self, rank: int) -> bool:
        """Whether the launcher starts a rank again that is killed."""
        page = self._world.page
        if page is None or rank not in self._replaced:
            return False
        return bool(page.read("ready")) and not page.read("over") and not page.read("done")

    def _obey(self, verdict: Verdict) -> None:
        self._is_to_end = True
        if verdict.is_to_end:
            self._kill(verdict)

    def _kill(self, verdict: Verdict) -> None:
        if verdict.machine == self._signing.machine and _runs(verdict.process):
            os.kill(verdict.process, signal.SIGKILL)

    def _end_if_idle(self, now: float) -> None:
        """Silently: the verdict has been printed."""
        waits = self._world.pulse.waits_for is not None
        longest = self._limits.leave if waits else self._limits.stuck
        if not self._is_closing and now - self._signing.moved_at >= longest:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(PeerError.exit_code)


class _Signing:
    """Makes a rank's own signs."""

    def __init__(self, host: str, pulse: Pulse, start: int) -> None:
        self._host, self._pulse, self._start = host, pulse, start
        self.machine = _machine()
        self._number = 0
        self._phases: set[str] = set()
        self._slowest: dict[str, float] = {}
        self._seen = (pulse.beats, pulse.phase, pulse.waits_for)
        self.moved_at = time.monotonic()  # when it last made progress, or began to wait

    def look(self, now: float) -> None:
        """Record whether it has moved since the last call."""
        pulse = self._pulse
        _, phase, waits_for = self._seen
        seen = (pulse.beats, pulse.phase, pulse.waits_for)
        if seen == self._seen:
            return
        if waits_for is None:
            self._slowest[phase] = max(self._slowest.get(phase, 0.0), now - self.moved_at)
        if pulse.phase != phase:
            self._phases.add(phase)
        self._seen, self.moved_at = seen, now

    def sign(self, has_left: bool) -> Sign:
        self._number += 1
        beats, phase, waits_for = self._seen
        knows_phase, slowest = phase in self._phases, self._slowest.get(phase, 0.0)
        who = self._host, self.machine, os.getpid()
        how = phase, knows_phase, slowest, waits_for, has_left, self._start
        return Sign(*who, self._number, beats, *how)


def _verdict(rank: int, sign: Sign, text: str, is_to_end: bool) -> Verdict:
    who = f"rank {rank} ({sign.host}, process {sign.process})"
    said = f"{who} {text.format(phase=sign.phase)}"
    return Verdict(said, rank, sign.process, sign.machine, is_to_end)


def _machine() -> str:
    """Containers can share a host name and have process numbers of their own."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    space = Path("/proc/self/ns/pid")
    return f"{boot.read_text().strip()} {os.readlink(space)}"


def _runs(process: int) -> bool:
    """Whether a process of this machine runs; a zombie does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
