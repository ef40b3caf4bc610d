"""The effective sample size: how many equal weights are worth as much as uneven ones.

    ESS / n = (sum w)^2 / (n * sum w^2)        1 where all n weights are equal, else below

(L. Kish, "Survey Sampling", 1965.)  An update has two, of w = pi / mu, mu the policy that drew:
over its response tokens, and over its sequences, with the product over the tokens of each.  Where
there are no corrections the ratio is the loss's own, pi / pi_old; pi_old / mu, their ratio, is in
it where there are.  It is never clipped, even where the loss clips.

With ``training.rate_by_ess`` the learning rate of an update on S sequences is multiplied by

    sqrt(ESS / S)

with the weights of sequences: AdamW's rule for a batch that is in effect smaller (VCPO, arXiv
2602.17616; github.com/mit-han-lab/vcpo, with its ``base_ess_ratio`` of 1).

A sequence lies in one micro-batch, which gives sums over its tokens in their order.  Sums over
sequences are rounded once (``math.fsum``), so that no bit depends on the cut into micro-batches or
on the number of processes.
"""

import math
from collections.abc import Sequence

import torch

from isobit.algorithms.corrections import LARGEST_LOG_RATIO
from isobit.records.metrics import Metrics


def effective_sample_size(weights: torch.Tensor) -> float:
    """(sum w)^2 / (N * sum w^2): the share of the N tokens that weights as uneven as these are
    worth; 1 where all are equal, 0 where all are 0.
    """
    values = weights.double()
    squares = float(values.square().sum())
    return float(values.sum()) ** 2 / (values.numel() * squares) if squares else 0.0


def ratio_sums(
    log_probs: torch.Tensor, drawn: torch.Tensor, sequence: torch.Tensor
) -> torch.Tensor:
    """Log-probabilities of N tokens by the policy and by what drew them, and the sequences of the
    tokens (int64, 0..S-1) -> float64 [S, 3]: the sums of w, of w^2 and of log w over each sequence.
    For the first two log w is kept within +-20.
    """
    log_ratios = (log_probs - drawn).double()
    ratios = log_ratios.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    columns = torch.stack((ratios, ratios.square(), log_ratios), 1)
    count = int(sequence.max()) + 1 if sequence.numel() else 0
    return columns.new_zeros(count, 3).index_add(0, sequence, columns)


def sample_sizes(sums: Sequence[torch.Tensor], tokens: int) -> Metrics:
    """Both shares by the names of their metrics, from the ``ratio_sums`` of all micro-batches of an
    update of so many tokens; empty without one.
    """
    rows = torch.cat([torch.empty(0, 3, dtype=torch.float64), *sums]).tolist()
    if not rows:
        return {}
    ratios, squares, logs = zip(*rows, strict=True)
    largest = max(logs)
    weights = [math.exp(log - largest) for log in logs]
    return {
        "ratio/effective_sample_size": _share(tokens, ratios, squares),
        "ratio/effective_sequences": _share(len(weights), weights, [w * w for w in weights]),
    }


def _share(count: int, weights: Sequence[float], squares: Sequence[float]) -> float:
    return min(1.0, math.fsum(weights) ** 2 / (count * math.fsum(squares)))
