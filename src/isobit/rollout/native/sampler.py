"""What the next tokens of samples are drawn with, and the check of the logits that they come from.

Rows and samples are not one to one: the samples of a prompt draw their first tokens from one row,
each with its own noise.  Every step works row by row, so a token and its log-probability do not
depend on what else is drawn with it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from isobit.errors import NonFiniteError
from isobit.kernels.operands import Draws
from isobit.rollout.native.sequence import Sample


def truncates(samples: Sequence[Sample]) -> bool:
    """Whether any sample has a filter."""
    return any(sample.prompt.request.sampling.truncates for sample in samples)


def draws_of(rows: Sequence[int], samples: Sequence[Sample]) -> Draws:
    """Temperature, noise and filters of each sample, on the host; ``rows`` of the logits are those
    that their tokens come from.
    """
    sampling = [sample.prompt.request.sampling for sample in samples]
    filters = None
    if truncates(samples):
        filters = (
            torch.tensor([params.top_k for params in sampling]),
            torch.tensor([params.top_p for params in sampling], dtype=torch.float64),
            torch.tensor([params.min_p for params in sampling], dtype=torch.float64),
        )
    return Draws(
        rows=torch.tensor(rows, dtype=torch.int32),
        temperatures=torch.tensor([params.temperature for params in sampling], dtype=torch.float32),
        keys=torch.tensor([sample.key for sample in samples]),
        positions=torch.tensor([sample.length for sample in samples]),
        filters=filters,
    )


def check_finite(logits: Tensor, rows: Sequence[int], samples: Sequence[Sample]) -> None:
    """Raises NonFiniteError naming the prompt and the position of the first row of ``logits`` FP32
    [R, V] that holds a NaN or an infinity.
    """
    finite = torch.isfinite(logits)
    if bool(finite.all()):
        return
    row = int((~finite.all(1)).nonzero()[0])
    sample = samples[rows.index(row)]
    raise NonFiniteError(
        f"logits of prompt {sample.prompt.request.prompt.id!r} at position {sample.length - 1}: "
        f"{int((~finite[row]).sum())} of {logits.shape[1]} are NaN or infinite"
    )
