"""Comparisons of the doctor: bit for bit, and to within a rounding; what differs is said in a
``Fault``.
"""

from collections.abc import Callable

import torch

from isobit.proof.doctor.finding import Fault

RowFunction = Callable[[torch.Tensor], torch.Tensor]
"""[N, ...] -> [N, ...], each row from its own row alone."""


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """FP32 as int32, so that NaN equals NaN and zeros of both signs differ; anything else as it
    is.
    """
    return x.view(torch.int32) if x.dtype == torch.float32 else x


def require_equal(what: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Raises Fault unless the bits are equal."""
    differing = int((bits_of(a) != bits_of(b)).sum())
    if differing:
        raise Fault(f"{what} give different bits: {differing:,} of {a.numel():,} numbers")


def require_close(
    what: str, result: torch.Tensor, expected: torch.Tensor, tolerance: float
) -> None:
    """Raises Fault where the largest difference, over the largest number expected, is above
    ``tolerance`` or not a number.
    """
    error = float((result.double() - expected).abs().max() / expected.abs().max())
    if not error <= tolerance:
        raise Fault(
            f"{what} is off by {error:.2g} of its largest number, more than {tolerance:.2g}"
        )


def rows_alone(function: RowFunction, x: torch.Tensor) -> torch.Tensor:
    """The rows of ``function`` on [N, ...], after comparing them with rows alone, in odd pieces,
    and in reverse.
    """
    whole = function(x)
    for size in (1, 7, 64):
        require_equal(
            f"rows in batches of {size} and of {len(x)}",
            torch.cat([function(part) for part in x.split(size)]),
            whole,
        )
    require_equal(
        "rows in reverse order and in order", function(x.flip(0).contiguous()).flip(0), whole
    )
    return whole
