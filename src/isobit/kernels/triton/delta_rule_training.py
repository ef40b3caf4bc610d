"""The gated delta rule of training: whole sequences, with the kernels of the rollout
(``isobit.kernels.triton.delta_rule``), and the backward.

The backward is that of the same formulas in FP32, by torch's products (FP32 by its default, not
TF32).  It repeats its bits for the same call, since none of its operations adds by atomics.  All
indices are made on the host, once for all layers.

**Work.**  Of up to DELTA_CHUNKS sequences consecutive chunks are taken together, DELTA_CHUNKS in
all, from the end.  The gradient of the state alone goes from a chunk to the one before it: with T
the inverse of 1 and the factors of u in u, W the rows of T (beta exp(G) k), P the factors of u in o
and K the rows of exp(G_63 - G) k,

    d S0 = exp(G_63) d S1 - W^T (K d S1) + (exp(G) q)^T dO - W^T (P^T dO)

so two small products a chunk, one after the other.  Given the d S1 of all chunks, autograd of one
chunk's formulas makes their other gradients at once.

Shapes: n chunks of 64 rows, H value heads; otherwise as in ``delta_rule``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from isobit.kernels.operands import DeltaGradients, DeltaInputs, DeltaShape, DeltaWeights
from isobit.kernels.spec.delta_rule import gradients_of
from isobit.kernels.triton.delta_rows import CHUNK, DeltaBatch, rows_of
from isobit.kernels.triton.delta_rule import KeptStates, apply_rule
from isobit.kernels.triton.memory import to_device
from isobit.kernels.triton.sizes import DELTA_CHUNKS

_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class SavedDeltaRule:
    """Inputs of a layer's delta rule, and the states of its chunks."""

    inputs: DeltaInputs
    kept: KeptStates


@dataclass(frozen=True, slots=True)
class _Block:
    """n chunks: a few consecutive ones of some sequences, those of one place together, the longest
    sequence first; int64 on the device.
    """

    counts: tuple[int, ...]  # sequences that reach each of the places, which is no more than before
    tokens: torch.Tensor  # [n, 64]: the token of each row; a row that is not there repeats the last
    hidden: torch.Tensor | None  # bool [n, 64]: rows that are not there; None where there are none
    rows: torch.Tensor  # [k]: the rows that are there, of 64 n
    tokens_of_rows: torch.Tensor  # [k]
    begun: int  # chunks at the start of a sequence, which come first; their states are zeros
    states: torch.Tensor  # [n - begun]: the places of the states in front of the others


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
                _block(starts[part], counts[part], first[part], range(begin, end), device)
                for begin, end in _cuts(chunks[part].tolist())
            ]
            for part in order.split(DELTA_CHUNKS)
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
        for blocks in self._groups:
            d_state: torch.Tensor | None = None
            for block in reversed(blocks):
                of_keys = [_taken(x, block).repeat_interleave(repeat, 1) for x in rows[:2]]
                given = *of_keys, *(_taken(x, block) for x in rows[2:])
                d_made = _taken(wide, block)
                if block.hidden is not None:  # only in a sequence's last chunk
                    d_made.masked_fill_(block.hidden[:, None, :, None], 0.0)
                d_next, d_state = _state_gradients(given, d_made, block.counts, d_state)
                state = _states(block, saved.kept.states)
                of_rows = gradients_of(partial(_chunk, state=state), given, (d_made, d_next))
                for total, one in zip(d_rows, of_rows, strict=True):
                    flat = one.transpose(1, 2).reshape(block.tokens.numel(), *total.shape[1:])
                    total.index_copy_(0, block.tokens_of_rows, flat.index_select(0, block.rows))
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
            sent.masked_fill_((self._positions[back:] < back)[:, None], 0)
            dx[: len(sent)] += sent
        return DeltaInputs(dx, da, db).map(lambda one: one.to(x.dtype))

    def _shifted(self, x: torch.Tensor, back: int) -> torch.Tensor:
        """x of the token so many places before each; zeros in front of a sequence."""
        found = torch.zeros_like(x)
        found[back:] = x[: max(0, len(x) - back)]
        return found.masked_fill_((self._positions < back)[:, None], 0)


def _cuts(chunks: Sequence[int]) -> Sequence[tuple[int, int]]:
    """The first chunk of each block and that behind it, of sequences by descending ``chunks``."""
    cuts, begin, taken = list[tuple[int, int]](), 0, 0
    for place in range(chunks[0]):
        reach = sum(count > place for count in chunks)
        if taken and taken + reach > DELTA_CHUNKS:
            cuts.append((begin, place))
            begin, taken = place, 0
        taken += reach
    return [*cuts, (begin, chunks[0])]


def _block(
    starts: torch.Tensor, counts: torch.Tensor, first: torch.Tensor, places: range,
    device: torch.device,
) -> _Block:  # fmt: skip
    """Those chunks of the sequences that reach them."""
    row, reach = torch.arange(CHUNK), list[int]()
    tokens, hidden, states = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    for place in places:
        some = counts > place * CHUNK
        there = (counts[some] - place * CHUNK).clamp(max=CHUNK)
        reach.append(len(there))
        tokens.append(starts[some, None] + place * CHUNK + row.minimum(there[:, None] - 1))
        hidden.append(row >= there[:, None])
        states.append(first[some] + place - 1)
    every, absent = torch.cat(tokens), torch.cat(hidden)
    rows = (~absent).flatten().nonzero()[:, 0]
    begun = 0 if places.start else reach[0]

    def sent(x: torch.Tensor) -> torch.Tensor:
        return to_device(x.contiguous(), device)

    return _Block(
        tuple(reach), sent(every), sent(absent) if bool(absent.any()) else None, sent(rows),
        sent(every.flatten()[rows]), begun, sent(torch.cat(states)[begun:]),
    )  # fmt: skip


def _taken(x: torch.Tensor, block: _Block) -> torch.Tensor:
    """[T, H, ...] -> those of the rows of chunks, [n, H, 64, ...]."""
    rows = x.index_select(0, block.tokens.flatten())
    return rows.view(*block.tokens.shape, *x.shape[1:]).transpose(1, 2).contiguous()


def _states(block: _Block, kept: torch.Tensor) -> torch.Tensor:
    found = kept.new_empty(len(block.tokens), *kept.shape[1:])
    found[: block.begun] = 0.0
    torch.index_select(kept, 0, block.states, out=found[block.begun :])
    return found


@dataclass(frozen=True, slots=True)
class _Factors:
    """FP32 [n, H, 64, 64] of rows i and j of chunks: exp(G_i - G_j) on and below the diagonal, and
    the factors of u_j in u_i, with 1 on it; and exp(G), [n, H, 64, 1].
    """

    between: torch.Tensor
    overlap: torch.Tensor
    seen: torch.Tensor

    @classmethod
    def of(cls, k: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor) -> "_Factors":
        size = k.shape[2]
        lower = torch.ones(size, size, dtype=torch.float64, device=k.device).tril()
        # In FP32 differences of G lose what small decays add; torch.cumsum has no order on GPUs.
        totals = torch.matmul(decay.double(), lower.t())
        distance = (totals[..., None] - totals[:, :, None]).masked_fill(lower == 0, -torch.inf)
        between, seen = distance.exp().float(), totals.exp().float()[..., None]
        overlap = (beta[..., None] * between * (k @ k.transpose(2, 3))).tril(-1)
        return cls(between, overlap + torch.eye(size, device=k.device), seen)

    def solved(self, rows: torch.Tensor) -> torch.Tensor:
        """T of rows [n, H, 64, ..]."""
        return torch.linalg.solve_triangular(self.overlap, rows, upper=False, unitriangular=True)

    def to_end(self, k: torch.Tensor) -> torch.Tensor:
        """exp(G_63 - G_j) k_j."""
        return self.between[:, :, -1, :, None] * k


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Chunks, with the states in front of them: o [n, H, 64, DV] and the states behind them."""
    factors = _Factors.of(k, decay, beta)
    seen = factors.seen
    updates = factors.solved(beta[..., None] * (v - seen * (k @ state)))
    output = seen * (q @ state) + (factors.between * (q @ k.transpose(2, 3))) @ updates
    return output, seen[:, :, -1:] * state + factors.to_end(k).transpose(2, 3) @ updates


def _state_gradients(
    given: Sequence[torch.Tensor],
    d_output: torch.Tensor,
    counts: Sequence[int],
    d_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the states behind each chunk of a block, [n, H, DK, DV], and of those in
    front of its first; ``d_state`` is that of the block behind it, None where there is none.
    """
    q, k, _, decay, beta = given
    factors = _Factors.of(k, decay, beta)
    final = factors.seen[:, :, -1:]
    reads = factors.solved(beta[..., None] * factors.seen * k).transpose(2, 3)  # W^T
    ends = factors.to_end(k)
    read_by = (factors.between * (q @ k.transpose(2, 3))).transpose(2, 3)
    of_output = (factors.seen * q).transpose(2, 3) @ d_output - reads @ (read_by @ d_output)
    d_next, end = torch.zeros_like(of_output), len(q)
    for count in reversed(counts):
        here = slice(end - count, end)
        if d_state is not None:
            d_next[here][: len(d_state)] = d_state
        passed = final[here] * d_next[here] - reads[here] @ (ends[here] @ d_next[here])
        d_state, end = passed + of_output[here], end - count
    assert d_state is not None, "a block has chunks"
    return d_next, d_state


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
