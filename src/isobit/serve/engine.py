"""The thread in which the engine of a server runs.

    the event loop                              this thread
    submit, score, cancel  -- commands -->      between two steps
    EngineCall.next              <-- what happens --  after each step, all calls at once

Nobody else touches the engine, so a request's tokens depend on nothing but the request: samples
come and go while others run (``isobit.rollout.engine``).  An error of some samples, such as logits
of an adapter that are not finite, ends their calls alone; any other error of the engine ends all
that were live, each with its sentence, and the next ones are served.  Anything else is a fault in
Isobit, after which the thread ends and the server with it.

New weights are taken while nothing is live, so that every answer comes from one version of them:
calls that arrive meanwhile wait.  They wait too while the thread is paused.
"""

import asyncio
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Literal

from isobit.rollout.engine import Follow, SampleEvent
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Handle, Request
from isobit.rollout.scoring import Scored, Scoring, TokenScorer
from isobit.util.errors import IsobitError, OutOfMemoryError, RequestError
from isobit.util.terminal import say

POLL_S = 1.0
"""Seconds between two checks for new weights."""


class EngineStoppedError(IsobitError):
    """The engine's thread has ended; the server ends too."""


class PausedError(IsobitError):
    """A pause has ended the call."""


class DisconnectedError(Exception):
    """The client is gone."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The engine has taken a call's requests on."""

    handles: list[list[Handle]]


@dataclass(frozen=True, slots=True)
class Scores:
    """The result of ``EngineThread.score``."""

    place: int
    scored: Scored


@dataclass(frozen=True, slots=True)
class Done:
    """The end of what ``EngineThread.publish``, ``pause`` or ``resume`` was called for."""


CallNews = Accepted | Scores | SampleEvent | Done
PauseMode = Literal["abort", "wait", "keep"]
"""The fate of the calls that are open: they end with a PausedError, they run to their end, or
they stand still until the thread is resumed."""


class EngineCall:
    """One HTTP request's line to the engine; made and read in the event loop. One ``is_control``
    asks for nothing that is drawn or scored, and never waits for others.
    """

    def __init__(self, is_control: bool = False) -> None:
        self._queue: asyncio.Queue[CallNews | BaseException] = asyncio.Queue()
        self.is_control = is_control
        self.is_closed = False
        self.is_gone = False
        """Whether its client has gone away."""

    def tell(self, what: CallNews | BaseException) -> None:
        """Put news into the call's queue; called in the event loop."""
        self.is_gone = self.is_gone or isinstance(what, DisconnectedError)
        self._queue.put_nowait(what)

    async def next(self) -> CallNews:
        """The next news. Raises what the engine has raised, and DisconnectedError."""
        what = await self._queue.get()
        if isinstance(what, BaseException):
            raise what
        return what


NewWeights = Callable[[], Callable[[], None] | None]
"""Looks for new weights; what takes them, if there are any."""


class EngineThread:
    """Steps an engine for as long as calls are live.

    Args:
        engine, scorer: of one policy; nobody else uses them.
        new_weights: asked every ``POLL_S`` seconds.
        on_fault: called in the thread when it ends by an error.
    """

    def __init__(
        self,
        engine: NativeEngine,
        scorer: "TokenScorer[tuple[EngineCall, int]]",
        new_weights: NewWeights | None = None,
        on_fault: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine, self.scorer = engine, scorer
        self.fault: str | None = None
        """Why the thread has ended, if it has."""
        self.on_fault = on_fault
        self._new_weights, self._looked_at = new_weights, monotonic()
        self._take_weights: Callable[[], None] | None = None
        self.is_paused = False
        """Whether calls that arrive wait until the thread is resumed."""
        self._is_frozen = False
        """Whether open calls wait too."""
        self._awaiting: list[tuple[EngineCall, Literal["weights", "end"]]] = []
        """Calls that wait until new weights are taken, or until no call is open any more."""
        self._calls: dict[Handle, EngineCall] = {}
        self._commands: SimpleQueue[tuple[EngineCall | None, Callable[[], None]]] = SimpleQueue()
        self._open: set[EngineCall] = set()
        """Calls that have begun and are not cancelled: their weights stay."""
        self._held: list[tuple[EngineCall, Callable[[], None]]] = []
        """Commands of calls that wait for new weights."""
        self._news: list[tuple[EngineCall, CallNews | BaseException]] = []
        self._is_ending = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def has_ended_well(self) -> bool:
        """Whether the thread has ended because it was stopped."""
        return self._is_ending and not self._thread.is_alive()

    def start(self) -> None:
        """Start the thread; called in the event loop that the calls belong to."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its step; what is live is told so."""
        self._command(None, self._end)
        self._thread.join()

    def submit(self, call: EngineCall, requests: Sequence[Request], follow: Follow) -> None:
        """Told: ``Accepted`` or a RequestError, then the samples' events."""
        self._command(call, partial(self._submit, call, requests, follow))

    def score(self, call: EngineCall, place: int, scoring: Scoring) -> None:
        """Told: ``Scores`` with the same ``place``, or a RequestError."""
        self._command(call, partial(self._score, call, place, scoring))

    def abort(self, call: EngineCall, handles: Iterable[Handle]) -> None:
        """Some of its samples end; nothing more is told of them."""
        self._command(call, partial(self._abort, list(handles)))

    def cancel(self, call: EngineCall) -> None:
        """Whatever the call has asked for ends; nothing more is told. Every call ends so."""
        call.is_closed = True
        self._command(None, partial(self._cancel, call))

    def publish(self, call: EngineCall, take: Callable[[], None]) -> None:
        """Take new weights once no call is open. Told: ``Done``, or a RequestError if calls are
        kept open by a pause.
        """
        self._command(call, partial(self._publish, call, take))

    def pause(self, call: EngineCall, mode: PauseMode) -> None:
        """Let calls that arrive wait. Told: ``Done``, once none is open or all are kept."""
        self._command(call, partial(self._pause, call, mode))

    def resume(self, call: EngineCall) -> None:
        """Told: ``Done``."""
        self._command(call, partial(self._resume, call))

    def _command(self, call: EngineCall | None, command: Callable[[], None]) -> None:
        self._commands.put((call, command))
        if self.fault is not None and call is not None:  # perhaps nobody reads the queue any more
            call.tell(EngineStoppedError(self.fault))

    # In the thread

    def _run(self) -> None:
        try:
            while not self._is_ending:
                self._obey()
                if self._calls and not self._is_frozen:
                    self._step()
                if self.scorer.has_work and not self._is_frozen:
                    self._score_step()
                self._look_for_weights()
                if not self._open:
                    self._tell_done("end")
                self._deliver()
            self.fault = "the server is shutting down"
        except BaseException as error:
            self.fault = f"the engine has stopped: {type(error).__name__}"
            say("isobit: a fault in the engine's thread; the server ends")
            traceback.print_exc()
            self.on_fault()
        waiting = [call for call, _ in [*self._held, *self._awaiting]]
        while not self._commands.empty():
            call, _ = self._commands.get()
            waiting += [] if call is None else [call]
        self._fail([*self._open, *waiting], EngineStoppedError(self.fault))
        self._deliver()

    def _obey(self) -> None:
        """Carry out the commands that are there; wait for one if there is nothing else to do."""
        is_idle = self._is_frozen or not (self._calls or self.scorer.has_work)
        try:
            if is_idle:
                self._begin(*self._commands.get(timeout=POLL_S if self._new_weights else None))
            while True:
                self._begin(*self._commands.get_nowait())
        except Empty:
            pass

    def _end(self) -> None:
        self._is_ending = True

    def _begin(self, call: EngineCall | None, command: Callable[[], None]) -> None:
        if call is None or call.is_control:
            command()
        elif call in self._open or not (self.is_paused or self._take_weights):
            if not call.is_closed:
                self._open.add(call)
                command()
        else:
            self._held.append((call, command))

    def _publish(self, call: EngineCall, take: Callable[[], None]) -> None:
        if self._is_frozen and self._open:
            why = "a pause keeps requests open that began with the old weights"
            error = RequestError(f"{why}: /resume lets them end; else pause with abort or wait")
            self._news.append((call, error))
            return
        self._take_weights = take
        self._awaiting.append((call, "weights"))

    def _pause(self, call: EngineCall, mode: PauseMode) -> None:
        self.is_paused, self._is_frozen = True, mode == "keep"
        if mode == "keep":
            self._news.append((call, Done()))
            return
        self._awaiting.append((call, "end"))
        if mode == "abort":
            self._fail(self._open, PausedError("generation was paused, and requests were ended"))

    def _resume(self, call: EngineCall) -> None:
        self.is_paused = self._is_frozen = False
        self._news.append((call, Done()))
        self._let_in()

    def _let_in(self) -> None:
        held, self._held = self._held, []
        for call, command in held:
            self._begin(call, command)

    def _tell_done(self, event: Literal["weights", "end"]) -> None:
        self._news += [(call, Done()) for call, awaited in self._awaiting if awaited == event]
        self._awaiting = [pair for pair in self._awaiting if pair[1] != event]

    def _submit(self, call: EngineCall, requests: Sequence[Request], follow: Follow) -> None:
        try:
            handles = self.engine.submit(requests, follow)
        except RequestError as error:
            self._news.append((call, error))
            return
        self._calls.update((handle, call) for group in handles for handle in group)
        self._news.append((call, Accepted(handles)))

    def _score(self, call: EngineCall, place: int, scoring: Scoring) -> None:
        try:
            self.scorer.add((call, place), scoring, owner=call)
        except RequestError as error:
            self._news.append((call, error))

    def _abort(self, handles: Sequence[Handle]) -> None:
        self.engine.abort(handles)
        for handle in handles:
            self._calls.pop(handle, None)

    def _cancel(self, call: EngineCall) -> None:
        self._open.discard(call)
        self._held = [pair for pair in self._held if pair[0] is not call]
        self._abort([handle for handle, one in self._calls.items() if one is call])
        self._drop_scorings([call])

    def _step(self) -> None:
        try:
            events = self.engine.step()
        except IsobitError as error:  # of some samples, or no sample is live any more
            for handle, reason in (error.samples or dict.fromkeys(self._calls, error)).items():
                if (call := self._calls.pop(handle, None)) is not None:
                    self._fail([call], reason)
            return
        for event in events:
            call = self._calls.get(event.handle)
            if call is None:
                continue
            if event.completion is not None:
                del self._calls[event.handle]
            self._news.append((call, event))

    def _score_step(self) -> None:
        try:
            try:
                scored_now = self.scorer.step()
            except OutOfMemoryError:
                self.engine.release()  # its samples wait, and draw what they would have drawn
                scored_now = self.scorer.step()
        except IsobitError as error:
            for (call, _), reason in (
                error.samples or dict.fromkeys(self.scorer.keys, error)
            ).items():
                self._fail([call], reason)
                self._drop_scorings([call])
            return
        self._news += [(call, Scores(place, scored)) for (call, place), scored in scored_now]

    def _drop_scorings(self, calls: Iterable[EngineCall]) -> None:
        leaving = set(calls)
        self.scorer.drop([key for key in self.scorer.keys if key[0] in leaving])

    def _fail(self, calls: Iterable[EngineCall], error: IsobitError) -> None:
        self._news += [(call, error) for call in dict.fromkeys(calls)]

    def _look_for_weights(self) -> None:
        look = self._new_weights
        if look and self._take_weights is None and monotonic() - self._looked_at >= POLL_S:
            self._looked_at = monotonic()
            self._take_weights = look()
        if self._take_weights is None or self._open:
            return
        self._take_weights()
        self._take_weights = None
        self._tell_done("weights")
        self._let_in()

    def _deliver(self) -> None:
        """Tell the calls, in one go: a wake-up of the event loop for each would cost more."""
        news, self._news = self._news, []
        if not news:
            return
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(_tell_all, news)
        except RuntimeError:  # the loop is closed: nobody waits
            return


def _tell_all(news: Sequence[tuple[EngineCall, CallNews | BaseException]]) -> None:
    for call, what in news:
        if not call.is_closed:
            call.tell(what)
