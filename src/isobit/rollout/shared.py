"""``generate`` by all ranks of a world: each has an engine of its own, with whole weights, and all
get all completions.  Ranks that share an engine (``isobit.rollout.shared_engine``) are one rank
here, the first of them.

    hand out     a rank takes the next request whenever its engine has room; the requests go in
                 their order, as whole groups, which share the pages of their prompt
    move         once all are handed out, a rank with less than half of another's samples asks for
                 some of them; half-done samples go there, where the steps that they may still have
                 are worth computing their K and V again
    come home    a sample that ended elsewhere goes to the rank that took its request, which has
                 the whole group then (to grade it, say)
    gather       when all have ended, every rank gets the completions of all

Who draws a sample depends on load and time.  What is drawn does not: noise is keyed by the sample,
rows of a forward do not see each other, and K and V computed again have the bits they had.

A rank that fails, or is told to stop, leaves a note; all leave, and all raise
(``isobit.parallel.world``).

What the ranks that draw samples together tell one another while they do: notes and counters on
their world's board, which nobody waits for.

    tickets        the requests handed out so far, in their order
    finished, tokens, running       of all ranks
    load/r         the live samples of rank r
    ask/r/n        n-th note to rank r: another one has room for some of its samples
    answer/r       to rank r, which has asked: the samples that it gets
    home/r/n       n-th note to rank r: completions of samples that it had given away
    stop           a rank has failed, or was told to stop

Every call has names of its own.  Whoever reads a note addressed to it takes it away; the rest is
removed when all ranks have left, because a note must not go while somebody reads it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter, sleep
from typing import Any

from isobit.parallel.world import World, decode, encode, is_raised_on_all, run_and_gather
from isobit.records.text import Completion
from isobit.records.wire import completions_of, completions_value
from isobit.rollout.engine import SampleEvent, Sampler, check_is_free, generate
from isobit.rollout.engine_stats import EngineStats, Periods, Progress, of_all_ranks
from isobit.rollout.requests import Handle, Request


@dataclass(frozen=True, slots=True)
class Counts:
    """Samples that have ended, tokens drawn and samples that run, on all ranks."""

    finished: int = 0
    tokens: int = 0
    running: int = 0

    def __sub__(self, other: "Counts") -> "Counts":
        """The counts that have come since."""
        return Counts(
            self.finished - other.finished, self.tokens - other.tokens, self.running - other.running
        )


class WorkQueue:
    """The notes of one call, seen from one rank."""

    def __init__(self, world: World) -> None:
        """Every rank calls it equally often."""
        self._board, self._rank = world.board, world.rank
        self._call = f"rollout/{self._board.add(f'rollout/calls/{world.rank}', 1)}"
        self._posted: set[str] = set()
        self._read = {"ask": 0, "home": 0}

    def take_ticket(self) -> int:
        """The place of the next request, counted from 0; no request has it once all are gone."""
        return self._board.add(f"{self._call}/tickets", 1) - 1

    def count(self, more: Counts) -> Counts:
        """Add what was done here since the last call; what all ranks have done."""
        numbers = {
            "tokens": more.tokens,
            "running": more.running,
            "finished": more.finished,
        }
        return Counts(
            **{name: self._board.add(f"{self._call}/{name}", n) for name, n in numbers.items()}
        )

    def show_load(self, live: int) -> None:
        """Let the others see how many live samples are here."""
        self._post(f"load/{self._rank}", str(live).encode())

    def load(self, rank: int) -> int:
        """The live samples of a rank, as it has shown them last."""
        note = self._board.read(f"{self._call}/load/{rank}")
        return 0 if note is None else int(note)

    def ask(self, rank: int, live: int) -> None:
        """Ask a rank for samples, with the number of those that are here."""
        self._send("ask", rank, f"{self._rank} {live}".encode())

    def asked(self) -> list[tuple[int, int]]:
        """The ranks that have asked this one, with their live samples."""
        notes = [note.split() for note in self._received("ask")]
        return [(int(rank), int(live)) for rank, live in notes]

    def answer(self, rank: int, note: bytes) -> None:
        """Send a note to a rank that has asked."""
        self._post(f"answer/{rank}", note)

    def answered(self) -> bytes | None:
        """The answer of the rank that was asked; None where it has not looked yet."""
        name = f"{self._call}/answer/{self._rank}"
        note = self._board.read(name)
        if note is not None:
            self._board.remove(name)
        return note

    def send_home(self, rank: int, note: bytes) -> None:
        """Send a note to the rank that some completions belong to."""
        self._send("home", rank, note)

    def come_home(self) -> list[bytes]:
        """The notes that others have sent since the last call."""
        return self._received("home")

    def stop(self) -> None:
        """Tell all ranks to leave."""
        self._post("stop", b"")

    @property
    def is_stopped(self) -> bool:
        """Whether any rank has said so."""
        return self._board.read(f"{self._call}/stop") is not None

    def clear(self) -> None:
        """Take away what this rank has left; all have left the call."""
        for name in self._posted:
            self._board.remove(name)

    def _post(self, name: str, note: bytes) -> None:
        self._board.post(f"{self._call}/{name}", note)
        self._posted.add(f"{self._call}/{name}")

    def _send(self, kind: str, rank: int, note: bytes) -> None:
        number = self._board.add(f"{self._call}/{kind}/{rank}", 1) - 1
        self._post(f"{kind}/{rank}/{number}", note)

    def _received(self, kind: str) -> list[bytes]:
        """The notes that have arrived, in order: one that is numbered but not there yet holds up
        the later ones.
        """
        notes: list[bytes] = []
        while True:
            name = f"{self._call}/{kind}/{self._rank}/{self._read[kind]}"
            note = self._board.read(name)
            if note is None:
                return notes
            self._board.remove(name)
            self._read[kind] += 1
            notes.append(note)


_LOOK_S, _LOOK_S_A_RANK = 0.05, 0.001
"""Seconds between two reads of the board by a rank that has samples: many ranks share one board."""
_PAUSE_S, _PAUSE_S_A_RANK = 0.005, 0.0001
"""Seconds between two reads by a rank that has none."""
_RECOMPUTED_A_STEP = 128
"""Tokens whose K and V may be computed again for each step that samples may still have: of 8B on an
H200 a step of 128 sequences is 4 ms shorter than one of 256, and prefill makes some 270 tokens in
that time; half of it, since most samples end before they have to.
"""
_ASKED_AT_ONCE = 8
"""Ranks whose load one looks at before asking one of them."""


def generate_shared(
    world: World,
    engine: Sampler,
    requests: Sequence[Request],
    progress: Callable[[Progress], None] | None = None,
    complete: Callable[[int, list[Completion]], None] | None = None,
) -> tuple[list[list[Completion]], list[int], EngineStats]:
    """The completions of each request, drawn by all ranks; for each request the rank that has taken
    it, on which ``complete`` was called; and what all ranks did, counts added and the longest time.
    Collective, with the same requests on every rank.  The engines must have nothing else to do.

    ``progress`` is called on every rank, with the counts of all, after each of its steps and while
    it waits.  ``complete`` is called on one rank for each request, with its place and its
    completions.  An error that either raises, or the engine, ends the call on all ranks.

    Raises:
        RequestError: where a sample is live; and what ``Sampler.check`` and ``step`` raise.
    """
    if world.size == 1:
        groups = generate(engine, requests, progress, complete)
        return groups, [world.rank] * len(requests), engine.stats
    sharing = engine.sharing
    drawing = world if sharing is None else sharing.peers
    queue = WorkQueue(drawing)
    share = _Share(drawing, queue, engine, requests, progress, complete)
    draw = share.run if sharing is None else partial(sharing.led, share.run, share.value)
    try:
        shares = run_and_gather(world, draw)
    except BaseException as error:
        if is_raised_on_all(error):
            queue.clear()
        raise
    queue.clear()
    groups, homes = dict(share.whole), dict[int, int]()
    for rank, value in enumerate(shares):
        homes |= dict.fromkeys(value["places"], rank)
        if rank != world.rank:
            groups |= _groups_of(value, requests)
    total = of_all_ranks([EngineStats(**value["stats"]) for value in shares])
    places = range(len(requests))
    return [groups[index] for index in places], [homes[index] for index in places], total


class _Share:
    """The part of one rank."""

    def __init__(
        self,
        world: World,
        queue: WorkQueue,
        engine: Sampler,
        requests: Sequence[Request],
        progress: Callable[[Progress], None] | None,
        complete: Callable[[int, list[Completion]], None] | None,
    ) -> None:
        self._world, self._queue, self._engine = world, queue, engine
        self._requests, self._progress, self._complete = requests, progress, complete
        self._places = {(one.prompt.id, one.visit): index for index, one in enumerate(requests)}
        self._total = sum(request.samples for request in requests)
        self.whole: dict[int, list[Completion]] = {}
        """Of the requests that were taken here, by place, those that have all their samples."""
        self._parts: dict[int, dict[int, Completion]] = {}
        """Of the others, by place and sample."""
        self._live: dict[Handle, int] = {}
        """The rank that took each sample's request, in the order of arrival."""
        self._ended: dict[int, list[tuple[int, int, Completion]]] = {}
        """Samples of other ranks, by the rank that they go to: place, sample."""
        self._finished = 0
        self._done, self._all = Counts(), Counts()
        """Counts of this rank and of all ranks when it last looked."""
        self._periods = Periods(engine)
        self._handed_out = self._has_asked = self._is_stopped = False
        self._next_look, self._next_other = 0.0, 0
        self._started_at = perf_counter()

    def run(self) -> dict[str, Any]:
        """Draw until all samples have ended, anywhere; -> ``value``."""
        try:
            check_is_free(self._engine)
            self._engine.check(self._requests)
            self._engine.take_weights()
            while self._all.finished < self._total and not self._is_stopped:
                self._turn()
        except BaseException:
            try:
                self._engine.abort(self._live)
            finally:
                self._queue.stop()
            raise
        if self._is_stopped:
            self._engine.abort(self._live)
            return {}
        assert not self._parts, "all samples have ended, and come home"
        self._periods.note()
        return self.value()

    def value(self) -> dict[str, Any]:
        """The completions of the requests that were taken here, as a message."""
        places = list(self.whole)
        return {
            "places": places,
            "stats": asdict(self._periods.total),
            **completions_value([one for place in places for one in self.whole[place]]),
        }

    def _turn(self) -> None:
        """A step of the engine, or a pause where it has nothing to do, and a look at the board."""
        self._take_requests()
        if self._engine.num_live:
            self._note(self._engine.step())
        else:
            with self._world.pulse.waiting("samples"):
                sleep(max(0.0, self._next_look - perf_counter()))
        if not self._engine.num_live or perf_counter() >= self._next_look:
            self._look()
        self._world.pulse.beat()
        if self._progress is not None:
            counts, seconds = self._all, perf_counter() - self._started_at
            self._progress(
                Progress(counts.finished, counts.running, self._total, counts.tokens, seconds)
            )

    def _take_requests(self) -> None:
        """Take as many requests as the engine has room for, up to an even share: the rest of a
        small batch is for ranks that come later.
        """
        share = -(-self._total // self._world.size)
        while not self._handed_out and self._engine.has_room and len(self._live) < share:
            index = self._queue.take_ticket()
            if index >= len(self._requests):
                self._handed_out = True
                return
            (handles,) = self._engine.submit([self._requests[index]])
            self._take_on(handles, [self._world.rank] * len(handles))
            self._parts[index] = {}

    def _take_on(self, handles: Sequence[Handle], homes: Sequence[int]) -> None:
        self._live.update(zip(handles, homes, strict=True))
        self._periods.note()

    def _note(self, events: Iterable[SampleEvent]) -> None:
        """Samples have ended here."""
        for event in events:
            if event.completion is None:
                continue
            self._finished += 1
            home = self._live.pop(event.handle)
            ended = self._place(event.handle), event.handle.sample, event.completion
            if home == self._world.rank:
                self._keep(*ended)
            else:
                self._ended.setdefault(home, []).append(ended)

    def _keep(self, place: int, sample: int, completion: Completion) -> None:
        """A sample of a request that was taken here has ended, anywhere."""
        part = self._parts[place]
        part[sample] = completion
        if len(part) == self._requests[place].samples:
            del self._parts[place]
            self.whole[place] = [part[index] for index in range(len(part))]
            if self._complete is not None:
                self._complete(place, self.whole[place])

    def _look(self) -> None:
        """Tell the others what was done here, and see what they have done."""
        for home, ended in self._ended.items():
            names = [(place, sample) for place, sample, _ in ended]
            self._queue.send_home(home, _note_of(names, [one for *_, one in ended]))
        self._ended.clear()
        self._periods.note()
        tokens = self._periods.total.generated_tokens
        done = Counts(self._finished, tokens, self._engine.num_running)
        self._all = self._queue.count(done - self._done)
        self._done = done
        self._is_stopped = self._queue.is_stopped
        if self._is_stopped:
            return
        for note in self._queue.come_home():  # all that has been counted
            for (place, sample), completion in _named_in(note):
                self._keep(place, sample, completion)
        self._share_load()
        size = self._world.size
        between = (
            _LOOK_S + size * _LOOK_S_A_RANK
            if self._engine.num_live
            else _PAUSE_S + size * _PAUSE_S_A_RANK
        )
        self._next_look = perf_counter() + between

    def _share_load(self) -> None:
        """Give samples to those who have asked; ask where there is nothing else to take."""
        for rank, live in self._queue.asked():
            self._give(rank, live)
        if self._has_asked and (note := self._queue.answered()) is not None:
            self._has_asked = False
            self._take_in(note)
        self._queue.show_load(len(self._live))
        if self._handed_out and not self._has_asked and self._world.size > 1:
            self._ask()

    def _give(self, rank: int, live: int) -> None:
        """Half of what is here beyond the ``live`` samples of another rank, the latest arrivals;
        nothing where it no longer has much less, or the samples are about to end.
        """
        mine = list(self._live)
        leaving = mine[len(mine) - _excess(len(mine), live) :]
        if not self._is_worth_moving(leaving):
            leaving = []
        half_done = self._engine.withdraw(leaving)
        names = [(self._live.pop(one), self._place(one), one.sample) for one in half_done]
        self._queue.answer(rank, _note_of(names, list(half_done.values())))

    def _is_worth_moving(self, leaving: Sequence[Handle]) -> bool:
        again, steps = 0, 0
        for handle in leaving:
            request, drawn = self._requests[self._place(handle)], self._engine.num_drawn(handle)
            again += len(request.prompt.token_ids) + drawn
            steps = max(steps, request.sampling.max_new_tokens - drawn)
        return again <= steps * _RECOMPUTED_A_STEP

    def _take_in(self, note: bytes) -> None:
        homes, half_done = list[int](), dict[Handle, Completion]()
        for (home, place, sample), completion in _named_in(note):
            request = self._requests[place]
            homes.append(home)
            half_done[Handle(request.prompt.id, request.visit, sample)] = completion
        self._engine.admit(self._requests, half_done)
        self._take_on(list(half_done), homes)

    def _ask(self) -> None:
        """Ask the most loaded of a few ranks, others each time, if it has more than twice as
        much.
        """
        size, rank, live = self._world.size, self._world.rank, len(self._live)
        others = [(rank + step) % size for step in range(1, size)]
        first = self._next_other
        some = (others[first:] + others[:first])[:_ASKED_AT_ONCE]
        self._next_other = (first + len(some)) % len(others)
        load, most = max((self._queue.load(other), -other) for other in some)
        if _excess(load, live):
            self._queue.ask(-most, live)
            self._has_asked = True

    def _place(self, handle: Handle) -> int:
        return self._places[handle.prompt_id, handle.visit]


def _excess(load: int, live: int) -> int:
    """Samples that a rank of so much load gives to one with ``live`` samples."""
    return (load - live) // 2 if load > 2 * live else 0


def _note_of(names: Sequence[tuple[int, ...]], completions: Sequence[Completion]) -> bytes:
    """Samples that ended, by place and number; or half-done ones, by the rank that has taken their
    request, place and number.
    """
    return encode({"samples": names, **completions_value(completions)})


def _named_in(note: bytes) -> list[tuple[Sequence[int], Completion]]:
    """The samples of ``_note_of``."""
    value = decode(note)
    return list(zip(value["samples"], completions_of(value), strict=True))


def _groups_of(
    value: Mapping[str, Any], requests: Sequence[Request]
) -> dict[int, list[Completion]]:
    """The completions that a rank has sent, by place."""
    completions = iter(completions_of(value))
    return {
        place: [next(completions) for _ in range(requests[place].samples)]
        for place in value["places"]
    }
