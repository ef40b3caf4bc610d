"""A request on its way: its prompts are scored, its samples drawn, and what happens is written in
the form of an answer, whole or in chunks.

A chat that has tools is read for calls (``isobit.data.tool_calls``).  A stream holds back what may
be part of a call until the choice has ended.

The likeliest tokens beside drawn ones come from a forward of their own over all that stands before
them.  A stream with them is told in pieces, each at least half as long as what was told before, so
that a choice of L tokens is put through about 3 L times altogether.
"""

import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from math import ceil
from typing import Any, Protocol

from isobit.config.environment import ToolFormat
from isobit.data.tool_calls import Parsed, ToolCall, TurnReader, names_of
from isobit.records.text import ends_in_thinking
from isobit.rollout.engine import Handle, Request, SampleEvent
from isobit.rollout.scoring import Scored, Scoring
from isobit.serve.answers import SMALL, Made, in_pieces, written
from isobit.serve.engine import (
    Accepted,
    Call,
    DisconnectedError,
    EngineStoppedError,
    EngineThread,
    PausedError,
    Scores,
)
from isobit.serve.protocol import (
    ApiError,
    Asked,
    ChatAsked,
    CompletionAsked,
    Part,
    Question,
    Spelling,
    Usage,
)
from isobit.util.errors import DataError, IsobitError, RequestError

LONGEST_RETRY_S = 60


class Gate:
    """The places of samples: who comes when all are taken is to come back."""

    def __init__(self, places: int) -> None:
        self.places, self.taken = places, 0
        self._seconds = 1.0
        """Of a request, lately."""

    def enter(self, samples: int) -> None:
        """Raises ApiError where the samples do not fit."""
        if samples > self.places:
            raise ApiError(
                400,
                f"n: the request asks for {samples} samples; this server takes at most "
                f"{self.places} at once: ask for fewer",
                "n",
            )
        if self.taken + samples > self.places:
            wait = min(max(1, ceil(self._seconds)), LONGEST_RETRY_S)
            raise ApiError(
                429,
                f"{self.taken} of {self.places} places are taken, and the request needs {samples}: "
                f"try again in {wait} s",
                code="rate_limit_exceeded",
                retry_after=wait,
            )
        self.taken += samples

    def leave(self, samples: int, seconds: float) -> None:
        self.taken -= samples
        self._seconds += 0.1 * (seconds - self._seconds)


class Form(Protocol):
    """How one kind of request is answered."""

    prefix: str
    """Of the ids of its answers."""
    whole: str
    """The ``object`` of an answer."""
    piece: str
    """The ``object`` of a chunk of a stream."""

    def choice(self, question: Question, part: Part) -> dict[str, Any]:
        """A whole choice."""
        ...

    def beginning(self, index: int, question: Question) -> dict[str, Any] | None:
        """The first chunk's choice, before anything is drawn; None for none."""
        ...

    def delta(self, question: Question, part: Part) -> dict[str, Any]:
        """A chunk's choice."""
        ...

    def of_prompts(self, questions: Sequence[Question]) -> dict[str, Any]:
        """What an answer, or the first chunk, says of the prompts beside the choices."""
        ...


class CompletionForm:
    """``POST /v1/completions``."""

    prefix, whole, piece = "cmpl-", "text_completion", "text_completion"

    def __init__(self, asked: CompletionAsked, spelling: Spelling) -> None:
        self._asked, self._spelling = asked, spelling
        self._offsets: dict[int, int] = {}
        """Where the next part of each choice begins, in characters."""

    def choice(self, question: Question, part: Part) -> dict[str, Any]:
        found = self.delta(question, part)
        if self._asked.echo:
            found["text"] = question.text + found["text"]
            if found["logprobs"] is not None:
                head = self._log_probs_of_prompt(question)
                found["logprobs"] = {name: head[name] + found["logprobs"][name] for name in head}
        return found | self._of_prompt(question)

    def beginning(self, index: int, question: Question) -> dict[str, Any] | None:
        of_prompt, echo = self._of_prompt(question), self._asked.echo
        if not echo and not of_prompt:
            return None
        wanted = echo and self._asked.logprobs is not None
        return {
            "index": index,
            "text": question.text if echo else "",
            "logprobs": self._log_probs_of_prompt(question) if wanted else None,
            "finish_reason": None,
            **of_prompt,
        }

    def delta(self, question: Question, part: Part) -> dict[str, Any]:
        begin = self._offsets.get(part.index, len(question.text) if self._asked.echo else 0)
        self._offsets[part.index] = begin + len(part.text)
        found: dict[str, Any] = {
            "index": part.index,
            "text": part.text,
            "logprobs": None,
            "finish_reason": part.finish_reason,
        }
        if self._asked.logprobs is not None:
            found["logprobs"] = self._spelling.legacy(part, begin)
        if self._asked.return_token_ids:
            found["token_ids"] = list(part.token_ids)
        return found

    def of_prompts(self, questions: Sequence[Question]) -> dict[str, Any]:
        return {}

    def _log_probs_of_prompt(self, question: Question) -> dict[str, list[Any]]:
        assert self._asked.logprobs is not None
        return self._spelling.legacy_prompt(question, self._asked.logprobs)

    def _of_prompt(self, question: Question) -> dict[str, Any]:
        return _of_prompt(self._asked, question, self._spelling)


class ChatForm:
    """``POST /v1/chat/completions``; ``calls`` is the format of calls that is read, if any is."""

    prefix, whole, piece = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, asked: ChatAsked, spelling: Spelling, calls: ToolFormat | None = None
    ) -> None:
        self._asked, self._spelling = asked, spelling
        self._calls: ToolFormat | None = calls if asked.shown_tools else None
        self._tools = names_of(asked.shown_tools or ())
        self._readers: dict[int, TurnReader] = {}
        """Of each choice; they hold back what may be part of a call."""

    @property
    def reads_calls(self) -> bool:
        return self._calls is not None

    def choice(self, question: Question, part: Part) -> dict[str, Any]:
        content, calls = self._told(question, part)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        return {
            "index": part.index,
            "message": message,
            "finish_reason": _finish_reason(part, calls),
            **self._of_tokens(part),
        }

    def beginning(self, index: int, question: Question) -> dict[str, Any] | None:
        start = {"role": "assistant", "content": ""}
        return {"index": index, "delta": start, "logprobs": None, "finish_reason": None}

    def delta(self, question: Question, part: Part) -> dict[str, Any]:
        content, calls = self._told(question, part)
        delta: dict[str, Any] = {"content": content} if content else {}
        if calls:
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
        return {
            "index": part.index,
            "delta": delta,
            "finish_reason": _finish_reason(part, calls),
            **self._of_tokens(part),
        }

    def of_prompts(self, questions: Sequence[Question]) -> dict[str, Any]:
        return _of_prompt(self._asked, questions[0], self._spelling)

    def _told(self, question: Question, part: Part) -> tuple[str, list[dict[str, Any]]]:
        """The text of a part that is no call, and at the end of the choice its calls."""
        if self._calls is None:
            return part.text, []
        if part.index not in self._readers:
            is_thinking = ends_in_thinking(question.text)
            self._readers[part.index] = TurnReader(self._calls, self._tools, is_thinking)
        reader = self._readers[part.index]
        text = reader.feed(part.text)
        if part.finish_reason is None:
            return text, []
        held, said = reader.held, reader.finish()
        calls = _tool_calls(said.calls, self._tools, f"{question.token_ids} {part.index}")
        return text + (said.text if calls else held), calls

    def _of_tokens(self, part: Part) -> dict[str, Any]:
        wanted = self._asked.alternatives is not None
        found: dict[str, Any] = {"logprobs": self._spelling.chat(part) if wanted else None}
        if self._asked.return_token_ids:
            found["token_ids"] = list(part.token_ids)
        return found


def _tool_calls(
    found: Sequence[Parsed], tools: Collection[str], answer: str
) -> list[dict[str, Any]]:
    """The calls in OpenAI's form; none where one of them cannot be read or names none of the
    ``tools``, so that all stay text.

    Their ids are a function of the ``answer`` that they stand in, because chat templates may write
    them into the next prompt; Mistral's want nine letters or digits.
    """
    calls = list[dict[str, Any]]()
    for place, call in enumerate(found):
        if not isinstance(call, ToolCall) or call.name not in tools:
            return []
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        calls.append(
            {
                "id": sha256(f"{answer} {place}".encode()).hexdigest()[:9],
                "type": "function",
                "function": {"name": call.name, "arguments": arguments},
            }
        )
    return calls


def _finish_reason(part: Part, calls: Sequence[Any]) -> str | None:
    return "tool_calls" if calls and part.finish_reason == "stop" else part.finish_reason


def _of_prompt(asked: Asked, question: Question, spelling: Spelling) -> dict[str, Any]:
    found = dict[str, Any]()
    if asked.return_token_ids:
        found["prompt_token_ids"] = list(question.token_ids)
    if asked.prompt_logprobs is not None:
        found["prompt_logprobs"] = spelling.prompt_log_probs(question, asked.prompt_logprobs)
    return found


_FIRST_PIECE = 8
"""Tokens of the first piece of a choice whose alternatives are streamed."""


@dataclass(slots=True)
class _Unscored:
    """A choice whose alternatives are asked for piece by piece.  What a piece holds depends on
    nothing but what was drawn.
    """

    growing: Part
    pieces: deque[Part] = field(default_factory=deque)
    """That are whole, the first of them perhaps asked for."""
    is_asked: bool = False
    whole: int = 0
    """Tokens of all pieces that ever were."""
    told: tuple[int, ...] = ()
    """Tokens whose alternatives are known."""

    def add(self, part: Part) -> None:
        piece = self.growing
        piece.text += part.text
        piece.token_ids += part.token_ids
        piece.log_probs += part.log_probs
        piece.finish_reason = part.finish_reason
        enough = max(_FIRST_PIECE, self.whole // 2)
        if len(piece.token_ids) >= enough or piece.finish_reason is not None:
            self.whole += len(piece.token_ids)
            self.pieces.append(piece)
            self.growing = Part(piece.index)

    def take(self, scored: Scored) -> Part:
        """The piece that is scored."""
        self.is_asked, piece = False, self.pieces.popleft()
        self.told += piece.token_ids
        piece.alternatives = scored.alternatives
        return piece


@dataclass(slots=True)
class Work:
    """One request on its way. Whoever makes it closes it, which ends whatever is left of it."""

    thread: EngineThread
    asked: Asked
    form: Form
    on_close: "Callable[[Work], None]"
    call: Call = field(default_factory=Call)
    is_large: bool = False
    """Whether the whole answer is to be written in pieces."""
    usage: Usage = field(default_factory=Usage)
    begun_at: float = field(default_factory=time.perf_counter)
    first_at: float | None = None
    """When the first token of a stream was known."""
    _head: Mapping[str, Any] = field(default_factory=dict)
    _questions: Sequence[Question] = ()
    _requests: Sequence[Request] = ()
    _index_of: dict[Handle, int] = field(default_factory=dict)
    _is_closed: bool = False

    async def begin(
        self, head: Mapping[str, Any], questions: Sequence[Question], requests: Sequence[Request]
    ) -> None:
        """Score the prompts and have the samples taken on; ``requests`` are of the ``questions``,
        and every chunk has the ``head``.

        Raises RequestError for what the engine refuses, and what ``Call.next`` raises.
        """
        self._head, self._questions, self._requests = head, questions, requests
        self.usage.prompt_tokens = sum(len(one.token_ids) for one in questions)
        if self.asked.scores_prompt is not None:
            await self._score_prompts(self.asked.scores_prompt)
        if self._draws:
            self.thread.submit(self.call, requests, "text" if self.asked.stream else "end")
            accepted = await self.call.next()
            assert isinstance(accepted, Accepted)
            handles = [handle for group in accepted.handles for handle in group]
            self._index_of = {handle: index for index, handle in enumerate(handles)}

    def name_weights(self, fingerprint: str) -> None:
        """Say in every chunk which weights it comes from, once they cannot change any more."""
        self._head = {**self._head, "system_fingerprint": fingerprint}

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.thread.cancel(self.call)
            self.on_close(self)

    async def whole(self) -> dict[str, Any]:
        """The answer, whose choices are made as they are written."""
        found = dict[int, Part]()
        async for part in self._parts():
            found[part.index] = part
        self.is_large = (
            sum(self._size(part, self._question(part.index)) for part in found.values()) > SMALL
        )

        def choice(index: int) -> dict[str, Any]:
            return self.form.choice(self._question(index), found.pop(index))

        return {
            **self._head,
            "object": self.form.whole,
            "choices": Made(len(found), choice),
            "usage": self.usage.json(),
            **self.form.of_prompts(self._questions),
        }

    async def in_pieces(self, answer: Mapping[str, Any]) -> AsyncIterator[str]:
        """The text of a large answer, for as long as its client is there."""
        self.thread.cancel(self.call)  # all is known: new weights need not wait
        async for piece in in_pieces(answer):
            if self.call.is_gone:
                return
            yield piece

    def _size(self, part: Part, question: Question | None = None) -> int:
        """The log-probabilities that are written of a part, and of a question before it."""
        drawn = len(part.token_ids) * (1 + (self.asked.alternatives or 0))
        if question is None or question.scored is None:
            return drawn
        return drawn + len(question.token_ids) * (1 + (self.asked.scores_prompt or 0))

    async def chunks(self) -> AsyncIterator[str]:
        """The events of a stream; closes the work."""
        head = {**self._head, "object": self.form.piece}
        if self.asked.reports_usage:
            head["usage"] = None
        try:
            async for text in self._beginnings(head):
                yield text
            async for part in self._parts():
                self.first_at = self.first_at or time.perf_counter()
                content = {**head, "choices": Made(1, partial(self._delta, part))}
                if self._size(part) <= SMALL:
                    yield event_of(content)
                    continue
                async for text in _event_in_pieces(content):
                    yield text
            if self.asked.reports_usage:
                yield event_of({**head, "choices": [], "usage": self.usage.json()})
            yield "data: [DONE]\n\n"
        except DisconnectedError:
            return
        except IsobitError as error:
            yield event_of(as_api_error(error).json())
        finally:
            self.close()

    async def _beginnings(self, head: Mapping[str, Any]) -> AsyncIterator[str]:
        """What is said of each choice before anything is drawn, and in the first chunk of the
        prompts.
        """
        of_prompts = self.form.of_prompts(self._questions)
        for index in range(len(self._questions) * self.asked.n):
            question = self._question(index)
            if self._size(Part(index), question) <= SMALL:
                begun = self.form.beginning(index, question)
                if begun is not None:
                    yield event_of({**head, "choices": [begun], **of_prompts})
            else:
                made = Made(1, partial(self._beginning, index))
                async for text in _event_in_pieces({**head, "choices": made, **of_prompts}):
                    yield text
            of_prompts = {}

    def _beginning(self, index: int, _: int) -> dict[str, Any] | None:
        return self.form.beginning(index, self._question(index))

    def _delta(self, part: Part, _: int) -> dict[str, Any]:
        return self.form.delta(self._question(part.index), part)

    @property
    def _draws(self) -> bool:
        """Without a token to draw the request is about its prompts alone."""
        return all(request.sampling.max_new_tokens for request in self._requests)

    def _question(self, index: int) -> Question:
        return self._questions[index // self.asked.n]

    async def _score_prompts(self, alternatives: int) -> None:
        found = [Scored() for _ in self._requests]
        scorings = [
            Scoring(
                one.prompt.token_ids,
                1,
                one.sampling.log_prob_temperature,
                alternatives,
                one.adapter,
            )
            for one in self._requests
        ]
        places = [place for place, one in enumerate(scorings) if len(one.token_ids) > 1]
        for place in places:
            self.thread.score(self.call, place, scorings[place])
        for _ in places:
            scores = await self.call.next()
            assert isinstance(scores, Scores)
            found[scores.place] = scores.scored
        self._questions = [
            Question(question.text, question.token_ids, scored)
            for question, scored in zip(self._questions, found, strict=True)
        ]

    async def _parts(self) -> AsyncIterator[Part]:
        """What is drawn, in the order in which it is known."""
        choices = range(len(self._questions) * self.asked.n)
        if not self._draws:
            for index in choices:
                yield Part(index, finish_reason="length")
            return
        left = set(choices)
        unscored = {index: _Unscored(Part(index)) for index in choices}
        while left:
            told = await self.call.next()
            if isinstance(told, Scores):
                choice = unscored[told.place]
                known = [choice.take(told.scored), *self._score_next(choice)]
            else:
                assert isinstance(told, SampleEvent)
                known = [self._part(told)]
                if self.asked.alternatives:
                    choice = unscored[known[0].index]
                    choice.add(known[0])
                    known = self._score_next(choice)
            for part in known:
                if part.finish_reason is not None:
                    left.discard(part.index)
                yield part

    def _part(self, event: SampleEvent) -> Part:
        index, completion = self._index_of[event.handle], event.completion
        part = Part(index, event.text, event.token_ids, event.log_probs)
        if completion is not None:
            part.finish_reason = completion.finish_reason
            if not self.asked.stream:
                part.text, part.token_ids = completion.text, completion.token_ids
                part.log_probs = completion.log_probs
        self.usage.completion_tokens += len(part.token_ids)
        return part

    def _score_next(self, choice: _Unscored) -> list[Part]:
        """Ask for the alternatives of the next piece of a choice, if there is one; -> an end
        without a token, which has none.
        """
        if choice.is_asked or not choice.pieces:
            return []
        piece = choice.pieces[0]
        if not piece.token_ids:
            return [choice.pieces.popleft()]
        request = self._requests[piece.index // self.asked.n]
        before = (*request.prompt.token_ids, *choice.told)
        temperature = request.sampling.log_prob_temperature
        ids, alternatives = (*before, *piece.token_ids), self.asked.alternatives or 0
        scoring = Scoring(ids, len(before), temperature, alternatives, request.adapter)
        self.thread.score(self.call, piece.index, scoring)
        choice.is_asked = True
        return []


def event_of(content: Mapping[str, Any]) -> str:
    """One event of a stream."""
    return f"data: {written(content)}\n\n"


async def _event_in_pieces(content: Mapping[str, Any]) -> AsyncIterator[str]:
    yield "data: "
    async for piece in in_pieces(content):
        yield piece
    yield "\n\n"


MOST_LOG_PROBS = 1 << 26
"""Of the prompts of a request, which are held until all are scored, in 8 bytes each."""


def check_size(asked: Asked, questions: Sequence[Question]) -> None:
    """Raises ApiError for more log-probabilities than are held at once."""
    if asked.scores_prompt is None:
        return
    tokens = sum(len(one.token_ids) for one in questions)
    wanted = tokens * (1 + asked.scores_prompt)
    if wanted > MOST_LOG_PROBS:
        raise ApiError(
            400,
            f"prompt: {wanted:,} log-probabilities of {tokens:,} tokens are asked for; this server "
            f"holds at most {MOST_LOG_PROBS:,} at once: send fewer prompts in a request, or ask "
            "for fewer alternatives",
            "prompt",
        )


def as_api_error(error: ApiError | IsobitError) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError | DataError):
        return ApiError(400, str(error))
    if isinstance(error, EngineStoppedError | PausedError):
        return ApiError(503, f"{error}; try again", retry_after=5)
    return ApiError(500, str(error))
