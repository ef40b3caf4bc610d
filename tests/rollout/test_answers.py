"""Servers whose answers are not what the protocol says: another one goes on with their samples, and
where there is none, the run ends in its time with an error that names the server.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from isobit.rollout import servers
from isobit.rollout.answers import (
    AnswerError,
    DrawnSample,
    Event,
    Step,
    Updated,
    WorkerDescribed,
    read_answer,
)
from isobit.rollout.engine import generate
from isobit.util.errors import ConfigError, ServerError
from tests.rollout.served import altered, engine_of, native_of, served
from tests.rollout.test_exactness import policy_of, requests
from tests.rollout.test_http_engine import finished, longer

DEEP = b"[" * 100_000
Change = Callable[[str, int, bytes], tuple[int, bytes]]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with served() as address:
        yield address


def steps(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Every answer to a step that tells of tokens, changed."""

    def made(path: str, status: int, body: bytes) -> tuple[int, bytes]:
        if path != "/isobit/step" or not (content := json.loads(body)).get("samples"):
            return status, body
        found = change(content)
        return status, found if isinstance(found, bytes) else json.dumps(found).encode()

    return made


def first(**changes: Any) -> Change:
    """The first sample of a step, with other entries; None takes one away."""

    def change(content: dict[str, Any]) -> dict[str, Any]:
        sample = {**content["samples"][0], **changes}
        kept = {name: value for name, value in sample.items() if value is not None}
        return {"samples": [kept, *content["samples"][1:]]}

    return steps(change)


def fault(path: str, status: int, body: bytes) -> tuple[int, bytes]:
    return (500, b"out of memory") if path == "/isobit/step" else (status, body)


BAD_STEPS = {
    "empty": (steps(lambda _: {"samples": []}), "drawn (no token|nothing) of"),
    "list": (steps(lambda _: []), "valid dictionary or object|should be an object"),
    "no JSON": (steps(lambda _: b"<html>"), "Invalid JSON"),
    "no samples": (steps(lambda _: {}), "samples: Field required"),
    "deep": (steps(lambda _: b'{"samples":' + DEEP), "Invalid JSON"),
    "no log-probabilities": (first(log_probs=None), "samples.0.log_probs: Field required"),
    "fewer log-probabilities": (first(log_probs=[]), "tokens came with 0 log-probabilities"),
    "log-probabilities in words": (first(log_probs=["x"]), "samples.0.log_probs.0: "),
    "a negative token": (first(token_ids=[-1]), "samples.0.token_ids.0: "),
    "a token in words": (first(token_ids=["a"]), "samples.0.token_ids.0: .*found 'a'"),
    "a token beyond the model": (
        first(token_ids=[5000], log_probs=[-1.0]),
        "drawn the token 5000; expected ids from 0 to",
    ),
    "numbers in words": (first(number="1"), "samples.0.number: "),
    "a fault": (fault, "answers with 500: out of memory"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", BAD_STEPS)
def test_a_run_ends_in_its_time_at_a_server_that_tells_nothing_of_use(
    kind: str, server: str
) -> None:
    change, match = BAD_STEPS[kind]
    with altered(server, change) as address:
        engine = engine_of(policy_of("fp8"), address, servers_timeout_s=0.6)
        engine.submit(longer(requests()[:1]))
        with pytest.raises(ServerError, match=rf"drawn a token for 0.6 s .*{address}.*({match})"):
            finished(engine)
    assert engine.num_live == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["empty", "a fault", "a token beyond the model"])
def test_another_server_goes_on_with_the_samples(kind: str, server: str) -> None:
    policy, wanted = policy_of("fp8"), requests()[:2]
    with altered(server, BAD_STEPS[kind][0]) as bad, served() as good:
        engine = engine_of(policy, bad, good, servers_timeout_s=2.0)
        assert generate(engine, wanted) == generate(native_of(policy), wanted)
        said = "; ".join(engine.notes())
    assert f"{bad} is down, and others go on with its samples" in said


BAD_SIZES = [
    ({"pages": ...}, "pages: Field required"),
    ({"weights": ...}, "weights: Field required"),
    ({"weights": 5}, "weights: .*found 5"),
    ({"pages": "x"}, "pages: .*found 'x'"),
    ({"pages": 2.5}, "pages: "),
    ({"places": 0}, "places: .*greater than or equal to 1; found 0"),
    ({"page_tokens": -64}, "page_tokens: .*found -64"),
    ({"running": True}, "running: "),
]


@pytest.mark.parametrize(("changes", "match"), BAD_SIZES)
def test_a_server_without_its_sizes_is_refused(
    changes: dict[str, Any], match: str, server: str
) -> None:
    def change(path: str, status: int, body: bytes) -> tuple[int, bytes]:
        content = {**json.loads(body), **changes}
        kept = {name: value for name, value in content.items() if value is not ...}
        return status, json.dumps(kept).encode()

    with (
        altered(server, change) as address,
        pytest.raises(ConfigError, match=f"{address}.*{match}"),
    ):
        engine_of(policy_of("fp8"), address)


@pytest.mark.parametrize("body", [DEEP, b"", b"\xff", b"null", b"[1]", b'"x"'])
def test_what_is_no_answer_of_a_server_is_refused(body: bytes, server: str) -> None:
    with (
        altered(server, lambda *_: (200, body)) as address,
        pytest.raises(ConfigError, match="is no server of Isobit, or of another version"),
    ):
        engine_of(policy_of("fp8"), address)
    with (
        altered(server, lambda *_: (500, body)) as address,
        pytest.raises(ConfigError, match=r"none of rollout.servers answers .*with 500"),
    ):
        engine_of(policy_of("fp8"), address)


def test_an_endless_answer_is_cut_off(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "MOST_ANSWERED", 1 << 20)
    with (
        altered(server, lambda *_: (200, b" " * (2 << 20))) as address,
        pytest.raises(ConfigError, match="engine is longer than 1 MiB"),
    ):
        engine_of(policy_of("fp8"), address)


def test_a_filtered_sample_needs_its_columns(server: str) -> None:
    with altered(server, first(truncated_log_probs=None)) as address:
        engine = engine_of(policy_of("fp8"), address)
        with pytest.raises(ServerError, match="without truncated_log_probs"):
            generate(engine, requests(top_p=0.9)[:1])


def test_answers_of_vllm_are_read_the_same_way() -> None:
    sizes = {"context": 1, "pages": 1, "page_tokens": 1, "running": 4, "weights": None}
    assert read_answer(WorkerDescribed, json.dumps(sizes).encode(), "x").sizes["places"] == 4
    sample = {"number": 1, "token_ids": [1], "log_probs": [0], "routings": [1, 2]}
    for kind, body in (
        (WorkerDescribed, {**sizes, "running": 0}),
        (WorkerDescribed, []),
        (Event, {"choices": [{"index": -1}]}),
        (Event, {"choices": [{"index": 0, "token_ids": ["a"]}]}),
        (Event, {"choices": [{"index": 0, "logprobs": {"token_logprobs": [None]}}]}),
        (Updated, {"digest": 5}),
        (Step, {"samples": [sample]}),
    ):
        with pytest.raises(AnswerError, match="its answer to x cannot be read"):
            read_answer(kind, json.dumps(body).encode(), "x")


def test_what_is_new_in_an_answer_is_left_alone() -> None:
    sample = {"number": 1, "token_ids": [1], "log_probs": [-0.1], "mood": "good"}
    body = json.dumps({"samples": [sample], "more": 2}).encode()
    (found,) = read_answer(Step, body, "x").samples
    assert found == DrawnSample(number=1, token_ids=(1,), log_probs=(-0.1,))
