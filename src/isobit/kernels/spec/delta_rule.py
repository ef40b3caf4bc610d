"""The gated delta rule (Yang et al., arXiv 2412.06464), which most layers of Qwen3.5 have in place
of attention, with the convolution in front of it and the gated norm behind it.

A value head has a state S [dk, dv], which a token decays, corrects and reads:

    q, k, v    silu(convolution(x)): of each channel the last ``WIDTH`` tokens
    q          q / |q| / sqrt(dk)        k   k / |k|
    beta       sigmoid(b)                g   -exp(A) softplus(a + dt), at most 0
    S          exp(g) S + k u^T          u   beta (v - exp(g) S^T k)         o = S^T q

**Chunks.**  The tokens at positions 64 c to 64 c + 63 of a sequence are chunk c, whatever is
computed at once.  With S0 the state in front of it and G_i the sum of g over its rows up to i:

    u_i = beta_i (v_i - exp(G_i) S0^T k_i) - sum_{j < i} beta_i exp(G_i - G_j) (k_i . k_j) u_j
    o_i = exp(G_i) S0^T q_i + sum_{j <= i} exp(G_i - G_j) (q_i . k_j) u_j
    S1  = exp(G_63) S0 + sum_j exp(G_63 - G_j) k_j u_j^T

So a row depends on S0 and on the rows of its chunk up to its own: decoding it, a chunk of a prompt
and a packed batch give the same bits.  Every sum over a vector is a product on the grid
(``isobit.kernels.spec.quantise``), exact in FP64 and rounded once: keys and queries with a power of
two a row, S0 one a column, u one a row, which the factor of the row takes up.  All else is
elementwise or a sum of fixed length, in FP32.

**Carries.**  What a sequence carries from one forward to the next is the chunk of its last token:
x, k, u and G of the rows that have come, S0, and the last inputs in front of the chunk, which the
convolution reads.  A forward reads one carry.  It puts new rows of that chunk into it, and where
its last row is of a later chunk writes all of that chunk's carry to another; states in between last
as long as the forward.  So a guess over the end of a chunk that is rejected leaves the first as it
was before, but for rows that are written again, and the other is written anew.

The backward is that of the same formulas in FP32, without the grid, chunk by chunk from the end.

Shapes: T tokens, H value heads, H / r key heads, n chunks of which m rows are new.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from isobit.kernels.observing import rounded
from isobit.kernels.operands import (
    DELTA_CHUNK,
    DeltaGradients,
    DeltaInputs,
    DeltaShape,
    DeltaWeights,
    KvShape,
    PagedBatch,
)
from isobit.kernels.spec.pointwise import gated, inverse_rms, row_sum
from isobit.kernels.spec.qkv import Heads, factors

CHUNK = DELTA_CHUNK
Zeros = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
_EPSILON = 1e-6  # of the lengths of q and k
_LARGEST = 87.0  # of an exponent, so that no gradient is 0 times infinity


@dataclass(frozen=True, slots=True)
class Rows:
    """What rows of chunks are computed from, FP32: q and k [T, H, dk], v [T, H, dv], and the decay
    g and beta [T, H].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor

    @property
    def all(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k, self.v, self.decay, self.beta

    def take(self, index: torch.Tensor) -> "Rows":
        """Tokens int64 [n, m] -> [n, H, m, ...] of each."""

        def taken(x: torch.Tensor) -> torch.Tensor:
            rows = x.index_select(0, index.reshape(-1))
            return rows.view(*index.shape, *x.shape[1:]).transpose(1, 2).contiguous()

        return Rows(*(taken(x) for x in self.all))


def rows_of(inputs: DeltaInputs, windows: torch.Tensor, weights: DeltaWeights) -> Rows:
    """``windows`` [WIDTH, T, channels]: x of each token's last tokens, its own at the end."""
    mixed = _convolved(inputs, windows, weights)
    return _rows_of_mixed(mixed, inputs.a, inputs.b, weights)


def _convolved(inputs: DeltaInputs, windows: torch.Tensor, weights: DeltaWeights) -> torch.Tensor:
    """[T, channels] in the dtype of x: FP32 sums from the oldest token on."""
    total: torch.Tensor | None = None
    for place, one in enumerate(windows):
        term = one.float() * weights.convolution[:, place].float()
        total = term if total is None else total + term
    assert total is not None
    return rounded(total, inputs.x.dtype)


def _rows_of_mixed(
    mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, weights: DeltaWeights
) -> Rows:
    """The convolution's output [T, channels], a and b [T, H]."""
    shape = weights.shape
    active = _silu(mixed.float())
    keys = shape.key_heads * shape.key_dim
    q, k, v = active.split([keys, keys, shape.values], 1)
    q, k = (_normalised(x.reshape(len(x), shape.key_heads, shape.key_dim)) for x in (q, k))
    repeat = shape.value_heads // shape.key_heads
    rate = torch.exp(weights.a_log.float())
    step = a.float() + weights.dt_bias.float()
    # at 0 maximum has half a gradient, as softplus has; clamp has a whole one
    positive = torch.maximum(step, step.new_zeros(()))
    softplus = positive + torch.log(1 + torch.exp(-step.abs()))
    return Rows(
        (q / shape.key_dim**0.5).repeat_interleave(repeat, 1),
        k.repeat_interleave(repeat, 1),
        v.reshape(len(v), shape.value_heads, shape.value_dim),
        -rate * softplus,
        _sigmoid(b.float()),
    )


def _normalised(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    return x * (row_sum(x * x) + _EPSILON).rsqrt()


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp((-x).clamp(max=_LARGEST)))


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp((-x).clamp(max=_LARGEST)))


@dataclass(frozen=True, slots=True)
class Chunks:
    """n chunks as far as they have come: FP32 keys [n, H, 64, dk], u [n, H, 64, dv], G [n, H, 64]
    and S0 [n, H, dk, dv]; rows that have not come yet are finite.
    """

    keys: torch.Tensor
    updates: torch.Tensor
    decays: torch.Tensor
    state: torch.Tensor

    def add(self, rows: Rows, first: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Put in new rows, [n, H, m, ...], of which chunk c has ``counts[c]``, from row
        ``first[c]`` on (int64 [n]); the others repeat the last.  -> o, FP32 [n, H, m, dv].
        """
        chunk, length = torch.arange(len(first)), rows.q.shape[2]
        places = first[:, None] + torch.minimum(torch.arange(length), counts[:, None] - 1)
        for new, row in enumerate(places.unbind(1)):
            before = self.decays[chunk, :, (row - 1).clamp(min=0)]
            is_new = new < counts[:, None]
            total = torch.where(row[:, None] > 0, before, 0.0) + rows.decay[:, :, new]
            self.decays[chunk, :, row] = torch.where(is_new, total, self.decays[chunk, :, row])
            self.keys[chunk, :, row] = rows.k[:, :, new]
        totals = torch.stack([self.decays[chunk, :, row] for row in places.unbind(1)], 2)
        distance = totals[..., None] - self.decays[:, :, None]
        hidden = torch.arange(CHUNK) > places[:, None, :, None]
        decay = torch.exp(distance.masked_fill(hidden, -torch.inf))
        keys, columns = _Grid.of(self.keys), _Grid.of(self.state.transpose(2, 3))
        new_keys, queries = _Grid.of(rows.k), _Grid.of(rows.q)
        overlap = rows.beta[..., None] * (decay * new_keys.product(keys))
        seen = torch.exp(totals)[..., None]
        wanted = rows.beta[..., None] * (rows.v - seen * new_keys.product(columns))
        own = torch.arange(CHUNK) == places[:, None, :, None]
        overlap = overlap.masked_fill(own, 0.0)
        made = _Grid.of(self.updates)
        for new, row in enumerate(places.unbind(1)):
            known = made.weighted(overlap[:, :, new, None])[:, :, 0]
            self.updates[chunk, :, row] = wanted[:, :, new] - known
            made.put(chunk, row, self.updates[chunk, :, row])
        return seen * queries.product(columns) + made.weighted(decay * queries.product(keys))

    def first(self, count: int) -> "Chunks":
        """The first so many, not copied."""
        held = self.keys, self.updates, self.decays, self.state
        keys, updates, decays, state = (one[:count] for one in held)
        return Chunks(keys, updates, decays, state)

    def next_state(self) -> torch.Tensor:
        """S1 of whole chunks, FP32 [n, H, dk, dv]."""
        last = self.decays[..., -1:]
        weights = (torch.exp(last - self.decays)[..., None] * self.keys).transpose(2, 3)
        added = _Grid.of(self.updates).weighted(weights)
        return torch.exp(last)[..., None] * self.state + added


@dataclass(frozen=True, slots=True)
class _Grid:
    """Vectors [..., n, D] as FP64 numbers on the grid, and a power of two for each, FP32 [...,
    n].
    """

    units: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor) -> "_Grid":
        encoded = Heads.encode(x.contiguous(), "fp32")
        return cls(encoded.values.double(), factors(encoded.scales))

    def put(self, chunk: torch.Tensor, row: torch.Tensor, x: torch.Tensor) -> None:
        """Replace a vector of each chunk [n, H, rows, D] by x [n, H, D]."""
        new = _Grid.of(x)
        self.units[chunk, :, row], self.scales[chunk, :, row] = new.units, new.scales

    def product(self, other: "_Grid") -> torch.Tensor:
        """[n, H, i, D] and [n, H, j, D] -> FP32 [n, H, i, j]."""
        exact = torch.matmul(self.units, other.units.transpose(2, 3)).float()
        return exact * self.scales[..., None] * other.scales[:, :, None]

    def weighted(self, weights: torch.Tensor) -> torch.Tensor:
        """FP32 weights [n, H, i, j] of the vectors [n, H, j, D] -> their sums, FP32 [n, H, i,
        D].
        """
        own = _Grid.of(weights * self.scales[:, :, None])
        return torch.matmul(own.units, self.units).float() * own.scales[..., None]


@dataclass(frozen=True, slots=True)
class DeltaSaved:
    """Inputs of a layer's delta rule, and the states in front of the chunks of each group, without
    those at the start, which are zeros.
    """

    inputs: DeltaInputs
    states: tuple[tuple[torch.Tensor, ...], ...]


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences by descending length: int64 [n, L], the packed row of each padded one."""

    index: torch.Tensor
    lengths: torch.Tensor

    def chunks(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The packed rows [n', m] of the sequences that reach each chunk, and how many of them
        count.
        """
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for first in range(0, self.index.shape[1], CHUNK):
            reach = int((self.lengths > first).sum())
            counts = (self.lengths[:reach] - first).clamp(max=CHUNK)
            found.append((self.index[:reach, first : first + CHUNK], counts))
        return found


class PackedDelta:
    """The delta rule of the training forward, from the start of each sequence of a packed batch."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        counts = torch.tensor(lengths)
        starts = counts.cumsum(0) - counts
        order = torch.argsort(counts, descending=True, stable=True)
        self._groups = [
            _Group(
                starts[part, None]
                + torch.minimum(torch.arange(int(counts[part[0]])), counts[part, None] - 1),
                counts[part],
            )
            for part in order.split(SEQUENCES)
        ]
        self._positions = torch.cat([torch.arange(length) for length in lengths])

    def _windows(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """[T, channels] -> [width, T, channels]: zeros in front of a sequence."""
        found = x.new_zeros(width, *x.shape)
        for back in range(width):
            place = found[width - 1 - back]
            place[back:] = x[: max(0, len(x) - back)]
            place.masked_fill_((self._positions < back)[:, None], 0)
        return found

    def forward(
        self, inputs: DeltaInputs, weights: DeltaWeights
    ) -> tuple[torch.Tensor, DeltaSaved]:
        """-> o [T, H dv] in the dtype of x, and what the backward reads."""
        shape = weights.shape
        windows = self._windows(inputs.x, shape.width)
        rows = rows_of(inputs, windows, weights)
        output = torch.empty(rows.v.shape, dtype=torch.float32)
        states = list[tuple[torch.Tensor, ...]]()
        for group in self._groups:
            kept = list[torch.Tensor]()
            chunks: Chunks | None = None
            for index, counts in group.chunks():
                if chunks is None:
                    state = _no_state(group, weights)
                else:
                    state = chunks.first(len(index)).next_state()
                    kept.append(state)
                chunks = _empty(state)
                made = chunks.add(rows.take(index), torch.zeros_like(counts), counts)
                _put(output, index, counts, made)
            states.append(tuple(kept))
        made = rounded(output.flatten(1), inputs.x.dtype)
        return made, DeltaSaved(inputs, tuple(states))

    def backward(
        self,
        saved: DeltaSaved,
        d_output: torch.Tensor,
        weights: DeltaWeights,
        gradients: DeltaGradients,
    ) -> DeltaInputs:
        """The gradient of o [T, H dv] -> those of x, a and b; adds to the weights' gradients."""
        windows = self._windows(saved.inputs.x, weights.shape.width)
        rows = rows_of(saved.inputs, windows, weights)
        wide = d_output.float().view(rows.v.shape)
        d_rows = [torch.zeros_like(x) for x in rows.all]
        for group, kept in zip(self._groups, saved.states, strict=True):
            states = (_no_state(group, weights), *kept)
            d_state = torch.zeros_like(states[-1])
            parts = list(zip(group.chunks(), states, strict=True))
            for (index, counts), state in reversed(parts):
                is_real = torch.arange(index.shape[1]) < counts[:, None]
                given = (*rows.take(index).all, state)
                d_made = torch.zeros(*index.shape, *rows.v.shape[1:], dtype=torch.float32)
                d_made[is_real] = wide[index[is_real]]
                d_next = torch.zeros_like(state)
                d_next[: len(d_state)] = d_state
                d_output_rows = d_made.transpose(1, 2).contiguous()
                found = gradients_of(_plain_chunk, given, (d_output_rows, d_next))
                for total, one in zip(d_rows, found[:-1], strict=True):
                    _put(total, index, counts, one)
                d_state = found[-1]
        return self._inputs_backward(saved.inputs, windows, d_rows, weights, gradients)

    def _inputs_backward(
        self,
        inputs: DeltaInputs,
        windows: torch.Tensor,
        d_rows: Sequence[torch.Tensor],
        weights: DeltaWeights,
        gradients: DeltaGradients,
    ) -> DeltaInputs:
        shape = weights.shape
        mixed = _convolved(inputs, windows, weights)

        def front(
            mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rate: torch.Tensor,
            step: torch.Tensor,
        ) -> tuple[torch.Tensor, ...]:  # fmt: skip
            learnt = DeltaWeights(shape, weights.convolution, rate, step)
            return _rows_of_mixed(mixed, a, b, learnt).all

        given = (mixed, inputs.a, inputs.b, weights.a_log, weights.dt_bias)
        d_mixed, da, db, d_rate, d_step = gradients_of(front, given, tuple(d_rows))
        gradients.a_log.add_(d_rate)
        gradients.dt_bias.add_(d_step)
        dx = torch.zeros_like(d_mixed)
        for place, one in enumerate(windows):
            gradients.convolution[:, place].add_((d_mixed * one.float()).sum(0))
            back = shape.width - 1 - place
            sent = (d_mixed * weights.convolution[:, place].float())[back:]
            sent.masked_fill_((self._positions[back:] < back)[:, None], 0)
            dx[: len(sent)] += sent
        return DeltaInputs(dx, da, db).map(lambda one: one.to(inputs.x.dtype))


SEQUENCES = 16
"""Chunks that are computed at once; in training they are padded to the longest sequence."""


def _plain_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``Chunks`` in FP32, of m rows from row 0 on: o [n, H, m, dv] and S1."""
    totals = decay.double().cumsum(-1)  # in FP32 their differences lose what small decays add
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    distance = (totals[..., None] - totals[:, :, None]).masked_fill(later, -torch.inf)
    between, seen = distance.exp().float(), totals.exp().float()[..., None]
    overlap = (beta[..., None] * between * (k @ k.transpose(2, 3))).tril(-1)
    wanted = beta[..., None] * (v - seen * (k @ state))
    own = torch.eye(q.shape[2])
    updates = torch.linalg.solve_triangular(overlap + own, wanted, upper=False, unitriangular=True)
    output = seen * (q @ state) + (between * (q @ k.transpose(2, 3))) @ updates
    weights = between[:, :, -1, :, None] * k
    return output, seen[:, :, -1:] * state + weights.transpose(2, 3) @ updates


def gradients_of(
    function: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    given: Sequence[torch.Tensor],
    d_made: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """The gradients of a function's arguments, in FP32, from those of its results."""
    with torch.enable_grad():
        leaves = [one.detach().float().requires_grad_() for one in given]
        return torch.autograd.grad(function(*leaves), leaves, d_made, materialize_grads=True)


def _put(target: torch.Tensor, index: torch.Tensor, counts: torch.Tensor, x: torch.Tensor) -> None:
    """Write [n, H, m, ...] to the tokens int64 [n, m], of which ``counts`` [n] are not repeated."""
    is_real = torch.arange(index.shape[1]) < counts[:, None]
    target[index[is_real]] = x.transpose(1, 2)[is_real]


def _no_state(group: _Group, weights: DeltaWeights) -> torch.Tensor:
    """The states in front of a group's sequences, FP32 [n, H, dk, dv]."""
    shape = weights.shape
    sizes = len(group.index), shape.value_heads, shape.key_dim, shape.value_dim
    return torch.zeros(sizes, dtype=torch.float32)


def _empty(state: torch.Tensor) -> Chunks:
    """Chunks of which no row has come."""
    rows = (*state.shape[:2], CHUNK)
    keys, updates = (torch.zeros(*rows, size, dtype=torch.float32) for size in state.shape[2:])
    return Chunks(keys, updates, torch.zeros(rows, dtype=torch.float32), state)


class DeltaCarries:
    """What sequences carry of one layer: a chunk each as far as it has come, and its inputs behind
    the last ones in front of it.
    """

    def __init__(self, shape: DeltaShape, count: int, dtype: torch.dtype, zeros: Zeros) -> None:
        """``zeros`` makes tensors."""
        heads = count, shape.value_heads
        self.inputs = zeros((count, shape.width - 1 + CHUNK, shape.channels), dtype)
        self.keys = zeros((*heads, CHUNK, shape.key_dim), torch.float32)
        self.updates = zeros((*heads, CHUNK, shape.value_dim), torch.float32)
        self.decays = zeros((*heads, CHUNK), torch.float32)
        self.states = zeros((*heads, shape.key_dim, shape.value_dim), torch.float32)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors, whose first dimension is carries."""
        return self.inputs, self.keys, self.updates, self.decays, self.states

    @classmethod
    def of_layers(
        cls, shape: KvShape, count: int, dtype: torch.dtype, zeros: Zeros
    ) -> "dict[int, DeltaCarries]":
        """Those of each layer with a delta rule."""
        if shape.delta is None:
            return {}
        return {layer: cls(shape.delta, count, dtype, zeros) for layer in shape.delta_layers}

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy carries, int64 [n] each; targets differ."""
        for tensor in self.tensors:
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))

    def clear(self) -> None:
        """Set everything to zero, in place."""
        for tensor in self.tensors:
            tensor.zero_()

    def read(self, carries: torch.Tensor) -> Chunks:
        """Chunks of carries int64 [n], copied."""
        held = self.keys, self.updates, self.decays, self.states
        keys, updates, decays, states = (one.index_select(0, carries) for one in held)
        return Chunks(keys, updates, decays, states)

    def write(self, carries: torch.Tensor, chunks: Chunks, which: torch.Tensor) -> None:
        """Put those of the chunks that ``which``, bool [n], says into carries int64 [n]."""
        if bool(which.any()):
            to = carries[which]
            self.keys[to], self.updates[to] = chunks.keys[which], chunks.updates[which]
            self.decays[to], self.states[to] = chunks.decays[which], chunks.state[which]


@dataclass(frozen=True, slots=True)
class _Step:
    """New rows of one chunk each of n sequences, int64 [n] each."""

    first: torch.Tensor  # the first new row of the chunk
    counts: torch.Tensor
    tokens: torch.Tensor  # the token of that row
    is_last: torch.Tensor  # bool: whether the sequence has no new rows behind them


@dataclass(frozen=True, slots=True)
class _Company:
    """A few sequences, those first that have new rows in most chunks; a step each of these chunks,
    for as many of the sequences as have one.
    """

    reads: torch.Tensor
    writes: torch.Tensor
    steps: tuple[_Step, ...]


class PagedDelta:
    """The delta rule of the rollout over the carries of a cache; one object serves all layers of a
    forward.
    """

    def __init__(self, batch: PagedBatch) -> None:
        assert batch.carries is not None, "sequences of a model with delta rules have carries"
        self._reads, self._writes = batch.carries
        self._counts, self._lengths = torch.tensor(batch.counts), torch.tensor(batch.lengths)
        self._companies = _companies(batch, self._reads, self._writes)
        self._inputs: _Inputs | None = None

    def forward(
        self, carries: DeltaCarries, inputs: DeltaInputs, weights: DeltaWeights
    ) -> torch.Tensor:
        """-> o [T, H dv] in the dtype of x."""
        if self._inputs is None:
            sequences = self._reads, self._writes, self._counts, self._lengths
            self._inputs = _Inputs.of(*sequences, weights.shape.width)
        windows = self._inputs.windows(carries, inputs.x)
        self._inputs.keep(carries, inputs.x, windows)
        rows = rows_of(inputs, windows, weights)
        output = torch.empty(rows.v.shape, dtype=torch.float32)
        for company in self._companies:
            chunks = carries.read(company.reads.clamp(min=0))
            for number, step in enumerate(company.steps):
                n = len(step.first)
                reads, writes = company.reads[:n], company.writes[:n]
                # a sequence that writes what it reads goes on in that chunk, at whatever row
                begins = (step.first == 0) & ((reads != writes) | (number > 0))
                chunks = _begun(chunks.first(n), begins, (reads >= 0) | (number > 0))
                places = torch.arange(int(step.counts.max()))
                index = step.tokens[:, None] + torch.minimum(places, step.counts[:, None] - 1)
                made = chunks.add(rows.take(index), step.first, step.counts)
                _put(output, index, step.counts, made)
                if number == 0:
                    carries.write(reads, chunks, ~begins & ~step.is_last)
                carries.write(writes, chunks, step.is_last)
        return rounded(output.flatten(1), inputs.x.dtype)


def _begun(chunks: Chunks, begins: torch.Tensor, follows: torch.Tensor) -> Chunks:
    """The chunks, or where one ``begins`` the empty one behind it, of which it ``follows`` unless
    the sequence begins; bool [n] each.
    """
    if not bool(begins.any()):
        return chunks
    held = chunks.keys, chunks.updates, chunks.decays, chunks.state
    before = Chunks(*(one[begins] for one in held)).next_state()
    before[~follows[begins]] = 0.0
    empty = _empty(before)
    if bool(begins.all()):
        return empty
    for one, new in zip(held, (empty.keys, empty.updates, empty.decays, before), strict=True):
        one[begins] = new
    return chunks


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Places of the inputs that a forward's convolution reads, and of those that it leaves in
    carries; rows are those of ``inputs`` of all carries laid end to end.
    """

    own: torch.Tensor  # int64 [width, T]: the last tokens of each, its own at the end, if new
    held: torch.Tensor  # int64 [width, T]: if they are not, their rows of carries; -1 for none
    kept: torch.Tensor  # int64 [2, n]: tokens, and the rows that they go to
    begun: torch.Tensor  # int64 [2, n]: tokens that begin a carry, and the carry

    @classmethod
    def of(
        cls,
        reads: torch.Tensor,
        writes: torch.Tensor,
        counts: torch.Tensor,
        lengths: torch.Tensor,
        width: int,
    ) -> "_Inputs":
        """The places of B sequences, int64 [B] each."""
        owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
        firsts, begin = (lengths - counts)[owner], (counts.cumsum(0) - counts)[owner]
        read, written = reads[owner], writes[owner]
        token = torch.arange(len(owner))
        position = firsts + token - begin
        back = torch.arange(width - 1, -1, -1)[:, None]
        own = token - back
        last_chunk = ((lengths - 1) // CHUNK)[owner]
        # of what is read: where it is written as well, a sequence may stand at its first row
        read_chunk = torch.where(read == written, last_chunk, (firsts - 1) // CHUNK)
        rows = CHUNK + width - 1

        def places(carry: torch.Tensor, chunk: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return carry * rows + width - 1 + at - chunk * CHUNK

        seen = position - back
        is_held = (own < begin) & (seen >= 0)
        held = torch.where(is_held, places(read, read_chunk, seen), -1)
        chunk = position // CHUNK
        to_last, to_read = chunk == last_chunk, (chunk == read_chunk) & (read >= 0)
        carry = torch.where(to_last, written, read)
        kept = torch.stack([token, places(carry, chunk, position)])[:, to_last | to_read]
        begins = to_last & (position == last_chunk * CHUNK) & (read != written)
        begun = torch.stack([token, written])[:, begins]
        return cls(own.where(own >= begin, -1), held, kept, begun)

    def windows(self, carries: DeltaCarries, x: torch.Tensor) -> torch.Tensor:
        """[width, T, channels]: zeros in front of a sequence."""
        found = x[self.own.clamp(min=0)]
        found[self.own < 0] = 0
        is_held = self.held >= 0
        found[is_held] = carries.inputs.flatten(0, 1)[self.held[is_held]]
        return found

    def keep(self, carries: DeltaCarries, x: torch.Tensor, windows: torch.Tensor) -> None:
        """Leave inputs of new rows in carries, and those in front of a chunk that begins."""
        tokens, rows = self.kept
        carries.inputs.flatten(0, 1)[rows] = x[tokens]
        tokens, begun = self.begun
        width = len(windows)
        carries.inputs[begun, : width - 1] = windows[: width - 1, tokens].transpose(0, 1)


def _companies(batch: PagedBatch, reads: torch.Tensor, writes: torch.Tensor) -> Sequence[_Company]:
    """A few sequences at a time, those together that have new rows in about as many chunks."""
    parts: list[list[tuple[int, int, int, bool]]] = []
    token = 0
    for count, length in zip(batch.counts, batch.lengths, strict=True):
        position, its = length - count, list[tuple[int, int, int, bool]]()
        while position < length:
            first = position % CHUNK
            rows = min(CHUNK - first, length - position)
            its.append((first, rows, token, position + rows == length))
            position, token = position + rows, token + rows
        parts.append(its)
    order = sorted(range(len(parts)), key=lambda place: -len(parts[place]))
    found = list[_Company]()
    for start in range(0, len(order), SEQUENCES):
        members = order[start : start + SEQUENCES]
        steps = list[_Step]()
        for number in range(len(parts[members[0]])):
            its = [parts[place][number] for place in members if len(parts[place]) > number]
            first, rows, tokens, is_last = torch.tensor(its).unbind(1)
            steps.append(_Step(first, rows, tokens, is_last.bool()))
        index = torch.tensor(members)
        found.append(_Company(reads[index], writes[index], tuple(steps)))
    return found


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """RMSNorm of each head times silu of its gate, [T, H dv] each, with weight [dv]; in FP32,
    rounded once.
    """
    return rounded(_gated_norm(x.float(), gate.float(), weight.float(), epsilon), x.dtype)


def _gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    heads = x.reshape(-1, weight.shape[0])
    return gated(gate, (heads * inverse_rms(heads, epsilon) * weight).view(x.shape))


def gated_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    grad: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and of the gate, in their dtype; that of the weight is added to ``grad``,
    FP32 [dv].
    """

    def function(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _gated_norm(x, gate.clamp(min=-_LARGEST), weight, epsilon)

    dx, d_gate, d_weight = gradients_of(function, (x, gate, weight), (dy.float(),))
    if grad is not None:
        grad.add_(d_weight)
    return dx.to(x.dtype), d_gate.to(gate.dtype)


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x times the sigmoid of its gate, [T, N] each; in FP32, rounded once."""
    return rounded(x.float() * _sigmoid(gate.float()), x.dtype)


def sigmoid_gate_backward(
    dy: torch.Tensor, x: torch.Tensor, gate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and of the gate, in their dtype."""
    share, wide = _sigmoid(gate.float()), dy.float()
    d_gate = wide * x.float() * share * (1 - share)
    return (wide * share).to(x.dtype), d_gate.to(gate.dtype)
