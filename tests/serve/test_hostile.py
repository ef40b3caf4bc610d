"""Requests that are damaged, oversized or cut off get a sentence; the server goes on."""

import copy
import json
import random
import socket
import time
from typing import Any

import pytest

from tests.mutations import COUNT, VALUES, mutated_bytes
from tests.serve.servers import KEY, Running, choices

COMPLETION: dict[str, Any] = {
    "model": "chatty", "prompt": "3+8+2+9=", "max_tokens": 3, "temperature": 0.8, "top_p": 0.9,
    "top_k": 20, "min_p": 0.01, "n": 2, "seed": 5, "stop": ["x"], "logprobs": 2, "echo": True,
    "stream": False, "stop_token_ids": [5], "prompt_logprobs": 1, "return_token_ids": True,
}  # fmt: skip
CHAT: dict[str, Any] = {
    "model": "chatty", "max_tokens": 3, "seed": 5, "logprobs": True, "top_logprobs": 2,
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "1+1="}]},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
}  # fmt: skip
WORSE: tuple[Any, ...] = (
    *VALUES, "a" * 100_000, [[[[]]]], [{"role": "user"}], "\ufdd0", "{% for x in y %}", -(2**70),
    ["3", 4], {"role": "user", "content": {"a": "b"}}, [2**40], 1e-300,
)  # fmt: skip


def mutated(body: dict[str, Any], draw: random.Random) -> bytes:
    """A value replaced, a key added or taken out, at any depth, or bytes changed."""
    made = copy.deepcopy(body)
    if draw.random() < 0.25:
        return mutated_bytes(json.dumps(made).encode(), draw)
    for _ in range(draw.randint(1, 2)):
        place: Any = made
        while isinstance(place, dict | list) and place:
            key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if isinstance(place[key], dict | list) and place[key] and draw.random() < 0.6:
                place = place[key]
                continue
            kind = draw.randrange(4)
            if kind == 0:
                del place[key]
            elif kind == 1 and isinstance(place, dict):
                place[f"{key}{draw.choice('sx_')}"] = copy.deepcopy(draw.choice(WORSE))
            else:
                place[key] = copy.deepcopy(draw.choice(WORSE))
            break
    return json.dumps(made).encode()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
)
def test_mutated_requests_get_an_answer_or_a_sentence(
    path: str, body: dict[str, Any], server: Running
) -> None:
    expected, draw = choices(server.answer(body, path)), random.Random(path)
    refused = 0
    for _ in range(COUNT // 2):
        sent = mutated(body, draw)
        status, headers, content = server.ask(path, sent)
        found = json.loads(content)
        if status == 200:
            assert found["choices"], sent
            continue
        refused += 1
        assert 400 <= status < 500, (sent, content)
        assert headers["content-type"] == "application/json"
        message = found["error"]["message"]
        assert message.isprintable() and " " in message and len(message) < 4100, message
    print(f"\n{path}: {COUNT // 2} mutations, {refused} refused")
    assert COUNT < 300 or 0.4 * COUNT / 2 < refused < COUNT / 2
    assert choices(server.answer(body, path)) == expected
    metrics = server.metrics()
    assert metrics["isobit_kv_pages_free"] == metrics["isobit_kv_pages"]
    assert metrics["isobit_samples_in_place"] == 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model": "gpt"}, "there is no model 'gpt' here; this server has 'chatty'"),
        ({"promt": "1"}, "promt: this server knows no such key; did you mean prompt?"),
        ({"prompt": []}, "prompt: expected a text, a list of texts"),
        ({"prompt": [1, -1]}, "prompt: expected a text, a list of texts"),
        ({"prompt": [1, 127, 128]}, "token 128 is none of the model's, which are 0 to 127"),
        ({"prompt": [1, 120], "echo": True}, "the distribution holds 0 to 98"),
        ({"prompt": "\ud800"}, "the body is not a JSON object"),
        ({"prompt": "1" * 600}, "context holds 512 tokens"),
        ({"prompt": "1" * 200_000}, "context holds 512 tokens"),
        ({"prompt": [5] * 600}, "and the request has 600 tokens: shorten"),
        ({"max_tokens": 510}, "and the request has 519 (9 of the prompt, 510 of the answer)"),
        ({"temperature": 1e-20}, "too small to divide by"),
        ({"temperature": float("nan")}, "temperature"),
        ({"frequency_penalty": 0.5}, "this server does not support it; leave it out, or 0"),
        ({"logit_bias": {"5": 1}}, "this server does not support it; leave it out, or {}"),
        ({"n": 0}, "n: Input should be greater than or equal to 1; found 0"),
        ({"n": True}, "n: Input should be a valid integer; found True"),
        ({"seed": 2**70}, "seed"),
        ({"stop": ["a"] * 17}, "stop: expected a text or a list of at most 16 texts"),
        ({"logprobs": 21}, "logprobs: Input should be less than or equal to 20; found 21"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0: Input should be greater than or equal to 0"),
        ({"stop_token_ids": [10**25]}, "stop_token_ids.0: Input should be less than"),
        ({"stop_token_ids": [5, 128]}, "stop_token_ids: token 128 is none of the model's"),
        ({"stop_token_ids": [5] * 1025}, "stop_token_ids: List should have at most 1024 items"),
        ({"truncate_prompt_tokens": 5}, "this server does not support it; leave it out, or -1"),
        ({"include_reasoning": False}, "this server does not support it; leave it out, or true"),
    ],
)
def test_what_is_refused_says_why(change: dict[str, Any], why: str, server: Running) -> None:
    body = COMPLETION | {"echo": False, "prompt_logprobs": None, "logprobs": None} | change
    if change.get("echo"):
        body["logprobs"] = 1
    status, _, content = server.ask("/v1/completions", body)
    assert 400 <= status < 500
    assert why in json.loads(content)["error"]["message"]


def test_a_key_that_is_unknown_is_shown_in_short(server: Running) -> None:
    status, _, content = server.ask("/v1/completions", COMPLETION | {"x" * 300_000: 1})
    assert status == 400 and len(content) < 1000
    error = json.loads(content)["error"]
    assert error["param"].startswith("xxx") and "this server knows no such key" in error["message"]


NOTHING: dict[str, Any] = {
    "include_stop_str_in_output": False, "spaces_between_special_tokens": True, "priority": 0,
    "truncate_prompt_tokens": -1, "include_reasoning": True, "bad_words": [], "min_tokens": 0,
    "return_tokens_as_token_ids": False, "repetition_penalty": 1.0, "logit_bias": None,
}  # fmt: skip


def test_what_asks_for_nothing_changes_nothing(server: Running) -> None:
    for path, body, more in (
        ("/v1/completions", COMPLETION, {}),
        ("/v1/chat/completions", CHAT, {"echo": False, "add_special_tokens": False}),
    ):
        assert choices(server.answer(body | NOTHING | more, path)) == choices(
            server.answer(body, path)
        )


def test_the_newer_name_of_the_limit_counts(server: Running) -> None:
    for given, expected in (((5, 2), 2), ((2, 5), 5), ((None, 3), 3), ((4, None), 4)):
        names = ("max_tokens", "max_completion_tokens")
        body = CHAT | {"ignore_eos": True} | dict(zip(names, given, strict=True))
        found = server.answer(body, "/v1/chat/completions")
        assert found["usage"]["completion_tokens"] == expected


def test_who_asks_for_no_route_is_told_those_that_there_are(server: Running) -> None:
    for path in ("/v1/responses", "/version", "/v1", "/v1/completions/x"):
        status, _, content = server.ask(path, {})
        message = json.loads(content)["error"]["message"]
        assert status == 404 and "POST /v1/chat/completions" in message, path
        assert "GET /health" in message and "docs/" not in message
    status, _, content = server.ask("/v1/completions")
    assert status == 405 and "this route takes POST" in json.loads(content)["error"]["message"]
    status, headers, content = server.ask("/")
    assert status == 200 and headers["content-type"].startswith("text/plain")
    assert content == b"chatty in fp8: an OpenAI-compatible server of Isobit, at /v1\n"
    assert b"chatty" not in server.ask("/", headers={})[2]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "u", "content": [{"type": "image_url"}]}]}, "only parts of text"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [CHAT["messages"][0]] * 600}, "and the request has 600 messages: shorten"),
        ({"tools": CHAT["tools"] * 600}, "and the request has 600 tools: shorten"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs: it needs logprobs = true"),
        ({"tool_choice": "required"}, "tool_choice: this server knows 'auto' and 'none'"),
        ({"response_format": {"type": "json_object"}}, "response_format: this server does not"),
        ({"echo": True}, "echo: this server does not support it; leave it out, or false"),
        ({"chat_template_kwargs": {"nothing": 1}}, "the chat template reads no variable"),
    ],
)
def test_what_is_refused_of_a_chat_says_why(
    change: dict[str, Any], why: str, server: Running
) -> None:
    status, _, content = server.ask("/v1/chat/completions", CHAT | change)
    assert status == 400
    assert why in json.loads(content)["error"]["message"]


def test_bodies_and_routes_that_are_none(server: Running) -> None:
    for body in (b"", b"{", b"[]", b"null", b'"x"', b"[" * 100_000, b"\xff\xfe", b"{}"):
        status, _, content = server.ask("/v1/completions", body)
        assert status == 400 and json.loads(content)["error"]["message"]
    assert server.ask("/v1/nothing")[0] == 404
    assert server.ask("/v1/completions", method="DELETE")[0] == 405
    status, _, content = server.ask("/v1/completions", b" " * (17 << 20))
    assert status == 413 and b"more than 16,777,216 bytes" in content


def test_a_client_that_sends_half_a_request_and_goes_leaves_nothing(server: Running) -> None:
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n"
        f"Authorization: Bearer {KEY}\r\n\r\n{{"
    )
    for sent in (head.encode(), b"GET / HT", b"\x16\x03\x01\x02\x00", head.encode()[:40]):
        with socket.create_connection(("127.0.0.1", server.port)) as one:
            one.sendall(sent)
    time.sleep(0.2)
    assert server.ask("/health")[0] == 200
    assert server.metrics()["isobit_samples_in_place"] == 0
