"""The form of answers as OpenAI has it: of completions, and of chat completions.

A chat that has tools is read for calls (``isobit.data.tool_calls``).  A stream holds back what may
be part of a call until the choice has ended.  What a model thinks is ``reasoning_content``, as
vLLM and SGLang have it: gpt-oss's always, and thinking between tags where the request asks for it.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType
from typing import Any, Protocol

from isobit.config.environment import ToolFormat
from isobit.data.harmony import AnswerReader
from isobit.data.parsed_calls import Parsed, ToolCall, TurnReader
from isobit.data.thinking import Portions, TaggedReader, is_left_thinking
from isobit.data.tool_calls import parameters_of, turn_reader
from isobit.records.text import ends_in_thinking
from isobit.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest
from isobit.serve.token_texts import ChoicePart, ScoredPrompt, Spelling


class ResponseFormat(Protocol):
    """The form of answers to one kind of request."""

    prefix: str
    """The beginning of the ids of its answers."""
    whole: str
    """The ``object`` of an answer."""
    piece: str
    """The ``object`` of a chunk of a stream."""
    unseen_tags: Mapping[str, int]  # special tokens for the reader of thinking alone, by text

    def choice(self, prompt: ScoredPrompt, part: ChoicePart) -> dict[str, Any]: ...

    def beginning(self, index: int, prompt: ScoredPrompt) -> dict[str, Any] | None:
        """The first chunk's choice, before anything is drawn; None for none."""
        ...

    def delta(self, prompt: ScoredPrompt, part: ChoicePart) -> dict[str, Any]:
        """A chunk's choice."""
        ...

    def of_prompts(self, prompts: Sequence[ScoredPrompt]) -> dict[str, Any]:
        """Keys of an answer, or of its first chunk, about the prompts."""
        ...


class CompletionFormat:
    """``POST /v1/completions``."""

    prefix, whole, piece = "cmpl-", "text_completion", "text_completion"
    unseen_tags: Mapping[str, int] = MappingProxyType({})

    def __init__(self, asked: CompletionRequest, spelling: Spelling) -> None:
        self._asked, self._spelling = asked, spelling
        self._offsets: dict[int, int] = {}
        """The characters of all tokens before the next part of each choice, shown or not."""

    def choice(self, prompt: ScoredPrompt, part: ChoicePart) -> dict[str, Any]:
        written = self.delta(prompt, part)
        if self._asked.echo:
            written["text"] = prompt.text + written["text"]
            if written["logprobs"] is not None:
                head = self._log_probs_of_prompt(prompt)
                written["logprobs"] = {
                    name: head[name] + written["logprobs"][name] for name in head
                }
        return written | self._of_prompt(prompt)

    def beginning(self, index: int, prompt: ScoredPrompt) -> dict[str, Any] | None:
        of_prompt, echo = self._of_prompt(prompt), self._asked.echo
        if not echo and not of_prompt:
            return None
        wanted = echo and self._asked.logprobs is not None
        return {
            "index": index,
            "text": prompt.text if echo else "",
            "logprobs": self._log_probs_of_prompt(prompt) if wanted else None,
            "finish_reason": None,
            **of_prompt,
        }

    def delta(self, prompt: ScoredPrompt, part: ChoicePart) -> dict[str, Any]:
        written: dict[str, Any] = {
            "index": part.index,
            "text": part.text,
            "logprobs": None,
            "finish_reason": part.finish_reason,
        }
        if self._asked.logprobs is not None:
            begin = self._offsets.get(part.index, len(prompt.text) if self._asked.echo else 0)
            written["logprobs"] = self._spelling.legacy(part, begin)
            texts = map(self._spelling.text, part.token_ids)
            self._offsets[part.index] = begin + sum(map(len, texts))
        if self._asked.return_token_ids:
            written["token_ids"] = list(part.token_ids)
        return written

    def of_prompts(self, prompts: Sequence[ScoredPrompt]) -> dict[str, Any]:
        return {}

    def _log_probs_of_prompt(self, prompt: ScoredPrompt) -> dict[str, list[Any]]:
        assert self._asked.logprobs is not None
        return self._spelling.legacy_prompt(prompt, self._asked.logprobs)

    def _of_prompt(self, prompt: ScoredPrompt) -> dict[str, Any]:
        return _of_prompt(self._asked, prompt, self._spelling)


class ChatFormat:
    """``POST /v1/chat/completions``; ``calls`` is the format of calls that is read, if any is."""

    prefix, whole, piece = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        asked: ChatRequest,
        spelling: Spelling,
        calls: ToolFormat | None = None,
        unseen_tags: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._asked, self._spelling, self.unseen_tags = asked, spelling, unseen_tags
        self._calls: ToolFormat | None = calls if asked.shown_tools else None
        self._answers: dict[int, AnswerReader | TaggedReader] = {}
        """A reader of the thinking of each choice."""
        self._is_harmony = calls == "harmony"
        self._tells_thinking = self._is_harmony or asked.separate_reasoning
        self._tools = parameters_of(asked.shown_tools or ())
        self._readers: dict[int, TurnReader] = {}
        """A reader for each choice, which holds back what may be part of a call."""

    def choice(self, prompt: ScoredPrompt, part: ChoicePart) -> dict[str, Any]:
        (thinking, content), calls = self._portions(prompt, part)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thinking:
            message["reasoning_content"] = thinking
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        return {
            "index": part.index,
            "message": message,
            "finish_reason": _finish_reason(part, calls),
            **self._of_tokens(part),
        }

    def beginning(self, index: int, prompt: ScoredPrompt) -> dict[str, Any] | None:
        start = {"role": "assistant", "content": ""}
        return {"index": index, "delta": start, "logprobs": None, "finish_reason": None}

    def delta(self, prompt: ScoredPrompt, part: ChoicePart) -> dict[str, Any]:
        (thinking, content), calls = self._portions(prompt, part)
        texts = {"reasoning_content": thinking, "content": content}
        delta: dict[str, Any] = {name: text for name, text in texts.items() if text}
        if calls:
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
        return {
            "index": part.index,
            "delta": delta,
            "finish_reason": _finish_reason(part, calls),
            **self._of_tokens(part),
        }

    def of_prompts(self, prompts: Sequence[ScoredPrompt]) -> dict[str, Any]:
        return _of_prompt(self._asked, prompts[0], self._spelling)

    def _portions(
        self, prompt: ScoredPrompt, part: ChoicePart
    ) -> tuple[Portions, list[dict[str, Any]]]:
        """The text of a part that is no call, and at the end of the choice its calls."""
        text, calls = self._uncalled_text(prompt, part)
        if not self._tells_thinking:
            return Portions("", text), calls
        if part.index not in self._answers:
            is_thinking = ends_in_thinking(prompt.ahead)
            self._answers[part.index] = (
                AnswerReader(is_thinking)
                if self._is_harmony
                else TaggedReader(is_thinking, prompt.begun, self.unseen_tags)
            )
        return self._answers[part.index].feed(text, part.finish_reason is not None), calls

    def _uncalled_text(
        self, prompt: ScoredPrompt, part: ChoicePart
    ) -> tuple[str, list[dict[str, Any]]]:
        if self._calls is None:
            return part.text, []
        if part.index not in self._readers:
            is_thinking = ends_in_thinking(prompt.ahead)
            if not self._is_harmony:
                is_thinking = is_left_thinking(is_thinking, prompt.begun)
            self._readers[part.index] = turn_reader(self._calls, self._tools, is_thinking)
        reader = self._readers[part.index]
        text = reader.feed(part.text)
        if part.finish_reason is None:
            return text, []
        held, said = reader.held, reader.finish(part.finish_reason != "length")
        calls = _tool_calls(said.calls, self._tools, f"{prompt.token_ids} {part.index}")
        return text + (said.text if calls else held), calls

    def _of_tokens(self, part: ChoicePart) -> dict[str, Any]:
        wanted = self._asked.alternatives is not None
        written: dict[str, Any] = {"logprobs": self._spelling.chat(part) if wanted else None}
        if self._asked.return_token_ids:
            written["token_ids"] = list(part.token_ids)
        return written


def _tool_calls(
    parsed: Sequence[Parsed], tools: Collection[str], answer: str
) -> list[dict[str, Any]]:
    """The calls in OpenAI's form; none where one of them cannot be read or names none of the
    ``tools``, so that all stay text.

    Their ids are a function of the ``answer`` that they stand in, because chat templates may write
    them into the next prompt; Mistral's want nine letters or digits.
    """
    calls = list[dict[str, Any]]()
    for index, call in enumerate(parsed):
        if not isinstance(call, ToolCall) or call.name not in tools:
            return []
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        calls.append(
            {
                "id": sha256(f"{answer} {index}".encode()).hexdigest()[:9],
                "type": "function",
                "function": {"name": call.name, "arguments": arguments},
            }
        )
    return calls


def _finish_reason(part: ChoicePart, calls: Sequence[Any]) -> str | None:
    return "tool_calls" if calls and part.finish_reason == "stop" else part.finish_reason


def _of_prompt(
    asked: GenerationRequest, prompt: ScoredPrompt, spelling: Spelling
) -> dict[str, Any]:
    written = dict[str, Any]()
    if asked.return_token_ids:
        written["prompt_token_ids"] = list(prompt.token_ids)
    if asked.prompt_logprobs is not None:
        written["prompt_logprobs"] = spelling.prompt_log_probs(prompt, asked.prompt_logprobs)
    return written
