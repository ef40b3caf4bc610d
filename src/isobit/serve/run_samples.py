"""The samples that runs draw here (``/isobit/step``, ``isobit.serve.runs``).

A sample is asked for with its tokens so far and the key of its noise, which is all that its tokens
depend on while the weights stay, and has a number that its client gave it.  Each step takes on what
is asked, lets go what is dropped, and tells what was drawn since the last one; it waits up to
``WAIT_S`` for something to tell.

What was drawn is kept until the weights change, so that a client that was killed gets it again.
Its samples are drawn on while it is away, up to ``AWAY_S``; where it asks in a new session for one
that is kept, by the same key, it is told the tokens behind those that it names, and the sample goes
on.  The first answer of a session says which keys are kept.  Live samples that a session has not
asked for end after ``ASKED_S``, or earlier where it needs their places.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from isobit.config.base import MAX_BATCH, MAX_FACTOR, Strict
from isobit.config.model_shape import MAX_POSITIONS, MAX_VOCAB_SIZE
from isobit.records.text import Prompt, SamplingParams
from isobit.rollout.engine import SampleEvent
from isobit.rollout.requests import Handle, Request
from isobit.serve.admission import Gate
from isobit.serve.engine import Accepted, DisconnectedError, EngineCall, EngineThread
from isobit.serve.errors import ApiError
from isobit.serve.metrics import Metrics

WAIT_S, GATHER_S = 1.0, 0.02
"""Seconds that a step waits for the first news, and then for more."""
AWAY_S, ASKED_S, LOOK_S = 300.0, 15.0, 5.0
"""Seconds that a client may be silent, that live samples may wait to be asked for in a new session,
and between two looks at either.
"""
MOST_KEPT = 1 << 24
"""Tokens that are kept of a client, in 16 to 24 bytes each; the oldest samples that have ended are
forgotten first.
"""

Token = Annotated[int, Field(ge=0, lt=MAX_VOCAB_SIZE)]
Key = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]


class AskedSampling(Strict):
    max_new_tokens: int = Field(gt=0, le=MAX_POSITIONS)
    temperature: float = Field(ge=0, le=MAX_FACTOR)
    top_k: int = Field(ge=0, le=MAX_VOCAB_SIZE)
    top_p: float = Field(gt=0, le=1)
    min_p: float = Field(ge=0, lt=1)
    stop_token_ids: tuple[Token, ...]


class AskedGroup(Strict):
    """Samples that start from the same tokens."""

    token_ids: tuple[Token, ...] = Field(min_length=1)
    numbers: tuple[int, ...] = Field(min_length=1, max_length=MAX_BATCH)
    keys: tuple[Key, ...]
    sampling: AskedSampling


class AskedStep(Strict):
    client: str = Field(min_length=1, max_length=64)
    session: int
    weights: str
    """The digest of those that samples are to be drawn from."""
    ask: tuple[AskedGroup, ...] = ()
    drop: tuple[int, ...] = ()


@dataclass(slots=True)
class DrawnTokens:
    """Tokens that were drawn one after the other, with what belongs to each."""

    token_ids: "array[int]" = field(default_factory=lambda: array("q"))
    log_probs: "array[float]" = field(default_factory=lambda: array("d"))
    truncated_log_probs: "array[float]" = field(default_factory=lambda: array("d"))
    routings: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, event: SampleEvent) -> None:
        self.token_ids.extend(event.token_ids)
        self.log_probs.extend(event.log_probs)
        self.truncated_log_probs.extend(event.truncated_log_probs)
        self.routings += event.routings
        if event.completion is not None:
            self.finish_reason = event.completion.finish_reason

    def told(self, number: int, first: int) -> dict[str, Any]:
        """Those from the ``first`` on, as an answer has them."""
        told = {
            "number": number,
            "token_ids": self.token_ids[first:].tolist(),
            "log_probs": self.log_probs[first:].tolist(),
        }
        if self.truncated_log_probs:
            told["truncated_log_probs"] = self.truncated_log_probs[first:].tolist()
        if self.routings:
            told["routings"] = self.routings[first:]
        if self.finish_reason is not None:
            told["finish_reason"] = self.finish_reason
        return told


@dataclass(slots=True)
class KeptSample:
    """A sample and what was drawn of it, since it was first asked for."""

    start: tuple[int, ...]
    sampling: AskedSampling
    """How it was asked for behind ``start``."""
    handle: Handle | None = None
    """Set while it is live."""
    drawn: DrawnTokens = field(default_factory=DrawnTokens)
    number: int | None = None
    """What the session calls it; None where that has not asked for it, or knows its end."""
    num_told: int = 0
    """Tokens drawn of it that the session has."""

    @property
    def has_news(self) -> bool:
        """Whether there is something that the session does not have."""
        return len(self.drawn.token_ids) > self.num_told or self.drawn.finish_reason is not None

    @property
    def tokens(self) -> tuple[int, ...]:
        return *self.start, *self.drawn.token_ids

    @property
    def is_new(self) -> bool:
        """Whether nothing was drawn, and nothing will be."""
        return self.handle is None and not self.drawn.token_ids and not self.drawn.finish_reason

    def sampling_behind(self, length: int) -> AskedSampling:
        """The sampling of one who has so many of its tokens, with the prompt's."""
        left = len(self.start) + self.sampling.max_new_tokens - length
        return self.sampling.model_copy(update={"max_new_tokens": left})

    def is_asked(self, group: AskedGroup) -> bool:
        """Whether a group asks for it, perhaps behind tokens that were drawn of it already."""
        length = len(group.token_ids)
        return (
            length >= len(self.start)
            and group.token_ids == self.tokens[:length]
            and group.sampling == self.sampling_behind(length)
        )


@dataclass(slots=True, eq=False)
class RunClient:
    """A client, with all its samples since the weights came."""

    session: int | None = None
    begun_at: float = 0.0
    """The time at which the session began."""
    call: EngineCall | None = None
    """The call whose samples are live; the weights stay as long."""
    is_asking: bool = False
    """Whether samples are on their way to the call."""
    kept: dict[int, KeptSample] = field(default_factory=dict)
    """Samples under the keys of their noise, in the order in which they were asked for."""
    live: dict[Handle, KeptSample] = field(default_factory=dict)
    asked: dict[int, KeptSample] = field(default_factory=dict)
    """What the session has asked for and does not know the end of, by its numbers."""
    heard_at: float = field(default_factory=time.monotonic)
    requests: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def unasked(self) -> list[Handle]:
        """Live samples of earlier sessions."""
        return [handle for handle, sample in self.live.items() if sample.number is None]

    def begin(self, session: int) -> None:
        """Begin a session, which has asked for nothing yet."""
        self.session, self.begun_at = session, time.monotonic()
        for number in list(self.asked):
            self.forget(number)

    def ask(self, number: int, sample: KeptSample, num_told: int) -> None:
        """The session asks for a sample, of which it has so many of the tokens that were drawn."""
        if sample.number is not None:
            self.forget(sample.number)
        self.asked[number] = sample
        sample.number, sample.num_told = number, num_told

    def forget(self, number: int) -> KeptSample | None:
        """The session is told no more of a sample.  -> It, if there is one."""
        if (sample := self.asked.pop(number, None)) is not None:
            sample.number = None
        return sample

    def tell(self) -> list[dict[str, Any]]:
        """The news of what the session has asked for."""
        told = list[dict[str, Any]]()
        for number, sample in list(self.asked.items()):
            if sample.has_news:
                told.append(sample.drawn.told(number, sample.num_told))
                sample.num_told = len(sample.drawn.token_ids)
            if sample.drawn.finish_reason is not None:
                self.forget(number)
        return told

    def forget_some(self) -> None:
        """Forget the oldest samples that have ended, as far as too many tokens are kept."""
        more = sum(len(one.drawn.token_ids) for one in self.kept.values()) - MOST_KEPT
        for key, one in list(self.kept.items()):
            if more <= 0:
                return
            if one.handle is None:
                more -= len(one.drawn.token_ids)
                del self.kept[key]


@dataclass(slots=True)
class AskedSamples:
    """The samples that a step asks for."""

    samples: list[tuple[int, KeptSample, int]] = field(default_factory=list)
    """All: number, sample, and how many of the tokens drawn of it the client has."""
    requests: list[Request] = field(default_factory=list)
    """What the engine is asked for."""
    new: list[KeptSample] = field(default_factory=list)
    """The samples of these requests, in their order."""


class RunSamples:
    """The samples of all clients.

    Args:
        check_weights: raises ApiError with the status 409 where others than those with this digest
            are held.
    """

    def __init__(
        self,
        thread: EngineThread,
        gate: Gate,
        metrics: Metrics,
        check_weights: Callable[[str], None],
    ) -> None:
        self._thread, self._gate, self._metrics = thread, gate, metrics
        self._check_weights = check_weights
        self._clients: dict[str, RunClient] = {}
        self._watch: asyncio.Task[None] | None = None

    async def answer(self, asked: AskedStep) -> dict[str, Any]:
        """The answer to a step.  Raises ApiError with the status 409 where the weights are others,
        and 429 where there are no places.
        """
        if self._watch is None:
            self._watch = asyncio.create_task(self._look_after_all())
        client = self._clients.setdefault(asked.client, RunClient())
        client.heard_at = time.monotonic()  # before anything that waits: it is not given up then
        async with client.lock:
            answer: dict[str, Any] = {}
            if client.session != asked.session:
                client.begin(asked.session)
                answer["kept"] = list(client.kept)
            try:
                answer["samples"] = await self._step(client, asked)
            except BaseException as error:
                if not (isinstance(error, ApiError) and error.status == 429):
                    self._end(client)
                raise
            client.heard_at = time.monotonic()
            return answer

    def end_all(self) -> None:
        """End all samples and forget what was drawn: other weights come."""
        for client in self._clients.values():
            self._end(client)

    async def _step(self, client: RunClient, asked: AskedStep) -> list[dict[str, Any]]:
        if asked.ask:
            self._check_weights(asked.weights)
            wanted = AskedSamples()
            for group in asked.ask:
                _look_up(client, asked.client, group, wanted)
            if wanted.requests:
                await self._submit(client, wanted)
            self._check_weights(asked.weights)  # from here on they stay
            for number, sample, known in wanted.samples:
                client.ask(number, sample, known)
                self._metrics.kept_tokens.inc(len(sample.drawn.token_ids) - known)
        leaving = [sample for number in asked.drop if (sample := client.forget(number)) is not None]
        self._abort(client, [one.handle for one in leaving if one.handle is not None])
        has_news = any(sample.has_news for sample in client.asked.values())
        await self._gather(client, GATHER_S if has_news else WAIT_S)
        return client.tell()

    async def _submit(self, client: RunClient, wanted: AskedSamples) -> None:
        """Have the engine take on what is not live."""
        count = len(wanted.new)
        if self._gate.taken + count > self._gate.places:
            for one in self._clients.values():
                self._abort(one, one.unasked)
        self._gate.enter(count)
        call = client.call = client.call or EngineCall()
        client.is_asking = True
        self._thread.submit(call, wanted.requests, "tokens")
        try:
            while not isinstance(news := await call.next(), Accepted):
                self._note(client, news)
        except BaseException:
            self._gate.leave(count, 0.0)
            raise
        finally:
            client.is_asking = False
        handles = [handle for of_request in news.handles for handle in of_request]
        for handle, sample in zip(handles, wanted.new, strict=True):
            sample.handle, client.live[handle] = handle, sample
        client.forget_some()

    async def _gather(self, client: RunClient, seconds: float) -> None:
        """Wait so long for news of the client's samples, then a little for more."""
        until = time.monotonic() + seconds
        while client.call is not None:
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    news = await client.call.next()
            except TimeoutError:
                return
            if self._note(client, news):
                until = min(until, time.monotonic() + GATHER_S)

    def _note(self, client: RunClient, news: Any) -> bool:
        """Keep what was drawn.  -> Whether the session has asked for it."""
        if not isinstance(news, SampleEvent) or (sample := client.live.get(news.handle)) is None:
            return False
        sample.drawn.add(news)
        self._metrics.run_tokens.inc(len(news.token_ids))
        if news.completion is not None:
            self._leave(client, news.handle)
        return sample.number is not None

    def _abort(self, client: RunClient, handles: Sequence[Handle]) -> None:
        if client.call is not None and handles:
            self._thread.abort(client.call, handles)
        for handle in handles:
            self._leave(client, handle)

    def _leave(self, client: RunClient, handle: Handle) -> None:
        """A sample has ended; without any left the weights may change."""
        client.live.pop(handle).handle = None
        self._gate.leave(1, 0.0)
        if not client.live and not client.is_asking and client.call is not None:
            self._thread.cancel(client.call)
            client.call = None

    def _end(self, client: RunClient) -> None:
        self._abort(client, list(client.live))
        client.kept, client.asked = {}, {}
        if client.call is not None:
            self._thread.cancel(client.call)
            client.call.tell(DisconnectedError())  # whoever waits for it is to go
            client.call = None

    async def _look_after_all(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for name, client in list(self._clients.items()):
                if client.lock.locked():
                    continue
                async with client.lock:
                    await self._look_after(client)
                if time.monotonic() - client.heard_at > AWAY_S:  # nobody waits for the lock
                    self._end(client)
                    del self._clients[name]

    async def _look_after(self, client: RunClient) -> None:
        """Take in what was drawn for a client that is away, so that places become free, and end
        what it has not asked for since it is back.
        """
        await self._gather(client, 0.0)
        now = time.monotonic()
        if client.heard_at > client.begun_at and now - client.begun_at > ASKED_S:
            self._abort(client, client.unasked)


def _look_up(client: RunClient, name: str, group: AskedGroup, wanted: AskedSamples) -> None:
    """Find the samples of a group among those that are kept."""
    if len(group.keys) != len(group.numbers):
        raise ApiError(400, "keys: expected one for each of numbers")
    unknown = dict[int, tuple[int, KeptSample]]()
    for key, number in zip(group.keys, group.numbers, strict=True):
        sample = client.kept.get(key)
        if sample is None or not sample.is_asked(group) or sample.is_new:
            client.kept[key] = sample = KeptSample(group.token_ids, group.sampling)
            unknown[key] = number, sample
            continue
        wanted.samples.append((number, sample, len(group.token_ids) - len(sample.start)))
        if sample.handle is None and sample.drawn.finish_reason is None:
            tokens = sample.tokens
            sampling = sample.sampling_behind(len(tokens))
            wanted.requests.append(_request(client, name, tokens, sampling, [key]))
            wanted.new.append(sample)
    if unknown:
        asked = group.token_ids, group.sampling, list(unknown)
        wanted.requests.append(_request(client, name, *asked))
        wanted.new += [sample for _, sample in unknown.values()]
        wanted.samples += [(number, sample, 0) for number, sample in unknown.values()]


def _request(
    client: RunClient,
    name: str,
    token_ids: tuple[int, ...],
    sampling: AskedSampling,
    keys: Sequence[int],
) -> Request:
    client.requests += 1
    prompt = Prompt(f"{name}/{client.requests}", "", token_ids)
    params = SamplingParams(**sampling.model_dump())
    return Request(prompt, 0, len(keys), params, keys=tuple(keys))
