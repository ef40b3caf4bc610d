"""The rules across the tables ``algorithm``, ``corrections``, ``teacher`` and ``replay``.

Every function raises ConfigError with the keys, their values and what to change.
"""

from collections.abc import Sequence

from isobit.config.algorithm import AlgorithmConfig, LossConfig, StepConfig, TokenClipConfig
from isobit.config.corrections import Correction, IcePopCorrection, MisCorrection, TisCorrection
from isobit.config.recipes import RunConfig
from isobit.config.rollout import RolloutConfig
from isobit.config.teacher import RunTeacher
from isobit.config.training import TrainingConfig
from isobit.util.errors import ConfigError


def check_corrections(corrections: Sequence[Correction]) -> None:
    """Refuse several corrections by the ratio, and a normalisation that is not the last one."""
    by_ratio = [
        correction.type
        for correction in corrections
        if isinstance(correction, TisCorrection | IcePopCorrection)
        or (isinstance(correction, MisCorrection) and correction.level != "geometric")
    ]
    if len(by_ratio) > 1:
        raise ConfigError(
            f"corrections has {' and '.join(by_ratio)}, which each weigh a token by its ratio; "
            "keep one (mis by the geometric mean, k3 and normalise go with it)"
        )
    if any(correction.type == "normalise" for correction in corrections[:-1]):
        raise ConfigError(
            "a correction of type normalise comes last, once; put it at the end of the list"
        )


_OF_TOKENS = "has returns of tokens, in which a turn's reward counts from its last token back"
_NOT_BY_TURN = {
    "ppo": _OF_TOKENS,
    "reinforce_pp": _OF_TOKENS,
    "gspo": "has one ratio a sequence, in whose gradient only the mean of its advantages counts",
    "remax": "has one greedy completion as its baseline, whose turns are others",
}
"""Why algorithms have no advantage for each turn."""


def check_credit(algorithm: AlgorithmConfig, acts: bool, replayed: float) -> None:
    """Refuse credit by turn where there is one turn, since nothing acts, or where it would count
    for nothing; ``replayed`` is a share of completions.
    """
    if algorithm.credit == "episode":
        if algorithm.turn_gamma != 1:
            raise ConfigError(
                f"algorithm.turn_gamma is {algorithm.turn_gamma:g}, but algorithm.credit is "
                "'episode', which discounts nothing; set credit to 'turn', or leave turn_gamma out"
            )
        return
    if not acts:
        raise ConfigError(
            "algorithm.credit is 'turn', but without [environment] a completion has one turn; "
            "leave credit out"
        )
    if algorithm.name in _NOT_BY_TURN:
        raise ConfigError(
            f"algorithm.credit is 'turn', but algorithm {algorithm.name!r} "
            f"{_NOT_BY_TURN[algorithm.name]}; leave credit out, or take 'grpo', 'dr_grpo', 'dapo', "
            "'rloo', 'reinforce_pp_baseline' or 'cispo'"
        )
    if replayed > 0:
        raise ConfigError(
            f"algorithm.credit is 'turn', and replay.fraction {replayed:g}: a "
            "replayed completion keeps one advantage for all its turns; leave one of them out"
        )


def check_teacher(teacher: RunTeacher | None, algorithm: AlgorithmConfig, replays: bool) -> None:
    """Refuse what a teacher does not go with; ``replays``: whether there is a replay buffer."""
    if teacher is None:
        return
    problems = {
        "teacher.top_k": (
            teacher.kl == "sampled" and teacher.top_k,
            "teacher.kl is 'sampled', which reads the sampled token alone: leave it out, or set kl "
            "to 'reverse' or 'forward'",
        ),
        "algorithm.calibrate_every": (
            getattr(algorithm, "calibrate_every", 0),
            "a calibration knows no teacher: leave one of them out",
        ),
        "algorithm.name": (
            algorithm.name == "gspo" and teacher.kl == "sampled" and "gspo",
            "it has one ratio a sequence, in whose gradient only the mean of its advantages "
            "counts: set teacher.kl to 'reverse', or take 'grpo'",
        ),
        "replay.fraction": (
            replays and teacher.kl == "sampled" and "above 0",
            "a replayed completion keeps one advantage for all its tokens: leave the replay out, "
            "or set teacher.kl to 'reverse'",
        ),
        "algorithm": (
            teacher.only and algorithm.name in ("ppo", "custom") and algorithm.name,
            "teacher.only leaves it without what its credit gives: leave `only` out, or take "
            "'grpo'",
        ),
        "algorithm.dynamic_sampling": (
            teacher.only and algorithm.dynamic_sampling,
            "with teacher.only no group is without a signal: leave it out",
        ),
    }
    for key, (value, why) in problems.items():
        if value:
            raise ConfigError(f"{key} is {value} and there is a teacher, but {why}")


def check_off_policy(config: RunConfig) -> None:
    """Refuse corrections of ratios that are all 1, ratios of another policy than the one that drew
    where nothing clips them, and replay with a KL penalty in the reward.
    """
    algorithm, training = config.algorithm, config.training
    if config.corrections and training.old_log_probs == "recorded":
        raise ConfigError(
            "training.old_log_probs is 'recorded', so that all ratios of corrections are 1; set it "
            "to 'recomputed' (or out in a flow that is not exact), or leave corrections out"
        )
    if isinstance(algorithm, TokenClipConfig) and algorithm.clip == "none":
        _check_exact_ratios(config)
    if config.replay.fraction > 0 and algorithm.kl_coefficient > 0 and algorithm.kl_in == "reward":
        raise ConfigError(
            "algorithm.kl_in is 'reward', and replay.fraction is above 0: a replayed completion "
            "keeps its old advantage, without the current penalty; set algorithm.kl_in = "
            "'loss', or leave the replay out"
        )


def _check_exact_ratios(config: RunConfig) -> None:
    """Refuse a loss without a clip where its ratios are not to what drew the tokens, to the bit."""
    old, engine, preset = (
        config.training.old_log_probs,
        config.rollout.engine,
        config.precision.preset,
    )
    problems = {
        f"training.old_log_probs is {old!r}, to which ratios are taken instead": (
            old == "recomputed",
            "leave old_log_probs out",
        ),
        f"rollout.engine is {engine!r}, whose log-probabilities are of another function": (
            not config.rollout.is_exact,
            "set rollout.engine to 'native'",
        ),
        f"precision.preset is {preset!r}, whose rollout is another function": (
            preset.endswith("-rollout"),
            "set precision to 'fp8' or 'int8'",
        ),
    }
    for problem, (is_so, advice) in problems.items():
        if is_so:
            raise ConfigError(
                "algorithm.clip is 'none', which weighs tokens by their ratios to the policy that "
                f"drew them, but {problem}; {advice}, or leave clip out and take corrections"
            )


def check_calibration(config: RunConfig) -> None:
    """Refuse to calibrate a clip where all ratios are 1, or where no 8 bits take part."""
    algorithm, training = config.algorithm, config.training
    if not isinstance(algorithm, TokenClipConfig) or not algorithm.calibrate_every:
        return
    every, preset = algorithm.calibrate_every, config.precision.preset
    if training.updates_per_batch * training.epochs == 1:
        raise ConfigError(
            f"algorithm.calibrate_every is {every}, but a step has one update, for which every "
            "ratio is 1; raise training.updates_per_batch or epochs, or leave calibrate_every out"
        )
    recorded = preset.endswith("-rollout") and training.old_log_probs == "recorded"
    if preset not in ("fp8", "fp8-linear", "int8", "int8-linear") and not recorded:
        raise ConfigError(
            f"algorithm.calibrate_every is {every}, but precision.preset is {preset!r}, without "
            "8 bits in a ratio; leave calibrate_every out, or set precision to 'fp8' or 'int8'"
        )


def check_algorithm(config: StepConfig, rollout: RolloutConfig) -> None:
    """Refuse penalties without effect, and keys that contradict one another."""
    if config.kl_coefficient > 0 and config.kl_in == "loss" and config.kl_estimator == "k1":
        raise ConfigError(
            f"algorithm.kl_coefficient is {config.kl_coefficient:g} with kl_estimator 'k1' in the "
            "loss, where its mean gradient is 0; take 'k2' or 'k3', or algorithm.kl_in = 'reward'"
        )
    if config.overlong_buffer is not None and config.overlong_buffer > rollout.max_new_tokens:
        raise ConfigError(
            f"algorithm.overlong_buffer is {config.overlong_buffer}, but a completion has at most "
            f"{rollout.max_new_tokens} tokens (rollout.max_new_tokens); set it below"
        )
    if isinstance(config, LossConfig) and config.loss_mean != "constant" and config.loss_constant:
        raise ConfigError(
            f"algorithm.loss_constant is {config.loss_constant}, but algorithm.loss_mean is "
            f"{config.loss_mean!r}, which has none; leave it out, or set loss_mean to 'constant'"
        )
    if isinstance(config, TokenClipConfig):
        _check_clip(config)


GROUPLESS = ("reinforce_pp", "ppo")
"""Algorithms in whose advantages the group of a completion has no part."""
ONE_SAMPLE = (*GROUPLESS, "remax", "custom")
"""Algorithms that learn from a single completion of a prompt, or may."""


def check_groups(algorithm: AlgorithmConfig, training: TrainingConfig) -> None:
    """Refuse one sample a prompt where advantages compare the samples of a prompt, and dynamic
    sampling where they do not depend on them.
    """
    name = algorithm.name
    if training.samples_per_prompt == 1 and name not in ONE_SAMPLE:
        raise ConfigError(
            f"training.samples_per_prompt is 1, but algorithm {name!r} compares the samples of a "
            "prompt with each other, so that one alone teaches nothing; set it to 2 or more, or "
            f"algorithm to one of {', '.join(map(repr, ONE_SAMPLE[:-1]))}"
        )
    if algorithm.dynamic_sampling and name in GROUPLESS:
        raise ConfigError(
            f"algorithm.dynamic_sampling is on, but algorithm {name!r} compares no samples of a "
            "prompt with each other: a group of equal rewards teaches as any other, and there is "
            "none to replace; leave dynamic_sampling out"
        )


def _check_clip(config: TokenClipConfig) -> None:
    if config.covariance == "clip_cov" and config.covariance_low >= config.covariance_high:
        raise ConfigError(
            f"algorithm.covariance_low is {config.covariance_low:g} and covariance_high "
            f"{config.covariance_high:g}, which leaves no token to pick; set low below high"
        )
    bounded = config.dual_clip is not None or config.calibrate_every
    unbounded = {
        "covariance 'kl_cov' takes the place of every clip": config.covariance == "kl_cov",
        "clip 'none' bounds no ratio": config.clip == "none",
    }
    for why, is_so in unbounded.items():
        if bounded and is_so:
            key = "calibrate_every" if config.dual_clip is None else "dual_clip"
            raise ConfigError(f"algorithm.{key} is set, but {why}; leave one of them out")
