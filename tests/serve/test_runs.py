"""The engine protocol over HTTP, as a client sees it that is not ours."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.client import HTTPConnection
from typing import Any, TypeAlias
from urllib.request import urlopen

import pytest
import torch

from isobit.models.weight_deltas import SentWeights, digest_of, files_of, rounded_masters
from isobit.rollout.engine import generate
from isobit.rollout.requests import Request
from isobit.serve import run_samples
from tests.rollout.served import SEED, native_of, served
from tests.rollout.test_exactness import policy_of, requests

Drawn: TypeAlias = dict[int, tuple[list[int], list[float]]]
"""Tokens and log-probabilities by number."""
STEP: Mapping[str, Any] = {"client": "me", "session": 1, "weights": "", "ask": [], "drop": []}


class Client:
    def __init__(self, url: str) -> None:
        self._connection = HTTPConnection(url.removeprefix("http://"), timeout=120)
        self.url = url

    def ask(self, path: str, body: Any = None, key: str = "") -> tuple[int, Any]:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = "octet-stream" if isinstance(body, bytes) else "json"
        headers = {"Content-Type": f"application/{kind}", "Authorization": f"Bearer {key}"}
        method = "GET" if body is None else "POST"
        self._connection.close()  # a server closes it after five idle seconds
        self._connection.request(method, f"/isobit/{path}", sent, headers)
        response = self._connection.getresponse()
        return response.status, json.loads(response.read())

    def get(self, path: str, body: Any = None) -> Any:
        status, found = self.ask(path, body)
        assert status == 200, found
        return found

    def refusal(self, path: str, body: Any) -> tuple[int, str]:
        status, found = self.ask(path, body)
        return status, found["error"]["message"]

    def push(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        self.get("weights/begin", {"base": None})
        for file in files_of(tensors):
            self.get("weights/part", b"".join(file))
        return self.get("weights/publish", {"sha256": digest_of(tensors)})


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with served(places=12) as url:
        yield Client(url)


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return {name: values for name, values, _ in rounded_masters(policy_of("fp8"))}


def group(at: int, numbers: list[int], **sampling: Any) -> dict[str, Any]:
    """Samples of a prompt as a run asks for them."""
    request = requests()[at]
    asked = {"max_new_tokens": 20, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return {
        "token_ids": list(request.prompt.token_ids),
        "numbers": numbers,
        "keys": [request.noise_key(SEED, sample) for sample in range(len(numbers))],
        "sampling": {**asked, "stop_token_ids": [], **sampling},
    }


def longer(at: int, samples: int) -> Request:
    """The request that ``group`` asks for with so many tokens as ``LONG``."""
    request = requests()[at]
    sampling = replace(request.sampling, max_new_tokens=60)
    return replace(request, samples=samples, sampling=sampling)


def test_samples_are_asked_for_by_tokens_and_keys(
    client: Client, tensors: dict[str, torch.Tensor]
) -> None:
    """Of the same prompt and keys as in a run, the same tokens and log-probabilities."""
    answer = client.push(tensors)
    assert answer["published"] == SentWeights.of(policy_of("fp8")).published
    assert client.get("engine")["weights"] == answer["sha256"] == digest_of(tensors)
    step = {**STEP, "weights": answer["sha256"]}
    found = {7: ([], []), 8: ([], []), 9: ([], [])}
    told = client.get("step", {**step, "ask": [group(0, [7, 8, 9])]})["samples"]
    ended = []
    while len(ended) < 3:
        for one in told:
            found[one["number"]][0].extend(one["token_ids"])
            found[one["number"]][1].extend(one["log_probs"])
            ended += [one["finish_reason"]] if "finish_reason" in one else []
        told = client.get("step", step)["samples"]
    assert told == [] and ended == ["length"] * 3
    (expected,) = generate(native_of(policy_of("fp8")), requests()[:1])
    assert [tuple(map(tuple, one)) for one in found.values()] == [
        (one.token_ids, one.log_probs) for one in expected
    ]


LONG = {"max_new_tokens": 60}


def told(client: Client, step: Mapping[str, Any], *asked: Mapping[str, Any]) -> Drawn:
    """What a client is told of the samples that it asks for, until all of them have ended."""
    drawn: Drawn = {number: ([], []) for one in asked for number in one["numbers"]}
    live, ask = set(drawn), list(asked)
    while live:
        for one in client.get("step", {**step, "ask": ask})["samples"]:
            drawn[one["number"]][0].extend(one["token_ids"])
            drawn[one["number"]][1].extend(one["log_probs"])
            live -= {one["number"]} if "finish_reason" in one else set()
        ask = []
    return drawn


def counts(client: Client) -> tuple[float, float]:
    """Tokens that were drawn for runs, and that were told once more."""
    with urlopen(f"{client.url}/metrics") as answer:
        lines = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines())
    names = "isobit_run_tokens_total", "isobit_kept_tokens_total"
    return float(lines[names[0]]), float(lines[names[1]])


def test_samples_that_are_dropped_are_told_of_no_more(
    client: Client, tensors: dict[str, torch.Tensor]
) -> None:
    step = {**STEP, "client": "you", "weights": client.push(tensors)["sha256"]}
    client.get("step", {**step, "ask": [group(3, [1, 2], **LONG)]})
    found = client.get("step", {**step, "drop": [1]})["samples"]
    assert {one["number"] for one in found} <= {2}


def test_what_a_new_session_does_not_ask_for_leaves_its_place_to_others(
    client: Client, tensors: dict[str, torch.Tensor]
) -> None:
    step = {**STEP, "client": "you", "weights": client.push(tensors)["sha256"]}
    client.get("step", {**step, "ask": [group(3, list(range(12)), **LONG)]})
    other = {**step, "client": "third", "ask": [group(2, [1])]}
    status, message = client.refusal("step", other)
    assert (status, message[:24]) == (429, "12 of 12 places are take")
    assert client.get("step", {**step, "session": 2})["samples"] == []
    client.get("step", other)


def test_a_client_that_comes_back_is_told_what_was_drawn_meanwhile(
    client: Client, tensors: dict[str, torch.Tensor]
) -> None:
    """It has the prompt alone, or some of the tokens that it had been told; every token is drawn
    once.  Once more it is told all of it, although nothing is live any more.
    """
    step = {**STEP, "client": "back", "weights": client.push(tensors)["sha256"]}
    (expected,) = generate(native_of(policy_of("fp8")), [longer(0, 3)])
    before = counts(client)
    first = client.get("step", {**step, "ask": [group(0, [1, 2, 3], **LONG)]})["samples"]
    had = {one["number"]: one["token_ids"] for one in first}
    asked = group(0, [7, 8, 9], **LONG)
    behind = [
        {
            **asked,
            "token_ids": [*asked["token_ids"], *had.get(number, [])[:2]],
            "numbers": [number + 6],
            "keys": [asked["keys"][number - 1]],
            "sampling": {
                **asked["sampling"],
                "max_new_tokens": LONG["max_new_tokens"] - len(had.get(number, [])[:2]),
            },
        }
        for number in (1, 2, 3)
    ]
    for session, wanted in ((2, [asked]), (3, behind), (4, behind)):
        hello = client.get("step", {**step, "session": session})
        assert set(hello["kept"]) == set(asked["keys"]) and hello["samples"] == []
        found = told(client, {**step, "session": session}, *wanted)
        for at, one in enumerate(expected):
            known = len(wanted[at]["token_ids"]) - len(asked["token_ids"]) if wanted[1:] else 0
            assert tuple(found[at + 7][0]) == one.token_ids[known:]
            assert tuple(found[at + 7][1]) == one.log_probs[known:]
    drawn, kept = (after - one for one, after in zip(before, counts(client), strict=True))
    assert drawn == sum(one.length for one in expected)
    assert kept > drawn


@pytest.mark.exhaustive
def test_a_sample_that_was_dropped_goes_on_behind_what_was_drawn(
    client: Client, tensors: dict[str, torch.Tensor]
) -> None:
    """As one that a stop string has ended in a run which was killed then."""
    step = {**STEP, "client": "dropped", "weights": client.push(tensors)["sha256"]}
    ((expected,),) = generate(native_of(policy_of("fp8")), [longer(0, 1)])
    asked, before = group(0, [1], **LONG), counts(client)[0]
    while not client.get("step", {**step, "ask": [asked]})["samples"]:
        pass
    client.get("step", {**step, "drop": [1]})
    found = told(client, {**step, "session": 2}, asked)
    assert tuple(found[1][0]) == expected.token_ids and tuple(found[1][1]) == expected.log_probs
    assert counts(client)[0] - before == expected.length


@pytest.mark.exhaustive
@pytest.mark.parametrize("change", ["key", "tokens", "sampling", "length", "client", "weights"])
def test_what_differs_in_anything_is_drawn_anew(
    client: Client, tensors: dict[str, torch.Tensor], change: str
) -> None:
    step = {**STEP, "client": f"other {change}", "weights": client.push(tensors)["sha256"]}
    asked = group(1, [1])
    told(client, step, asked)
    before = counts(client)
    again = {**step, "session": 2}
    if change == "key":
        asked["keys"] = [asked["keys"][0] + 1]
    elif change == "tokens":
        asked["token_ids"][-1] ^= 1
    elif change == "sampling":
        asked["sampling"]["temperature"] = 0.9
    elif change == "length":
        asked["sampling"]["max_new_tokens"] += 1
    elif change == "client":
        again["client"] = "stranger"
    else:
        moved = {name: values * 2 for name, values in tensors.items()}
        again["weights"] = client.push(moved)["sha256"]
    found = told(client, again, asked)
    assert counts(client) == (before[0] + len(found[1][0]), before[1])


def test_a_client_that_stays_away_is_given_up(
    tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_samples, "AWAY_S", 0.2)
    monkeypatch.setattr(run_samples, "LOOK_S", 0.05)
    with served(places=2) as url:
        client = Client(url)
        step = {**STEP, "weights": client.push(tensors)["sha256"]}
        client.get("step", {**step, "ask": [group(3, [1, 2], max_new_tokens=250)]})
        other = {**step, "client": "other", "ask": [group(3, [1])]}
        while (status := client.ask("step", other)[0]) == 429:
            time.sleep(0.02)
        assert status == 200
        assert client.get("step", {**step, "session": 2})["kept"] == []


@pytest.mark.exhaustive
def test_live_samples_that_are_not_asked_for_again_end(
    tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_samples, "ASKED_S", 0.05)
    monkeypatch.setattr(run_samples, "LOOK_S", 0.01)
    with served(max_sequences=1) as url:
        client = Client(url)
        step = {**STEP, "weights": client.push(tensors)["sha256"]}
        client.get("step", {**step, "ask": [group(3, list(range(9)), max_new_tokens=200)]})
        client.get("step", {**step, "session": 2})
        while client.get("step", {**step, "session": 2})["samples"] == []:
            with urlopen(f"{url}/metrics") as answer:
                if "isobit_samples_in_place 0.0" in answer.read().decode():
                    break
        assert counts(client)[0] < 9 * 200


@pytest.mark.exhaustive
def test_the_oldest_that_have_ended_are_forgotten_beyond_a_size(
    tensors: dict[str, torch.Tensor], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_samples, "MOST_KEPT", 50)
    step = {**STEP, "client": "many", "weights": client.push(tensors)["sha256"]}
    asked = [group(at, [at]) for at in range(4)]
    for one in asked:
        told(client, step, one)
    kept = client.get("step", {**step, "session": 2})["kept"]
    assert kept == [key for one in asked[1:] for key in one["keys"]]


def test_what_is_refused_says_why(client: Client, tensors: dict[str, torch.Tensor]) -> None:
    digest = client.push(tensors)["sha256"]
    step = {**STEP, "client": "wrong", "weights": digest}

    def refused(path: str, body: Any, status: int, message: str) -> None:
        found = client.refusal(path, body)
        assert found[0] == status and message in found[1], found

    def asked(**changes: Any) -> dict[str, Any]:
        return {**step, "ask": [{**group(3, [1]), **changes}]}

    refused("step", {**asked(), "weights": "0" * 64}, 409, "samples are drawn from " + digest[:12])
    refused("step", asked(keys=[]), 400, "keys: expected one for each of numbers")
    refused("step", asked(token_ids=[]), 400, "ask.0.token_ids")
    refused("step", asked(token_ids=[95, 96]), 400, "the model knows 0 to 95")
    refused("step", asked(keys=[1 << 63]), 400, "ask.0.keys.0")
    refused("step", asked(more=1), 400, "ask.0.more")
    refused("step", [], 400, "")
    refused("weights/begin", {"base": "0" * 64}, 409, "does not hold the weights 000000000000")
    refused("weights/part", b"", 409, "no update has begun")
    refused("weights/publish", {"sha256": digest}, 409, "no update has begun")

    def sent(parts: Mapping[str, torch.Tensor], base: str | None, message: str) -> None:
        client.get("weights/begin", {"base": base})
        for file in files_of(parts):
            client.get("weights/part", b"".join(file))
        refused("weights/publish", {"sha256": digest}, 400, message)
        client.push(tensors)

    name = "norm.weight"
    sent({name: tensors[name]}, None, "tensors have not come, the first is embed_tokens.weight")
    sent({name: tensors[name].float()}, digest, "is torch.float32 (128,); expected torch.bfloat16")
    sent({name: tensors[name] * float("inf")}, digest, "holds a NaN or an infinity")
    sent({f"{name}.counts": torch.zeros(1, dtype=torch.uint8)}, digest, "one is missing")
    client.get("weights/begin", {"base": digest})
    refused("weights/part", b"\x08", 400, "less than a header's length")
    for part, message in (
        ({"x": tensors[name]}, "x is no master of this model"),
        ({"x.counts": torch.zeros(1, dtype=torch.uint8)}, "x is no master of this model"),
        ({name: torch.zeros(1 << 12)}, "norm.weight has 16,384 bytes; an update of it at most"),
    ):
        (file,) = files_of(part)
        refused("weights/part", b"".join(file), 400, message)
    assert client.get("weights/publish", {"sha256": "1" * 64}) == {
        "sha256": digest, "published": None
    }  # fmt: skip
    assert client.get("engine")["weights"] is None
    refused("step", asked(), 409, "samples are drawn from others here")


def test_the_routes_ask_for_the_key() -> None:
    with served(key="secret") as url:
        client = Client(url)
        for path, body in (("engine", None), ("step", STEP), ("weights/begin", {"base": None})):
            assert client.ask(path, body)[0] == 401
            assert client.ask(path, body, "secret")[0] == 200
