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

so two small products a chunk, one after the other.  Given the d S1 of all chunks, their other
gradients are made at once (``_WholeChunks``), by eighteen batched products and one solution for T.

Shapes: n chunks of 64 rows, H value heads; otherwise as in ``delta_rule``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
        rows = found.q, found.k, found.v, found.decay, found.beta
        wide = d_output.float().view(found.v.shape)
        d_rows = [
            torch.empty(len(wide), shape.value_heads, *x.shape[2:], device=x.device) for x in rows
        ]
        for blocks in self._groups:
            d_state: torch.Tensor | None = None
            for block in reversed(blocks):
                d_state = _put_gradients(block, rows, wide, saved.kept, d_state, d_rows)
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


def _put_gradients(
    block: _Block, rows: Sequence[torch.Tensor], d_output: torch.Tensor, kept: KeptStates,
    d_state: torch.Tensor | None, d_rows: Sequence[torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """Write the gradients of a block's rows to ``d_rows``.  -> That of its first states, from that
    of those behind it.  All else that it makes is gone when the next block is computed.
    """
    repeat = d_output.shape[1] // rows[0].shape[1]
    of_keys = [_taken(x, block).repeat_interleave(repeat, 1) for x in rows[:2]]
    given = *of_keys, *(_taken(x, block) for x in rows[2:])
    d_made = _taken(d_output, block)
    if block.hidden is not None:  # only in a sequence's last chunk
        d_made.masked_fill_(block.hidden[:, None, :, None], 0.0)
    chunks = _WholeChunks.of(given, _states(block, kept.states))
    of_rows, d_state = chunks.backward(d_made, block.counts, d_state)
    for total, one in zip(d_rows, of_rows, strict=True):
        flat = one.transpose(1, 2).reshape(block.tokens.numel(), *total.shape[1:])
        total.index_copy_(0, block.tokens_of_rows, flat.index_select(0, block.rows))
    return d_state


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
class _WholeChunks:
    """n whole chunks as the backward reads them: FP32 [n, H, ...], rows i and j of 64.

    With Gamma_ij = exp(G_i - G_j) on and below the diagonal, else 0:

        A = beta_i Gamma_ij (k_i . k_j), j < i      r = v - exp(G) (k S0)       T = 1 / (1 + A)
        P = Gamma_ij (q_i . k_j)                    u = T (beta r)              E = Gamma_63j k_j
        o = exp(G) (q S0) + P u                     S1 = exp(G_63) S0 + E^T u
    """

    q: torch.Tensor
    k: torch.Tensor
    beta: torch.Tensor  # [.., 64, 1]
    state: torch.Tensor  # S0
    gamma: torch.Tensor
    seen: torch.Tensor  # exp(G), [.., 64, 1]
    told: torch.Tensor  # k S0
    wanted: torch.Tensor  # r
    shared: torch.Tensor  # A without beta
    inverse: torch.Tensor  # T
    read_by: torch.Tensor  # P
    ends: torch.Tensor  # E

    @classmethod
    def of(cls, rows: Sequence[torch.Tensor], state: torch.Tensor) -> "_WholeChunks":
        """q, k, v, decay and beta of rows, [n, H, 64, ..] each, and S0 [n, H, DK, DV]."""
        q, k, v, decay, beta = rows
        lower, turned = _lower(decay), k.transpose(2, 3)
        # In FP32 differences of G lose what small decays add; torch.cumsum has no order on GPUs.
        totals = torch.matmul(decay.double(), lower.t())
        distance = totals[..., None] - totals[:, :, None]
        gamma = distance.masked_fill_(lower == 0, -torch.inf).exp_().float()
        seen, beta = totals.exp().float()[..., None], beta[..., None]
        shared = (k @ turned).mul_(gamma).tril_(-1)
        one = torch.eye(len(lower), device=k.device).expand_as(shared)
        overlap = beta * shared
        inverse = torch.linalg.solve_triangular(overlap, one, upper=False, unitriangular=True)
        told = k @ state
        return cls(
            q, k, beta, state, gamma, seen, told, v - seen * told, shared, inverse,
            (q @ turned).mul_(gamma), gamma[:, :, -1, :, None] * k,
        )  # fmt: skip

    def backward(
        self, d_output: torch.Tensor, counts: Sequence[int], d_state: torch.Tensor | None
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """The gradients of q, k, v, decay and beta, and of the states in front of the first chunk
        of each sequence, [n', H, DK, DV].

        Args:
            d_output: [n, H, 64, DV].
            counts: of ``_Block``.
            d_state: of the states behind the last chunks of the sequences that go on behind this
                block; None where there are none.
        """
        q, k, beta, seen = self.q, self.k, self.beta, self.seen
        d_updates = self.read_by.transpose(2, 3) @ d_output
        reads = (self.inverse @ (beta * seen * k)).transpose(2, 3)  # W^T
        d_front = (seen * q).transpose(2, 3) @ d_output
        d_front -= reads @ d_updates
        d_behind, d_state = self._behind(d_front, reads, counts, d_state)
        del d_front, reads
        updates = self.inverse @ (beta * self.wanted)
        d_wanted = self.inverse.transpose(2, 3) @ (d_updates + self.ends @ d_behind)
        turned = updates.transpose(2, 3)
        d_read_by, d_overlap = d_output @ turned, (d_wanted @ turned).neg_()
        of_rows = d_overlap * self.shared
        d_beta = (d_wanted * self.wanted).sum(-1) + of_rows.sum(-1)
        # On the diagonal there is no difference of G.
        of_rows = of_rows.mul_(beta).add_((d_read_by * self.read_by).tril_(-1))
        d_read_by *= self.gamma
        d_overlap = d_overlap.mul_(self.gamma).mul_(beta).tril_(-1)
        d_v = beta * d_wanted
        from_state, from_behind = self.state.transpose(2, 3), d_behind.transpose(2, 3)
        d_q = d_output @ from_state
        d_ends = updates @ from_behind
        # In FP64, since most of what is added to one G is taken away from another.
        d_totals = of_rows.sum(-1, dtype=torch.float64) - of_rows.sum(-2, dtype=torch.float64)
        d_totals += _along(seen * q, d_q) - _along(seen * d_v, self.told)
        moved = _along(self.ends, d_ends)
        d_totals[..., :-1] -= moved[..., :-1]
        final = seen[:, :, -1, 0] * (self.state * d_behind).sum((-1, -2), dtype=torch.float64)
        d_totals[..., -1] += moved[..., :-1].sum(-1) + final
        d_decay = (d_totals @ _lower(d_totals)).float()
        d_q = (seen * d_q).add_(d_read_by @ k)
        d_k = d_read_by.transpose(2, 3) @ q
        d_k += (d_overlap + d_overlap.transpose(2, 3)) @ k
        d_k += self.gamma[:, :, -1, :, None] * d_ends
        d_k -= (seen * d_v) @ from_state
        return (d_q, d_k, d_v, d_decay, d_beta), d_state

    def _behind(
        self, d_front: torch.Tensor, reads: torch.Tensor, counts: Sequence[int],
        d_state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """The gradients of the states behind each chunk, and of those in front of the first, from
        what each chunk adds to that of the state in front of it by its outputs.
        """
        final = self.seen[:, :, -1:]
        d_behind, end = torch.zeros_like(d_front), len(d_front)
        for count in reversed(counts):
            here = slice(end - count, end)
            if d_state is not None:
                d_behind[here][: len(d_state)] = d_state
            passed = reads[here] @ (self.ends[here] @ d_behind[here])
            d_state = (final[here] * d_behind[here]).add_(d_front[here]).sub_(passed)
            end -= count
        assert d_state is not None, "a block has chunks"
        return d_behind, d_state


def _along(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """FP64 <x, y> of each row, [..., D] each."""
    return (x * y).sum(-1, dtype=torch.float64)


def _lower(rows: torch.Tensor) -> torch.Tensor:
    """FP64 [64, 64], 1 on and below the diagonal: of ``rows`` [n, H, 64]."""
    size = rows.shape[-1]
    return torch.ones(size, size, dtype=torch.float64, device=rows.device).tril()


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
