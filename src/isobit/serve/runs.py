"""The engine protocol over HTTP, for runs that sample here (``rollout.engine = "http"``,
docs/engines.md):

    GET  /isobit/engine            what computes here, and the digest of its weights
    POST /isobit/weights/begin     {"base": "<digest>"}: what the update starts from, or null
    POST /isobit/weights/part      a safetensors file (``isobit.models.weight_deltas``); repeatedly
    POST /isobit/weights/publish   {"sha256": "<digest>"} -> {"sha256", "published"}
    POST /isobit/step              {"client", "session", "weights", "ask", "drop"} -> {"samples"}

A sample is asked for with its tokens so far and the key of its noise, which is all that its tokens
depend on, and has a number that its client gave it.  Each step takes on what is asked, lets go what
is dropped, and tells what was drawn since the last one; it waits up to ``WAIT_S`` for something to
tell.  Who asks in a new session is told nothing of the old one, whose samples end; so do those of a
client that has not been heard for ``SILENT_S``.

A copy of the last weights stays in the host's memory, in BF16.  An update is applied to it, and
published only where its digest is the one that the client has named; it ends all samples of runs,
so that no answer mixes two versions.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import torch
from pydantic import Field

import isobit
from isobit.config.base import MAX_BATCH, MAX_FACTOR, Strict
from isobit.config.model_shape import MAX_POSITIONS, MAX_VOCAB_SIZE
from isobit.models.adapter_folder import check_numbers
from isobit.models.checkpoint import is_finite
from isobit.models.policy import Policy
from isobit.models.weight_deltas import apply_change, digest_of, parted_names, read_file
from isobit.records.text import Prompt, SamplingParams
from isobit.rollout.engine import SampleEvent
from isobit.rollout.requests import Handle, Request
from isobit.serve.admission import Gate
from isobit.serve.engine import Accepted, DisconnectedError, EngineCall, EngineThread
from isobit.serve.errors import ApiError
from isobit.serve.protocol import read_request
from isobit.store.manifest import environment
from isobit.util.errors import ModelError, shown

PROTOCOL = 1
WAIT_S, GATHER_S, SILENT_S = 1.0, 0.02, 60.0
"""Seconds that a step waits for the first news and then for more, and that a client may be
silent.
"""

Token = Annotated[int, Field(ge=0, lt=MAX_VOCAB_SIZE)]


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
    keys: tuple[Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)], ...]
    sampling: AskedSampling


class AskedStep(Strict):
    client: str = Field(min_length=1, max_length=64)
    session: int
    weights: str
    """The digest of those that samples are to be drawn from."""
    ask: tuple[AskedGroup, ...] = ()
    drop: tuple[int, ...] = ()


class AskedBegin(Strict):
    base: str | None


class AskedPublish(Strict):
    sha256: str


@dataclass(slots=True, eq=False)
class ClientSession:
    """The samples of one client since it last began a session."""

    number: int
    call: EngineCall | None = None
    """The call whose samples are live; the weights stay as long."""
    is_asking: bool = False
    """Whether samples are on their way to the call."""
    live: dict[Handle, int] = field(default_factory=dict)
    """The client's numbers."""
    heard_at: float = field(default_factory=time.monotonic)
    groups: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True)
class Runs:
    """The routes' state."""

    policy: Policy
    thread: EngineThread
    gate: Gate | None = None
    """The server's gate, which the server sets."""
    _held: dict[str, torch.Tensor] = field(default_factory=dict)
    """The weights of the last update, by master."""
    _digest: str | None = None
    """The digest of these weights."""
    _published: int | None = None
    """The policy's version that was published from them."""
    _staged: dict[str, torch.Tensor] | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _sessions: dict[str, ClientSession] = field(default_factory=dict)
    _watch: "asyncio.Task[None] | None" = None

    @property
    def weights(self) -> str | None:
        """The digest of what is sampled from; None where it did not come from a run."""
        return self._digest if self.policy.version == self._published else None

    @property
    def routes(self) -> Mapping[tuple[str, str], Callable[[bytearray], Awaitable[dict[str, Any]]]]:
        """The handler that answers the body of a request."""
        return {
            ("GET", "/isobit/engine"): self._describe,
            ("POST", "/isobit/weights/begin"): self._begin,
            ("POST", "/isobit/weights/part"): self._part,
            ("POST", "/isobit/weights/publish"): self._publish,
            ("POST", "/isobit/step"): self._answer,
        }

    async def _describe(self, _: bytearray) -> dict[str, Any]:
        """A description of what computes here: one that is equal in all but the sizes computes the
        same bits.
        """
        limits, graph = self.thread.engine.limits, self.policy.flow.graph("rollout")
        assert self.gate is not None
        return {
            "protocol": PROTOCOL,
            "isobit": isobit.__version__,
            "model": asdict(self.policy.config),
            "flow": [list(site.forward_formats) for site in graph.sites],
            "bits": environment(self.policy.device)["bits"],
            "weights": self.weights,
            "pages": limits.num_pages,
            "page_tokens": limits.page_tokens,
            "places": self.gate.places,
            "running": self.thread.engine.max_sequences,
        }

    # Weights

    async def _begin(self, body: bytearray) -> dict[str, Any]:
        asked = read_request(AskedBegin, body)
        async with self._lock:
            if asked.base is not None and asked.base != self._digest:
                raise ApiError(
                    409,
                    f"base: this server does not hold the weights {asked.base[:12]}; send all of "
                    "them, with the base null",
                )
            self._staged = {}
            if asked.base is None:
                self._held, self._digest = {}, None
        return {}

    async def _part(self, body: bytearray) -> dict[str, Any]:
        async with self._lock:
            staged = self._begun()
            try:
                tensors = await asyncio.to_thread(read_file, body)
                self._check_part(tensors)
            except ModelError as error:
                raise ApiError(400, str(error)) from None
            staged.update(tensors)
        return {"tensors": len(tensors)}

    def _check_part(self, found: Mapping[str, torch.Tensor]) -> None:
        """Raises ModelError for what no update has, so that it need not be kept."""
        shapes = self.policy.shapes
        for name, sent in parted_names(found).items():
            if name not in shapes:
                raise ModelError(f"{shown(name)} is no master of this model")
            most = 4 * torch.Size(shapes[name]).numel()  # all of it in FP32
            size = sum(one.nbytes for one in sent.values())
            if size > 2 * most:
                raise ModelError(f"{name} has {size:,} bytes; an update of it at most {2 * most:,}")

    async def _publish(self, body: bytearray) -> dict[str, Any]:
        asked = read_request(AskedPublish, body)
        async with self._lock:
            staged, self._staged = self._begun(), None
            self._digest = None  # until all of it has been applied
            digest = await asyncio.to_thread(self._apply, staged)
            if digest != asked.sha256:
                self._held = {}
                return {"sha256": digest, "published": None}
            for session in self._sessions.values():  # a run that died has left some
                self._end(session)
            call = EngineCall(is_control=True)
            self.thread.publish(call, lambda: self.policy.republish(self._held))
            await call.next()
            self._digest, self._published = digest, self.policy.version
            published = await asyncio.to_thread(self.policy.checksum, values=False)
            return {"sha256": digest, "published": published}

    def _begun(self) -> dict[str, torch.Tensor]:
        if self._staged is None:
            raise ApiError(409, "no update has begun: ask /isobit/weights/begin")
        return self._staged

    def _apply(self, staged: Mapping[str, torch.Tensor]) -> str:
        """The digest of all weights with what has come."""
        shapes, dtype = self.policy.shapes, torch.bfloat16
        if self.policy.flow.preset == "fp32":
            dtype = torch.float32
        try:
            for name, sent in parted_names(staged).items():
                whole = sent.get("")
                if whole is None:
                    if name not in self._held:
                        raise ModelError(f"{name}: a change has come, and it is not held here")
                    apply_change(self._held[name], sent, name)
                elif (tuple(whole.shape), whole.dtype) != (tuple(shapes[name]), dtype):
                    raise ModelError(
                        f"{name} is {whole.dtype} {tuple(whole.shape)}; expected {dtype} "
                        f"{tuple(shapes[name])}"
                    )
                else:
                    self._held[name] = whole
                _check_sent(name, self._held[name] if whole is not None else sent["values"])
        except ModelError as error:
            self._held = {}
            raise ApiError(400, str(error)) from None
        missing = [name for name in shapes if name not in self._held]
        if missing:
            raise ApiError(400, f"{len(missing)} tensors have not come, the first is {missing[0]}")
        return digest_of(self._held)

    # Samples

    async def _answer(self, body: bytearray) -> dict[str, Any]:
        """Raises ApiError with the status 409 where the weights are others, and 429 where there
        are no places.
        """
        asked = read_request(AskedStep, body)
        session = self._session(asked)
        async with session.lock:
            session.heard_at = time.monotonic()
            try:
                found = await self._step(session, asked)
            except BaseException as error:
                if not (isinstance(error, ApiError) and error.status == 429):
                    self._end(session)
                raise
            session.heard_at = time.monotonic()
            return {"samples": found}

    def _session(self, asked: AskedStep) -> ClientSession:
        """The client's; a new one ends the one before."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._end_silent())
        known = self._sessions.get(asked.client)
        if known is None or known.number != asked.session:
            if known is not None:
                self._end(known)
            known = self._sessions[asked.client] = ClientSession(asked.session)
        return known

    async def _step(self, session: ClientSession, asked: AskedStep) -> list[dict[str, Any]]:
        samples: dict[int, dict[str, Any]] = {}
        if asked.ask:
            await self._take_on(session, asked, samples)
        if asked.drop:
            self._drop(session, set(asked.drop))
        await self._gather(session, samples)
        dropped = set(asked.drop)
        return [sample for number, sample in samples.items() if number not in dropped]

    async def _take_on(
        self, session: ClientSession, asked: AskedStep, found: dict[int, dict[str, Any]]
    ) -> None:
        self._check_weights(asked)
        requests = [self._request(session, asked.client, one) for one in asked.ask]
        assert self.gate is not None
        self.gate.enter(sum(request.samples for request in requests))
        call = session.call = session.call or EngineCall()
        session.is_asking = True
        numbers = [number for one in asked.ask for number in one.numbers]
        self.thread.submit(call, requests, "tokens")
        try:
            while not isinstance(news := await call.next(), Accepted):
                self._note(session, news, found)
        except BaseException:
            self.gate.leave(len(numbers), 0.0)
            raise
        finally:
            session.is_asking = False
        handles = [handle for group in news.handles for handle in group]
        session.live.update(zip(handles, numbers, strict=True))
        self._check_weights(asked)  # from here on they stay

    def _check_weights(self, asked: AskedStep) -> None:
        if asked.weights != self.weights:
            held = "others" if self.weights is None else self.weights[:12]
            raise ApiError(409, f"weights: samples are drawn from {held} here", "weights")

    def _request(self, session: ClientSession, client: str, asked: AskedGroup) -> Request:
        if len(asked.keys) != len(asked.numbers):
            raise ApiError(400, "keys: expected one for each of numbers")
        session.groups += 1
        name = f"{client}/{session.number}/{session.groups}"
        sampling = SamplingParams(**asked.sampling.model_dump())
        prompt = Prompt(name, "", asked.token_ids)
        return Request(prompt, 0, len(asked.numbers), sampling, keys=asked.keys)

    def _drop(self, session: ClientSession, numbers: set[int]) -> None:
        leaving = [handle for handle, number in session.live.items() if number in numbers]
        if session.call is not None and leaving:
            self.thread.abort(session.call, leaving)
        for handle in leaving:
            self._leave(session, handle)

    async def _gather(self, session: ClientSession, samples: dict[int, dict[str, Any]]) -> None:
        """Wait for news of the session's samples, then a little for more."""
        until = time.monotonic() + (GATHER_S if samples else WAIT_S)
        while session.call is not None:
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    news = await session.call.next()
            except TimeoutError:
                return
            if not samples:
                until = time.monotonic() + GATHER_S
            self._note(session, news, samples)

    def _note(self, session: ClientSession, news: Any, samples: dict[int, dict[str, Any]]) -> None:
        if not isinstance(news, SampleEvent) or news.handle not in session.live:
            return
        number = session.live[news.handle]
        sample = samples.setdefault(number, {"number": number, "token_ids": [], "log_probs": []})
        sample["token_ids"] += news.token_ids
        sample["log_probs"] += news.log_probs
        for name in ("truncated_log_probs", "routings"):
            if getattr(news, name):
                sample.setdefault(name, []).extend(getattr(news, name))
        if news.completion is not None:
            sample["finish_reason"] = news.completion.finish_reason
            self._leave(session, news.handle)

    def _leave(self, session: ClientSession, handle: Handle) -> None:
        """A sample has ended; without any left the weights may change."""
        assert self.gate is not None
        del session.live[handle]
        self.gate.leave(1, 0.0)
        if not session.live and not session.is_asking and session.call is not None:
            self.thread.cancel(session.call)
            session.call = None

    def _end(self, session: ClientSession) -> None:
        self._drop(session, set(session.live.values()))
        if session.call is not None:
            self.thread.cancel(session.call)
            session.call.tell(DisconnectedError())  # whoever waits for it is to go
            session.call = None

    async def _end_silent(self) -> None:
        while True:
            await asyncio.sleep(SILENT_S / 4)
            for client, session in list(self._sessions.items()):
                if time.monotonic() - session.heard_at > SILENT_S and not session.lock.locked():
                    self._end(session)
                    del self._sessions[client]


def _check_sent(name: str, values: torch.Tensor) -> None:
    """Raise ModelError for numbers that cannot be computed with."""
    if not is_finite(values):
        raise ModelError(f"{name} holds a NaN or an infinity")
    if ".lora_" in name:
        check_numbers(values, name)
