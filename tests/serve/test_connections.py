"""Connections that are silent, slow or too many: others are answered meanwhile."""

import asyncio
import http.client
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import uvicorn

from isobit.serve import connections
from isobit.serve.connections import HttpConnection, QuietLoop, most_connections

ended: list[str] = []


async def app(scope: Any, receive: Any, send: Any) -> None:
    path = scope["path"]
    try:
        if path == "/wait":
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000 if path == "/large" else 1):
            body = {"type": "http.response.body", "body": b"x" * 100_000, "more_body": True}
            await send(body)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    finally:
        ended.append(path)


@contextmanager
def listening(most: int = 100) -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    made: Any = partial(HttpConnection, most=most)
    config = uvicorn.Config(
        app, lifespan="off", http=made, ws="none", log_config=None, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)


def opened(port: int, sent: bytes = b"") -> socket.socket:
    one = socket.create_connection(("127.0.0.1", port), timeout=30)
    one.sendall(sent)
    return one


def status(port: int, path: str = "/") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def rest(one: socket.socket) -> bytes:
    """What comes until the other side closes."""
    found = b""
    with suppress(ConnectionResetError):
        while part := one.recv(1 << 20):
            found += part
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: ",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET /",
    ],
    ids=["nothing", "half a head", "no body", "half a second head"],
)
def test_a_client_that_sends_no_request_is_let_go(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    with listening() as port:
        silent, trickling = opened(port, sent), opened(port, sent)
        until = time.monotonic() + 20
        with suppress(ConnectionError):
            while time.monotonic() < until:  # each byte is no new start
                trickling.sendall(b"a")
                time.sleep(0.05)
        assert time.monotonic() < until
        assert rest(silent).count(b"200 OK") == sent.count(b"\r\n\r\n")
        assert status(port) == 200


def test_a_client_that_takes_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SEND_S", 0.3)
    with listening() as port:
        ended.clear()
        one = opened(port, b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        until = time.monotonic() + 20
        while "/large" not in ended and time.monotonic() < until:
            time.sleep(0.02)
        assert ended == ["/large"]
        assert len(rest(one)) < 50_000_000


def test_who_sends_a_request_is_answered_however_many_send_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 300)
    with listening(most=6) as port:
        silent = [opened(port, b"GET" if place % 2 else b"") for place in range(40)]
        assert [status(port) for _ in range(3)] == [200] * 3
        assert [rest(one) for one in silent[:35]] == [b""] * 35  # the oldest went
        assert status(port) == 200


def test_who_comes_where_all_are_at_work_is_told() -> None:
    with listening(most=2) as port:
        busy = [opened(port, b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(2)]
        time.sleep(0.3)
        assert status(port) == 503
        busy.pop().close()
        time.sleep(0.3)
        assert status(port) == 200


@pytest.mark.few(3)
@pytest.mark.parametrize("path", ["/", "/wait", "/large"])
@pytest.mark.parametrize("body", [b"ZZ\r\n", b"1\r\nxx", b"-1\r\n\r\n"])
def test_a_body_that_is_no_http_ends_its_connection_without_a_traceback(
    path: str, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "error", told.append)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with listening() as port:
        for pause in (0.0, 0.1):
            one = opened(port, head.encode())
            time.sleep(pause)
            with suppress(ConnectionError):
                one.sendall(body)
            assert rest(one) is not None
        assert status(port) == 200
    assert told == []


def test_descriptors_that_run_out_are_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    loop, handler = asyncio.new_event_loop(), QuietLoop()
    error = OSError(24, "Too many open files")
    context = {"message": "socket.accept() out of system resource", "exception": error}
    for _ in range(100):
        handler(loop, context)
    loop.close()
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "raise the limit of open files" in said


def test_the_bound_follows_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [64, 64]
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: tuple(limits))

    def limit(_: int, given: tuple[int, int]) -> None:
        limits[:] = given

    monkeypatch.setattr(connections.resource, "setrlimit", limit)
    assert 1 <= most_connections(4096) < 60
    limits[:] = [1024, 1 << 20]
    assert most_connections(4096) == 4096 and limits[0] > 4096
