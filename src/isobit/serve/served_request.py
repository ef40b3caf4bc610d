"""A request on its way: its prompts are scored, its samples are drawn, and what happens is written
as an answer, whole or in chunks.

The likeliest tokens beside drawn ones come from a forward of their own over all that stands before
them.  A stream with them is sent in pieces, each at least half as long as what was sent before, so
that a choice of L tokens is put through about 3 L times altogether.
"""

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from isobit.rollout.engine import SampleEvent
from isobit.rollout.requests import Handle, Request
from isobit.rollout.scoring import Scored, Scoring
from isobit.serve.answers import SMALL, LazyList, in_pieces, written
from isobit.serve.engine import Accepted, DisconnectedError, EngineCall, EngineThread, Scores
from isobit.serve.errors import as_api_error
from isobit.serve.protocol import GenerationRequest
from isobit.serve.response_formats import ResponseFormat
from isobit.serve.token_texts import ChoicePart, ScoredPrompt, Usage
from isobit.util.errors import IsobitError

_FIRST_PIECE = 8
"""Tokens of the first piece of a choice whose alternatives are streamed."""


@dataclass(slots=True)
class _Unscored:
    """A choice whose alternatives are asked for piece by piece.  What a piece holds depends on
    nothing but what was drawn.
    """

    growing: ChoicePart
    pieces: deque[ChoicePart] = field(default_factory=deque)
    """Complete pieces, of which the first may have been asked for."""
    is_asked: bool = False
    whole: int = 0
    """Tokens of all pieces so far."""
    scored_ids: tuple[int, ...] = ()
    """Tokens whose alternatives are known."""

    def add(self, part: ChoicePart) -> None:
        piece = self.growing
        piece.text += part.text
        piece.token_ids += part.token_ids
        piece.log_probs += part.log_probs
        piece.finish_reason = part.finish_reason
        enough = max(_FIRST_PIECE, self.whole // 2)
        if len(piece.token_ids) >= enough or piece.finish_reason is not None:
            self.whole += len(piece.token_ids)
            self.pieces.append(piece)
            self.growing = ChoicePart(piece.index)

    def take(self, scored: Scored) -> ChoicePart:
        """The piece that is scored."""
        self.is_asked, piece = False, self.pieces.popleft()
        self.scored_ids += piece.token_ids
        piece.alternatives = scored.alternatives
        return piece


@dataclass(slots=True)
class ServedRequest:
    """One request on its way. Whoever makes it closes it, which ends whatever is left of it."""

    thread: EngineThread
    asked: GenerationRequest
    form: ResponseFormat
    on_close: "Callable[[ServedRequest], None]"
    call: EngineCall = field(default_factory=EngineCall)
    is_large: bool = False
    """Whether the whole answer is to be written in pieces."""
    usage: Usage = field(default_factory=Usage)
    begun_at: float = field(default_factory=time.perf_counter)
    first_at: float | None = None
    """The time at which the first token of a stream was known."""
    _head: Mapping[str, Any] = field(default_factory=dict)
    _prompts: Sequence[ScoredPrompt] = ()
    _requests: Sequence[Request] = ()
    _index_of: dict[Handle, int] = field(default_factory=dict)
    _is_closed: bool = False

    async def begin(
        self, head: Mapping[str, Any], prompts: Sequence[ScoredPrompt], requests: Sequence[Request]
    ) -> None:
        """Score the prompts and have the samples taken on; ``requests`` are of the ``prompts``,
        and every chunk has the ``head``.

        Raises RequestError for what the engine refuses, and what ``EngineCall.next`` raises.
        """
        self._head, self._prompts, self._requests = head, prompts, requests
        self.usage.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
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
        parts = dict[int, ChoicePart]()
        async for part in self._parts():
            parts[part.index] = part
        self.is_large = (
            sum(self._size(part, self._prompt(part.index)) for part in parts.values()) > SMALL
        )

        def choice(index: int) -> dict[str, Any]:
            return self.form.choice(self._prompt(index), parts.pop(index))

        return {
            **self._head,
            "object": self.form.whole,
            "choices": LazyList(len(parts), choice),
            "usage": self.usage.json(),
            **self.form.of_prompts(self._prompts),
        }

    async def in_pieces(self, answer: Mapping[str, Any]) -> AsyncIterator[str]:
        """The text of a large answer, for as long as its client is there."""
        self.thread.cancel(self.call)  # all is known: new weights need not wait
        async for piece in in_pieces(answer):
            if self.call.is_gone:
                return
            yield piece

    def _size(self, part: ChoicePart, prompt: ScoredPrompt | None = None) -> int:
        """The log-probabilities that are written of a part, and of a prompt before it."""
        drawn = len(part.token_ids) * (1 + (self.asked.alternatives or 0))
        if prompt is None or prompt.scored is None:
            return drawn
        return drawn + len(prompt.token_ids) * (1 + (self.asked.scores_prompt or 0))

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
                content = {**head, "choices": LazyList(1, partial(self._delta, part))}
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
        """Chunks for each choice before anything is drawn; the first also holds what concerns the
        prompts.
        """
        of_prompts = self.form.of_prompts(self._prompts)
        for index in range(len(self._prompts) * self.asked.n):
            prompt = self._prompt(index)
            if self._size(ChoicePart(index), prompt) <= SMALL:
                begun = self.form.beginning(index, prompt)
                if begun is not None:
                    yield event_of({**head, "choices": [begun], **of_prompts})
            else:
                made = LazyList(1, partial(self._beginning, index))
                async for text in _event_in_pieces({**head, "choices": made, **of_prompts}):
                    yield text
            of_prompts = {}

    def _beginning(self, index: int, _: int) -> dict[str, Any] | None:
        return self.form.beginning(index, self._prompt(index))

    def _delta(self, part: ChoicePart, _: int) -> dict[str, Any]:
        return self.form.delta(self._prompt(part.index), part)

    @property
    def _draws(self) -> bool:
        """Whether tokens are drawn; otherwise the request is about its prompts alone."""
        return all(request.sampling.max_new_tokens for request in self._requests)

    def _prompt(self, index: int) -> ScoredPrompt:
        return self._prompts[index // self.asked.n]

    async def _score_prompts(self, alternatives: int) -> None:
        results = [Scored() for _ in self._requests]
        scorings = [
            Scoring(
                request.prompt.token_ids,
                1,
                request.sampling.log_prob_temperature,
                alternatives,
                request.adapter,
            )
            for request in self._requests
        ]
        indices = [index for index, scoring in enumerate(scorings) if len(scoring.token_ids) > 1]
        for index in indices:
            self.thread.score(self.call, index, scorings[index])
        for _ in indices:
            scores = await self.call.next()
            assert isinstance(scores, Scores)
            results[scores.place] = scores.scored
        self._prompts = [
            ScoredPrompt(prompt.text, prompt.token_ids, scored)
            for prompt, scored in zip(self._prompts, results, strict=True)
        ]

    async def _parts(self) -> AsyncIterator[ChoicePart]:
        """The drawn parts of choices, in the order in which they are known."""
        choices = range(len(self._prompts) * self.asked.n)
        if not self._draws:
            for index in choices:
                yield ChoicePart(index, finish_reason="length")
            return
        left = set(choices)
        unscored = {index: _Unscored(ChoicePart(index)) for index in choices}
        while left:
            news = await self.call.next()
            if isinstance(news, Scores):
                choice = unscored[news.place]
                known = [choice.take(news.scored), *self._score_next(choice)]
            else:
                assert isinstance(news, SampleEvent)
                known = [self._part(news)]
                if self.asked.alternatives:
                    choice = unscored[known[0].index]
                    choice.add(known[0])
                    known = self._score_next(choice)
            for part in known:
                if part.finish_reason is not None:
                    left.discard(part.index)
                yield part

    def _part(self, event: SampleEvent) -> ChoicePart:
        index, completion = self._index_of[event.handle], event.completion
        part = ChoicePart(index, event.text, event.token_ids, event.log_probs)
        if completion is not None:
            part.finish_reason = completion.finish_reason
            if not self.asked.stream:
                part.text, part.token_ids = completion.text, completion.token_ids
                part.log_probs = completion.log_probs
        self.usage.completion_tokens += len(part.token_ids)
        return part

    def _score_next(self, choice: _Unscored) -> list[ChoicePart]:
        """Ask for the alternatives of the next piece of a choice, if there is one; -> an end
        without a token, which has none.
        """
        if choice.is_asked or not choice.pieces:
            return []
        piece = choice.pieces[0]
        if not piece.token_ids:
            return [choice.pieces.popleft()]
        request = self._requests[piece.index // self.asked.n]
        before = (*request.prompt.token_ids, *choice.scored_ids)
        temperature = request.sampling.log_prob_temperature
        ids, alternatives = (*before, *piece.token_ids), self.asked.alternatives or 0
        scoring = Scoring(ids, len(before), temperature, alternatives, request.adapter)
        self.thread.score(self.call, piece.index, scoring)
        choice.is_asked = True
        return []


def event_of(content: Mapping[str, Any]) -> str:
    return f"data: {written(content)}\n\n"


async def _event_in_pieces(content: Mapping[str, Any]) -> AsyncIterator[str]:
    yield "data: "
    async for piece in in_pieces(content):
        yield piece
    yield "\n\n"
