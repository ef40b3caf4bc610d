"""Calibrated clipping: every so many steps a shadow of the policy in BF16 says what the clip would
cut off there, and bounds that cut off as much here take the place of the configured ones.

    before the step's first update   log pi_old of the sequences of its last one, by the shadow
    before its last update           log pi of the same, by the shadow as it is now, and the
                                     policy's own
    then                             bounds from both ratios, for that update and all others up
                                     to the next calibration

The shadow is published from the masters when it is asked and dropped once it has scored, so that it
and a gradient are never there together.  A replayed sequence takes no part, since the weights that
drew it have no shadow any more; and while no weight has moved, every ratio is 1 and says nothing.

**The bounds** are those of the ratio for FP8 that cut off what BF16's would ("Towards full
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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from isobit.algorithms.objective import Algorithm
from isobit.algorithms.policy_gradient import ClipBounds, ClippedPolicyGradient
from isobit.config.algorithm import TokenClipConfig
from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import RunConfig
from isobit.memory.activations import FrozenModel
from isobit.models.config import ModelConfig
from isobit.models.decoder import build_decoder, decoder_shape
from isobit.models.frozen import FrozenPolicy, frozen_config
from isobit.models.policy import Policy
from isobit.precision.flow import build_flow
from isobit.records.batch import TokenScores
from isobit.records.packing import responses
from isobit.records.sequence import Numbers, TokenSequence
from isobit.training.advantage_estimator import scores_by_frozen, scores_by_policy
from isobit.training.trainer import Trainer

SHADOW = PrecisionConfig(preset="bf16")
"""What the shadow computes in."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A calibration that waits for the step's last update."""

    sequences: Sequence[TokenSequence]
    """The fresh sequences of that update."""
    shadow: torch.Tensor
    """float64 [N]: log pi_old of their response tokens, by the shadow."""
    version: int
    """The version of the weights before the step."""


class Calibration:
    """The bounds of a run's clip, as a checkpoint holds them (``isobit.store.training_run.Extra``).

    The configured ones stand until the first calibration.
    """

    def __init__(self, trainer: Trainer, algorithm: ClippedPolicyGradient) -> None:
        """The bounds are calibrated every ``calibrate_every`` steps."""
        self._trainer, self._configured = trainer, algorithm
        self._bounds: ClipBounds | None = None

    @property
    def bounds(self) -> ClipBounds:
        """The bounds in use."""
        config = self._configured.config
        return self._bounds or ClipBounds(config.clip_low, config.clip_high)

    @property
    def algorithm(self) -> ClippedPolicyGradient:
        """The algorithm with the bounds in use."""
        return self._configured.with_clip(self.bounds)

    def begin(self, step: int, sequences: Sequence[TokenSequence]) -> Begun | None:
        """Begin a calibration before the first update of step number ``step``, whose last one
        learns from ``sequences``; None where it is not time, or nothing of them is fresh.
        """
        fresh = [sequence for sequence in sequences if sequence.fresh]
        if step % self._configured.config.calibrate_every or not fresh:
            return None
        return Begun(fresh, self._by_shadow(fresh), self._trainer.policy.version)

    def finish(self, begun: Begun) -> None:
        """Set the bounds, before the last update of the step."""
        if self._trainer.policy.version == begun.version:
            return
        config, sequences = self._configured.config, begun.sequences
        self._bounds = calibrated_bounds(
            self._by_policy(sequences)
            - _joined(sequences, [one.ratio_log_probs for one in sequences]),
            self._by_shadow(sequences) - begun.shadow,
            _joined(sequences, map(_weighted_advantages, sequences)),
            ClipBounds(config.clip_low, config.clip_high),
        )

    def state(self) -> dict[str, float]:
        """The bounds, once there are others than the configured ones."""
        if self._bounds is None:
            return {}
        return {"clip_low": self._bounds.clip_low, "clip_high": self._bounds.clip_high}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """None: the shadow is a function of the masters."""
        return {}

    def restore(self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on with the bounds of ``state``."""
        self._bounds = ClipBounds(state["clip_low"], state["clip_high"]) if state else None

    def _by_policy(self, sequences: Sequence[TokenSequence]) -> torch.Tensor:
        """log pi of the response tokens, by the weights as they are now."""
        return _log_probs(scores_by_policy(self._trainer, sequences))

    def _by_shadow(self, sequences: Sequence[TokenSequence]) -> torch.Tensor:
        """The same by a shadow of these weights, of which nothing remains."""
        trainer, phase = self._trainer, "the BF16 shadow's forward"
        scores = scores_by_frozen(trainer, lambda: shadow_of(trainer.policy), sequences, phase)
        return _log_probs(scores)


def shadow_of(policy: Policy) -> FrozenPolicy:
    """What the policy's masters are in BF16, without a value head."""
    config = frozen_config(policy.config)
    names = build_decoder(config).masters()
    masters = ((name, policy.whole_master(name)) for name in names)
    return FrozenPolicy.publish(config, SHADOW, masters, policy.device)


def _weighted_advantages(sequence: TokenSequence) -> Numbers:
    """Advantages as they count in the loss: times the weights of the corrections."""
    if sequence.importance is None:
        return sequence.advantages
    return sequence.advantages * sequence.importance


def _log_probs(scores: Sequence[TokenScores]) -> torch.Tensor:
    return torch.cat([one.log_probs for one in scores]).double()


def _joined(sequences: Sequence[TokenSequence], columns: Iterable[Numbers]) -> torch.Tensor:
    """float64 [N]: the entries of all response tokens of a column each."""
    return responses(sequences, columns).double()


def calibrates(config: RunConfig) -> bool:
    """Whether the clip's bounds are ever set anew."""
    algorithm = config.algorithm
    return isinstance(algorithm, TokenClipConfig) and algorithm.calibrate_every > 0


def describe_shadow(config: RunConfig, policy: ModelConfig) -> FrozenModel | None:
    """The shadow as a plan of the memory knows it; None where there is none."""
    if not calibrates(config):
        return None
    shape = frozen_config(policy)
    flow = build_flow(SHADOW, decoder_shape(shape))
    return FrozenModel("BF16 shadow", shape, flow, "algorithm", lasting=False)


def build_calibration(
    config: RunConfig, algorithm: Algorithm, trainer: Trainer
) -> Calibration | None:
    """What sets the bounds of ``algorithm``, which is the recipe's; None where nothing does."""
    if not calibrates(config):
        return None
    assert isinstance(algorithm, ClippedPolicyGradient), "its configuration has the key"
    return Calibration(trainer, algorithm)


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
