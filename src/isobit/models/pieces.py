"""Tensors of a file against tensors of a device, some numbers at a time, so that neither side holds
a second copy.
"""

import torch

PIECE = 1 << 24
"""Numbers that are on their way to a device at a time."""


def copy_in_pieces(target: torch.Tensor, source: torch.Tensor) -> None:
    """Overwrite contiguous numbers with those of a mapped tensor of as many, which are converted
    where they arrive.
    """
    flat, mapped = target.view(-1), source.view(-1)
    for begin in range(0, len(flat), PIECE):
        piece = mapped[begin : begin + PIECE].to(target.device)
        flat[begin : begin + PIECE].copy_(piece)


def is_equal_in_pieces(held: torch.Tensor, mapped: torch.Tensor) -> bool:
    """Whether both hold the same numbers in the same order."""
    pieces = zip(held.view(-1).split(PIECE), mapped.reshape(-1).split(PIECE), strict=True)
    return all(torch.equal(mine, theirs.to(mine.device)) for mine, theirs in pieces)


def is_finite(values: torch.Tensor) -> bool:
    """Whether all numbers are, without a temporary as large as they are."""
    least, most = torch.aminmax(values)
    return bool(torch.isfinite(torch.stack((least, most))).all())


def holds_nan_byte(values: torch.Tensor) -> bool:
    """Whether E4M3 values hold one of its two NaNs; it has no infinity."""
    pieces = values.view(torch.uint8).view(-1).split(PIECE)
    return bool(torch.stack([piece.bitwise_and(0x7F).amax() for piece in pieces]).amax() == 0x7F)
