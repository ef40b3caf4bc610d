"""The routes of the server, what they let in, and what becomes of a request.

    let in      key, size of the body, a place (429 with Retry-After where there is none)
    read        ``protocol``; tokenised once, in a thread of its own
    score       the prompt's log-probabilities, where they are asked for
    draw        ``engine``; events become parts of choices
    answer      ``answers``: whole, or as server-sent events

A client that goes away ends its samples at once, wherever the request stands.  Everything that can
go wrong is answered in OpenAI's form with a sentence.
"""

import asyncio
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from isobit.config.data import ChatConfig
from isobit.config.environment import ToolFormat
from isobit.data.encoding import special_token_ids
from isobit.data.thinking import THINKING_TAGS
from isobit.data.tool_calls import MARKS, tool_format
from isobit.models.folder import SamplingModel
from isobit.records.text import Prompt, SamplingParams
from isobit.rollout.requests import Request as EngineRequest
from isobit.rollout.sequence import decode
from isobit.serve.admission import Gate, check_size
from isobit.serve.answers import Streamed, json_response
from isobit.serve.connections import QuietLoop
from isobit.serve.engine import DisconnectedError, EngineCall, EngineStoppedError, EngineThread
from isobit.serve.errors import ApiError, as_api_error
from isobit.serve.metrics import Metrics
from isobit.serve.prompt_reader import PromptReader
from isobit.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Kind,
    read_request,
)
from isobit.serve.response_formats import ChatFormat, CompletionFormat, ResponseFormat
from isobit.serve.served_request import ServedRequest, event_of
from isobit.serve.token_texts import ScoredPrompt, Spelling
from isobit.serve.weights import Handler, Sent, WeightUpdates
from isobit.util.errors import ConfigError, IsobitError, shown
from isobit.util.hosts import HostCheck

LARGEST_BODY = 16 << 20
"""Bytes."""
_SMALL_BODY = 1 << 16
"""Bytes of a request that is read at once, in the event loop."""
BODY_S, WEIGHTS_S = 60, 600
"""Seconds that a client may take to send a request, and to send weights."""
COMPLETION_TOKENS = 16
"""The most tokens of a completion where the request does not say; OpenAI's figure."""
GONE = 499
"""The status that is counted for a client that went away; nobody reads it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a served model."""

    name: str
    """The model's name for clients."""
    key: str | None
    """The bearer token that clients must send."""
    max_live: int
    """Samples that are served or wait at once; more are refused."""
    chat: ChatConfig
    sampling: SamplingParams
    """Defaults for what a request does not say."""
    max_tokens: int | None
    """The default length of an answer; None for OpenAI's defaults."""
    precision: str
    adapters: tuple[str, ...] = ()
    """Names of the model's adapters (``Policy.adapters``), for clients."""
    folders: Mapping[str, str] = field(default_factory=dict)
    """The folder that the command line gave for each name."""
    hosts: HostCheck | None = None
    """The names that requests may mean it by; None for any."""


class ApiServer:
    """A model behind routes.

    Args:
        model: what is served.
        reader: a tokenizer of the same folder that nobody else uses: encoding changes its state.
        thread: runs the engine of the model.
        updates: takes other weights, if it may.
    """

    def __init__(
        self,
        model: SamplingModel,
        reader: PreTrainedTokenizerBase,
        thread: EngineThread,
        settings: Settings,
        updates: WeightUpdates | None = None,
    ) -> None:
        self.model, self.thread, self.settings = model, thread, settings
        self._updates = updates
        self.is_draining: Callable[[], bool] = lambda: False
        """Whether the server ends: then nothing new is taken."""
        self._prompts = PromptReader(model, reader, settings.chat)
        self._reading = ThreadPoolExecutor(1, "tokenizer")
        self.gate = Gate(settings.max_live)
        self.metrics = Metrics(thread, self.gate)
        if updates is not None:
            updates.runs.open(self.gate, self.metrics)
        tokenizer = model.tokenizer
        self.spelling = Spelling(
            lru_cache(1 << 18)(lambda token: decode(tokenizer, [token], special=True))
        )
        self._calls: ToolFormat | None = None
        """The format of calls that is read in answers; None where the chat template's is not known.
        """
        with suppress(ConfigError):
            form = tool_format(reader, settings.chat)
            self._calls = form if form in MARKS else None
        known, special = reader.get_vocab(), special_token_ids(reader)
        self._hides_calls = bool(self._calls) and known.get(MARKS[self._calls]) in special
        """Whether the text of an answer without special tokens would not show its calls."""
        self._special_tags = {one: known[one] for one in THINKING_TAGS if known.get(one) in special}
        self._started_at = int(time.time())

    def app(self) -> ASGIApp:
        """The ASGI application; its lifespan starts and stops the engine's thread."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            asyncio.get_running_loop().set_exception_handler(QuietLoop())
            self.thread.start()
            yield
            await asyncio.to_thread(self.thread.stop)
            self._reading.shutdown(cancel_futures=True)

        routes = [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._guarded(self._models)),
            Route("/v1/models/{name:path}", self._guarded(self._one_model)),
            Route("/v1/completions", self._guarded(self._complete), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
        ]
        for (method, path), handler in self._updates.routes.items() if self._updates else ():
            routes.append(Route(path, self._guarded(self._updating(handler)), methods=[method]))
        routes.append(Route("/", self._greeting))
        handlers: Any = {HTTPException: _no_route, Exception: _fault}
        app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
        return app if self.settings.hosts is None else self._by_name(app, self.settings.hosts)

    def _by_name(self, app: ASGIApp, hosts: HostCheck) -> ASGIApp:
        """The application ``app``, but refusing requests that a web page may have sent."""

        async def checked(scope: Scope, receive: Receive, send: Send) -> None:
            wrong = hosts.wrong_header(scope["headers"]) if scope["type"] == "http" else None
            if wrong is None:
                await app(scope, receive, send)
                return
            status = 421 if wrong == "Host" else 403
            sentence = (
                f"{wrong}: this server is not known by that name, so that pages of the web cannot "
                "ask it; start it with --allowed-host NAME, or with --api-key"
            )
            await _refusal(ApiError(status, sentence))(scope, receive, send)

        return checked

    # Routes

    async def _greeting(self, request: Request) -> Response:
        """A line for whoever opens the address in a browser; the name is for those with the key."""
        line = "an OpenAI-compatible server of Isobit, at /v1"
        if self._has_key(request):
            line = f"{self.settings.name} in {self.settings.precision}: {line}"
        return Response(f"{line}\n", media_type="text/plain")

    async def _health(self, _: Request) -> Response:
        fault = self.thread.fault
        if fault is not None or self.is_draining():
            return json_response({"status": fault or "the server is shutting down"}, 503)
        return json_response({"status": "ok"})

    async def _metrics(self, _: Request) -> Response:
        return Response(self.metrics.page(), media_type=self.metrics.content_type)

    async def _models(self, _: Request) -> Response:
        names = (self.settings.name, *self.settings.adapters)
        return json_response({"object": "list", "data": [self._described(name) for name in names]})

    async def _one_model(self, request: Request) -> Response:
        self._adapter(name := request.path_params["name"])
        return json_response(self._described(name))

    async def _complete(self, request: Request) -> Response:
        asked = await _asked(CompletionRequest, request)
        form = CompletionFormat(asked, self.spelling)
        places = len(asked.prompt) * asked.n
        return await self._answer(request, asked, form, places, lambda: self._prompts.texts(asked))

    async def _chat(self, request: Request) -> Response:
        asked = await _asked(ChatRequest, request)
        has_tags = asked.separate_reasoning and not self._shows_special(asked)
        tags = self._special_tags if has_tags else {}
        form = ChatFormat(asked, self.spelling, self._calls, tags)
        return await self._answer(
            request, asked, form, asked.n, lambda: [self._prompts.rendered(asked)]
        )

    def _updating(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def update(request: Request) -> Response:
            assert self._updates is not None
            is_json = request.headers.get("content-type") != "application/octet-stream"
            limits = (LARGEST_BODY, BODY_S) if is_json else (self._updates.largest_body, WEIGHTS_S)
            body = await _body(request, *limits)
            return json_response(await handler(Sent(body, is_json, request.query_params)))

        return update

    def _described(self, name: str) -> dict[str, Any]:
        base = self.settings.name
        return {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "isobit",
            "root": self.settings.folders.get(name, name),
            "parent": None if name == base else base,
            "max_model_len": self.model.context,
            "precision": self.settings.precision,
        }

    def _adapter(self, name: str) -> str | None:
        """The adapter of a model's name; None for the base. Raises ApiError for an unknown name."""
        names = (self.settings.name, *self.settings.adapters)
        if name not in names:
            raise ApiError(
                404,
                f"model: there is no model {name[:100]!r} here; this server has "
                f"{', '.join(map(repr, names))}",
                "model",
                "model_not_found",
            )
        return None if name == self.settings.name else name

    def _guarded(
        self, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """A route that checks the key, answers errors, and counts the request."""

        async def guarded(request: Request) -> Response:
            route = request.scope["route"].path
            try:
                self._check_key(request)
                response = await handler(request)
            except (ClientDisconnect, DisconnectedError):
                response = Response(status_code=GONE)
            except (ApiError, IsobitError) as error:
                response = _refusal(as_api_error(error))
            except asyncio.CancelledError:  # the time of a graceful end is over
                if not self.is_draining():
                    raise
                response = _refusal(as_api_error(_ended()))
            self.metrics.requests.labels(route, str(response.status_code)).inc()
            return response

        return guarded

    def _has_key(self, request: Request) -> bool:
        key = self.settings.key
        if key is None:
            return True
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        fits = hmac.compare_digest(given.strip().encode(), key.encode())
        return fits and kind.lower() == "bearer"

    def _check_key(self, request: Request) -> None:
        if not self._has_key(request):
            raise ApiError(
                401,
                "the key is missing or wrong; send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
            )

    # Answering

    async def _answer(
        self,
        request: Request,
        asked: GenerationRequest,
        form: ResponseFormat,
        places: int,
        read: Callable[[], list[ScoredPrompt]],
    ) -> Response:
        self._adapter(asked.model)
        self._prompts.check_ids(asked.stop_token_ids, "stop_token_ids")
        if self.is_draining() or self.thread.fault is not None:
            raise EngineStoppedError(self.thread.fault or "the server is shutting down")
        self.gate.enter(places)
        call = EngineCall()
        watch = asyncio.create_task(_watch(request, call))

        def on_close(work: ServedRequest) -> None:
            watch.cancel()
            self.metrics.count(work)
            self.gate.leave(places, time.perf_counter() - work.begun_at)

        work = ServedRequest(self.thread, asked, form, on_close, call)
        try:
            loop = asyncio.get_running_loop()
            prompts = await loop.run_in_executor(self._reading, read)
            check_size(asked, prompts)
            await work.begin(*self._asked_of_engine(asked, form, prompts))
            work.name_weights(f"{self.settings.precision}-{self.model.policy.version}")
            if asked.stream:
                return Streamed(work.chunks(), work.close, "text/event-stream", self._last_words)
            answer = await work.whole()
            if work.is_large:
                return Streamed(work.in_pieces(answer), work.close, "application/json")
            response = json_response(answer)
        except BaseException:
            work.close()
            raise
        work.close()
        return response

    def _last_words(self) -> str | None:
        """The last event of a stream that the end of the server cuts off."""
        return event_of(as_api_error(_ended()).json()) if self.is_draining() else None

    def _asked_of_engine(
        self, asked: GenerationRequest, form: ResponseFormat, prompts: list[ScoredPrompt]
    ) -> tuple[dict[str, Any], list[ScoredPrompt], list[EngineRequest]]:
        """The beginning of each answer, the prompts, and the engine's requests for them."""
        name, settings = form.prefix + secrets.token_hex(12), self.settings
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        special = self._shows_special(asked) or frozenset(form.unseen_tags.values())
        requests = [
            EngineRequest(
                Prompt(f"{name}/{place}", prompt.text, prompt.token_ids),
                0,
                asked.n,
                asked.sampling(
                    settings.sampling,
                    self._max_new_tokens(asked, len(prompt.token_ids)),
                    special,
                ),
                seed,
                adapter=self._adapter(asked.model),
            )
            for place, prompt in enumerate(prompts)
        ]
        head = {"id": name, "created": int(time.time()), "model": asked.model}
        return head, prompts, requests

    def _shows_special(self, asked: GenerationRequest) -> bool:
        """Whether texts have all special tokens: for calls, or because the request, or else the
        server, says so.
        """
        if isinstance(asked, ChatRequest) and asked.shown_tools and self._hides_calls:
            return True
        skips = asked.skip_special_tokens
        return bool(self.settings.sampling.special_tokens) if skips is None else not skips

    def _max_new_tokens(self, asked: GenerationRequest, prompt: int) -> int:
        """Raises ApiError where prompt and answer do not fit the context."""
        limits = self.thread.engine.limits
        room = min(limits.context, limits.num_pages * limits.page_tokens + 1) - prompt
        said = asked.most_tokens
        default = max(room, 1) if isinstance(asked, ChatRequest) else COMPLETION_TOKENS
        wanted = self.settings.max_tokens or default if said is None else said
        if said is None:
            wanted = min(wanted, max(room, 1))
        if prompt + wanted > limits.context:
            what = f"{prompt + wanted} ({prompt} of the prompt, {wanted} of the answer)"
            raise self._prompts.too_long(what)
        return wanted


async def _watch(request: Request, call: EngineCall) -> None:
    """Tell the call when the client is gone."""
    with suppress(ClientDisconnect):
        while (await request.receive())["type"] != "http.disconnect":
            pass
    call.tell(DisconnectedError())


def _ended() -> EngineStoppedError:
    return EngineStoppedError("the server has ended before the answer")


async def _asked(kind: type[Kind], request: Request) -> Kind:
    body = await _body(request)
    if len(body) < _SMALL_BODY:
        return read_request(kind, body)
    return await asyncio.to_thread(read_request, kind, body)


async def _body(request: Request, most: int = LARGEST_BODY, seconds: int = BODY_S) -> bytearray:
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                if len(body) + len(part) > most:
                    raise ApiError(413, f"the body has more than {most:,} bytes")
                body += part
    except TimeoutError:
        raise ApiError(408, f"the body has not come within {seconds} s") from None
    return body


def _refusal(error: ApiError) -> Response:
    response = json_response(error.json(), error.status)
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    if error.status in (408, 413):  # the rest of the body is not read
        response.headers["Connection"] = "close"
    return response


async def _no_route(request: Request, error: HTTPException) -> Response:
    asked = f"{request.method} {shown(request.url.path)}"
    if error.status_code == 405:
        there = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        return _refusal(ApiError(405, f"{asked}: this route takes {there}"))
    routes = ", ".join(
        f"{'POST' if 'POST' in (route.methods or ()) else 'GET'} {route.path}"
        for route in request.app.routes
    )
    return _refusal(ApiError(error.status_code, f"{asked}: there is no such route; {routes}"))


async def _fault(_: Request, error: Exception) -> Response:
    return _refusal(ApiError(500, f"a fault in the server: {type(error).__name__}; see its log"))
