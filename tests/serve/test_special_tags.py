"""Tags around thinking that are special tokens, as Mistral's are."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from isobit.data.thinking import THINKING_TAGS
from isobit.data.tokenizer import load_tokenizer
from isobit.rollout.sequence import decode
from tests.serve.servers import chat_folder, choices, events, serving

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
LETTERS = "uvwxyz"
"""The starter's tokens that are tags here."""
TAG = "|".join(map(re.escape, THINKING_TAGS))
TURN = re.compile(
    r"\s*(?:<think>|<thinking>|\[THINK\])(?P<thinking>.*?)"
    r"(?:(?:</think>|</thinking>|\[/THINK\])(?P<answer>.*))?",
    re.DOTALL,
)


def tagged_folder(place: Path) -> Path:
    folder = chat_folder(place)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    like = tokenizer["added_tokens"][0]
    texts = dict(zip(LETTERS, THINKING_TAGS, strict=True))
    added = [{**like, "id": vocab[one], "content": text} for one, text in texts.items()]
    tokenizer["added_tokens"] += added
    tokenizer["model"]["vocab"] = {texts.get(one, one): token for one, token in vocab.items()}
    path.write_text(json.dumps(tokenizer))
    return folder


def portions(shown: str) -> tuple[str, str]:
    """The thinking and the answer of a turn, without tags."""
    turn = TURN.fullmatch(shown)
    parts = (turn["thinking"], turn["answer"] or "") if turn else ("", shown)
    thinking, answer = (re.sub(TAG, "", part) for part in parts)
    return thinking if thinking.strip() else "", answer


def test_they_tell_thinking_and_no_answer_shows_them(tmp_path: Path) -> None:
    """Nor any other special token; hot samples, whole and streamed, with tools and without."""
    folder = tagged_folder(tmp_path)
    tokenizer = load_tokenizer(folder)
    tags = frozenset(tokenizer.get_vocab()[one] for one in THINKING_TAGS)
    asked: dict[str, Any] = {
        "model": "chatty", "messages": [{"role": "user", "content": "3+8="}], "n": 48, "seed": 0,
        "temperature": 100, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    route = "/v1/chat/completions"
    with serving(folder, tmp_path, "--name", "chatty", "--max-live", "48") as server:
        plain = choices(server.answer(asked, route))
        for one in plain:
            assert one["message"]["content"] == decode(tokenizer, one["token_ids"])
        expected = [portions(decode(tokenizer, one["token_ids"], tags)) for one in plain]
        assert sum(bool(thinking and answer) for thinking, answer in expected) > 1
        body = {**asked, "separate_reasoning": True}
        messages = [one["message"] for one in choices(server.answer(body, route))]
        told = [(one.get("reasoning_content", ""), one["content"]) for one in messages]
        assert told == expected
        for choice in choices(server.answer({**body, "tools": [TOOL]}, route)):
            thinking, answer = portions(decode(tokenizer, choice["token_ids"], tags))
            message = choice["message"]
            assert not re.search(TAG, message["content"] or "")
            if "tool_calls" not in message:
                assert (message.get("reasoning_content", ""), message["content"]) == (
                    thinking,
                    answer,
                )
        _, _, stream = server.ask(route, {**body, "stream": True})
        parts = defaultdict[tuple[int, str], str](str)
        for chunk in events(stream):
            for choice in chunk["choices"]:
                for key in ("reasoning_content", "content"):
                    parts[choice["index"], key] += choice["delta"].get(key, "")
        assert told == [
            (parts[index, "reasoning_content"], parts[index, "content"]) for index in range(48)
        ]
