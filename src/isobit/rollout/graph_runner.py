"""The engine's model on an asynchronous device: decode steps captured and replayed, prompts run as
they come, nothing waited for.

A decode step is one captured graph for a number of sequences: newest tokens in, K and V written,
next tokens drawn, all of it on rows of ``DeviceState``.  Weights are read where the policy
publishes them and pages where the cache holds them, so neither new weights nor new pages need
another capture.  Batches are padded up to a captured size; sizes are captured when they first
occur, and so are longer contexts, whose attention runs in more parts.  Where a sample has a filter
(top-k, top-p, min-p), the graph ends with the logits.

Guesses (``isobit.rollout.drafts``) are rows of their own in such a step: to attention the k + 1
rows of a sample are as many sequences with the same pages, each one token longer than the one
before, whose K and V are all written before any is read. So a row's kernels, and its bits, are
those of decoding, a step is captured for a number of rows however they are shared out, and the keys
of a sample are read once for each of its rows. To a delta rule they are one sequence
(``DecodeBatch.places``). The device itself counts the guesses that it has drawn.

The carries that each row's sequence reads and writes, of a model with delta rules, the host sends
with a step: it knows how many tokens are in the cache. Rows of padding have one of their own.

Drawn tokens travel to the host behind the step that made them; ``TokensInFlight`` waits for them.

What the device itself knows of each running sample: its newest token, its length, its pages, its
noise key and its temperature.

A decode step reads and writes these rows without the host, so the next step can be launched before
this one's tokens are known.  A sample has a slot for as long as it runs.  The last slot is
nobody's: a batch is padded with it up to a captured size; its length stays 0 and its K and V go to
a page of its own.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobit.kernels import backend as back_ends
from isobit.kernels.backend import Backend, Captured, name_fallbacks
from isobit.kernels.operands import DecodeBatch, Drawn, Draws
from isobit.memory.cache_size import SPECULATED_ROWS, CacheSize
from isobit.models.folder import model_needs
from isobit.models.function import SampledPolicy
from isobit.parallel.world import Pulse
from isobit.rollout.draws import Ready, distinct_rows, draws_of, truncates
from isobit.rollout.runner import DrawnToken, build_batch, empty_cache, rollout_states
from isobit.rollout.scheduler import Plan
from isobit.rollout.sequence import Sample, States
from isobit.util.errors import ConfigError
from isobit.util.terminal import say


class DeviceState:
    """The rows of all slots, and which sample has which."""

    def __init__(
        self,
        num_slots: int,
        max_pages: int,
        page_tokens: int,
        padding_page: int,
        backend: Backend,
    ) -> None:
        def zeros(dtype: torch.dtype, *more: int) -> torch.Tensor:
            return torch.zeros(num_slots + 1, *more, dtype=dtype, device=backend.device)

        self.padding = num_slots
        self.tokens = zeros(torch.int64)
        """The newest token, whose K and V are not in the cache yet."""
        self.lengths = zeros(torch.int64)
        """Tokens in the cache."""
        self.keys = zeros(torch.int64)
        self.temperatures = zeros(torch.float32)
        self._table = zeros(torch.int32, max_pages)
        self._table[self.padding] = padding_page
        self._grows = torch.ones_like(self.lengths)
        self._grows[self.padding] = 0
        self._page_tokens, self._to_device = page_tokens, backend.to_device
        self._slots: dict[Sample, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        # entries of the slot's row of the table that are up to date
        self._pages_known = [0] * num_slots

    def slots(self, samples: Sequence[Sample]) -> list[int]:
        """The slots of samples that have one, after bringing their pages up to date."""
        slots = [self._slots[sample] for sample in samples]
        stale = [
            (slot, sample)
            for slot, sample in zip(slots, samples, strict=True)
            if self._pages_known[slot] != len(sample.pages)
        ]
        if stale:
            rows = torch.from_numpy(
                np.stack([sample.block_row for _, sample in stale]).astype(np.int32)
            )
            index = torch.tensor([slot for slot, _ in stale])
            self._table[:, : rows.shape[1]].index_copy_(
                0, self._to_device(index), self._to_device(rows)
            )
            for slot, sample in stale:
                self._pages_known[slot] = len(sample.pages)
        return slots

    def admit(self, samples: Sequence[Sample], tokens: torch.Tensor) -> None:
        """Give each sample a slot and its first state: ``tokens`` int64 [N] were just drawn, all
        before them are in the cache.
        """
        for sample in samples:
            slot = self._slots[sample] if sample in self._slots else self._free.pop()
            self._slots[sample], self._pages_known[slot] = slot, 0
        index = self._to_device(torch.tensor(self.slots(samples)))
        lengths, keys = (
            torch.tensor(values)
            for values in zip(*((len(s.tokens), s.key) for s in samples), strict=True)
        )
        temperatures = torch.tensor(
            [sample.prompt.request.sampling.temperature for sample in samples], dtype=torch.float32
        )
        self.tokens.index_copy_(0, index, tokens)
        for row, values in (
            (self.lengths, lengths),
            (self.keys, keys),
            (self.temperatures, temperatures),
        ):
            row.index_copy_(0, index, self._to_device(values))

    def forget(self, samples: Iterable[Sample]) -> None:
        """The slots of these samples are free; what was launched for them may still run."""
        for sample in samples:
            slot = self._slots.pop(sample, None)
            if slot is not None:
                self._free.append(slot)

    def clear(self) -> None:
        """Forget all samples."""
        self.forget(list(self._slots))

    def batch(
        self, rows: torch.Tensor, max_length: int, carries: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, DecodeBatch]:
        """The tokens int64 [B] of rows, and where their K and V go; ``carries`` as in
        ``DecodeBatch``.

        ``rows`` is int64 [1, B]: a slot each, of which the newest token is meant. Where guesses are
        among them it is [3, B], also the token that is guessed, -1 for the newest, and how many
        rows of the slot stand before this one.
        """
        tokens, positions, table = self.tokens[rows[0]], self.lengths[rows[0]], self._table[rows[0]]
        places = rows[2] if len(rows) > 1 else None
        if places is not None:
            tokens, positions = torch.where(rows[1] < 0, tokens, rows[1]), positions + places
        pages = table.gather(1, (positions // self._page_tokens)[:, None])[:, 0].long()
        slots = pages * self._page_tokens + positions % self._page_tokens
        lengths = (positions + 1).int()
        batch = DecodeBatch(positions, slots, table, lengths, max_length, carries, places)
        return tokens, batch

    def append(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """``tokens`` int64 [B] were drawn from ``rows``: what precedes them is in the cache now. Of
        a slot's rows those count whose guess, and each before it, is the token that was drawn from
        the row before.
        """
        slots, grown = rows[0], self._grows[rows[0]]
        newest_of = slots
        if len(rows) > 1:
            guesses, places = rows[1], rows[2]
            index = torch.arange(tokens.numel(), device=tokens.device)
            wrong = (places > 0) & (guesses != tokens.roll(1))
            # the last wrong guess up to a row belongs to a sample before its own
            counts = torch.where(wrong, index, -1).cummax(0).values < index - places
            is_last = counts & ~(counts & (places > 0)).roll(-1)
            newest_of, grown = torch.where(is_last, slots, self.padding), grown * counts
        self.tokens.index_copy_(0, newest_of, tokens)
        self.lengths.index_add_(0, slots, grown)


_SLOW_CAPTURE = 1.0
"""Seconds from which a first capture is worth a line: kernels were compiled."""
_compiled: set[tuple[object, ...]] = set()
"""What this process has captured before, whose kernels it has: a runner that is made again captures
again, but compiles nothing.
"""
_measured: dict[tuple[object, ...], tuple[float, float]] = {}
"""Seconds of captured steps with guesses, of which this process has measured each once."""
_MEASURED_LENGTH = 8192
"""The longer of the two lengths at which they are measured, where a sequence may be as long."""
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class DrawnFor:
    """Tokens drawn for samples."""

    samples: Sequence[Sample]
    drawn: Drawn
    routings: Tensor | None
    """int64 [N], of the rows that they were drawn from; None for a model without experts."""


class TokensInFlight:
    """The tokens of one step on their way to the host."""

    def __init__(
        self, parts: Sequence[DrawnFor], backend: Backend, pulse: Pulse | None = None
    ) -> None:
        """``pulse`` of a rank that shares the engine: its tokens wait for those of the others."""
        self._pulse = pulse
        self._samples = [sample for part in parts for sample in part.samples]
        drawn = [part.drawn for part in parts]
        columns: dict[str, list[Tensor]] = {}
        if parts:
            columns["tokens"] = [draw.tokens for draw in drawn]
            columns["log_probs"] = [draw.log_probs for draw in drawn]
        if any(draw.truncated is not None for draw in drawn):
            columns["truncated"] = [
                draw.log_probs if draw.truncated is None else draw.truncated for draw in drawn
            ]
        if routings := [part.routings for part in parts if part.routings is not None]:
            columns["routings"] = routings
        self._names = list(columns)
        self._arriving = backend.to_host([torch.cat(column) for column in columns.values()])

    def wait(self) -> list[DrawnToken]:
        """Wait for the tokens; they come in the order of the draws."""
        # also where nothing was drawn, so that the host is never more than a step ahead
        with nullcontext() if self._pulse is None else self._pulse.waiting("tokens"):
            arrived = [tensor.tolist() for tensor in self._arriving.wait()]
        columns = dict(zip(self._names, arrived, strict=True))
        if not columns:
            return []
        none: list[Any] = [None] * len(self._samples)
        truncated: list[float | None] = none
        if "truncated" in columns:
            truncated = [
                value if sample.prompt.request.sampling.truncates else None
                for sample, value in zip(self._samples, columns["truncated"], strict=True)
            ]
        rows = zip(
            self._samples,
            columns["tokens"],
            columns["log_probs"],
            truncated,
            columns.get("routings", none),
            strict=True,
        )
        return [DrawnToken(*row) for row in rows]


@dataclass(frozen=True, slots=True)
class _StepKey:
    """The key of a captured step."""

    size: int
    """Rows."""
    reach: int
    """Tokens of the longest sequence that it serves."""
    filtered: bool
    """Whether the draw is left to the host: it ends with the logits."""
    adapter: str | None
    """The adapter whose weights it reads; None for the policy's."""
    verifies: bool = False
    """Whether guesses are among the rows."""


class GraphRunner:
    """A ``PipelineRunner``: the rollout side of a policy."""

    def __init__(self, policy: SampledPolicy, size: CacheSize, max_sequences: int) -> None:
        config, backend = policy.config, policy.backend
        needs = model_needs(config, policy.flow.preset)
        problem = back_ends.support(policy.device.type).model_problem(needs)
        if problem is not None:
            raise ConfigError(f"{problem}; use device 'cpu'")
        name_fallbacks(backend, policy.flow)
        self._policy, self._backend = policy, backend
        # the last page is for padding, and so is the last carry
        num_pages, self._padding_carry = size.pages, size.carries
        carries = size.carries + 1 if size.carries else 0
        self._cache = empty_cache(policy, CacheSize(num_pages + 1, carries))
        self.page_tokens = self._cache.page_tokens
        max_pages = -(-config.max_positions // self.page_tokens)
        self._state = DeviceState(max_sequences, max_pages, self.page_tokens, num_pages, backend)
        self._sizes, self._verified_sizes = graph_sizes(max_sequences), graph_sizes(SPECULATED_ROWS)
        widest = max(self._sizes[-1], SPECULATED_ROWS)
        self._rows = torch.zeros((3, widest), dtype=torch.int64, device=policy.device)
        self._carries: Tensor | None = None
        if carries:
            self._carries = torch.zeros((2, widest), dtype=torch.int32, device=policy.device)
        self._steps: dict[_StepKey, Captured] = {}
        self._logits_left: dict[bool, Tensor] = {}
        """Of steps whose draw is left to the host, without and with guesses."""
        self._seconds: dict[tuple[int, int], tuple[float, float]] = {}
        self._drawn: list[DrawnFor] = []

    @property
    def version(self) -> int:
        """The policy's count of publications."""
        return self._policy.version

    @torch.no_grad()
    def decode(self, samples: Sequence[Sample]) -> None:
        """Feed each sample's newest token, which the device knows, and guesses, which the host
        knows, and draw the tokens behind them.
        """
        columns, longest = [self._state.slots(samples)], max([sample.length for sample in samples])
        verifies = any(sample.draft for sample in samples)
        if verifies:
            longest = max([sample.length + len(sample.draft) for sample in samples])
            samples, columns = _with_guesses(samples, columns[0])
        n, sizes = len(samples), self._verified_sizes if verifies else self._sizes
        size, filtered = next(size for size in sizes if size >= n), truncates(samples)
        reach, adapter = self._reach(longest, size), samples[0].adapter
        step = self._captured(_StepKey(size, reach, filtered, adapter, verifies))
        rows = self._rows[: len(columns), :size]
        padding = [self._state.padding, -1, 0][: len(columns)]
        if self._carries is not None:
            found = [sample.carries(1 + len(sample.draft)) for sample in samples]
            columns += [list(column) for column in zip(*found, strict=True)]
            padding += [self._padding_carry] * 2
        padded = [own + [pad] * (size - n) for own, pad in zip(columns, padding, strict=True)]
        sent = self._backend.to_device(torch.tensor(padded))
        rows.copy_(sent[: len(rows)])
        if self._carries is not None:
            self._carries[:, :size].copy_(sent[len(rows) :])
        outputs = step.replay()
        if filtered:
            drawn = self._draw(outputs[0][:n], range(n), samples)
            self._state.append(rows[:, :n], drawn.tokens)
            routings = outputs[1:]
        else:
            # the next replay overwrites them
            drawn = Drawn(*(output[:n].clone() for output in outputs[:2]))
            routings = outputs[2:]
        self._drawn.append(DrawnFor(samples, drawn, routings[0][:n].clone() if routings else None))

    @property
    def captures(self) -> int:
        """See ``isobit.rollout.drafts.StepTimes``."""
        return len(self._steps) + len(self._seconds)

    def now(self) -> float:
        """0 on ranks that share the engine, whose clocks differ."""
        ranks = self._policy.weights("rollout").tensor_parallel.world.size
        return perf_counter() if ranks == 1 else 0.0

    @torch.no_grad()
    def step_seconds(self, rows: int, length: int) -> float:
        """Measured when a step of this size is first asked about, between the times of two lengths
        on a straight line.
        """
        size = next(size for size in self._verified_sizes if size >= rows)
        reach = self._reach(length, size)
        if (size, reach) not in self._seconds:
            key = _StepKey(size, reach, False, None, verifies=True)
            ranks = self._policy.weights("rollout").tensor_parallel.world.size
            name = (self._policy.config, self._policy.flow, key, ranks)
            if name not in _measured:
                _measured[name] = self._measure(key)
            self._seconds[size, reach] = _measured[name]
        short, per_token = self._seconds[size, reach]
        return short + per_token * length

    @torch.no_grad()
    def prefill(self, plan: Plan) -> States:
        """Put tokens that the host knows through the model; -> what it leaves of each chunk's last
        token.
        """
        batch, to_device = build_batch(plan, self.page_tokens), self._backend.to_device
        attend = self._backend.paged_attention(self._cache, batch.paged, to_device(batch.positions))
        states = rollout_states(self._policy, to_device(batch.token_ids), attend, batch.adapter)
        last = torch.tensor(batch.paged.counts).cumsum(0) - 1
        return states.take(to_device(last))

    @torch.no_grad()
    def draw(self, ready: Ready) -> None:
        """Draw the next token of each sample from the state of its last; the sample can be decoded
        from then on.
        """
        samples = [sample for sample, _ in ready]
        states, rows = distinct_rows(ready)
        drawn = self._draw(self._logits(states.hidden), rows, samples)
        self._state.admit(samples, drawn.tokens)
        routings = states.routings
        if routings is not None:
            routings = routings.index_select(0, self._backend.to_device(torch.tensor(rows)))
        self._drawn.append(DrawnFor(samples, drawn, routings))

    def end_step(self) -> TokensInFlight:
        """Everything drawn since the last call."""
        drawn, self._drawn = self._drawn, []
        world = self._policy.weights("rollout").tensor_parallel.world
        return TokensInFlight(drawn, self._backend, world.pulse if world.size > 1 else None)

    def forget(self, samples: Sequence[Sample]) -> None:
        """These samples have left."""
        self._state.forget(samples)

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """Copy pages of all layers."""
        self._cache.copy_pages(sources, targets)

    def copy_carries(self, sources: list[int], targets: list[int]) -> None:
        """Copy carries of all layers."""
        self._cache.copy_carries(sources, targets)

    def clear_pages(self, pages: list[int]) -> None:
        """Set pages of all layers to zero."""
        self._cache.clear_pages(pages)

    def clear(self) -> None:
        """Forget all samples and everything in the cache, non-finite numbers included."""
        self._drawn = []
        self._state.clear()
        self._cache.clear()

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._policy.decoder.lm_head.logits(self._policy.weights("rollout"), hidden)

    def _draw(self, logits: Tensor, rows: Sequence[int], samples: Sequence[Sample]) -> Drawn:
        return self._backend.draw(logits, draws_of(rows, samples).map(self._backend.to_device))

    def _reach(self, length: int, rows: int) -> int:
        """The back end's, but no sequence is longer than the model's context."""
        return min(self._backend.reach(length, rows), self._policy.config.max_positions)

    def _captured(self, key: _StepKey) -> Captured:
        if key not in self._steps:
            started = perf_counter()
            self._steps[key] = self._capture(key)
            seconds = perf_counter() - started
            kernels = (self._policy.config, self._policy.flow, key)
            if seconds > _SLOW_CAPTURE and kernels not in _compiled:
                say(
                    f"isobit: kernels for {key.size} decoding sequences were compiled or loaded in "
                    f"{seconds:.1f} s"
                )
            _compiled.add(kernels)
        return self._steps[key]

    def _measure(self, key: _StepKey) -> tuple[float, float]:
        """Seconds of a captured step over padding, and what each token of a sequence adds. The rows
        have other tokens, so that these go to other experts. Of ranks that share the engine the
        slowest counts, so that all guess alike.
        """
        step, config, state = self._captured(key), self._policy.config, self._state
        tokens = torch.arange(key.size, device=self._rows.device) * 7919 % config.vocab_size
        self._padded(key)[1].copy_(tokens)
        furthest = min(_MEASURED_LENGTH, key.reach, config.max_positions) - 1
        seconds = list[float]()
        for length in (0, furthest):
            state.lengths[state.padding] = length
            step.replay()
            tries = list[float]()
            for _ in range(_REPEATS):
                self._backend.synchronize()
                began = perf_counter()
                step.replay()
                self._backend.synchronize()
                tries.append(perf_counter() - began)
            seconds.append(min(tries))
        state.lengths[state.padding] = 0
        world = self._policy.weights("rollout").tensor_parallel.world
        short, long = map(max, zip(*world.all_gather(seconds), strict=True))
        return short, max(0.0, long - short) / max(1, furthest)

    def _padded(self, key: _StepKey) -> Tensor:
        """The rows of a step, of padding alone."""
        rows = self._rows[: 3 if key.verifies else 1, : key.size]
        for row, padding in zip(rows, (self._state.padding, -1, 0), strict=False):
            row.fill_(padding)
        if self._carries is not None:
            self._carries.fill_(self._padding_carry)
        return rows

    def _capture(self, key: _StepKey) -> Captured:
        """The step over padding alone, captured."""
        rows = self._padded(key)
        beside = next(iter(self._steps.values()), None)
        return self._backend.capture(lambda: self._step(rows, key), beside)

    @torch.no_grad()
    def _step(self, rows: Tensor, key: _StepKey) -> tuple[Tensor, ...]:
        carries = None if self._carries is None else self._carries[:, : key.size]
        token_ids, batch = self._state.batch(rows, key.reach, carries)
        attend = self._backend.decode_attention(self._cache, batch)
        states = rollout_states(self._policy, token_ids, attend, key.adapter)
        logits = self._logits(states.hidden)
        routings = () if states.routings is None else (states.routings,)
        if key.filtered:
            return self._left(logits, key), *routings
        index = torch.arange(key.size, dtype=torch.int32, device=rows.device)
        temperatures, keys = self._state.temperatures[rows[0]], self._state.keys[rows[0]]
        draws = Draws(index, temperatures, keys, batch.positions + 1)
        drawn = self._backend.draw(logits, draws)
        self._state.append(rows, drawn.tokens)
        return drawn.tokens, drawn.log_probs, *routings

    def _left(self, logits: Tensor, key: _StepKey) -> Tensor:
        """Logits where all steps of the kind leave theirs. What a captured step returns keeps its
        memory, and would for each size and reach.
        """
        if key.verifies not in self._logits_left:
            rows = (self._verified_sizes if key.verifies else self._sizes)[-1]
            made = logits.new_empty(rows, logits.stride(0))
            self._logits_left[key.verifies] = made[:, : logits.shape[1]]
        return self._logits_left[key.verifies][: key.size].copy_(logits)


def _with_guesses(
    samples: Sequence[Sample], slots: Sequence[int]
) -> tuple[list[Sample], list[list[int]]]:
    """The sample of each row, and the rows as ``DeviceState.batch`` reads them."""
    rows, of_rows, guesses, places = list[Sample](), list[int](), list[int](), list[int]()
    for sample, slot in zip(samples, slots, strict=True):
        count = 1 + len(sample.draft)
        rows += [sample] * count
        of_rows += [slot] * count
        guesses += [-1, *sample.draft]
        places += range(count)
    return rows, [of_rows, guesses, places]


def graph_sizes(max_sequences: int) -> list[int]:
    """The batch sizes that are captured: powers of two up to 32, then multiples of 64.

    Padding costs next to nothing: a decode step waits for weights and for K and V, and a padded row
    has one key.  Every size costs a capture, and seconds of compilation on a machine that has not
    seen it.
    """
    sizes = [1, 2, 4, 8, 16, 32, *range(64, max_sequences, 64)]
    return [size for size in sizes if size < max_sequences] + [max_sequences]
