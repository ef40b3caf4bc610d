"""The weight of each response token in the mean over one update.

Token mean, DAPO's (arXiv 2503.14476, section 3.3): with N tokens in the step, every token weighs
``1 / N``, so that a long answer counts for more than a short one.  Sequence mean, GRPO's own (arXiv
2402.03300, equation 3): with S answers in the step, a token of an answer of n tokens weighs ``1 /
(S * n)``.  Either way the weights of a step sum to one.

Constant, Dr. GRPO's (arXiv 2503.20783, section 3.1): ``1 / (S * C)`` with C tokens, the same for
every length, so that a long wrong answer is not punished less a token than a short one.  The
weights sum to the answers' mean length over C.
"""

from collections.abc import Sequence

import torch

from isobit.config.algorithm import LossMean
from isobit.errors import ConfigError


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


def constant_mean_weights(sequences: Sequence[torch.Tensor], constant: int) -> list[torch.Tensor]:
    """``1 / (S * constant)`` for every token."""
    total = sum(int((torch.bincount(sequence) > 0).sum()) for sequence in sequences)
    return [
        torch.full(sequence.shape, 1.0 / (max(total, 1) * constant), device=sequence.device)
        for sequence in sequences
    ]


def mean_weights(
    mean: LossMean, sequences: Sequence[torch.Tensor], constant: int | None = None
) -> list[torch.Tensor]:
    """The weights of the named mean: see the functions above.  Raises ConfigError for the mean by a
    constant without one.
    """
    if mean == "constant":
        if constant is None:
            raise ConfigError(
                "algorithm.loss_mean is 'constant', but algorithm.loss_constant is not set; set it "
                "to the longest completion, in tokens"
            )
        return constant_mean_weights(sequences, constant)
    return token_mean_weights(sequences) if mean == "token" else sequence_mean_weights(sequences)
