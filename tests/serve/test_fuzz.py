"""Hostile requests as bytes, while a good one is asked again and again beside them.

``ISOBIT_HOSTILE`` says how many; 80 by default.
"""

import json
import os
import random
import socket
import struct
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

from tests.serve.servers import KEY, Running, choices
from tests.serve.test_hostile import CHAT, COMPLETION, WORSE, mutated

COUNT = int(os.environ.get("ISOBIT_HOSTILE", "80"))
PATHS = (
    "/", "/health", "/metrics", "/v1/models", "/v1/models/chatty", "/v1/completions",
    "/v1/chat/completions", "/v1/models/%2e%2e%2fetc", "//health", "/%00", "/v1/completions?x=\x7f",
    "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/weight_info",
    "/isobit/engine", "/isobit/step", "/isobit/weights/begin", "/isobit/weights/part", "*",
    "http://evil.example/health", "/" + "a" * 5000,
)  # fmt: skip
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "get")
BODIES = (
    b"", b"{", b"[" * 200_000, b'{"a":' * 50_000, b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b"NaN",
    b'{"model": "chatty", "prompt": "1", "n": 1e400}', b'{"seed": ' + b"9" * 5000 + b"}",
    b'{"model": "chatty", "model": 5}', b'{"prompt": "\\ud800", "model": "chatty"}',
    b'{"model": "chatty", "prompt": ' + json.dumps(["1"] * 2000).encode() + b"}",
    b'{"model": "chatty", "prompt": [' + b"5," * 90_000 + b"5]}", b"\x1f\x8b\x08\x00" + b"x" * 99,
    b'{"update_info": {"path": "../../../etc/passwd"}}', b"\x80\x04cos\nsystem\n(S'x'\ntR.",
    struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 2) + b"{}", b'{"base": "' + b"0" * 64,
)  # fmt: skip
HEADERS = (
    b"", b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: chunked, identity\r\n", b"Expect: 100-continue\r\n", b"Host: y\r\n",
    b"Authorization: Basic eDp5\r\n", b"Authorization: Bearer \xff\xfe\r\n", b" folded: x\r\n",
    b"Upgrade: websocket\r\nConnection: upgrade\r\n", b"X: " + b"x" * 70_000 + b"\r\n",
    b"".join(b"X%d: y\r\n" % place for place in range(2000)), b"X: a\x00b\r\n", b"no colon\r\n",
    b"Content-Encoding: gzip\r\n", b"Content-Type: application/octet-stream\r\n",
    b"Origin: null\r\n", b"Connection: close\r\n", b"Content-Length: 99999999999999999999\r\n",
)  # fmt: skip
RAW = (
    b"\x16\x03\x01\x02\x00\x01\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x00" * 9000,
    b"\r\n" * 9, b"GET /health HTTP/1.1\r\n\r\n", b"GET /health HTTP/0.9\r\n\r\n",
    b"GET  HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", b"SSH-2.0-x\r\n", b"POST / HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n", b"A" * 200_000,
)  # fmt: skip


def hostile(draw: random.Random) -> bytes:
    """One request, or what is none."""
    if draw.random() < 0.15:
        return draw.choice((*RAW, draw.randbytes(200)))
    path = draw.choice(PATHS)
    method = draw.choice(METHODS) if draw.random() < 0.3 else "POST"
    kind = draw.random()
    if kind < 0.3:
        body = mutated(draw.choice((COMPLETION, CHAT)), draw)
        path = draw.choice(("/v1/completions", "/v1/chat/completions"))
    elif kind < 0.4:
        values = {draw.choice([*COMPLETION]): draw.choice(WORSE) for _ in range(3)}
        body = json.dumps(COMPLETION | values).encode()
    else:
        body = draw.choice((*BODIES, draw.randbytes(500)))
    more = draw.choice(HEADERS) if draw.random() < 0.4 else b""
    length = len(body) if draw.random() < 0.9 else draw.choice((0, 1, len(body) + 50))
    key = KEY if draw.random() < 0.9 else draw.choice(("", KEY + "x", "x" * 9000))
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    return head.encode() + b"Content-Length: %d\r\n" % length + more + b"\r\n" + body


def status_of(server: Running, sent: bytes, draw: random.Random) -> str:
    """The status that is answered, or how the connection ends."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as one:
        with suppress(ConnectionError):
            if draw.random() < 0.1:
                sent = sent[: draw.randrange(1 + len(sent))]
            one.sendall(sent)
            if draw.random() < 0.1:  # a client that resets
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return "left"
            with suppress(OSError):  # the server has ended the connection
                one.shutdown(socket.SHUT_WR)
            found = b""
            while part := one.recv(1 << 16):
                found += part
                if len(found) > 15:
                    return found.split(b" ", 2)[1].decode()
        return "closed"


def test_hostile_requests_end_and_spoil_nobody_elses(server: Running) -> None:
    body: dict[str, Any] = COMPLETION | {"seed": 11, "max_tokens": 12}
    expected, wrong, is_done = choices(server.answer(body)), list[str](), threading.Event()
    asked = 0

    def ask_on() -> None:
        nonlocal asked
        while not is_done.is_set():
            status, _, content = server.ask("/v1/completions", body)
            asked += 1
            if status != 429 and choices(json.loads(content)) != expected:
                wrong.append(content.decode()[:300])

    beside = threading.Thread(target=ask_on)
    beside.start()
    seen, draw = Counter[str](), random.Random(59)
    try:
        for _ in range(COUNT):
            sent = hostile(draw)
            status = status_of(server, sent, draw)
            seen[status] += 1
            assert not status.startswith("5"), (status, sent[:400])
    finally:
        is_done.set()
        beside.join()
    print(f"\n{COUNT} hostile requests: {dict(seen)}; {asked} good ones beside them")
    assert wrong == [] and asked > 0
    assert "Traceback" not in server.log.read_text()
    assert server.ask("/health")[0] == 200
    assert choices(server.answer(body)) == expected
