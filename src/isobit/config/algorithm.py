"""The tables ``algorithm``, ``reference`` and ``replay``.

Each algorithm has only the keys that it reads, with the defaults of its paper. ``algorithm =
"dapo"`` names one, ``algorithm = "file.py:Class"`` a custom objective; a table without a name is
GRPO. Formulas are in ``docs/algorithms.md``.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from isobit.config.base import MAX_COUNT, MAX_FACTOR, MAX_STEPS, HomeName, Strict
from isobit.config.model_shape import MAX_POSITIONS

KlDirection = Literal["forward", "reverse"]
LossMean = Literal["token", "sequence", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
ClipLow = Annotated[
    float, Field(ge=0, le=MAX_FACTOR, description="The clip's lower bound is 1 - clip_low.")
]
ClipHigh = Annotated[
    float,
    Field(
        ge=0,
        le=MAX_FACTOR,
        description="The clip's upper bound is 1 + clip_high, in DAPO above 1 + clip_low.",
    ),
]
Gamma = Annotated[
    float, Field(ge=0, le=1, description="Discount of later rewards, for each token.")
]


class StepConfig(Strict):
    """The keys of every algorithm: which completions count, and for how much."""

    truncated: Literal["keep", "mask", "exclude"] = "keep"
    """Completions that reached the length limit, and episodes that did not end by themselves: keep
    trains on them, mask only uses their rewards in the group's baseline, exclude drops them.
    """
    dynamic_sampling: bool = False
    """Replace groups whose rewards give no completion an advantage, as zero-variance groups, by
    groups of further prompts (DAPO); not for ``reinforce_pp`` and ``ppo``.
    """
    max_refills: int = Field(default=10, ge=0, le=MAX_COUNT)
    """How often a step with ``dynamic_sampling`` samples further prompts at most."""
    overlong_buffer: int | None = Field(default=None, gt=0, le=MAX_POSITIONS)
    """DAPO's soft length penalty: it grows from 0 to ``overlong_penalty`` over the last so many
    tokens before ``rollout.max_new_tokens``. Off by default.
    """
    overlong_penalty: float = Field(default=1.0, gt=0, le=MAX_FACTOR)
    """Subtracted from the reward of a completion of full length, with ``overlong_buffer``."""
    kl_coefficient: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """Weight of the KL divergence from the reference model; 0 loads no reference."""
    kl_estimator: KlEstimator = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: a differentiated term of the loss; reward: subtracted from the reward."""
    credit: Literal["episode", "turn"] = "episode"
    """What the tokens of an episode's turn are learnt from, with ``environment``: the return of the
    whole episode, or the one from that turn on, compared with the group's at the same turn.
    """
    turn_gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of the rewards of later turns, for each turn, with ``credit = turn``."""


class LossConfig(StepConfig):
    """The keys that all clipped losses share."""

    loss_mean: LossMean = "token"
    """token: mean over all response tokens of an update; sequence: mean over sequences of each
    one's mean; constant: mean over sequences of each one's sum divided by ``loss_constant`` (Dr.
    GRPO).
    """
    loss_constant: int | None = Field(default=None, gt=0, le=MAX_COUNT)
    """Divisor of ``loss_mean = constant``, in tokens; by default ``rollout.max_new_tokens``."""
    entropy_coefficient: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """Weight of the entropy bonus."""


class ClipConfig(LossConfig):
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2


class TokenClipConfig(ClipConfig):
    """PPO's clipped surrogate, for each token."""

    clip: Literal["ratio", "none"] = "ratio"
    """ratio: PPO's clip of the ratio by ``clip_low`` and ``clip_high``. none: exact importance
    sampling, weighing each token by its whole ratio, where recorded log-probabilities are exact.
    """
    dual_clip: float | None = Field(default=None, gt=1, le=MAX_FACTOR)
    """Upper bound of the ratio for negative advantages (arXiv 1912.09729 uses 3). Off by
    default.
    """
    covariance: Literal["clip_cov", "kl_cov"] | None = None
    """A remedy for entropy collapse (arXiv 2505.22617), for the tokens whose log-probability and
    advantage covary most: clip_cov masks some of them, kl_cov penalises their distance from the
    old policy and clips nothing. Off by default.
    """
    covariance_fraction: float = Field(default=2e-4, gt=0, le=1)
    """Share of an update's tokens that are selected."""
    covariance_low: float = Field(default=1.0, ge=0, le=MAX_FACTOR)
    """clip_cov selects among covariances between this and ``covariance_high``."""
    covariance_high: float = Field(default=5.0, gt=0, le=MAX_FACTOR)
    covariance_kl: float = Field(default=1.0, ge=0, le=MAX_FACTOR)
    """kl_cov's penalty on abs(log ratio) of the selected tokens."""
    calibrate_every: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps between calibrations of the clip's bounds, so that they clip as much as in BF16 (arXiv
    2609.22870 uses 20); 0 is off.
    """


class GrpoConfig(TokenClipConfig):
    """Group relative policy optimisation (arXiv 2402.03300), with DAPO's mean and clip-higher."""

    name: Literal["grpo"] = "grpo"
    clip_high: ClipHigh = 0.28
    normalise_by_std: bool = True
    """Divide a group's centred rewards by their standard deviation."""


class DrGrpoConfig(TokenClipConfig):
    """GRPO without its two biases (arXiv 2503.20783)."""

    name: Literal["dr_grpo"] = "dr_grpo"
    loss_mean: LossMean = "constant"


class DapoConfig(TokenClipConfig):
    """Decoupled clip and dynamic sampling (arXiv 2503.14476)."""

    name: Literal["dapo"] = "dapo"
    clip_high: ClipHigh = 0.28
    dynamic_sampling: bool = True


class RlooConfig(TokenClipConfig):
    """REINFORCE with the other samples' mean as baseline (arXiv 2402.14740)."""

    name: Literal["rloo"] = "rloo"
    kl_estimator: KlEstimator = "k1"
    kl_in: Literal["loss", "reward"] = "reward"


class ReinforcePpConfig(TokenClipConfig):
    """REINFORCE++ (arXiv 2501.03262): returns normalised over all tokens of a step."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    gamma: Gamma = 1.0
    kl_estimator: KlEstimator = "k1"
    kl_in: Literal["loss", "reward"] = "reward"


class ReinforcePpBaselineConfig(TokenClipConfig):
    """REINFORCE++ with the group's mean as baseline (arXiv 2501.03262)."""

    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    kl_estimator: KlEstimator = "k2"


class GspoConfig(ClipConfig):
    """Ratios and clips of whole sequences (arXiv 2507.18071)."""

    name: Literal["gspo"] = "gspo"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4
    loss_mean: LossMean = "sequence"


class CispoConfig(ClipConfig):
    """The ratio as a clipped weight of log pi (arXiv 2506.13585)."""

    name: Literal["cispo"] = "cispo"
    clip_low: ClipLow = 1.0
    clip_high: ClipHigh = 4.0


class ReMaxConfig(TokenClipConfig):
    """REINFORCE with the greedy completion's reward as baseline (arXiv 2310.10505)."""

    name: Literal["remax"] = "remax"
    kl_estimator: KlEstimator = "k1"
    kl_in: Literal["loss", "reward"] = "reward"


class PpoConfig(TokenClipConfig):
    """Proximal policy optimisation (arXiv 1707.06347) with a value head."""

    name: Literal["ppo"] = "ppo"
    gamma: Gamma = 1.0
    lam: float = Field(default=0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation (arXiv 1506.02438); 1 uses rewards alone."""
    value_coefficient: float = Field(default=0.1, ge=0, le=MAX_FACTOR)
    """Weight of the value loss."""
    value_learning_rate: float | None = Field(default=None, gt=0, le=MAX_FACTOR)
    """The value head's learning rate; by default ten times ``training.learning_rate``."""
    value_clip: float = Field(default=0.2, gt=0, le=MAX_FACTOR)
    """How far a value may move from its value before the step and still get a gradient."""
    kl_estimator: KlEstimator = "k1"
    kl_in: Literal["loss", "reward"] = "reward"


class CustomConfig(StepConfig):
    """An objective of the user's own."""

    name: Literal["custom"] = "custom"
    source: HomeName
    """``path/to/file.py:Class`` or ``module:Class``, an ``Algorithm`` (docs/algorithms.md)."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of the class."""


def algorithm_table(name: str) -> dict[str, Any]:
    return {"name": "custom", "source": name} if ":" in name else {"name": name}


def _named(value: Any) -> Any:
    if isinstance(value, str):
        return algorithm_table(value)
    return {"name": "grpo", **value} if isinstance(value, dict) else value


AlgorithmConfig = Annotated[
    GrpoConfig
    | DrGrpoConfig
    | DapoConfig
    | RlooConfig
    | ReinforcePpConfig
    | ReinforcePpBaselineConfig
    | GspoConfig
    | CispoConfig
    | ReMaxConfig
    | PpoConfig
    | CustomConfig,
    Field(discriminator="name"),
    BeforeValidator(_named),
]


class ReferenceConfig(Strict):
    """The frozen reference model, loaded where ``algorithm.kl_coefficient`` is above 0."""

    model: HomeName | None = None
    """A folder or name of the hub with the policy's vocabulary; by default the run's ``model``."""
    refresh_every: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps after which it takes the policy's current weights; 0 is never."""
    offload: bool = False
    """Keep it in host memory except while it scores, to free GPU memory."""


class ReplayConfig(Strict):
    """Experience replay; ``fraction = 0`` switches it off."""

    fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of each step's batch that comes from the replay buffer."""
    max_staleness: int = Field(default=4, gt=0, le=MAX_COUNT)
    """Updates since a completion was sampled after which it is dropped."""
    max_mib: float = Field(default=256.0, gt=0, le=MAX_COUNT)
    """Largest size of the buffer; the oldest completions are dropped first."""
    sampling: Literal["uniform", "advantage"] = "uniform"
    """uniform: every completion is equally likely; advantage: in proportion to the size of its
    advantage, which leaves out zero-variance groups.
    """

    def beside(self, fresh: int) -> int:
        """Replayed completions that ``fraction`` asks for beside ``fresh`` ones."""
        return round(fresh * self.fraction / (1 - self.fraction))
