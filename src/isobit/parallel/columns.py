"""Columns that the ranks have computed become one tensor on all of them: what gathered tensor
parallelism sends.

    rank r has [T, c_r]     ->     every rank has [T, c_0 + c_1 + ..]

Nothing is added, so the result has the bits of one rank that had computed all columns.  Messages of
a collective are equally long: narrower shares are filled up to the widest.  A quantised share goes
as one message, values and scales:

    T w bytes           E4M3 values [T, w], w the columns of the widest share
    4 ceil(w/128) T     FP32 scales [ceil(w/128), T], a row a group
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F

from isobit.parallel.world import World
from isobit.precision.quant_tensor import num_blocks

Cuts = Sequence[int]
"""Rank r has the columns ``cuts[r]`` to ``cuts[r + 1]``."""


def joined_columns(world: World, mine: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """This rank's columns [T, c_r], contiguous -> the columns of all, a new contiguous [T, C]."""
    widths = widths_of(cuts)
    return _beside(world.stack(_filled(mine, max(widths))), widths)


def joined_groups(
    world: World, values: torch.Tensor, scales: torch.Tensor, cuts: Cuts
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's E4M3 values [T, c_r], contiguous, and FP32 scales of their 1x128 groups
    [T, ceil(c_r / 128)] of any strides -> those of all [T, C] and, a row a group, [G, T].

    The cuts are multiples of 128, so that no group is in two shares.
    """
    tokens, widths = len(values), widths_of(cuts)
    groups, width = [num_blocks(n) for n in widths], max(widths)
    sent = _filled(values.view(torch.uint8), width)
    rows = _filled(scales, max(groups)).t().contiguous()
    stacked = world.stack(torch.cat([sent.view(-1), rows.view(-1).view(torch.uint8)]))
    found = _beside(stacked[:, : tokens * width].view(world.size, tokens, width), widths)
    found_rows = stacked[:, tokens * width :].view(torch.float32).view(world.size, -1, tokens)
    return found.view(values.dtype), _upon(found_rows, groups)


def widths_of(cuts: Cuts) -> list[int]:
    """Columns of each rank."""
    return [last - first for first, last in pairwise(cuts)]


def _filled(share: torch.Tensor, width: int) -> torch.Tensor:
    """[T, c] -> [T, w]."""
    missing = width - share.shape[1]
    return F.pad(share, (0, missing)) if missing else share


def _beside(stacked: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
    """[size, T, w] -> [T, C], without what fills up."""
    size, tokens, width = stacked.shape
    if all(n == width for n in widths):
        return stacked.transpose(0, 1).reshape(tokens, size * width)
    return torch.cat([share[:, :n] for share, n in zip(stacked, widths, strict=True)], 1)


def _upon(stacked: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """[size, g, T] -> [G, T], without what fills up."""
    if all(n == stacked.shape[1] for n in rows):
        return stacked.reshape(-1, stacked.shape[2])
    return torch.cat([share[:n] for share, n in zip(stacked, rows, strict=True)])
