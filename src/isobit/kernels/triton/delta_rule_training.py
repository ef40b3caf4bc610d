"""The gated delta rule of training: whole sequences, with the kernels of the rollout
(``isobit.kernels.triton.delta_rule``), and the backward.

The backward is that of the same formulas in FP32, of up to DELTA_SEQUENCES sequences at once, chunk
by chunk from the end, by torch's products (FP32 by its default, not TF32): it repeats its bits for
the same call, since none of its operations adds by atomics.  All indices are made on the host, once
for all layers.

Shapes: n chunks of which m rows are new, H value heads; otherwise as in ``delta_rule``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from isobit.kernels.operands import DeltaGradients, DeltaInputs, DeltaShape, DeltaWeights
from isobit.kernels.spec.delta_rule import gradients_of
from isobit.kernels.triton.delta_rows import CHUNK, DeltaBatch, rows_of
from isobit.kernels.triton.delta_rule import KeptStates, apply_rule
from isobit.kernels.triton.memory import to_device
from isobit.kernels.triton.sizes import DELTA_SEQUENCES

_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class SavedDeltaRule:
    """Inputs of a layer's delta rule, and the states of its chunks."""

    inputs: DeltaInputs
    kept: KeptStates


@dataclass(frozen=True, slots=True)
class _ChunkStep:
    """A chunk of each of n sequences, the one with the most rows first; int64 on the device."""

    tokens: torch.Tensor  # [n, m]: the token of each row; a row that is not there repeats the last
    hidden: torch.Tensor | None  # bool [n, m]: rows that are not there; None where there are none
    rows: torch.Tensor  # [k]: the rows that are there, of n m
    tokens_of_rows: torch.Tensor  # [k]
    states: torch.Tensor | None  # [n]: the places of the states in front of it; None for zeros


class PackedDeltaRule:
    """The delta rule of the training forward; one object serves all layers."""

    def __init__(self, lengths: tuple[int, ...], device: torch.device) -> None:
        counts = torch.tensor(lengths)
        starts, chunks = counts.cumsum(0) - counts, (counts + CHUNK - 1) // CHUNK
        first = (chunks - 1).cumsum(0) - (chunks - 1)
        owners = torch.repeat_interleave(torch.arange(len(counts)), counts)
        of_sequences = torch.stack([torch.zeros_like(counts), counts, starts, first]).int()
        positions, sizes, tokens, places = to_device(of_sequences, device).unbind(0)
        self._batch = DeltaBatch(positions, sizes, tokens, None, None, max(lengths))
        self._owners, self._first = to_device(owners.int(), device), places
        self._chunks = int((chunks - 1).sum())
        order = torch.argsort(counts, descending=True, stable=True)
        self._groups = [
            [
                _step(starts[some], counts[some], first[some], chunk, device)
                for chunk in range(int(chunks[part].max()))
                for some in (part[chunks[part] > chunk],)
            ]
            for part in order.split(DELTA_SEQUENCES)
        ]
        places = torch.cat([torch.arange(length) for length in lengths])
        self._positions = to_device(places, device)

    def forward(
        self, inputs: DeltaInputs, weights: DeltaWeights
    ) -> tuple[torch.Tensor, SavedDeltaRule]:
        """-> o [T, H DV] in the dtype of x, and what the backward reads."""
        shape, x = weights.shape, inputs.x
        rows = rows_of(inputs, weights, self._batch, self._owners, None)
        sizes = self._chunks, shape.value_heads, shape.key_dim, shape.value_dim
        kept = KeptStates(rows.v.new_empty(sizes), self._first)
        output = x.new_empty(len(x), shape.values)
        apply_rule(rows, shape, self._batch, kept, output)
        return output, SavedDeltaRule(inputs, kept)

    def backward(
        self,
        saved: SavedDeltaRule,
        d_output: torch.Tensor,
        weights: DeltaWeights,
        gradients: DeltaGradients,
    ) -> DeltaInputs:
        """The gradient of o [T, H DV] -> those of x, a and b; adds to the weights' gradients."""
        shape = weights.shape
        found = rows_of(saved.inputs, weights, self._batch, self._owners, None)
        repeat = shape.value_heads // shape.key_heads
        rows = found.q, found.k, found.v, found.decay, found.beta
        wide = d_output.float().view(found.v.shape)
        d_rows = [
            torch.empty(len(wide), shape.value_heads, *x.shape[2:], device=x.device) for x in rows
        ]
        for steps in self._groups:
            d_state: torch.Tensor | None = None
            for step in reversed(steps):
                of_keys = (_taken(x, step).repeat_interleave(repeat, 1) for x in rows[:2])
                state = _states(step, saved.kept.states)
                given = (*of_keys, *(_taken(x, step) for x in rows[2:]), state)
                d_made = _taken(wide, step)
                if step.hidden is not None:  # only in a sequence's last chunk
                    d_made.masked_fill_(step.hidden[:, None, :, None], 0.0)
                d_next = torch.zeros_like(state)
                if d_state is not None:
                    d_next[: len(d_state)] = d_state
                *of_rows, d_state = gradients_of(_chunk, given, (d_made, d_next))
                for total, one in zip(d_rows, of_rows, strict=True):
                    flat = one.transpose(1, 2).reshape(step.tokens.numel(), *total.shape[1:])
                    total.index_copy_(0, step.tokens_of_rows, flat.index_select(0, step.rows))
        return self._inputs_backward(saved.inputs, d_rows, weights, gradients)

    def _inputs_backward(
        self,
        inputs: DeltaInputs,
        d_rows: Sequence[torch.Tensor],
        weights: DeltaWeights,
        gradients: DeltaGradients,
    ) -> DeltaInputs:
        shape, x = weights.shape, inputs.x
        windows = [self._shifted(x, shape.width - 1 - place) for place in range(shape.width)]
        factors = weights.convolution.float().unbind(1)
        mixed = windows[0].float() * factors[0]
        for one, factor in zip(windows[1:], factors[1:], strict=True):
            mixed = mixed + one.float() * factor

        def front(
            mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rate: torch.Tensor,
            step: torch.Tensor,
        ) -> tuple[torch.Tensor, ...]:  # fmt: skip
            return _rows_of_mixed(mixed, a, b, rate, step, shape)

        given = mixed.to(x.dtype), inputs.a, inputs.b, weights.a_log, weights.dt_bias
        d_mixed, da, db, d_rate, d_step = gradients_of(front, given, d_rows)
        gradients.a_log.add_(d_rate)
        gradients.dt_bias.add_(d_step)
        dx = torch.zeros_like(d_mixed)
        for place, (one, factor) in enumerate(zip(windows, factors, strict=True)):
            gradients.convolution[:, place].add_((d_mixed * one.float()).sum(0))
            back = shape.width - 1 - place
            sent = (d_mixed * factor)[back:]
            dx[: len(dx) - back] += sent.masked_fill((self._positions[back:] < back)[:, None], 0)
        return DeltaInputs(dx, da, db).map(lambda one: one.to(x.dtype))

    def _shifted(self, x: torch.Tensor, back: int) -> torch.Tensor:
        """x of the token so many places before each; zeros in front of a sequence."""
        found = torch.zeros_like(x)
        found[back:] = x[: len(x) - back]
        return found.masked_fill_((self._positions < back)[:, None], 0)


def _step(
    starts: torch.Tensor, counts: torch.Tensor, first: torch.Tensor, chunk: int,
    device: torch.device,
) -> _ChunkStep:  # fmt: skip
    """The chunk of sequences that reach it."""
    there = (counts - chunk * CHUNK).clamp(max=CHUNK)
    row = torch.arange(int(there.max()))
    tokens = starts[:, None] + chunk * CHUNK + torch.minimum(row, there[:, None] - 1)
    hidden = row >= there[:, None]
    rows = (~hidden).flatten().nonzero()[:, 0]

    def sent(x: torch.Tensor) -> torch.Tensor:
        return to_device(x.contiguous(), device)

    return _ChunkStep(
        sent(tokens), sent(hidden) if bool(hidden.any()) else None, sent(rows),
        sent(tokens.flatten()[rows]), sent(first + chunk - 1) if chunk else None,
    )  # fmt: skip


def _taken(x: torch.Tensor, step: _ChunkStep) -> torch.Tensor:
    """[T, H, ...] -> those of the rows of a chunk, [n, H, m, ...]."""
    rows = x.index_select(0, step.tokens.flatten())
    return rows.view(*step.tokens.shape, *x.shape[1:]).transpose(1, 2).contiguous()


def _states(step: _ChunkStep, kept: torch.Tensor) -> torch.Tensor:
    if step.states is None:
        return kept.new_zeros(len(step.tokens), *kept.shape[1:])
    return kept.index_select(0, step.states)


def _chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """m rows of chunks from row 0 on: o [n, H, m, DV] and the state behind them."""
    size = q.shape[2]
    lower = torch.ones(size, size, dtype=torch.float64, device=q.device).tril()
    # In FP32 differences of G lose what small decays add; torch.cumsum has no order on GPUs.
    totals = torch.matmul(decay.double(), lower.t())
    distance = (totals[..., None] - totals[:, :, None]).masked_fill(lower == 0, -torch.inf)
    between, seen = distance.exp().float(), totals.exp().float()[..., None]
    overlap = (beta[..., None] * between * (k @ k.transpose(2, 3))).tril(-1)
    wanted = beta[..., None] * (v - seen * (k @ state))
    own = torch.eye(size, device=q.device)
    updates = torch.linalg.solve_triangular(overlap + own, wanted, upper=False, unitriangular=True)
    output = seen * (q @ state) + (between * (q @ k.transpose(2, 3))) @ updates
    weights = between[:, :, -1, :, None] * k
    return output, seen[:, :, -1:] * state + weights.transpose(2, 3) @ updates


def _rows_of_mixed(
    mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rate: torch.Tensor, step: torch.Tensor,
    shape: DeltaShape,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The convolution's output [T, channels], a and b [T, H] -> what rows are computed from, with
    q and k of each value head.
    """
    keys, repeat = shape.key_heads * shape.key_dim, shape.value_heads // shape.key_heads
    q, k, v = (mixed / (1 + torch.exp(-mixed))).split([keys, keys, shape.values], 1)
    q, k = (one.reshape(len(one), shape.key_heads, 1, shape.key_dim) for one in (q, k))
    q, k = (one * ((one * one).sum(-1, keepdim=True) + _EPSILON).rsqrt() for one in (q, k))
    q, k = (one.expand(-1, -1, repeat, -1).flatten(1, 2) for one in (q, k))
    decay = -torch.exp(rate) * torch.nn.functional.softplus(a + step)
    v = v.reshape(len(v), shape.value_heads, shape.value_dim)
    return q * shape.key_dim**-0.5, k, v, decay, 1 / (1 + torch.exp(-b))
