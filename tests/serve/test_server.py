"""The server in a process of its own, asked by OpenAI's client and by plain HTTP."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from isobit.config.rollout import RolloutConfig
from isobit.models.folder import LoadedModel, load_model
from isobit.records.text import Completion, Prompt
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.rollout.sequence import decode
from tests.serve.servers import KEY, Running, choices, events

if TYPE_CHECKING:
    from openai import OpenAI

TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ASKED: dict[str, Any] = {
    "model": "chatty", "prompt": ["3+8+2+9=", "1+1="], "n": 2, "seed": 7, "max_tokens": 24,
    "temperature": 1.3, "logprobs": 3, "return_token_ids": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def client(server: Running) -> "OpenAI":
    import openai

    return openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("starter", "fp8", trainable=False)


def drawn(
    model: LoadedModel, seed: int, samples: int, text: str, **rollout: Any
) -> list[Completion]:
    """By the engine alone."""
    ids = tuple(model.tokenizer(text)["input_ids"])
    sampling = model.sampling(RolloutConfig(**rollout))
    request = Request(Prompt("alone", text, ids), 0, samples, sampling, seed)
    return generate(NativeEngine(model.policy, RolloutConfig(), model.tokenizer, 0), [request])[0]


def test_models(client: "OpenAI") -> None:
    (one,) = client.models.list().data
    assert one.id == "chatty" and client.models.retrieve("chatty") == one
    import openai

    with pytest.raises(openai.NotFoundError, match="there is no model 'other' here"):
        client.models.retrieve("other")


def test_a_completion_is_what_the_engine_draws(client: "OpenAI", model: LoadedModel) -> None:
    made = client.completions.create(
        model="chatty", prompt="3+8+2+9=", n=3, seed=5, max_tokens=20, logprobs=0,
        extra_body={"return_token_ids": True, "top_k": 30},
    )  # fmt: skip
    expected = drawn(model, 5, 3, "3+8+2+9=", max_new_tokens=20, top_k=30)
    for choice, completion in zip(made.choices, expected, strict=True):
        assert choice.text == completion.text
        assert choice.finish_reason == completion.finish_reason
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == list(completion.log_probs)
        assert choice.model_extra is not None
        assert choice.model_extra["token_ids"] == list(completion.token_ids)
    assert made.usage is not None
    assert made.usage.completion_tokens == sum(one.length for one in expected)
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens


def test_ids_are_taken_as_they_are(server: Running, model: LoadedModel) -> None:
    ids = model.tokenizer("1+1=")["input_ids"]
    body = {"model": "chatty", "seed": 1, "temperature": 0, "return_token_ids": True}
    (text,) = choices(server.answer(body | {"prompt": "1+1="}))
    (given,) = choices(server.answer(body | {"prompt": ids}))
    (listed,) = choices(server.answer(body | {"prompt": [ids]}))
    assert text == given == listed
    assert given["prompt_token_ids"] == ids


@pytest.mark.exhaustive
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_among_others_is_the_request_alone(server: Running, stream: bool) -> None:
    """Sixteen others come before it, with it and while it runs; pages are too few for all."""
    others = [
        {"model": "chatty", "prompt": f"{i}+{i}=" * (1 + i % 9), "seed": i % 3, "max_tokens": 40,
         "ignore_eos": i % 2 == 0, "temperature": 0.5 + i / 8, "n": 1 + i % 2}
        for i in range(16)
    ]  # fmt: skip
    body = ASKED | {"ignore_eos": True, "max_tokens": 60}
    if stream:
        body |= {"stream": True, "logprobs": 0}

    def ask(one: dict[str, Any]) -> Any:
        status, _, content = server.ask("/v1/completions", one)
        assert status == 200, content
        return _joined(events(content)) if one.get("stream") else choices(json.loads(content))

    alone = ask(body)
    before = server.metrics()
    with ThreadPoolExecutor(17) as pool:
        found = [pool.submit(ask, other) for other in others[:9]]
        among = pool.submit(ask, body)
        found += [pool.submit(ask, other) for other in others[9:]]
        assert among.result() == alone
        for other, one in zip(others[::5], found[::5], strict=False):
            assert one.result() == ask(other)
    after = server.metrics()
    assert after["isobit_generated_tokens_total"] > before["isobit_generated_tokens_total"]
    assert after["isobit_kv_pages_free"] == after["isobit_kv_pages"] == 20


def _joined(chunks: list[dict[str, Any]]) -> dict[int, Any]:
    """Text, tokens and log-probabilities of each choice of a stream."""
    found: dict[int, Any] = {}
    for choice in (one for chunk in chunks for one in chunk["choices"]):
        kept = found.setdefault(
            choice["index"], {"text": "", "ids": [], "log_probs": [], "top": [], "offsets": []}
        )
        kept["text"] += choice["text"]
        kept["ids"] += choice.get("token_ids", [])
        kept["log_probs"] += (choice["logprobs"] or {}).get("token_logprobs", [])
        kept["top"] += (choice["logprobs"] or {}).get("top_logprobs", [])
        kept["offsets"] += (choice["logprobs"] or {}).get("text_offset", [])
        kept["finish_reason"] = choice["finish_reason"]
    return found


@pytest.mark.parametrize(
    "how",
    [
        {"logprobs": 0},
        {"logprobs": 3},
        {"logprobs": 3, "ignore_eos": True, "max_tokens": 40},  # its text leaves out special tokens
        {"logprobs": 0, "echo": True, "ignore_eos": True, "max_tokens": 40},
        {"logprobs": 2, "stop": ["1"]},  # its text ends before its tokens
    ],
)
@pytest.mark.few(2)
def test_a_stream_adds_up_to_the_answer(server: Running, how: dict[str, Any]) -> None:
    asked = ASKED | how
    whole = choices(server.answer(asked))
    body = asked | {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(server.ask("/v1/completions", body)[2])
    assert [c["usage"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    tokens = sum(len(one["token_ids"]) for one in whole)
    assert chunks[-1]["usage"]["completion_tokens"] == tokens
    joined = _joined(chunks)
    for one in whole:
        assert joined[one["index"]] == {
            "text": one["text"],
            "ids": one["token_ids"],
            "log_probs": one["logprobs"]["token_logprobs"],
            "top": one["logprobs"]["top_logprobs"],
            "offsets": one["logprobs"]["text_offset"],
            "finish_reason": one["finish_reason"],
        }


@pytest.mark.exhaustive
def test_choices_are_streamed_side_by_side_with_their_alternatives(client: "OpenAI") -> None:
    def ask(**how: Any) -> Any:
        return client.chat.completions.create(
            model="chatty", messages=[{"role": "user", "content": "3+8+2+9="}], seed=3, n=3,
            max_tokens=30, logprobs=True, top_logprobs=2, extra_body={"ignore_eos": True}, **how,
        )  # fmt: skip

    whole = ask()
    chunks = [chunk.choices[0] for chunk in ask(stream=True)]
    order = [one.index for one in chunks if one.logprobs is not None]
    assert order != sorted(order)
    for choice in whole.choices:
        pieces = [one for one in chunks if one.index == choice.index]
        assert [one.delta.role for one in pieces if one.delta.role] == ["assistant"]
        assert "".join(one.delta.content or "" for one in pieces) == choice.message.content
        scored = [one.logprobs.content for one in pieces if one.logprobs is not None]
        assert [one for piece in scored for one in piece] == choice.logprobs.content
        assert [len(piece) for piece in scored] == [8, 8, 8, 6]
        assert [one.finish_reason for one in pieces[-2:]] == [None, "length"]


def test_alternatives_hold_the_drawn_token_with_its_own_bits(server: Running) -> None:
    for choice in choices(server.answer(ASKED)):
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(choice["token_ids"]) > 0
        for token, log_prob, top in zip(
            found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
        ):
            assert 3 <= len(top) <= 4 and top[token] == log_prob
            assert len(top) == 3 or log_prob < min(v for t, v in top.items() if t != token)


def test_stop_strings_and_lengths(client: "OpenAI") -> None:
    plain = client.completions.create(model="chatty", prompt="3+8+2+9=", seed=3, max_tokens=16)
    text = plain.choices[0].text
    assert plain.choices[0].finish_reason == "stop" and len(text) > 1
    stop = text[1:]
    cut = client.completions.create(
        model="chatty", prompt="3+8+2+9=", seed=3, max_tokens=16, stop=[stop]
    )
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (
        text[: text.find(stop)],
        "stop",
    )
    short = client.completions.create(model="chatty", prompt="3+8+2+9=", seed=3, max_tokens=1)
    assert (short.choices[0].text, short.choices[0].finish_reason) == (text[:1], "length")


def test_echo_scores_the_prompt_as_lm_eval_reads_it(server: Running, model: LoadedModel) -> None:
    """Tokens with their log-probabilities, those of the prompt first and one drawn behind."""
    ids = model.tokenizer("3+8+2+9=")["input_ids"]
    body = {"model": "chatty", "prompt": [ids, ids[:4]], "max_tokens": 1, "temperature": 0}
    body |= {"logprobs": 1, "echo": True, "seed": 1234}
    for choice, prompt in zip(choices(server.answer(body)), (ids, ids[:4]), strict=True):
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert len(found["token_logprobs"]) == len(prompt) + 1
        assert choice["text"].startswith(decode(model.tokenizer, prompt, special=True))
        assert len(found["text_offset"]) == len(found["tokens"])
    none = server.answer(body | {"max_tokens": 0, "prompt_logprobs": 2})
    assert none["usage"]["completion_tokens"] == 0
    (first, _) = choices(none)
    assert first["prompt_logprobs"][0] is None
    for token, table, log_prob in zip(
        ids[1:], first["prompt_logprobs"][1:], first["logprobs"]["token_logprobs"][1:], strict=True
    ):
        assert table[str(token)]["logprob"] == log_prob
        assert min(one["rank"] for one in table.values()) == 1


def test_chat(client: "OpenAI", server: Running, model: LoadedModel) -> None:
    messages: Any = [{"role": "user", "content": "3+8+2+9="}]
    made = client.chat.completions.create(
        model="chatty", messages=messages, seed=2, n=2, logprobs=True, top_logprobs=2,
        max_completion_tokens=9, tools=[TOOL], extra_body={"return_token_ids": True},
    )  # fmt: skip
    assert made.model_extra is not None
    seen = decode(model.tokenizer, made.model_extra["prompt_token_ids"])
    assert seen == "tool: add; user: 3+8+2+9=; assistant: "
    for choice in made.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        content = choice.logprobs.content
        assert "".join(one.token for one in content if one.token != "<eos>") == (
            choice.message.content
        )
        assert all(len(one.top_logprobs) == 2 and one.bytes for one in content)
    with client.chat.completions.create(
        model="chatty", messages=messages, seed=2, max_tokens=9, tools=[TOOL], stream=True
    ) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == made.choices[0].message.content
    begun = [*messages, {"role": "assistant", "content": "2"}]
    more = client.chat.completions.create(
        model="chatty", messages=begun, seed=2, max_tokens=2,
        extra_body={"continue_final_message": True, "add_generation_prompt": False,
                    "return_token_ids": True},
    )  # fmt: skip
    assert more.model_extra is not None
    ids = more.model_extra["prompt_token_ids"]
    assert decode(model.tokenizer, ids).endswith("assistant: 2")


@pytest.mark.exhaustive
def test_a_chat_without_a_limit_may_fill_the_context(server: Running) -> None:
    messages = [{"role": "user", "content": "1" * 440}]
    body = {"model": "chatty", "messages": messages, "ignore_eos": True}
    made = server.answer(body, "/v1/chat/completions")
    assert made["usage"]["total_tokens"] == 512
    assert choices(made)[0]["finish_reason"] == "length"


def test_keys(server: Running) -> None:
    for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": KEY}):
        status, _, body = server.ask("/v1/completions", ASKED, headers)
        assert status == 401 and b"the key is missing or wrong" in body
        assert server.ask("/v1/models", headers=headers)[0] == 401
        assert server.ask("/health", headers=headers)[0] == 200


@pytest.mark.exhaustive
def test_places_are_limited_and_a_request_that_never_fits_is_refused(server: Running) -> None:
    status, _, body = server.ask("/v1/completions", ASKED | {"n": 60, "prompt": "1"})
    assert status == 400 and b"takes at most 48 at once" in body
    full = ASKED | {"n": 48, "prompt": "1", "max_tokens": 50, "ignore_eos": True, "logprobs": None}
    holder = threading.Thread(target=server.ask, args=("/v1/completions", full))
    holder.start()
    server.wait_for("samples_in_place", 48)
    status, headers, body = server.ask("/v1/completions", ASKED)
    assert status == 429 and int(headers["retry-after"]) >= 1
    assert json.loads(body)["error"]["type"] == "rate_limit_error"
    holder.join()
    assert server.ask("/v1/completions", ASKED)[0] == 200
