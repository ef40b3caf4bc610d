"""Large answers are written in pieces by a thread of their own; what is said is the same."""

import asyncio
import json
import time
from typing import Any

import pytest

from isobit.serve.admission import check_size
from isobit.serve.answers import LazyList, in_pieces, pieces, written
from isobit.serve.errors import ApiError
from isobit.serve.protocol import CompletionRequest
from isobit.serve.token_texts import ScoredPrompt
from tests.serve.servers import Running, choices, events


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        {"a": [], "b": {}, "c": None, "\ud800": "\ud800é\n"},
        {"a": list(range(1000)), "b": [[1.5, None]] * 129, "c": [{"x": [1] * 200}]},
        [{"a": 1}] * 64,
        [{"a": 1}] * 65,
    ],
)
def test_pieces_add_up_to_what_is_written_at_once(content: Any) -> None:
    assert "".join(pieces(content)) == written(content) == json.dumps(content)
    made = {
        "choices": LazyList(3, lambda at: {"index": at, "of": content}),
        "none": LazyList(0, str),
    }
    assert written(made) == json.dumps(
        {"choices": [{"index": at, "of": content} for at in range(3)], "none": []}
    )
    assert "".join(pieces(made)) == written(made)


def test_the_event_loop_goes_on_while_a_large_answer_is_made() -> None:
    made, most = list[int](), 0

    def make(at: int) -> list[int]:
        time.sleep(0.05)
        made.append(at)
        return [at] * 20_000

    async def use() -> int:
        nonlocal most
        turns, texts = 0, list[str]()

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.001)

        beside = asyncio.create_task(turn())
        async for text in in_pieces(LazyList(8, make)):
            texts.append(text)
            most = max(most, len(text))
            assert len(made) <= len(texts) + 1, "entries are made as they are written"
        beside.cancel()
        assert "".join(texts) == json.dumps([[at] * 20_000 for at in range(8)])
        return turns

    assert asyncio.run(use()) > 50
    assert most < 200_000


def test_more_log_probabilities_than_are_held_are_refused() -> None:
    asked = CompletionRequest(model="m", prompt=["x"], echo=True, logprobs=20)
    lm_eval = [ScoredPrompt("", tuple(range(511)))] * 64
    check_size(asked, lm_eval)
    check_size(asked, [ScoredPrompt("", tuple(range(8192)))] * 64)
    with pytest.raises(ApiError, match="send fewer prompts in a request"):
        check_size(asked, [ScoredPrompt("", tuple(range(32768)))] * 512)
    check_size(CompletionRequest(model="m", prompt=["x"]), [ScoredPrompt("", (1,) * 32768)] * 4096)


@pytest.mark.few(1)
@pytest.mark.parametrize("stream", [False, True])
def test_a_large_answer_says_what_small_ones_say(server: Running, stream: bool) -> None:
    """As lm-evaluation-harness asks, in one request of many prompts."""
    prompts = [[3 + (place * row) % 90 for place in range(200 + row)] for row in range(1, 4)]
    body: dict[str, Any] = {
        "model": "chatty", "max_tokens": 0, "echo": True, "logprobs": 20, "prompt_logprobs": 3,
        "seed": 1, "stream": stream,
    }  # fmt: skip
    status, headers, content = server.ask("/v1/completions", body | {"prompt": prompts})
    assert status == 200 and headers["transfer-encoding"] == "chunked"
    if stream:
        found = [choice for event in events(content) for choice in event["choices"]]
        found = [one for one in found if one["finish_reason"] is None]
    else:
        found = choices(json.loads(content))
    for place, one in enumerate(found):
        small = body | {"prompt": prompts[place][:30], "stream": False}
        expected = server.answer(small)["choices"][0]
        assert one["index"] == place and len(one["logprobs"]["tokens"]) == len(prompts[place])
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert one["logprobs"][name][:30] == expected["logprobs"][name]
        assert one["prompt_logprobs"][:30] == expected["prompt_logprobs"]
    assert server.metrics()["isobit_samples_in_place"] == 0


def test_prompts_are_described_once_in_a_stream(server: Running) -> None:
    body = {"model": "chatty", "messages": [{"role": "user", "content": "1+1="}], "n": 3}
    body |= {"max_tokens": 1, "prompt_logprobs": 2, "stream": True}
    chunks = events(server.ask("/v1/chat/completions", body)[2])
    assert ["prompt_logprobs" in chunk for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
