"""What is refused before anything runs, and what the message says."""

from dataclasses import replace
from typing import Any

import pytest

from isobit.records.text import Prompt, SamplingParams
from isobit.rollout.engine import generate
from isobit.rollout.requests import EngineLimits, Handle, Request, check_limits, check_requests
from isobit.util.errors import RequestError
from tests.rollout.history_model import make_engine

LIMITS = EngineLimits(context=300, vocab_size=50, num_pages=4, page_tokens=64, has_tokenizer=True)


def a_request(length: int = 10, samples: int = 2, token: int = 7, **sampling: Any) -> Request:
    sampling.setdefault("max_new_tokens", 20)
    return Request(
        Prompt("gsm8k/12", "", (token,) * length), 0, samples, SamplingParams(**sampling)
    )


def refusal(*requests: Request, limits: EngineLimits = LIMITS) -> str:
    with pytest.raises(RequestError) as caught:
        check_limits(requests, limits)
    return str(caught.value)


def test_the_largest_request_that_fits_is_accepted():
    check_limits(
        [a_request(length=237, max_new_tokens=20)], LIMITS
    )  # 257 tokens, of which 256 are cached
    check_limits([a_request(length=299, max_new_tokens=1000)], replace(LIMITS, num_pages=5))


def test_a_request_longer_than_the_cache_is_refused_with_the_numbers():
    message = refusal(a_request(length=238, max_new_tokens=20))
    assert (
        "'gsm8k/12' can grow to 258 tokens (238 of the prompt, at most 20 new, context 300)"
        in message
    )
    assert "5 pages of 64 tokens, and the KV cache has 4" in message
    assert "rollout.kv_pages" in message


@pytest.mark.parametrize("length", [300, 301, 5000])
def test_a_prompt_without_room_for_a_token_is_refused_with_the_numbers(length: int):
    message = refusal(a_request(length=length), limits=replace(LIMITS, num_pages=1000))
    assert f"has {length} tokens; the model's context holds 300" in message


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (a_request(length=0), "has no tokens"),
        (a_request(token=50), "token ids from 50 to 50; the model knows 0 to 49"),
        (a_request(token=-1), "token ids from -1 to -1"),
        (a_request(samples=0), "samples = 0 must be at least 1"),
        (a_request(max_new_tokens=0), "max_new_tokens = 0 must be at least 1"),
        (a_request(temperature=-0.5), "temperature = -0.5 must be finite and not below 0"),
        (a_request(temperature=float("nan")), "temperature = nan"),
        (a_request(temperature=1e-39), "temperature = 1e-39 is too small"),
        (a_request(temperature=float("inf")), "temperature = inf"),
        (a_request(top_k=-1), "top_k = -1"),
        (a_request(top_p=0.0), "top_p = 0.0"),
        (a_request(top_p=1.5), "top_p = 1.5"),
        (a_request(min_p=1.0), "min_p = 1.0"),
        (a_request(stop_strings=("",)), "an empty stop string"),
    ],
)
def test_impossible_requests_are_refused_by_name(request_: Request, message: str):
    refused = refusal(request_)
    assert message in refused
    assert "'gsm8k/12'" in refused


def test_stop_strings_need_a_tokenizer():
    assert "need a tokenizer" in refusal(
        a_request(stop_strings=("\n",)), limits=replace(LIMITS, has_tokenizer=False)
    )


def test_the_same_visit_twice_is_refused():
    assert "requested twice for visit 0" in refusal(a_request(), a_request())
    check_requests([a_request(), replace(a_request(), visit=1)])


def test_a_visit_of_which_a_sample_is_live_is_refused():
    live = {Handle("gsm8k/12", 1, 4)}
    check_requests([a_request()], live)
    with pytest.raises(RequestError, match="requested twice for visit 1"):
        check_requests([replace(a_request(), visit=1)], live)


def test_nothing_runs_when_one_request_of_a_batch_is_refused():
    engine, model = make_engine(kv_pages=1)
    with pytest.raises(RequestError):
        generate(engine, [replace(a_request(length=5), visit=1), a_request(length=100)])
    assert model.batches == []
