"""The gated delta rule of training: whole sequences, with the kernels of the rollout
(``isobit.kernels.triton.delta_rule``), and the backward.

The backward is that of the same formulas in FP32, by torch's products (FP32 by its default, not
TF32) and kernels between them (``delta_chunks_backward``), then that of the convolution and the
norms (``delta_rows_backward``).  It repeats its bits for the same call, since none of its
operations adds by atomics.  All indices are made on the host, once for all layers.

**Work.**  Of up to DELTA_CHUNKS sequences consecutive chunks are taken together, DELTA_CHUNKS in
all, from the end.  The gradient of the state alone goes from a chunk to the one before it: with T
the inverse of 1 and the factors of u in u, W the rows of T (beta exp(G) k), P the factors of u in o
and K the rows of exp(G_63 - G) k,

    d S0 = exp(G_63) d S1 - W^T (K d S1) + (exp(G) q)^T dO - W^T (P^T dO)

so two small products a chunk, one after the other.  Given the d S1 of all chunks, their other
gradients are made at once, by eighteen batched products and one solution for T.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from isobit.kernels.operands import DeltaGradients, DeltaInputs, DeltaWeights
from isobit.kernels.triton.delta_chunks_backward import ChunkBlock, put_gradients
from isobit.kernels.triton.delta_rows import CHUNK, DeltaBatch, reach_of, rows_of
from isobit.kernels.triton.delta_rows_backward import rows_backward
from isobit.kernels.triton.delta_rule import KeptStates, apply_rule
from isobit.kernels.triton.memory import to_device
from isobit.kernels.triton.sizes import DELTA_CHUNKS


@dataclass(frozen=True, slots=True)
class SavedDeltaRule:
    """Inputs of a layer's delta rule, and the states of its chunks."""

    inputs: DeltaInputs
    kept: KeptStates


@dataclass(frozen=True, slots=True)
class _Block:
    """Chunks that are taken together, and where the states in front of them are."""

    chunks: ChunkBlock
    begun: int  # chunks at the start of a sequence, which come first; their states are zeros
    states: torch.Tensor  # int64 [n - begun]: the places of the states in front of the others


class PackedDeltaRule:
    """The delta rule of the training forward; one object serves all layers."""

    def __init__(self, lengths: tuple[int, ...], device: torch.device) -> None:
        counts = torch.tensor(lengths)
        order = torch.argsort(counts, descending=True, stable=True)
        owners = torch.repeat_interleave(order.argsort(), counts)
        starts = (counts.cumsum(0) - counts)[order]
        counts = counts[order]
        chunks = (counts + CHUNK - 1) // CHUNK
        first = (chunks - 1).cumsum(0) - (chunks - 1)
        of_sequences = torch.stack([torch.zeros_like(counts), counts, starts, first]).int()
        positions, sizes, tokens, places = to_device(of_sequences, device).unbind(0)
        self._batch = DeltaBatch(
            positions, sizes, tokens, None, None, max(lengths), reach_of(chunks)
        )
        self._owners, self._first = to_device(owners.int(), device), places
        self._chunks = int((chunks - 1).sum())
        self._groups = [
            [
                _block(starts[part], counts[part], first[part], range(begin, end), device)
                for begin, end in _cuts(chunks[part].tolist())
            ]
            for part in torch.arange(len(counts)).split(DELTA_CHUNKS)
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
        rows = rows_of(saved.inputs, weights, self._batch, self._owners, None)
        sizes = (shape.key_dim,), (shape.key_dim,), (shape.value_dim,), (), ()
        d_rows = tuple(rows.v.new_empty(len(d_output), shape.value_heads, *one) for one in sizes)
        for blocks in self._groups:
            d_state: torch.Tensor | None = None
            for block in reversed(blocks):
                state = _states(block, saved.kept.states)
                d_state = put_gradients(block.chunks, rows, d_output, state, d_state, d_rows)
        return rows_backward(saved.inputs, d_rows, weights, self._positions, gradients)


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
    tokens, sizes, states = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    for place in places:
        some = counts > place * CHUNK
        there = (counts[some] - place * CHUNK).clamp(max=CHUNK)
        reach.append(len(there))
        tokens.append(starts[some, None] + place * CHUNK + row.minimum(there[:, None] - 1))
        sizes.append(there.int())
        states.append(first[some] + place - 1)
    begun = 0 if places.start else reach[0]
    every = (torch.cat(tokens), torch.cat(sizes), torch.cat(states)[begun:])
    sent = [to_device(x.contiguous(), device) for x in every]
    return _Block(ChunkBlock(tuple(reach), *sent[:2]), begun, sent[2])


def _states(block: _Block, kept: torch.Tensor) -> torch.Tensor:
    found = kept.new_empty(len(block.chunks.tokens), *kept.shape[1:])
    found[: block.begun] = 0.0
    torch.index_select(kept, 0, block.states, out=found[block.begun :])
    return found
