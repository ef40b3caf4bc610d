"""Connections of clients, with what uvicorn leaves open: a deadline for a client that sends no
request, one for a client that takes nothing of its answer, and a bound on how many there are.

    opened, or answered     HEAD_S for the head of the next request
    head is there           the application reads the body, with a deadline of its own
    answer is sent          SEND_S for each time that the client lets it wait

Where one connection more is opened than the bound, the one that has waited longest for its client
is closed in its place; only where all are at work is the new one refused.  So whoever sends a
request at once is answered, however many send none.
"""

import asyncio
import os
import resource
import time
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from isobit.util.terminal import say

HEAD_S, SEND_S = 30.0, 60.0
MOST_CONNECTIONS = 4096
_SPARE = 16
"""Descriptors that are left for files."""
_SAY_S = 60.0
"""Seconds between two lines on the console about descriptors that have run out."""
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 5\r\n"
    b"Content-Type: text/plain\r\nContent-Length: 51\r\n\r\n"
    b"all connections of this server are taken; try again"
)


class HttpConnection(H11Protocol):
    """One connection; ``most`` is how many there may be."""

    def __init__(self, *arguments: Any, most: int = MOST_CONNECTIONS, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._most = most
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._since = time.monotonic()
        """The time at which it began to wait for its client."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait("head", HEAD_S)
        if len(self.connections) > self._most:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._timers):
            self._arrived(name)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._arrived("head")

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP, which may stand in the body of a request that is at
        work.
        """
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # what the application answers goes nowhere
            cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.give_up()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # else the next request was there already
            self._wait("head", HEAD_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait("send", SEND_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._arrived("send")

    @property
    def waits_for_client(self) -> bool:
        """Whether no request of it is being served."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    def give_up(self) -> None:
        """Close it at once, whatever was not sent."""
        with suppress(h11.LocalProtocolError):
            self.conn.send(h11.ConnectionClosed())
        self.transport.abort()

    def _wait(self, name: str, seconds: float) -> None:
        self._arrived(name)
        self._since = time.monotonic()
        self._timers[name] = self.loop.call_later(seconds, self.give_up)

    def _arrived(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _make_room(self) -> None:
        open_ones = [
            connection
            for connection in self.connections
            if isinstance(connection, HttpConnection) and not connection.transport.is_closing()
        ]
        if len(open_ones) <= self._most:
            return  # enough are about to go
        idle = [one for one in open_ones if one.waits_for_client and one is not self]
        if idle:
            min(idle, key=lambda one: one._since).give_up()
        else:
            self.transport.write(_FULL)
            self.transport.close()


def most_connections(wanted: int = MOST_CONNECTIONS) -> int:
    """The number of connections that the limit of open files allows, which is raised as far as it
    may be.
    """
    held = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 64
    needed = wanted + held + _SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    allowed = wanted if soft == resource.RLIM_INFINITY else soft - held - _SPARE
    return max(1, min(wanted, allowed))


class QuietLoop:
    """An event loop's handler of errors that says in a line, now and then, that no descriptor is
    left for a connection, of which asyncio writes thousands of tracebacks.
    """

    def __init__(self) -> None:
        self._said_at = -_SAY_S

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "out of system resource" not in str(context.get("message")):
            loop.default_exception_handler(context)
            return
        if time.monotonic() - self._said_at >= _SAY_S:
            self._said_at = time.monotonic()
            say(
                f"isobit: no connection can be accepted now: {context.get('exception')}; raise the "
                "limit of open files (ulimit -n)"
            )
