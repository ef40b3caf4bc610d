"""vLLM's own servers as the engine of a run: ``rollout.engine = "vllm"`` with ``rollout.servers``
(docs/engines.md).

    run                                              each ``vllm serve``
    the published tensors as a file  ------------->  its worker loads the file, compares its model
                                                     with it and answers with its SHA-256
    a sample's tokens so far  -------------------->  /v1/completions, as a stream
    books of the samples  <----------------------    ids of tokens and their log-probabilities

The file is in ``rollout.weights_folder``, which the servers have under the same path.  A server is
started in vLLM's development mode, which has the routes that pause it and call its worker, and
with ``isobit.rollout.vllm_model.Worker`` in that.  Who draws what, and what becomes of the samples
of a server that is lost, is as with servers of Isobit (``isobit.rollout.http_engine``).
"""

import json
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import save_file

import isobit
from isobit.config.rollout import RunRolloutConfig
from isobit.models.function import LogProbFunction
from isobit.models.policy import Policy
from isobit.models.saving import published_tensors, quantised_sites, whole_blocks
from isobit.models.weight_deltas import digest_of
from isobit.rollout.answers import (
    MOST_ANSWERED,
    Answer,
    AnswerError,
    Choice,
    DrawnSample,
    Event,
    Models,
    Paused,
    Rpc,
    Scales,
    Step,
    UnavailableError,
    Updated,
    WorkerDescribed,
    read_answer,
)
from isobit.rollout.http_engine import MIB, HttpEngine
from isobit.rollout.requests import Handle, Request
from isobit.rollout.sequence import Sample
from isobit.rollout.servers import (
    PUBLISH_S,
    AskedSamples,
    News,
    Server,
    VersionedWeights,
    connect,
    difference,
    sentence_of,
)
from isobit.rollout.vllm_engine import check_whole_distribution
from isobit.rollout.vllm_model import (
    SUPPORTED,
    cache_arguments,
    check_scales,
    described_model,
    fused_names,
)
from isobit.util.errors import ConfigError, MismatchError, ServerError, StorageError, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WAIT_S, GATHER_S, TOKEN_S = 0.1, 0.02, 600.0
"""Seconds to wait for the first news of samples, for more of it, and for the next token of a
stream.
"""
_MINUS_INFINITY = -9999.0  # as vLLM writes it
_SAME = {
    "isobit": "another version of Isobit",
    "vllm": "another version of vLLM",
    "world": "its model on several GPUs",
    "vocabulary": "another vocabulary",
    "e4m3": "other matrices in E4M3",
    "makes_scales": "another KV cache",
    "logprobs_mode": "other log-probabilities",
}
"""The fields of a description that must be as expected, each with what a difference means."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class WeightsFile:
    """One version of a policy's weights, in a file that lasts as long as this."""

    version: int
    digest: str
    nbytes: int
    path: Path
    fused: Mapping[str, Sequence[str]]
    keeps_scales: bool

    @classmethod
    def of(cls, policy: Policy, folder: Path) -> "WeightsFile":
        """Write what the policy has published last.  Raises StorageError."""
        tensors = {name: one.cpu().contiguous() for name, one in published_tensors(policy)}
        digest, size = digest_of(tensors), sum(tensor.nbytes for tensor in tensors.values())
        path = folder / f"weights-{policy.version}-{digest[:12]}.safetensors"
        try:
            save_file(tensors, path)
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            raise StorageError(
                f"{path} (rollout.weights_folder) cannot be written: {error}; it needs {size:,} "
                "bytes, twice during an update"
            ) from None
        keeps_scales = policy.flow.kv_calibration == "never"
        file = cls(policy.version, digest, size, path, fused_names(policy), keeps_scales)
        weakref.finalize(file, path.unlink, missing_ok=True)
        return file

    @property
    def order(self) -> str:
        """The arguments of a worker's method."""
        asked = {"path": str(self.path), "fused": self.fused, "keeps_scales": self.keeps_scales}
        return json.dumps(asked)


class VllmServers(HttpEngine):
    """Draws samples with servers of vLLM, on copies of the weights (``RolloutEngine``), which say
    nothing of experts.

    Args:
        policy: its published rollout side is what servers load.
        config: ``servers``, ``weights_folder`` and what belongs to them.
        key: the servers' bearer token.
        tokenizer: for text and stop strings; None leaves texts empty.
        model: the folder of the run's tokenizer, for the command that starts a server.
        watch: as for ``HttpEngine``.

    Raises ConfigError for a policy that vLLM does not compute, for a server that computes something
    else, and where none answers.
    """

    tells_routings = False

    def __init__(
        self,
        policy: Policy,
        config: RunRolloutConfig,
        key: str | None,
        tokenizer: "PreTrainedTokenizerBase | None",
        model: Path,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        assert config.weights_folder is not None, "check_engine asks for it"
        self._folder, self._model = config.weights_folder.resolve(), model
        self._start = start_command(policy, self._folder, model)
        super().__init__(policy, config, key, tokenizer, seed=0, bits={}, watch=watch)

    @property
    def function(self) -> LogProbFunction:
        """The function of the servers' copies of the weights, which is the trainer's in no flow."""
        return LogProbFunction(self, self._policy.flow.graph("rollout"), _NAME)

    def figures(self) -> dict[str, Any]:
        return {"engine": _NAME, **super().figures()}

    def _check(self, requests: Sequence[Request], live: Iterable[Handle] = ()) -> None:
        """Also filters of the distribution."""
        super()._check(requests, live)
        check_whole_distribution(requests)

    def _reach(
        self, urls: Iterable[str], key: str | None, bits: Mapping[str, str]
    ) -> Sequence[Server]:
        expected = expected_of(self._policy)
        return [VllmServer(url, key, expected, self._board, self._start) for url in urls]

    def _how_to_start(self) -> str:
        return self._start

    def _take_published(self) -> VersionedWeights:
        return WeightsFile.of(self._policy, self._folder)

    def _note_update(self, weights: VersionedWeights, up: int, seconds: float) -> None:
        loaded = max(
            (took for server in self._servers for _, _, took in server.pushed), default=0.0
        )
        self._notes.append(
            f"weights of version {weights.version}: {up} of {len(self._servers)} servers have "
            f"loaded {weights.nbytes / MIB:.1f} MiB with the digest {weights.digest[:12]}, equal "
            f"to what is published; written in {max(0.0, seconds - loaded):.2f} s, loaded and "
            f"compared in {loaded:.2f} s"
        )

    def _asked(self, samples: Sequence[Sample], server: Server) -> AskedSamples:
        sampling = samples[0].prompt.request.sampling
        # vLLM refuses several greedy samples of a request
        alone = bool(sampling.stop_strings) or sampling.temperature == 0
        return replace(super()._asked(samples, server), end_here=alone)


_NAME = f"vllm {SUPPORTED[-1]}"


def expected_of(policy: Policy) -> dict[str, Any]:
    """What ``Worker.isobit_describe`` must answer."""
    whole = whole_blocks(policy.config, quantised_sites(policy.config, policy.flow).keys())
    return {
        "isobit": isobit.__version__,
        "vllm": SUPPORTED[-1],
        "world": 1,
        "vocabulary": policy.config.num_drawn,
        "e4m3": sorted(own for own, parts in fused_names(policy).items() if parts[0] in whole),
        "makes_scales": cache_arguments(policy)["calculate_kv_scales"],
        "logprobs_mode": "processed_logprobs",
    }


def start_command(policy: Policy, folder: Path, tokenizer: Path) -> str:
    """The command that starts a server, whose model ``folder`` describes then.  Raises StorageError
    where it cannot, and ConfigError for a policy that vLLM does not compute.
    """
    described, cache = described_model(policy), cache_arguments(policy)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"rollout.weights_folder cannot be written: {error}") from None
    words = [
        "VLLM_SERVER_DEV_MODE=1",
        *(["VLLM_USE_V2_MODEL_RUNNER=0"] if cache["calculate_kv_scales"] else []),
        f"vllm serve {folder} --load-format dummy --tokenizer {tokenizer.resolve()}",
        "--dtype bfloat16 --generation-config vllm --logprobs-mode processed_logprobs",
        "--stream-interval 8 --worker-extension-cls isobit.rollout.vllm_model.Worker",
    ]
    if cache["calculate_kv_scales"]:
        words.append("--kv-cache-dtype fp8 --calculate-kv-scales")
        if skipped := cache["kv_cache_dtype_skip_layers"]:
            words.append(f"--kv-cache-dtype-skip-layers {' '.join(skipped)}")
    return " ".join(words)


@dataclass(frozen=True, slots=True)
class StreamNews:
    """News of a stream: tokens of a sample, or what went wrong."""

    number: int = 0
    token_ids: Sequence[int] = ()
    log_probs: Sequence[float] = ()
    finish_reason: str | None = None
    error: Exception | None = None


class Stream:
    """A request for samples that start from the same tokens, whose answer a thread reads."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        body: Mapping[str, Any],
        numbers: Sequence[int],
        news: "SimpleQueue[StreamNews]",
    ) -> None:
        self.numbers = frozenset(numbers)
        self._url, self._headers, self._body = url, headers, json.dumps(body).encode()
        self._order, self._news, self._unended = list(numbers), news, set(numbers)
        self._connection: HTTPConnection | None = None
        self._is_closed = False
        threading.Thread(target=self._run, name=f"stream {url}", daemon=True).start()

    def close(self) -> None:
        """Have vLLM end what has not ended, by going away."""
        self._is_closed, connection = True, self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            self._read()
        except (OSError, HTTPException) as error:
            self._fail(UnavailableError(shown(str(error) or type(error).__name__)))
        except (UnavailableError, ServerError) as error:
            self._fail(error)
        finally:
            if self._connection is not None:
                self._connection.close()

    def _fail(self, error: Exception) -> None:
        if not self._is_closed:
            self._news.put(StreamNews(error=error))

    def _read(self) -> None:
        self._connection = connection = connect(self._url)
        assert connection.sock is not None
        connection.sock.settimeout(TOKEN_S)
        connection.request("POST", "/v1/completions", self._body, dict(self._headers))
        response = connection.getresponse()
        if response.status != 200:
            sentence = sentence_of(response.read())
            if response.status >= 500 or response.status in (408, 429):
                raise UnavailableError(sentence)
            raise ServerError(f"{self._url}/v1/completions answers {response.status}: {sentence}")
        for event in _events(response):
            if self._is_closed:
                return
            if (error := event.error) is not None:
                said = error.get("message", error) if isinstance(error, Mapping) else error
                raise UnavailableError(shown(str(said)))
            for choice in event.choices:
                self._note(choice)
        if self._unended and not self._is_closed:
            raise UnavailableError("the answer to /v1/completions ended before its samples")

    def _note(self, choice: Choice) -> None:
        tokens, reason = choice.token_ids or (), choice.finish_reason
        values = () if choice.logprobs is None else choice.logprobs.token_logprobs or ()
        if len(values) != len(tokens):
            raise AnswerError(f"{len(tokens)} tokens came with {len(values)} log-probabilities")
        if reason == "abort":
            raise UnavailableError("it has ended a sample before its time: others paused it")
        if choice.index >= len(self._order):
            raise AnswerError(
                f"it tells of sample {choice.index} of a request for {len(self._order)}"
            )
        number = self._order[choice.index]
        if reason is not None:
            self._unended.discard(number)
        log_probs = [float("-inf") if value == _MINUS_INFINITY else value for value in values]
        self._news.put(StreamNews(number, tokens, log_probs, reason))


def _events(response: HTTPResponse) -> Iterator[Event]:
    """The events of a stream of server-sent events.  Raises AnswerError."""
    while line := response.readline(MOST_ANSWERED + 1):
        if len(line) > MOST_ANSWERED:
            raise AnswerError(f"an event of its stream is longer than {MOST_ANSWERED >> 20} MiB")
        if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
            yield read_answer(Event, data, "/v1/completions")


def _drawn(found: Iterable[Mapping[str, Any]]) -> Step:
    """News of samples in the form of another server's step."""
    columns = ("token_ids", "log_probs")
    made = [{**one, **{name: tuple(one[name]) for name in columns}} for one in found]
    return Step(samples=tuple(DrawnSample(**one) for one in made))


def _scales_of(answer: Scales) -> Any:
    """Three numbers a layer.  Raises AnswerError."""
    with suppress(ValueError, RecursionError):
        scales = json.loads(answer.scales)
        if isinstance(scales, list) and all(_is_triple(one) for one in scales):
            return scales
    raise AnswerError("its scales cannot be read; expected three numbers a layer")


def _is_triple(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) == 3
        and all(isinstance(value, (int, float)) for value in values)
    )


class VllmServer(Server):
    """One server of vLLM (``Server``); ``start`` is the command that starts such a one."""

    def __init__(
        self, url: str, key: str | None, expected: Mapping[str, Any], board: Any, start: str
    ) -> None:
        super().__init__(url, key, expected, board)
        self._start_command, self._name = start, ""
        self._streams: list[Stream] = []
        self._news: SimpleQueue[StreamNews] = SimpleQueue()
        self._scales_due = False

    def check(self) -> None:
        """Check the server as ``Server.check`` does; one that was left paused gets its weights
        again.
        """
        try:
            description = self._call(WorkerDescribed, "isobit_describe")
            is_paused = self._read(Paused, "/is_paused").is_paused
            self._name = self._read(Models, "/v1/models").data[0].id
        except AnswerError as error:
            raise ConfigError(
                f"{self.url} (rollout.servers) is no server of vLLM with Isobit's worker: {error}; "
                f"start it as `{self._start_command}`"
            ) from None
        for name, other in _SAME.items():
            if (has := getattr(description, name)) != self._expected[name]:
                where = difference(has, self._expected[name])
                raise ConfigError(
                    f"{self.url} (rollout.servers) has {other}: {name} {where}; start it as "
                    f"`{self._start_command}`"
                )
        self.sizes, self._held = description.sizes, None if is_paused else description.weights

    # In the thread.

    def _run(self) -> None:
        try:
            super()._run()
        finally:
            self._close_streams()

    def _lose(self, problem: str, is_other: bool = False) -> None:
        self._close_streams()
        super()._lose(problem, is_other)

    def _close_streams(self) -> None:
        for stream in self._streams:
            stream.close()
        self._streams = []

    def _step(
        self, weights: VersionedWeights, asks: Sequence[AskedSamples], drops: Sequence[int]
    ) -> Step | None:
        """The news of all streams since the last step; streams without live samples are closed."""
        for stream in [stream for stream in self._streams if not stream.numbers & self._live]:
            stream.close()
            self._streams.remove(stream)
        for asked in asks:
            size = 1 if asked.end_here else len(asked.numbers)
            for first in range(0, len(asked.numbers), size):
                self._ask(asked, asked.numbers[first : first + size])
        samples: dict[int, dict[str, Any]] = {}
        for news in self._take() if self._live else ():
            if news.error is not None:
                self._board.post(News(samples=_drawn(samples.values()).samples))
                raise news.error
            if news.number not in self._live:
                continue
            sample = samples.setdefault(news.number, {"token_ids": [], "log_probs": []})
            sample["number"], sample["finish_reason"] = news.number, news.finish_reason
            sample["token_ids"] += news.token_ids
            sample["log_probs"] += news.log_probs
        if samples and self._scales_due:
            self._scales_due = False
            line = check_scales(_scales_of(self._call(Scales, "isobit_scales")))
            self._board.post(News(note=f"{self.url} has {line}"))
        return _drawn(samples.values())

    def _take(self) -> Iterator[StreamNews]:
        with suppress(Empty):
            yield self._news.get(timeout=WAIT_S)
            time.sleep(GATHER_S)
            while True:
                yield self._news.get_nowait()

    def _ask(self, asked: AskedSamples, numbers: Sequence[int]) -> None:
        sampling = asked.sampling
        body = {
            "model": self._name,
            "prompt": list(asked.token_ids),
            "n": len(numbers),
            "max_tokens": sampling["max_new_tokens"],
            "temperature": sampling["temperature"],
            # what is left out may be the model's own
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": sampling["stop_token_ids"],
            "ignore_eos": True,  # stop_token_ids says which ids end it
            "logprobs": 0,
            "stream": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        headers = {"Content-Type": "application/json", **self._authorisation}
        self._streams.append(Stream(self.url, headers, body, numbers, self._news))

    def _push(self, weights: VersionedWeights) -> None:
        """Have the worker load the file, with nothing there that is sampled."""
        assert isinstance(weights, WeightsFile)
        begun = time.perf_counter()
        self._held = None
        self._post("/pause?mode=abort")
        try:
            answer = self._call(Updated, "isobit_update", [weights.order], seconds=PUBLISH_S)
            self._post("/reset_prefix_cache")
        finally:
            self._post("/resume")
        if answer.problem is not None:
            raise ServerError(
                f"{self.url} cannot load {weights.path}: {shown(answer.problem)}; "
                "rollout.weights_folder must be a folder that servers have under the same path"
            )
        if answer.digest != weights.digest:
            raise MismatchError(
                f"{self.url} has read other bytes from {weights.path} than were written: digest "
                f"{shown(answer.digest[:12])}, expected {weights.digest[:12]}; the disk or a "
                "memory is faulty; take the server out of rollout.servers and go on with --resume"
            )
        if answer.differs is not None:
            raise MismatchError(f"{self.url}: {shown(answer.differs)}")
        seconds = time.perf_counter() - begun
        self.pushed.append((True, weights.nbytes, seconds))
        self._held, self._scales_due = weights.digest, answer.makes_scales

    def _call(
        self, kind: type[Answer], method: str, args: Sequence[str] = (), seconds: float = 120.0
    ) -> Answer:
        """The answer of a method of the server's worker.  Raises ConfigError where it has none, and
        AnswerError.
        """
        body = json.dumps({"method": method, "args": list(args)}).encode()
        ok = (200, 401, 404, 500)
        status, answer = self._request("POST", "/collective_rpc", [body], ok, seconds=seconds)
        if status == 500 and method != "isobit_describe":
            raise UnavailableError(sentence_of(answer))
        if status != 200:
            lacks = {
                401: "refuses the key: set rollout.server_key",
                404: "is no server of vLLM in development mode",
                500: f"has a worker that does not answer {method}",
            }
            raise ConfigError(
                f"{self.url} (rollout.servers) {lacks[status]}; start it as "
                f"`{self._start_command}` ({sentence_of(answer)})"
            )
        result = read_answer(Rpc, answer, "/collective_rpc").results[0]
        return read_answer(kind, json.dumps(result).encode(), method)

    def _read(self, kind: type[Answer], path: str) -> Answer:
        status, found = self._request("GET", path, [], ok=(200, 401))
        if status == 401:
            raise ConfigError(
                f"{self.url} (rollout.servers) refuses the key: set rollout.server_key to the "
                'variable that holds it, as "env:NAME"'
            )
        return read_answer(kind, found, path)

    def _post(self, path: str) -> None:
        self._request("POST", path, [b"{}"])
