"""What a log-probability is: log-softmax(logits / temperature) over the full vocabulary, in FP32
and in one order.

    log p_v = x_v - (M + log sum_v exp(x_v - M)),    x = logits / temperature,    M = max x

The sum runs over chunks of 4096 entries of the vocabulary, each summed in one piece, added in
ascending order.  Rollout, loss and reference all call this file.
"""

import torch

from isobit.errors import NonFiniteError
from isobit.kernels.spec.norm import row_sum


def log_softmax(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """FP32 logits [N, V], FP32 temperatures [N] (above 0) -> FP32 log-probabilities [N, V].

    Raises NonFiniteError where a row's logits are not finite.
    """
    scaled = logits / temperatures[:, None]
    maximum = scaled.amax(-1, keepdim=True)
    log_sum = maximum + row_sum(torch.exp(scaled - maximum)).log()
    finite = torch.isfinite(log_sum)
    if not bool(finite.all()):
        raise NonFiniteError(
            f"logits: {int((~finite).sum())} of {finite.numel()} rows hold a NaN or an infinity"
        )
    return scaled - log_sum
