"""An example of an objective of one's own, for ``own_objective.toml``: SAPO (arXiv 2511.20347), a
soft gate in the place of GRPO's clip.

For a token with ratio r = pi / pi_old and advantage A:

    l = -sigmoid(t (r - 1)) (4 / t) A        t = positive where A > 0, negative elsewhere

At r = 1 its gradient is that of -A log pi.  It falls off smoothly on both sides of 1, the faster
the larger t is.  Advantages, means, KL and entropy are GRPO's.
"""

from dataclasses import dataclass, field

import torch

from isobit.algorithms.family import Grpo
from isobit.algorithms.objective import Shares
from isobit.algorithms.policy_gradient import Terms, ratio_metrics
from isobit.config.algorithm import GrpoConfig
from isobit.records.batch import PackedBatch, TokenScores


@dataclass(frozen=True)
class Sapo(Grpo):
    """The objective; its fields are the recipe's ``options``."""

    config: GrpoConfig = field(default_factory=GrpoConfig)
    positive: float = 1.0
    negative: float = 1.05

    def surrogate(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> Terms:
        """See the top of this file."""
        ratio = torch.exp(scores.log_probs - batch.old_log_probs)
        steepness = torch.where(batch.advantages > 0, self.positive, self.negative)
        gate = torch.sigmoid(steepness * (ratio - 1)) * 4 / steepness
        return Terms(-gate * batch.advantages, ratio_metrics(ratio.detach(), batch.advantages))
