"""The gated delta rule of training: whole sequences, with the kernels of the rollout
(``isobit.kernels.triton.delta_rule``), and the backward.

The backward is that of the same formulas (``delta_chunks_backward``), then that of the convolution
and the norms (``delta_rows_backward``).  It repeats its bits for the same call, since none of its
operations adds by atomics.  All indices are made on the host, once for all layers.

**Work.**  Of up to DELTA_CHUNKS sequences consecutive chunks are taken together, DELTA_CHUNKS in
all, from the end, so that what the backward makes does not grow with the tokens.
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
                kept = saved.kept.states
                d_state = put_gradients(block, rows, d_output, kept, d_state, d_rows)
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
) -> ChunkBlock:  # fmt: skip
    """Those chunks of the sequences that reach them."""
    reach, tokens = list[int](), list[torch.Tensor]()
    sizes, states = list[torch.Tensor](), list[torch.Tensor]()
    for place in places:
        some = counts > place * CHUNK
        reach.append(int(some.sum()))
        tokens.append(starts[some] + place * CHUNK)
        sizes.append((counts[some] - place * CHUNK).clamp(max=CHUNK).int())
        states.append(first[some] + place - 1 if place else torch.full_like(first[some], -1))
    firsts = torch.tensor([0, *reach[:-1]]).cumsum(0)
    lengths = (torch.tensor(reach) > torch.arange(reach[0])[:, None]).sum(1)
    every = torch.cat(tokens), torch.cat(sizes), torch.cat(states), firsts.int(), lengths.int()
    return ChunkBlock(*(to_device(x, device) for x in every))
