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

**Pages.**  A page of the KV cache holds a chunk: x, k, u and G of its rows, and S0.  What is
computed of a page needs the page before it for S0 and the last inputs of the convolution, and no
other.  Whoever writes row 0 computes S0 anew, so that a guess that was rejected leaves nothing.

The backward is that of the same formulas in FP32, without the grid, chunk by chunk from the end.

Shapes: T tokens, H value heads, H / r key heads, n chunks of which m rows are new.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from isobit.kernels.operands import (
    DeltaGradients,
    DeltaInputs,
    DeltaShape,
    DeltaWeights,
    PagedBatch,
    rounded,
)
from isobit.kernels.spec.pointwise import gated, inverse_rms, row_sum
from isobit.kernels.spec.qkv import Heads, factors

CHUNK = 64
Zeros = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
_EPSILON = 1e-6  # of the lengths of q and k


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
    softplus = step.clamp(min=0) + torch.log(1 + torch.exp(-step.abs()))
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
    return 1 / (1 + torch.exp(-x))


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


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
        """For each chunk the packed rows [n', m] of the sequences that reach it, and how many of
        them count.
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
            place[back:] = x[: len(x) - back]
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
            dx[: len(dx) - back] += sent.masked_fill((self._positions[back:] < back)[:, None], 0)
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


class DeltaPages:
    """What pages of the KV cache hold of one layer: a chunk each, and its inputs."""

    def __init__(self, shape: DeltaShape, num_pages: int, dtype: torch.dtype, zeros: Zeros) -> None:
        """``zeros`` makes tensors."""
        heads = num_pages, shape.value_heads
        self.inputs = zeros((num_pages, CHUNK, shape.channels), dtype)
        self.keys = zeros((*heads, CHUNK, shape.key_dim), torch.float32)
        self.updates = zeros((*heads, CHUNK, shape.value_dim), torch.float32)
        self.decays = zeros((*heads, CHUNK), torch.float32)
        self.states = zeros((*heads, shape.key_dim, shape.value_dim), torch.float32)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Of each the first dimension is pages."""
        return self.inputs, self.keys, self.updates, self.decays, self.states

    def read(self, pages: torch.Tensor) -> Chunks:
        """Those of pages int64 [n], copied."""
        held = self.keys, self.updates, self.decays, self.states
        keys, updates, decays, states = (one.index_select(0, pages) for one in held)
        return Chunks(keys, updates, decays, states)

    def write(self, pages: torch.Tensor, chunks: Chunks) -> None:
        self.keys[pages], self.updates[pages] = chunks.keys, chunks.updates
        self.decays[pages], self.states[pages] = chunks.decays, chunks.state


@dataclass(frozen=True, slots=True)
class _Segments:
    """New rows of n pages of different sequences, int64 [n] each."""

    pages: torch.Tensor
    before: torch.Tensor  # the page before each; -1 where there is none
    first: torch.Tensor  # the first new row
    counts: torch.Tensor
    tokens: torch.Tensor  # the token of that row


class PagedDelta:
    """The delta rule of the rollout over the pages of a cache; one object serves all layers of a
    forward.
    """

    def __init__(self, batch: PagedBatch, positions: torch.Tensor) -> None:
        """``positions`` int64 [T], of the new tokens."""
        self._batch, self._positions = batch, positions
        self._steps = _segments(batch)
        self._before: torch.Tensor | None = None

    def forward(
        self, pages: DeltaPages, inputs: DeltaInputs, weights: DeltaWeights
    ) -> torch.Tensor:
        """-> o [T, H dv] in the dtype of x."""
        pages.inputs.flatten(0, 1)[self._batch.slots] = inputs.x
        rows = rows_of(inputs, self._windows(pages, weights.shape.width), weights)
        output = torch.empty(rows.v.shape, dtype=torch.float32)
        for step in self._steps:
            chunks = pages.read(step.pages)
            begins, follows = step.first == 0, step.before >= 0
            chunks.state[begins] = 0.0
            if bool((begins & follows).any()):
                ends = pages.read(step.before[begins & follows])
                chunks.state[begins & follows] = ends.next_state()
            places = torch.arange(int(step.counts.max()))
            index = step.tokens[:, None] + torch.minimum(places, step.counts[:, None] - 1)
            made = chunks.add(rows.take(index), step.first, step.counts)
            _put(output, index, step.counts, made)
            pages.write(step.pages, chunks)
        return rounded(output.flatten(1), inputs.x.dtype)

    def _windows(self, pages: DeltaPages, width: int) -> torch.Tensor:
        """[width, T, channels]: zeros in front of a sequence."""
        if self._before is None:
            self._before = self._slots_before(width)
        held = pages.inputs.flatten(0, 1)
        found = [held.index_select(0, slots.clamp(min=0)) for slots in self._before]
        hidden = self._before < 0
        return torch.stack(found).masked_fill_(hidden[..., None], 0)

    def _slots_before(self, width: int) -> torch.Tensor:
        """int64 [width, T]: the slots of each token's last tokens, its own at the end; -1 for
        none.
        """
        owner = torch.repeat_interleave(
            torch.arange(len(self._batch.counts)), torch.tensor(self._batch.counts)
        )
        back = torch.arange(width - 1, -1, -1)[:, None]
        seen = self._positions - back
        page = self._batch.block_table[owner, seen.clamp(min=0) // CHUNK]
        return torch.where(seen >= 0, page * CHUNK + seen % CHUNK, -1)


def _segments(batch: PagedBatch) -> list[_Segments]:
    """The first page of each sequence that has new rows, then the second of those that have one,
    and so on, of a few sequences at a time.
    """
    steps: list[list[tuple[int, int, int, int, int]]] = []
    token = 0
    for place, (count, length) in enumerate(zip(batch.counts, batch.lengths, strict=True)):
        position, table = length - count, batch.block_table[place]
        for step in range((length - 1) // CHUNK - position // CHUNK + 1):
            page, first = divmod(position, CHUNK)
            rows = min(CHUNK - first, length - position)
            before = int(table[page - 1]) if page else -1
            if step == len(steps):
                steps.append([])
            steps[step].append((int(table[page]), before, first, rows, token))
            position, token = position + rows, token + rows
    found: list[_Segments] = []
    for step in steps:
        for part in torch.tensor(step).split(SEQUENCES):
            pages, before, first, counts, tokens = part.unbind(1)
            found.append(_Segments(pages, before, first, counts, tokens))
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
        return _gated_norm(x, gate, weight, epsilon)

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
