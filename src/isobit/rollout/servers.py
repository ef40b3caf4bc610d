"""Servers that sample for a run over HTTP, each with a thread that talks to it
(``isobit.rollout.http_engine`` decides who draws what; ``isobit.serve.runs`` has the other end).

    run's thread                       thread of a server              server
    set_weights, ask, drop  ------->   push, if it holds others  --->  /isobit/weights/...
                                       step                      --->  /isobit/step
    News               <------------   what was drawn, who is lost

A server is up once it computes what the run does and holds the run's weights.  It is down where it
does not answer, answers with a fault of its own (500, 503) or with what is no answer of such a
server (``isobit.rollout.answers``), or where it answers and has drawn nothing of its samples for
``rollout.servers_timeout_s``.  Others go on with the samples that it had, and it is asked again
after 1, 2, 4, .. 30 s.  When it answers it gets the weights anew, from what it still holds.

A server keeps what it drew until it gets other weights, so a run that was killed and is resumed
asks each for what it has kept.
"""

import json
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from secrets import randbits, token_hex
from typing import Any, Protocol
from urllib.parse import urlsplit

from isobit.models.weight_deltas import SentWeights
from isobit.rollout.answers import (
    MOST_ANSWERED,
    AnswerError,
    Described,
    DrawnSample,
    PublishAnswer,
    Step,
    UnavailableError,
    read_answer,
)
from isobit.util.errors import ConfigError, IsobitError, MismatchError, ServerError, shown

PROTOCOL = 1
CONNECT_S, ANSWER_S, PUBLISH_S = 10.0, 120.0, 300.0
"""Seconds that a connection, an answer, and the answer to an update may take."""
IDLE_S = 2.0
"""Seconds that a connection is kept unused; servers close it after 5 s."""
FULL_S = 0.5
"""Seconds until a server whose places are taken by others is asked again."""
LONGEST_WAIT_S = 30.0
MOST_ASKED = 1 << 20
"""Tokens in one body, of which servers take 16 MiB."""
_SAME = {
    "protocol": "another version of the protocol",
    "isobit": "another version of Isobit",
    "model": "another model",
    "flow": "another precision flow",
    "bits": "other kernels or libraries, and with them other bits",
}
"""The fields of a description that must be equal, each with what a difference means."""


class VersionedWeights(Protocol):
    """One version of a policy's weights on their way to servers."""

    @property
    def version(self) -> int: ...

    @property
    def digest(self) -> str: ...

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        ...


@dataclass(frozen=True, slots=True)
class AskedSamples:
    """Samples of a server that start from the same tokens, by the engine's numbers."""

    token_ids: Sequence[int]
    numbers: Sequence[int]
    keys: Sequence[int]
    sampling: Mapping[str, Any]
    end_here: bool = False
    """Whether they may end for reasons that servers do not know of."""

    def body(self) -> dict[str, Any]:
        return {
            "token_ids": list(self.token_ids),
            "numbers": list(self.numbers),
            "keys": list(self.keys),
            "sampling": self.sampling,
        }


@dataclass(frozen=True, slots=True)
class News:
    """News of a server: tokens, lost samples, a line for the console, or an error."""

    samples: Sequence[DrawnSample] = ()
    lost: Collection[int] = ()
    """Numbers of samples that it will not go on with."""
    note: str | None = None
    error: IsobitError | None = None
    """An error that ends the run."""


@dataclass(slots=True)
class NewsBoard:
    """News of all servers for the run's thread; ``changed`` guards it, and all that this thread
    writes into a ``Server``.
    """

    patience_s: float
    """``rollout.servers_timeout_s``."""
    num_tokens: int
    """The number of tokens that can be drawn: the first of the vocabulary."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    news: list[News] = field(default_factory=list)
    is_closed: bool = False

    def post(self, news: News) -> None:
        with self.changed:
            self.news.append(news)
            self.changed.notify_all()

    def take(self, wait_s: float) -> list[News]:
        """The news that has come, waiting for it at most so many seconds."""
        with self.changed:
            self.changed.wait_for(lambda: bool(self.news), wait_s)
            taken, self.news = self.news, []
        return taken

    def close(self) -> None:
        """Let the threads end."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()


class Server:
    """One server.

    Args:
        url: ``http://host:port``.
        key: its bearer token, if it has one.
        expected: what the run computes by, in the form of ``/isobit/engine``.
        run: a name of the run that it has again when it is resumed, for what servers have kept.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        expected: Mapping[str, Any],
        board: NewsBoard,
        run: str | None = None,
    ) -> None:
        self.url, self._key, self._expected, self._board = url, key, expected, board
        self.is_up, self.problem = False, "it has not been asked yet"
        self.sizes: Mapping[str, int] = {}
        self.name: str | None = None
        """What it calls itself, once it has answered."""
        self.pushed: list[tuple[bool, int, float]] = []
        """Of each update: whether all weights went, bytes and seconds."""
        self.kept: frozenset[int] = frozenset()
        """Keys of samples that it has kept from before."""
        self._weights: VersionedWeights | None = None
        self._asks: list[AskedSamples] = []
        self._drops: list[int] = []
        # of the thread alone
        self._held: str | None = None
        self._live: set[int] = set()
        self._is_full = self._begins = False
        self._heard_at = 0.0
        """The time at which it last had nothing to draw, or sent a token."""
        self._client = token_hex(8) if run is None else sha256(f"{run} {url}".encode()).hexdigest()
        self._session = randbits(53)
        self._connection: HTTPConnection | None = None
        self._used_at = 0.0

    def check(self) -> None:
        """Raises ConfigError for a server that cannot serve the run, UnavailableError for one that
        does not answer.
        """
        description = self._get()
        for name, other in _SAME.items():
            if (has := getattr(description, name)) != self._expected[name]:
                where = difference(has, self._expected[name])
                raise ConfigError(
                    f"{self.url} (rollout.servers) has {other}: {where}; start it with the same "
                    "model, --precision, --back_end and version as the run, on the same kind of "
                    "device"
                )
        self.sizes, self._held = description.sizes, description.weights
        self.name = description.server

    def start(self) -> None:
        threading.Thread(target=self._run, name=f"server {self.url}", daemon=True).start()

    # By the run's thread, which holds ``board.changed``.

    def set_weights(self, weights: VersionedWeights) -> None:
        """Sample from other weights from now on; all samples of the present ones are dropped."""
        self._weights, self.is_up = weights, False
        self._drops, self._asks = [], []

    def ask(self, asked: AskedSamples) -> None:
        self._asks.append(asked)

    def drop(self, numbers: Iterable[int]) -> None:
        self._drops.extend(numbers)

    # In the thread.

    def _run(self) -> None:
        wait_s, is_checked = 1.0, bool(self.sizes)
        while not self._board.is_closed:
            try:
                if not is_checked:
                    self.check()
                is_checked = False
                self._session += 1
                while self._turn():
                    wait_s = 1.0
            except (UnavailableError, ConfigError) as error:
                is_checked = False
                self._lose(str(error), isinstance(error, ConfigError) or self._begins)
                with self._board.changed:
                    self._board.changed.wait_for(lambda: self._board.is_closed, wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            except IsobitError as error:
                self._lose(str(error))
                self._board.post(News(error=error))
                return
            except BaseException as error:  # a fault here
                self._lose(f"{type(error).__name__}: {error}")
                self._board.post(News(error=ServerError(f"{self.url}: {self.problem}")))
                raise
        self._close()

    def _turn(self) -> bool:
        """Send what is to be sent and hear what there is; False once the board is closed."""
        board = self._board
        with board.changed:
            board.changed.wait_for(
                lambda: (
                    board.is_closed
                    or self._asks
                    or self._drops
                    or self._live
                    or (self._weights is not None and not self.is_up)
                )
            )
            if board.is_closed:
                return False
            weights, is_up = self._weights, self.is_up
            asks, drops = self._take_asks(), self._drops
            self._drops = []
        assert weights is not None
        if not is_up:
            self._begin(weights)
            return True
        if not self._live:
            self._heard_at = time.monotonic()
        numbers = {number for ask in asks for number in ask.numbers}
        self._live |= numbers
        self._live -= set(drops)
        answer = self._step(weights, asks, drops)
        self._is_full = answer is None
        if answer is None:  # others have its places: let ours that have ended go, and ask again
            with board.changed:
                self._asks[:0] = asks
            time.sleep(FULL_S)
            self._live -= numbers
            answer = self._step(weights, [], drops) or Step(samples=())
        answer.check_tokens(board.num_tokens)
        self._live -= {sample.number for sample in answer.samples if sample.finish_reason}
        board.post(News(samples=answer.samples))
        self._check_progress(answer)
        return True

    def _check_progress(self, answer: Step) -> None:
        """Raise UnavailableError where nothing was drawn for too long, though it answers."""
        now = time.monotonic()
        if not self._live or any(sample.token_ids for sample in answer.samples):
            self._heard_at = now
        elif now - self._heard_at > self._board.patience_s:
            raise UnavailableError(
                f"it answers, and has drawn no token of {len(self._live)} samples for "
                f"{self._board.patience_s:g} s (rollout.servers_timeout_s): it may be paused, or "
                "the address lead elsewhere"
            )

    def _take_asks(self) -> list[AskedSamples]:
        """Take as many requests as a body holds; one after the server had no places for them."""
        taken: list[AskedSamples] = []
        tokens, most = 0, 0 if self._is_full else MOST_ASKED
        while self._asks and (not taken or tokens + len(self._asks[0].token_ids) <= most):
            tokens += len(self._asks[0].token_ids)
            taken.append(self._asks.pop(0))
        return taken

    def _begin(self, weights: VersionedWeights) -> None:
        """Have the server hold these weights, in a session that has asked for nothing."""
        self._begins, is_held = True, self._held == weights.digest
        answer = None
        if self._live:
            self._session += 1
        if self._live or is_held:
            self._live.clear()
            answer = self._step(weights, [], [])
        if not is_held:
            self._push(weights)
        kept = frozenset(answer.kept if is_held and answer is not None else ())
        with self._board.changed:
            self.kept = kept
            self.is_up = weights is self._weights
        self._board.post(News(note=f"{self.url} samples" if self.problem else None))
        self.problem, self._begins = "", False

    def _step(
        self, weights: VersionedWeights, asks: Sequence[AskedSamples], drops: Sequence[int]
    ) -> Step | None:
        """The answer; None where the places do not suffice for what is asked."""
        body = {
            "client": self._client,
            "session": self._session,
            "weights": weights.digest,
            "ask": [ask.body() for ask in asks],
            "drop": list(drops),
        }
        sent = json.dumps(body).encode()
        status, answer = self._request("POST", "/isobit/step", [sent], ok=(200, 409, 429))
        if status == 409:
            self._held = None
            raise UnavailableError(sentence_of(answer))
        return None if status == 429 else read_answer(Step, answer, "/isobit/step")

    def _push(self, weights: VersionedWeights) -> None:
        """Send an update, and all weights where it does not lead to the right digest."""
        assert isinstance(weights, SentWeights)
        base = self._held if self._held == weights.base else None
        for start in dict.fromkeys((base, None)):
            begun, size = time.perf_counter(), 0
            self._held = None
            body = json.dumps({"base": start}).encode()
            status, _ = self._request("POST", "/isobit/weights/begin", [body], ok=(200, 409))
            if status == 409:
                continue
            for file in weights.files(start):
                size += sum(map(len, file))
                self._request("POST", "/isobit/weights/part", file, is_json=False)
            body = json.dumps({"sha256": weights.digest}).encode()
            _, found = self._request("POST", "/isobit/weights/publish", [body], seconds=PUBLISH_S)
            answer = read_answer(PublishAnswer, found, "/isobit/weights/publish")
            self.pushed.append((start is None, size, time.perf_counter() - begun))
            if answer.sha256 != weights.digest:
                continue
            if answer.published != weights.published:
                raise MismatchError(
                    f"{self.url} was sent the weights of version {weights.version} and quantised "
                    "them to other bytes than the trainer has: a folder in FP8 is sampled as it "
                    "is until the first update, which another engine cannot repeat; begin with "
                    "the model in BF16, or set rollout.engine = 'native'"
                )
            self._held = weights.digest
            return
        raise MismatchError(
            f"{self.url} was sent all weights of version {weights.version}, and they have another "
            "digest there: the connection or a memory is faulty; take it out of rollout.servers "
            "and go on with --resume"
        )

    def _lose(self, problem: str, is_other: bool = False) -> None:
        """``is_other``: it is there, and computes something else than before, or does not take
        part.
        """
        self._close()
        self._begins = False
        with self._board.changed:
            asked = {number for ask in self._asks for number in ask.numbers}
            lost, self._live = self._live | asked, set()
            is_new = self.is_up or (is_other and problem != self.problem)
            self.is_up, self.problem, self._asks, self._drops = False, problem, [], []
        note = f"{self.url} is down, and others go on with its samples: {problem}"
        self._board.post(News(lost=lost, note=note if is_new else None))

    # HTTP

    def _get(self) -> Described:
        status, found = self._request("GET", "/isobit/engine", [], ok=(200, 401, 404))
        if status == 401:
            raise ConfigError(
                f"{self.url} (rollout.servers) refuses the key: set rollout.server_key to the "
                'variable that holds it, as "env:NAME"'
            )
        if status == 404:
            raise ConfigError(
                f"{self.url} (rollout.servers) takes no weights of a run: start it as `isobit "
                "serve MODEL --api-key env:NAME --allow-weight-updates DIR`"
            )
        try:
            return read_answer(Described, found, "/isobit/engine")
        except AnswerError as error:
            raise ConfigError(
                f"{self.url} (rollout.servers) is no server of Isobit, or of another version: "
                f"{error}; name the address of one"
            ) from None

    def _request(
        self,
        method: str,
        path: str,
        pieces: Sequence[memoryview | bytes],
        ok: Collection[int] = (200,),
        is_json: bool = True,
        seconds: float = ANSWER_S,
    ) -> tuple[int, bytes]:
        """Status and body. Raises UnavailableError where the server is not there, is busy ending
        or has a fault, AnswerError for an endless answer, and ServerError for what it refuses.
        """
        headers = {
            "Content-Type": "application/json" if is_json else "application/octet-stream",
            "Content-Length": str(sum(map(len, pieces))),
            **self._authorisation,
        }
        try:
            connection = self._connected(seconds)
            connection.request(method, path, iter(pieces), headers)
            response = connection.getresponse()
            status, content = response.status, response.read(MOST_ANSWERED + 1)
        except (OSError, HTTPException) as error:
            self._close()
            raise UnavailableError(shown(str(error) or type(error).__name__)) from None
        self._used_at = time.monotonic()
        if len(content) > MOST_ANSWERED:
            self._close()
            raise AnswerError(f"its answer to {path} is longer than {MOST_ANSWERED >> 20} MiB")
        if status in ok:
            return status, content
        sentence = sentence_of(content)
        if status >= 500 or status in (408, 499):
            raise UnavailableError(f"{path} answers with {status}: {sentence}")
        raise ServerError(f"{self.url}{path} answers with {status}: {sentence}")

    @property
    def _authorisation(self) -> dict[str, str]:
        return {} if self._key is None else {"Authorization": f"Bearer {self._key}"}

    def _connected(self, seconds: float) -> HTTPConnection:
        if self._connection is not None and time.monotonic() - self._used_at > IDLE_S:
            self._close()
        if self._connection is None:
            self._connection = connect(self.url)
        if self._connection.sock is not None:
            self._connection.sock.settimeout(seconds)
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def connect(url: str) -> HTTPConnection:
    """Raises OSError."""
    address = urlsplit(url)
    kind = HTTPSConnection if address.scheme == "https" else HTTPConnection
    assert address.hostname is not None
    connection = kind(address.hostname, address.port, timeout=CONNECT_S)
    connection.connect()
    return connection


def sentence_of(found: bytes) -> str:
    """The message of an error response, or its first bytes."""
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        return shown(json.loads(found)["error"]["message"])
    return shown(found[:200].decode(errors="replace"))


def difference(found: Any, expected: Any) -> str:
    """The first place where two values differ."""
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        for name in expected:
            if found.get(name) != expected[name]:
                return f"{name} {difference(found.get(name), expected[name])}"
    if isinstance(found, list) and isinstance(expected, list):
        pairs = zip(found, expected, strict=False)
        different = next((pair for pair in pairs if pair[0] != pair[1]), None)
        if different is not None:
            found, expected = different
    return f"is {shown(repr(found))}, and the run's {shown(repr(expected))}"
