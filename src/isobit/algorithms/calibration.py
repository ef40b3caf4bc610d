"""Calibrated clipping: bounds of the ratio for FP8 that cut off what BF16's would ("Towards full
pipeline FP8 RL", arXiv 2609.22870).

Noise in both log-probabilities of r = pi / pi_old widens the distribution of ratios.  Tokens with a
negative advantage fall below the lower bound by noise alone, lose their gradient, and are never
unlearnt.  So every so many steps the ratios are computed in BF16 beside, and

    alpha   is the share of the tokens with A < 0 that BF16's ratios put at or below 1 - clip_low
    L       the alpha-quantile of FP8's ratios over the same tokens
    H       such that positive over negative contributions are what they are in BF16

A contribution is the size of the gradient by log pi of the tokens that a bound leaves:

    P(H) = sum of r * A    where A > 0 and r <= H
    Q(L) = sum of r * |A|  where A < 0 and r > L

P is a step function; H is the first step at which P reaches its target.  (The paper's abstract and
summaries of its tables were at hand, not its text: what a contribution is, is our reading.)
Between two ratios every bound cuts off the same; the configured one is kept where it lies there, so
that equal ratios change nothing.  Where there is nothing to calibrate by (no token with a negative
advantage, or none with a positive one) the configured bound stands.
"""

import math

import torch

from isobit.algorithms.policy_gradient import ClipBounds


def calibrated_bounds(
    log_ratios: torch.Tensor,
    shadow_log_ratios: torch.Tensor,
    advantages: torch.Tensor,
    configured: ClipBounds,
) -> ClipBounds:
    """log(pi / pi_old) of N tokens in the run's flow and in BF16, and their advantages, [N] each ->
    the bounds for the run's flow; ``configured`` are BF16's.
    """
    ratio, shadow = log_ratios.double().exp(), shadow_log_ratios.double().exp()
    size = advantages.double().abs()
    negative, positive = advantages < 0, advantages > 0
    low, high = 1.0 - configured.clip_low, 1.0 + configured.clip_high
    if not negative.any():
        return configured
    lower = _lower(ratio[negative], shadow[negative], low)
    kept = (ratio * size)[negative & (ratio > lower)].sum()
    shadow_kept = (shadow * size)[negative & (shadow > low)].sum()
    upper = high
    if positive.any() and shadow_kept > 0:
        target = (shadow * size)[positive & (shadow <= high)].sum() * kept / shadow_kept
        upper = _upper(ratio[positive], size[positive], float(target), high)
    return ClipBounds(
        configured.clip_low if lower == low else 1.0 - min(lower, 1.0),
        configured.clip_high if upper == high else max(upper, 1.0) - 1.0,
    )


def _lower(ratios: torch.Tensor, shadow: torch.Tensor, low: float) -> float:
    """The bound that has as many of ``ratios`` at or below it as ``low`` has of ``shadow``."""
    number = int((shadow <= low).sum())
    edges = [0.0, *ratios.sort().values.tolist(), math.inf]
    return _between(edges[number], edges[number + 1], low)


def _upper(ratios: torch.Tensor, sizes: torch.Tensor, target: float, high: float) -> float:
    """The bound up to which ``ratios`` times ``sizes`` first add up to ``target``."""
    order = ratios.argsort(stable=True)
    sums = (ratios * sizes)[order].cumsum(0)
    reached = sums >= target * (1 - 1e-12)  # the same tokens, added in another order
    number = int((~reached).sum()) + 1 if target > 0 else 0
    edges = [0.0, *ratios[order].tolist(), math.inf]
    number = min(number, len(edges) - 2)
    return _between(edges[number], edges[number + 1], high)


def _between(first: float, second: float, wanted: float) -> float:
    """``wanted`` where it lies in [first, second), else the middle, or ``first`` without an end."""
    if first <= wanted < second:
        return wanted
    return first if math.isinf(second) else (first + second) / 2
