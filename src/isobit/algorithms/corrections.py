"""Weights for tokens that another policy drew than the one that learns.

mu is the policy that drew and recorded, pi_old the trainer's before its update; where engine and
trainer are one function and nothing is stale they are equal.  With rho = pi_old / mu of a token,
and log rho kept within +-20 so that nothing overflows:

    tis        min(max(rho, low), high), of a token or of the product over its sequence ("Your
               efficient RL framework secretly brings you off-policy RL training", Yao et al. 2025)
    mis        rho where it lies in [low, high], else 0; of a token or the product ("When speed
               kills stability", Liu et al. 2025)
               geometric: 1 where exp(mean log rho) of the sequence lies in [low, high], else 0
    icepop     rho where it lies in [low, high], else 0, on both sides (Ant's Ling team, 2025)
    k3         1 where rho - 1 - log rho, of a token or as the mean over its sequence, is at most
               max, else 0: an estimate of KL(mu || pi_old) of what mu drew
    normalise  the weights so far over their mean: over sequences, where each is one weight for a
               whole sequence (the self-normalised estimator over the samples that were drawn), else
               over tokens

The weights of all corrections are multiplied, and the loss multiplies a token's surrogate with what
comes out; no gradient flows through it.  Where rho is 1 everywhere, every weight is exactly 1.
"""

from collections.abc import Callable, Sequence

import torch

from isobit.config.corrections import (
    Correction,
    IcePopCorrection,
    K3Correction,
    MisCorrection,
    TisCorrection,
)


def sequence_sums(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """[N] of the sequences numbered in ``sequence`` (int64 [N]) -> [S], S the largest number and
    one; tokens are added in their order.
    """
    count = int(sequence.max()) + 1 if sequence.numel() else 0
    return values.new_zeros(count).index_add(0, sequence, values)


def sequence_means(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """``sequence_sums`` over each sequence's number of tokens; 0 where it has none."""
    counts = torch.bincount(sequence).clamp(min=1)
    return sequence_sums(values, sequence) / counts.to(values.dtype)


LARGEST_LOG_RATIO = 20.0
"""The bound of |log rho| of a token, and of a sequence; as in verl."""


def correction_weights(
    corrections: Sequence[Correction], log_ratios: torch.Tensor, sequence: torch.Tensor
) -> torch.Tensor:
    """log rho [N] and the sequences of the N tokens (int64, 0..S-1, of the whole batch) -> the
    weight of each, float32 [N].
    """
    log_rho = log_ratios.double()
    weights = torch.ones_like(log_rho)
    for correction in corrections:
        if correction.type == "normalise":
            of = sequence_means(weights, sequence) if _of_sequences(corrections) else weights
            mean = of.mean()
            weights = weights / mean if mean > 0 else weights
        else:
            weights = weights * _weight(correction, log_rho, sequence)
    return weights.float()


def _of_sequences(corrections: Sequence[Correction]) -> bool:
    """Whether all weights before a normalisation are one for a whole sequence."""
    levels = [getattr(one, "level", "token") for one in corrections if one.type != "normalise"]
    return bool(levels) and "token" not in levels


def _weight(
    correction: TisCorrection | MisCorrection | IcePopCorrection | K3Correction,
    log_rho: torch.Tensor,
    sequence: torch.Tensor,
) -> torch.Tensor:
    match correction:
        case TisCorrection(level=level, min=low, max=high):
            return _ratio(log_rho, sequence, level).clamp(low, high)
        case MisCorrection(level="geometric", bounds=(low, high)):
            mean = _ratio(log_rho, sequence, "geometric")
            return _within(mean, low, high).double()
        case MisCorrection(level=level, bounds=(low, high)):
            ratio = _ratio(log_rho, sequence, level)
            return torch.where(_within(ratio, low, high), ratio, 0.0)
        case IcePopCorrection(min=low, max=high):
            ratio = _ratio(log_rho, sequence, "token")
            return torch.where(_within(ratio, low, high), ratio, 0.0)
        case K3Correction(level=level, max=high):
            bounded = log_rho.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
            divergence = torch.expm1(bounded) - bounded
            if level == "sequence":
                divergence = sequence_means(divergence, sequence)[sequence]
            return (divergence <= high).double()


def _ratio(log_rho: torch.Tensor, sequence: torch.Tensor, level: str) -> torch.Tensor:
    """rho of each token, or its product or geometric mean over the token's sequence; [N]."""
    joined: dict[str, Callable[[], torch.Tensor]] = {
        "token": lambda: log_rho,
        "sequence": lambda: sequence_sums(log_rho, sequence)[sequence],
        "geometric": lambda: sequence_means(log_rho, sequence)[sequence],
    }
    return joined[level]().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def _within(values: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return (values >= low) & (values <= high)
