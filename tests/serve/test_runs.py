"""The engine protocol over HTTP, as a client sees it that is not ours."""

import json
import time
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from typing import Any

import pytest
import torch

from isobit.models.weight_deltas import SentWeights, digest_of, files_of, rounded_masters
from isobit.rollout.engine import generate
from isobit.serve import runs
from tests.rollout.served import SEED, native_of, served
from tests.rollout.test_exactness import policy_of, requests

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


def test_samples_are_dropped_and_those_of_an_older_session_end(
    client: Client, tensors: dict[str, torch.Tensor]
) -> None:
    step = {**STEP, "client": "you", "weights": client.push(tensors)["sha256"]}
    long = {"max_new_tokens": 200}
    client.get("step", {**step, "ask": [group(3, [1, 2], **long)]})
    told = client.get("step", {**step, "drop": [1]})["samples"]
    assert {one["number"] for one in told} <= {2}
    later = client.get("step", {**step, "session": 2, "ask": [group(3, [5], **long)]})["samples"]
    assert {one["number"] for one in later} <= {5}
    assert client.get("step", {**step, "session": 3})["samples"] == []
    full = {**step, "session": 4, "ask": [group(3, list(range(12)), **long)]}
    client.get("step", full)  # all places are free again
    other = {**step, "client": "third", "ask": [group(3, [1])]}
    status, message = client.refusal("step", other)
    assert (status, message[:24]) == (429, "12 of 12 places are take")
    client.get("step", {**step, "session": 5})
    assert client.get("step", other)["samples"] is not None


def test_a_silent_client_is_given_up(
    tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "SILENT_S", 0.2)
    with served(places=2) as url:
        client = Client(url)
        step = {**STEP, "weights": client.push(tensors)["sha256"]}
        client.get("step", {**step, "ask": [group(3, [1, 2], max_new_tokens=250)]})
        other = {**step, "client": "other", "ask": [group(3, [1])]}
        while (status := client.ask("step", other)[0]) == 429:
            time.sleep(0.02)
        assert status == 200


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
