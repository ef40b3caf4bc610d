"""Servers elsewhere as the engine of a run: ``rollout.engine = "http"`` (docs/engines.md).

    run                                              each of rollout.servers
    masters, rounded as a publication does   ----->  publishes them: the same 8-bit bytes
    a sample's tokens and the key of its noise  -->  draws on, in the run's flow
    books of the samples                     <-----  tokens and log-probabilities

A token depends on the tokens before it, the key of its sample's noise, its place and the weights,
so it does not matter which server draws it, and a run over HTTP leaves the bytes of a native one.
Samples of a server that is lost go on at others, behind the tokens that were heard of; stop strings
are looked for here, as episodes are.

``isobit.rollout.servers`` talks to the servers.
"""

import json
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

import isobit
from isobit.config.rollout import RunRolloutConfig
from isobit.memory.cache_size import pages_for
from isobit.models.function import LogProbFunction, function_of
from isobit.models.policy import Policy
from isobit.models.weight_deltas import SentWeights
from isobit.parallel.world import ALONE, World, raised_on_all, run_on_all
from isobit.rollout.answers import DrawnSample, UnavailableError
from isobit.rollout.remote_samples import RemoteSamples
from isobit.rollout.requests import EngineLimits, Handle
from isobit.rollout.sequence import Sample
from isobit.rollout.servers import PROTOCOL, AskedSamples, NewsBoard, Server, VersionedWeights
from isobit.util.errors import ConfigError, ServerError, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIB = 1 << 20
_TICK_S = 0.1
"""The longest that a step waits for news."""


def described(policy: Policy, bits: Mapping[str, str]) -> dict[str, Any]:
    """The description of a run that a server must share, as it comes out of JSON; ``bits`` is the
    class of the run's machine (``isobit.store.class_of_bits``).
    """
    graph = policy.flow.graph("rollout")
    value = {
        "protocol": PROTOCOL,
        "isobit": isobit.__version__,
        "model": asdict(replace(policy.config, value_head=False)),
        "flow": [site.forward_formats for site in graph.sites],
        "bits": dict(bits),
    }
    return json.loads(json.dumps(value))


@dataclass(slots=True)
class Load:
    """The work that a server has to do."""

    samples: int = 0
    tokens: int = 0
    """The most that they may still have."""

    def add(self, sample: Sample, sign: int) -> None:
        self.samples += sign
        self.tokens += sign * sample.max_length


class HttpEngine(RemoteSamples):
    """Draws samples with servers elsewhere, which hold the current weights of a policy
    (``RolloutEngine``).

    Args:
        policy: its masters are what servers are sent.
        config: ``servers`` and what belongs to them.
        key: their bearer token.
        tokenizer: for text and stop strings; None leaves texts empty.
        seed: of the run; with prompt, visit and sample it fixes the noise.
        bits: the class of this machine's bits, which must be the servers'.
        run: a name of the run that it has again when it is resumed.
        world: of the policy; each rank has an engine, with other servers.
        watch: called all the time while servers are waited for in the middle of a call; what it
            raises ends the call.

    Raises ConfigError, on all ranks, for a server that computes something else, and where none of
    a rank's answers.
    """

    tells_routings = True
    """Whether servers say which experts a token had."""

    def __init__(
        self,
        policy: Policy,
        config: RunRolloutConfig,
        key: str | None,
        tokenizer: "PreTrainedTokenizerBase | None",
        seed: int,
        bits: Mapping[str, str],
        run: str | None = None,
        world: World = ALONE,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self._policy, self._patience_s, self._run = policy, config.servers_timeout_s, run
        self._watch = watch
        self._board = NewsBoard(self._patience_s, policy.config.num_drawn)
        self._servers = self._reach(config.servers, key, bits)
        self._loads = {server: Load() for server in self._servers}
        notes = run_on_all(world, self._check_servers)
        names = [(one.name, one.url) for one in self._servers if one.name]
        _check_apart([name for of_rank in world.all_gather(names) for name in of_rank])
        own = [dict(one.sizes) for one in self._servers if one.sizes]
        sizes = [size for of_rank in world.all_gather(own) for size in of_rank]
        limits = EngineLimits(
            min(size.get("context", policy.config.max_positions) for size in sizes),
            policy.config.vocab_size,
            min(size["pages"] for size in sizes),
            max(size["page_tokens"] for size in sizes),
            tokenizer is not None,
        )
        super().__init__(limits, seed, tokenizer)
        self._notes += notes
        self._there: dict[int, tuple[Sample, Server]] = {}
        """Samples that a server has, by the numbers that they have there."""
        self._number_of: dict[Handle, int] = {}
        self._numbered = 0
        self._weights: VersionedWeights | None = None
        self._holds = False
        self._heard_at = monotonic()
        weakref.finalize(self, self._board.close)
        for server in self._servers:
            server.start()

    @property
    def function(self) -> LogProbFunction:
        """The trainer's, if its flow is one function: servers have its bytes and its kernels."""
        return function_of(self._policy, "rollout")

    @property
    def num_running(self) -> int:
        """Samples that servers have, of which some may wait there."""
        return len(self._there)

    @property
    def has_room(self) -> bool:
        """Whether all live samples are at servers, or will be at the next step."""
        waiting = len(self._live) - len(self._there)
        return not waiting or waiting < sum(self._room(one) for one in self._servers if one.is_up)

    def figures(self) -> dict[str, Any]:
        """The sizes of the smallest server's cache, of all ranks."""
        limits = self._limits
        return {"kv_pages": limits.num_pages, "page_tokens": limits.page_tokens}

    def take_weights(self) -> None:
        """Have the servers hold what was published last.  All ranks together."""
        with self._all_or_nothing():
            self._update()

    def release(self) -> None:
        """Nothing of it is on the device."""

    @contextmanager
    def weights_held(self) -> Iterator[None]:
        """A block in which servers keep the weights that they have, though the policy learns."""
        self._holds = True
        try:
            yield
        finally:
            self._holds = False

    # Servers

    def _reach(
        self, urls: Iterable[str], key: str | None, bits: Mapping[str, str]
    ) -> Sequence[Server]:
        expected = described(self._policy, bits)
        return [Server(url, key, expected, self._board, self._run) for url in urls]

    def _how_to_start(self) -> str:
        """The command that starts a server."""
        return "isobit serve MODEL --api-key env:NAME --allow-weight-updates DIR"

    def _take_published(self) -> VersionedWeights:
        """The weights published last, as servers get them."""
        assert self._weights is None or isinstance(self._weights, SentWeights)
        return SentWeights.of(self._policy, self._weights)

    def _check_servers(self) -> list[str]:
        """-> Lines on those that do not answer, which are asked again later."""
        notes: list[str] = []
        for server in self._servers:
            try:
                server.check()
                server.problem = ""
            except UnavailableError as error:
                server.problem = str(error)
                notes.append(f"{server.url} does not answer yet: {error}")
        if not any(server.sizes for server in self._servers):
            raise ConfigError(
                f"none of rollout.servers answers ({self._problems()}); start them with "
                f"`{self._how_to_start()}`, or correct the addresses"
            )
        return notes

    def _problems(self) -> str:
        def state(server: Server) -> str:
            if not server.is_up:
                return server.problem or "no answer"
            if samples := self._loads[server].samples:
                return (
                    f"it answers, and has drawn nothing of {samples} samples; it may be paused, "
                    "or others have its places"
                )
            if self._room(server) > 0:
                return "it answers, and has a cache or a context too small for what waits"
            return "it answers, and has no places for samples"

        return "; ".join(f"{one.url}: {state(one)}" for one in self._servers)

    def _draw(self) -> None:
        """Hand out what waits, and hear what servers have drawn.

        Raises ServerError where no server has drawn a token for ``rollout.servers_timeout_s``,
        whether they answer or not, and MismatchError where a server has other weights than it was
        sent.
        """
        self._update()
        self._hand_out()
        self._hear(draws=True)

    def _update(self) -> None:
        """Have all servers that answer hold the newest weights, with no sample there meanwhile."""
        before = self._weights
        if before is not None and (self._holds or before.version == self._policy.version):
            return
        begun = perf_counter()
        for number in list(self._there):
            self._forget(number)
        self._weights = weights = self._take_published()
        self._heard_at = monotonic()
        for server in self._servers:
            server.pushed.clear()
        with self._board.changed:
            for server in self._servers:
                server.set_weights(weights)
            self._board.changed.notify_all()
        while True:
            self._watch()
            self._hear()
            with self._board.changed:
                up = sum(one.is_up for one in self._servers)
                asked = sum(not one.is_up and not one.problem for one in self._servers)
            if up and not asked:
                break
        seconds = perf_counter() - begun
        self._note_update(weights, up, seconds)
        self._count_update(seconds, is_first=before is None)

    def _note_update(self, weights: VersionedWeights, up: int, seconds: float) -> None:
        sent = [size for server in self._servers for _, size, _ in server.pushed]
        self._notes.append(
            f"weights of version {weights.version}: {up} of {len(self._servers)} servers have "
            f"acknowledged the digest {weights.digest[:12]}; {sum(sent) / MIB:.1f} MiB sent to "
            f"{len(sent)} (all weights are {weights.nbytes / MIB:.1f} MiB), {seconds:.2f} s"
        )

    def _hand_out(self) -> None:
        """Give what waits to the servers with the fewest tokens to draw, or to the one that has
        kept it from before; samples that start from one prompt together.
        """
        waiting = [sample for sample in self._live.values() if sample.handle not in self._number_of]
        if not waiting:
            return
        groups = [list(group) for _, group in groupby(waiting, _start)]
        with self._board.changed:
            for group in groups:
                while group:
                    fit = [
                        one
                        for one in self._servers
                        if one.is_up and self._room(one) > 0 and _has_space(one, group[0])
                    ]
                    if not fit:
                        break
                    keys = {sample.key for sample in group}
                    server = min(fit, key=lambda one: self._preference(one, keys))
                    room = self._room(server)
                    server.ask(self._asked(group[:room], server))
                    group = group[room:]
            self._board.changed.notify_all()

    def _preference(self, server: Server, keys: Collection[int]) -> tuple[bool, int]:
        """The least for a server that has kept some of the samples, then by the tokens to draw."""
        return server.kept.isdisjoint(keys), self._loads[server].tokens

    def _room(self, server: Server) -> int:
        """A few more than run at once, so that none waits for the next step to be asked."""
        most = min(server.sizes["places"], server.sizes["running"] * 5 // 4 + 1)
        return most - self._loads[server].samples

    def _asked(self, samples: Sequence[Sample], server: Server) -> AskedSamples:
        first, sampling = samples[0], samples[0].prompt.request.sampling
        numbers = range(self._numbered + 1, self._numbered + 1 + len(samples))
        self._numbered += len(samples)
        for number, sample in zip(numbers, samples, strict=True):
            self._there[number] = sample, server
            self._number_of[sample.handle] = number
            self._loads[server].add(sample, 1)
        self.stats.prompt_tokens += len(first.prompt.tokens)
        self.stats.recomputed_tokens += len(first.tokens) - len(first.prompt.tokens)
        asked = {
            "max_new_tokens": first.max_length - len(first.tokens),
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "stop_token_ids": list(sampling.stop_token_ids),
        }
        return AskedSamples(tuple(first.tokens), numbers, [one.key for one in samples], asked)

    def _hear(self, draws: bool = False) -> None:
        """Take in the servers' news; ``draws`` says whether those that are up should draw."""
        for news in self._board.take(_TICK_S):
            if news.error is not None:
                raise news.error
            self._notes += [] if news.note is None else [news.note]
            for number in news.lost:
                self._forget(number)
            for drawn in news.samples:
                self._accept(drawn)
        with self._board.changed:
            is_up = any(server.is_up for server in self._servers)
        if (draws or not is_up) and monotonic() - self._heard_at > self._patience_s:
            state = "though some answer" if is_up else "and none is up"
            raise ServerError(
                f"no server has drawn a token for {self._patience_s:g} s "
                f"(rollout.servers_timeout_s), {state} ({self._problems()}); start them "
                "again, and go on with --resume"
            )

    def _accept(self, drawn: DrawnSample) -> None:
        """Append what a server drew for one sample, up to what ends it here.  Raises ServerError
        for columns that the sample needs and has not, and for an end that is none.
        """
        if (found := self._there.get(drawn.number)) is None:
            return  # aborted, or with another server
        sample, server = found
        assert self._weights is not None
        self._check_columns(sample, server, drawn)
        if drawn.token_ids:
            self._heard_at = monotonic()
        truncated, routings = drawn.truncated_log_probs, drawn.routings
        for at, token in enumerate(drawn.token_ids):
            version = self._weights.version
            self._append(sample, token, drawn.log_probs[at], version, server.url)
            sample.routings += routings[at : at + 1]
            sample.truncated_log_probs += truncated[at : at + 1]
            if sample.finish_reason is not None:
                break
        reason = drawn.finish_reason
        if sample.finish_reason is not None:
            if reason is not None:
                self._forget(drawn.number)
            self._end(sample)
        elif reason is not None:
            raise ServerError(
                f"{server.url} ended a sample of prompt {sample.handle.prompt_id!r} after "
                f"{len(sample.log_probs)} tokens for the reason {shown(repr(reason))}, which ends "
                "none here"
            )

    def _check_columns(self, sample: Sample, server: Server, drawn: DrawnSample) -> None:
        truncates = sample.prompt.request.sampling.truncates
        routes = self.tells_routings and self._policy.config.experts is not None
        for is_needed, column, what in (
            (
                truncates,
                drawn.truncated_log_probs,
                "truncated_log_probs, which its filters ask for",
            ),
            (routes, drawn.routings, "routings, which a mixture of experts has"),
        ):
            if is_needed and len(column) != len(drawn.token_ids):
                raise ServerError(
                    f"{server.url} has drawn tokens for prompt {sample.handle.prompt_id!r} without "
                    f"{what}; take it out of rollout.servers and go on with --resume"
                )

    def _forget(self, number: int) -> None:
        """A server does not have a sample any more; it waits, unless it has ended."""
        if number in self._there:
            sample, server = self._there.pop(number)
            del self._number_of[sample.handle]
            self._loads[server].add(sample, -1)

    def _let_go(self, samples: Iterable[Sample]) -> None:
        """Have servers drop samples."""
        for sample in samples:
            if (number := self._number_of.get(sample.handle)) is None:
                continue
            _, server = self._there[number]
            with self._board.changed:
                server.drop([number])
                self._board.changed.notify_all()
            self._forget(number)

    def _begin_period(self) -> None:
        if not self._live:
            self._heard_at = monotonic()
        super()._begin_period()


def _has_space(server: Server, sample: Sample) -> bool:
    """Whether a server holds a sample of any length that it may have: one that comes later can have
    a smaller cache or context than those that the engine has its limits from.
    """
    sizes, most = server.sizes, sample.max_length
    is_short = most <= sizes.get("context", most)
    return is_short and pages_for(most - 1, sizes["page_tokens"]) <= sizes["pages"]


def _check_apart(named: Iterable[tuple[str, str]]) -> None:
    """Refuse two addresses of one server, by the names that servers have for themselves."""
    addresses: dict[str, str] = {}
    for name, url in named:
        if name in addresses:
            raise raised_on_all(
                ConfigError(
                    f"rollout.servers names one server twice, as {addresses[name]} and {url}; name "
                    "each once, and start as many as the run has processes"
                )
            )
        addresses[name] = url


def _start(sample: Sample) -> tuple[int, int]:
    """A key that samples share which start from the same tokens."""
    is_fresh = len(sample.tokens) == len(sample.prompt.tokens)
    return id(sample.prompt), -1 if is_fresh else sample.handle.sample
