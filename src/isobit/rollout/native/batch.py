"""From a plan to the tensors of one ragged forward."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from isobit.kernels.operands import PagedBatch
from isobit.memory.cache_size import pages_for
from isobit.rollout.native.scheduler import Plan


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """What the model reads: T new tokens of B sequences laid end to end."""

    token_ids: Tensor
    """int64 [T]"""
    positions: Tensor
    """int64 [T], from 0 in each sequence."""
    paged: PagedBatch


def build_batch(plan: Plan, page_tokens: int) -> ForwardBatch:
    """The tensors of ``plan``.  Every sequence of it has pages, of ``page_tokens`` tokens, for the
    tokens it puts in.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for sequence, count in plan:
        first, pages = sequence.cached, sequence.pages
        if count == 1:  # most sequences of most steps
            token_ids.append(sequence.tokens[first])
            positions.append(first)
            slots.append(pages[first // page_tokens] * page_tokens + first % page_tokens)
            continue
        chunk = range(first, first + count)
        token_ids += sequence.tokens[first : first + count]
        positions += chunk
        slots += [
            pages[position // page_tokens] * page_tokens + position % page_tokens
            for position in chunk
        ]
    lengths = tuple([sequence.cached + count for sequence, count in plan])
    width = pages_for(max(lengths), page_tokens)
    block_table = torch.from_numpy(np.stack([sequence.block_row[:width] for sequence, _ in plan]))
    paged = PagedBatch(
        tuple([count for _, count in plan]), lengths, block_table, torch.tensor(slots)
    )
    return ForwardBatch(torch.tensor(token_ids), torch.tensor(positions), paged)
