"""Clients that go away, and servers that end."""

import json
import random
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.serve.servers import KEY, Running, choices, events, serving

LONG: dict[str, Any] = {
    "model": "chatty", "prompt": "3+8+2+9=", "seed": 4, "ignore_eos": True, "max_tokens": 400,
}  # fmt: skip


def begin(server: Running, body: dict[str, Any]) -> socket.socket:
    """A request whose answer nobody has read yet."""
    sent = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Length: {len(sent)}\r\n\r\n"
    )
    one = socket.create_connection(("127.0.0.1", server.port), timeout=120)
    one.sendall(head.encode() + sent)
    return one


def wait_until_empty(server: Running) -> dict[str, float]:
    found: dict[str, float] = {}
    for _ in range(600):
        found = server.metrics()
        if found["isobit_samples_in_place"] == found["isobit_samples_live"] == 0:
            return found
        time.sleep(0.1)
    raise AssertionError(found)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_ends_its_samples(server: Running, stream: bool) -> None:
    body = LONG | {"stream": stream, "n": 20}
    before = server.metrics()["isobit_generated_tokens_total"]
    one = begin(server, body)
    server.wait_for("samples_live", 20)
    one.close()
    after = wait_until_empty(server)
    assert after["isobit_kv_pages_free"] == after["isobit_kv_pages"]
    assert after["isobit_generated_tokens_total"] - before < 20 * 400


@pytest.mark.exhaustive
def test_a_soak_with_clients_that_go_at_random_leaks_nothing(server: Running) -> None:
    """Eight clients; those who stay get the same bytes for a seed as the first one alone."""
    draw = random.Random(3)
    bodies = [
        LONG
        | {"seed": i, "max_tokens": 8 + 9 * i, "prompt": "12+3=" * (1 + i), "stream": i % 2 == 0}
        for i in range(8)
    ]
    bodies[3] |= {"logprobs": 2, "n": 2}
    bodies[6] |= {"logprobs": 2}
    bodies[5] |= {"echo": True, "logprobs": 1, "max_tokens": 1}
    ask = [server.ask("/v1/completions", body)[2] for body in bodies]
    expected = [_said(content, body) for content, body in zip(ask, bodies, strict=True)]
    plans = [[(draw.randrange(8), draw.random()) for _ in range(12)] for _ in range(8)]
    wrong: list[str] = []

    def live(plan: list[tuple[int, float]]) -> None:
        for which, patience in plan:
            if patience < 0.5:
                one = begin(server, bodies[which])
                time.sleep(patience / 5)
                one.close()
                continue
            status, _, content = server.ask("/v1/completions", bodies[which])
            if status != 429 and _said(content, bodies[which]) != expected[which]:
                wrong.append(f"{which}: {content!r}")

    clients = [threading.Thread(target=live, args=(plan,)) for plan in plans]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert wrong == []
    found = wait_until_empty(server)
    assert found["isobit_kv_pages_free"] == found["isobit_kv_pages"] == 20
    assert found["isobit_samples_running"] == 0


def _said(content: bytes, body: dict[str, Any]) -> Any:
    if not body.get("stream"):
        return choices(json.loads(content))
    return [choice for chunk in events(content) for choice in chunk["choices"]]


def test_sigterm_lets_answers_end_and_takes_nothing_new(tmp_path: Path) -> None:
    with serving("starter", tmp_path, "--name", "chatty", "--grace", "300") as server:
        found: list[tuple[int, dict[str, str], bytes]] = []
        body = {"n": 8, "max_tokens": 60}
        first = threading.Thread(
            target=lambda: found.append(server.ask("/v1/completions", LONG | body, timeout=600))
        )
        first.start()
        server.wait_for("samples_live", 8)
        assert server.end() == 0
        first.join()
    status, _, content = found[0]
    assert status == 200
    assert json.loads(content)["usage"]["completion_tokens"] == 8 * 60
    assert "Traceback" not in server.log.read_text()


@pytest.mark.exhaustive
def test_what_outlasts_the_grace_is_cut_off(tmp_path: Path) -> None:
    with serving("starter", tmp_path, "--name", "chatty", "--grace", "1") as server:
        stream, whole = (begin(server, LONG | {"n": 50, "stream": one}) for one in (True, False))
        server.wait_for("samples_live", 100)
        assert server.end() == 0
        cut, refused = (b"".join(iter(partial(one.recv, 1 << 16), b"")) for one in (stream, whole))
    assert cut.startswith(b"HTTP/1.1 200") and b"data: [DONE]" not in cut
    last = json.loads(cut.split(b"\n\n")[-2].rpartition(b"data: ")[2])
    assert "the server has ended before the answer" in last["error"]["message"]
    assert "Traceback" not in server.log.read_text()
    assert refused.startswith(b"HTTP/1.1 503")
    assert b"the server has ended before the answer; try again" in refused
