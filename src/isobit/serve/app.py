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
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from isobit.config.data import ChatConfig
from isobit.config.environment import ToolFormat
from isobit.data.encoding import most_characters, special_token_ids, token_ids
from isobit.data.prompts import Noticed, prompts_of_rows
from isobit.data.rendering import encodable
from isobit.data.sources import Row, row_of
from isobit.data.tool_calls import MARKS, tool_format
from isobit.models.folder import SamplingModel
from isobit.records.text import Prompt, SamplingParams
from isobit.rollout.engine import Request as EngineRequest
from isobit.rollout.sequence import decode
from isobit.serve.answers import Streamed, json_response
from isobit.serve.connections import QuietLoop
from isobit.serve.engine import Call, DisconnectedError, EngineStoppedError, EngineThread
from isobit.serve.protocol import (
    ApiError,
    Asked,
    ChatAsked,
    CompletionAsked,
    Kind,
    Question,
    Spelling,
    read_request,
)
from isobit.serve.weights import Handler, Sent, WeightUpdates
from isobit.serve.work import (
    ChatForm,
    CompletionForm,
    Form,
    Gate,
    Work,
    as_api_error,
    check_size,
    event_of,
)
from isobit.util.errors import ConfigError, DataError, IsobitError, shown
from isobit.util.hosts import HostCheck

LARGEST_BODY = 16 << 20
"""Bytes."""
_SMALL_BODY = 1 << 16
"""Bytes of a request that is read at once, in the event loop."""
BODY_S, WEIGHTS_S = 60, 600
"""How long a client may take to send a request, and to send weights."""
COMPLETION_TOKENS = 16
"""What a completion has at most where the request does not say; OpenAI's figure."""
GONE = 499
"""The status that is counted for a client that went away; nobody reads it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a model is served."""

    name: str
    """The model's, for clients."""
    key: str | None
    """What clients must send as a bearer token."""
    max_live: int
    """Samples that are served or wait at once; more are refused."""
    chat: ChatConfig
    sampling: SamplingParams
    """For what a request does not say."""
    max_tokens: int | None
    """The same of its length; None for OpenAI's defaults."""
    precision: str
    adapters: tuple[str, ...] = ()
    """Names of the model's adapters (``Policy.adapters``), for clients."""
    folders: Mapping[str, str] = field(default_factory=dict)
    """What each name was said to be on the command line."""
    hosts: HostCheck | None = None
    """The names that requests may mean it by; None for any."""


class Metrics:
    """What Prometheus is told."""

    def __init__(self, thread: EngineThread, gate: Gate) -> None:
        self.registry = CollectorRegistry()
        made = {"registry": self.registry, "namespace": "isobit"}
        self.requests = Counter("requests", "Requests, by status", ["route", "status"], **made)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts", **made)
        self.tokens = Counter("generated_tokens", "Tokens drawn", **made)
        self.seconds = Histogram("request_seconds", "Time of what the engine served", **made)
        self.first = Histogram("time_to_first_token_seconds", "Of streams", **made)
        engine = thread.engine
        for name, text, value in (
            ("samples_in_place", "Samples that are served or wait", lambda: gate.taken),
            ("samples_live", "Samples of the engine", lambda: engine.num_live),
            ("samples_running", "Samples that decode", lambda: engine.num_running),
            ("kv_pages", "Pages of the KV cache", lambda: engine.limits.num_pages),
            ("kv_pages_free", "Pages that nobody holds", lambda: engine.free_pages),
        ):
            Gauge(name, text, **made).set_function(value)

    def count(self, work: Work) -> None:
        """What has become of a request to the engine, at its end."""
        self.prompt_tokens.inc(work.usage.prompt_tokens)
        self.tokens.inc(work.usage.completion_tokens)
        self.seconds.observe(time.perf_counter() - work.begun_at)
        if work.first_at is not None:
            self.first.observe(work.first_at - work.begun_at)


class Server:
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
        self._reader = reader
        self._reading = ThreadPoolExecutor(1, "tokenizer")
        self.gate = Gate(settings.max_live)
        if updates is not None:
            updates.runs.gate = self.gate
        self.metrics = Metrics(thread, self.gate)
        tokenizer = model.tokenizer
        self.spelling = Spelling(
            lru_cache(1 << 18)(lambda token: decode(tokenizer, [token], special=True))
        )
        self._calls: ToolFormat | None = None
        """Of calls in answers; None where the chat template's is not read."""
        with suppress(ConfigError):
            form = tool_format(reader, settings.chat)
            self._calls = form if form in MARKS else None
        mark = reader.get_vocab().get(MARKS[self._calls]) if self._calls else None
        self._hides_calls = mark in special_token_ids(reader)
        """Whether the text of an answer without special tokens would not show its calls."""
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
        """With requests refused that a web page may have sent."""

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
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def _models(self, _: Request) -> Response:
        names = (self.settings.name, *self.settings.adapters)
        return json_response({"object": "list", "data": [self._described(name) for name in names]})

    async def _one_model(self, request: Request) -> Response:
        self._adapter(name := request.path_params["name"])
        return json_response(self._described(name))

    async def _complete(self, request: Request) -> Response:
        asked = await _asked(CompletionAsked, request)
        form = CompletionForm(asked, self.spelling)
        places = len(asked.prompt) * asked.n
        return await self._answer(request, asked, form, places, lambda: self._texts(asked))

    async def _chat(self, request: Request) -> Response:
        asked = await _asked(ChatAsked, request)
        form = ChatForm(asked, self.spelling, self._calls)
        return await self._answer(request, asked, form, asked.n, lambda: [self._rendered(asked)])

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
        """That of a model's name; None for the base. Raises ApiError for an unknown name."""
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
        """With the key checked, errors answered, and the request counted."""

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

    # Reading

    def _texts(self, asked: CompletionAsked) -> list[Question]:
        """In the thread of the tokenizer. Raises DataError."""
        return [self._text(one, asked.add_special_tokens) for one in asked.prompt]

    def _text(self, prompt: str | list[int], add_special_tokens: bool) -> Question:
        if not isinstance(prompt, str):
            self._check_count(len(prompt), "tokens")
            self._check_ids(prompt, "prompt")
            return Question(decode(self.model.tokenizer, prompt, special=True), tuple(prompt))
        self._check_characters(prompt)
        encodable(prompt, Row(prompt, {}, "prompt"))
        (ids,) = token_ids([prompt], self._reader, add_special_tokens)
        return Question(prompt, tuple(ids))

    def _rendered(self, asked: ChatAsked) -> Question:
        """In the thread of the tokenizer. Raises DataError, RequestError."""
        tools, noticed = asked.shown_tools, Noticed()
        self._check_count(len(asked.messages), "messages")
        self._check_count(len(tools or ()), "tools")
        row = row_of(
            asked.messages, {}, "messages", tools=tools, variables=asked.chat_template_kwargs
        )
        (prompt,) = prompts_of_rows(
            "messages",
            [row],
            self._reader,
            self.settings.chat,
            context_tokens=self.model.context,
            noticed=noticed,
            continues=asked.continue_final_message,
        )
        if noticed.unread_tools or noticed.unread_calls:
            raise DataError(
                "tools: the chat template of this model does not write them, so that the model "
                "would not see them; leave them out, or serve another model"
            )
        return Question(prompt.text, prompt.token_ids)

    def _check_ids(self, ids: Sequence[int], name: str) -> None:
        known = self.model.policy.config.vocab_size
        if max(ids, default=0) >= known:
            raise ApiError(
                400,
                f"{name}: token {max(ids)} is none of the model's, which are 0 to {known - 1}",
                name,
            )

    def _check_count(self, count: int, name: str) -> None:
        """What has a token or more each; others would wait while too many are written or read."""
        if count > self.model.context:
            raise self._too_long(f"{count:,} {name}")

    def _check_characters(self, text: str) -> None:
        """A text that cannot fit would take seconds and gigabytes to encode."""
        most = most_characters(self.model.context, self._reader)
        if len(text) > most:
            raise self._too_long(f"{len(text):,} characters")

    def _too_long(self, what: str) -> ApiError:
        return ApiError(
            400,
            f"the model's context holds {self.model.context} tokens, and the request has {what}: "
            "shorten the prompt or lower max_tokens",
            code="context_length_exceeded",
        )

    # Answering

    async def _answer(
        self,
        request: Request,
        asked: Asked,
        form: Form,
        places: int,
        read: Callable[[], list[Question]],
    ) -> Response:
        self._adapter(asked.model)
        self._check_ids(asked.stop_token_ids, "stop_token_ids")
        if self.is_draining() or self.thread.fault is not None:
            raise EngineStoppedError(self.thread.fault or "the server is shutting down")
        self.gate.enter(places)
        call = Call()
        watch = asyncio.create_task(_watch(request, call))

        def on_close(work: Work) -> None:
            watch.cancel()
            self.metrics.count(work)
            self.gate.leave(places, time.perf_counter() - work.begun_at)

        work = Work(self.thread, asked, form, on_close, call)
        try:
            loop = asyncio.get_running_loop()
            questions = await loop.run_in_executor(self._reading, read)
            check_size(asked, questions)
            await work.begin(*self._asked_of_engine(asked, form, questions))
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
        """Of a stream that is cut off by the end of the server."""
        return event_of(as_api_error(_ended()).json()) if self.is_draining() else None

    def _asked_of_engine(
        self, asked: Asked, form: Form, questions: list[Question]
    ) -> tuple[dict[str, Any], list[Question], list[EngineRequest]]:
        """What each answer begins with, the questions, and the engine's requests for them."""
        name, settings = form.prefix + secrets.token_hex(12), self.settings
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        shows_special = isinstance(form, ChatForm) and form.reads_calls and self._hides_calls
        requests = [
            EngineRequest(
                Prompt(f"{name}/{place}", question.text, question.token_ids),
                0,
                asked.n,
                asked.sampling(
                    settings.sampling,
                    self._max_new_tokens(asked, len(question.token_ids)),
                    shows_special,
                ),
                seed,
                adapter=self._adapter(asked.model),
            )
            for place, question in enumerate(questions)
        ]
        head = {
            "id": name,
            "created": int(time.time()),
            "model": asked.model,
        }
        return head, questions, requests

    def _max_new_tokens(self, asked: Asked, prompt: int) -> int:
        """Raises ApiError where prompt and answer do not fit the context."""
        limits = self.thread.engine.limits
        room = min(limits.context, limits.num_pages * limits.page_tokens + 1) - prompt
        said = asked.most_tokens
        default = max(room, 1) if isinstance(asked, ChatAsked) else COMPLETION_TOKENS
        wanted = self.settings.max_tokens or default if said is None else said
        if said is None:
            wanted = min(wanted, max(room, 1))
        if prompt + wanted > limits.context:
            what = f"{prompt + wanted} ({prompt} of the prompt, {wanted} of the answer)"
            raise self._too_long(what)
        return wanted


async def _watch(request: Request, call: Call) -> None:
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
