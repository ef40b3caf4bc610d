"""The weight of each response token in the mean over one update.

Token mean, DAPO's (arXiv 2503.14476, section 3.3): with N tokens in the step, every token weighs
``1 / N``, so that a long answer counts for more than a short one.  Sequence mean, GRPO's own (arXiv
2402.03300, equation 3): with S answers in the step, a token of an answer of n tokens weighs ``1 /
(S * n)``.  Either way the weights of a step sum to one.
"""

from collections.abc import Sequence
from typing import Literal

import torch


def token_mean_weights(sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``1 / N`` for every token; takes and gives one tensor [N_m] a micro-batch, int64 and
    float32.
    """
    total = sum(sequence.numel() for sequence in sequences)
    return [
        torch.full(sequence.shape, 1.0 / max(total, 1), device=sequence.device)
        for sequence in sequences
    ]


def sequence_mean_weights(sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``1 / (S * n)`` for every token of an answer of n tokens; a sequence must lie in one
    micro-batch.
    """
    counts = [torch.bincount(sequence) for sequence in sequences]
    total = sum(int((count > 0).sum()) for count in counts)
    return [
        (1.0 / (total * count[sequence].double())).float()
        for sequence, count in zip(sequences, counts, strict=True)
    ]


def mean_weights(
    mean: Literal["token", "sequence"], sequences: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The weights of the named mean: see the two functions above."""
    return token_mean_weights(sequences) if mean == "token" else sequence_mean_weights(sequences)
