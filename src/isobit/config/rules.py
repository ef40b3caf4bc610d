"""All rules across fields: settings that are each allowed and contradict one another.

Ranges of single fields stand in the tables.  What needs more than the configuration (the model's
context, the tokenizer, the memory) is refused where that is known.  Every function raises
ConfigError with the keys, their values and the way out.
"""

from collections.abc import Collection

from isobit.config.checkpoint import CheckpointConfig
from isobit.config.evaluation import EvaluationConfig
from isobit.config.reward import RewardConfig, RewardPart
from isobit.config.rollout import RolloutConfig
from isobit.config.run import RunConfig
from isobit.config.sft import SftConfig
from isobit.config.shape import ModelShape
from isobit.config.training import TrainingConfig
from isobit.errors import ConfigError


def check_run(config: RunConfig) -> None:
    """Every rule of a recipe of ``isobit train``."""
    sets = config.data.eval
    check_batch(config.training, config.rollout)
    check_reward(config.reward)
    check_samples(config.evaluation)
    check_keeping(config.checkpoint)
    check_best(config.checkpoint, _graded_figures(sets, config.evaluation))


def check_sft(config: SftConfig) -> None:
    """Every rule of a recipe of ``isobit sft``."""
    sets, figures = config.data.eval, [f"eval/{name}/loss" for name in config.data.eval]
    if config.reward is not None:
        check_reward(config.reward)
        if not sets:
            raise ConfigError(
                "reward is set, but data.eval names no set whose completions it could grade; add "
                "one, or leave the reward out"
            )
        check_samples(config.evaluation)
        figures = _graded_figures(sets, config.evaluation) + figures
    check_keeping(config.checkpoint)
    check_best(config.checkpoint, figures)


def check_batch(training: TrainingConfig, rollout: RolloutConfig) -> None:
    """Refuse batches that cannot be cut into their updates, or that teach nothing."""
    if training.updates_per_batch > training.prompts_per_step:
        raise ConfigError(
            f"training.updates_per_batch is {training.updates_per_batch}, but a step has "
            f"{training.prompts_per_step} prompts (training.prompts_per_step), and each update "
            "needs at least one"
        )
    if rollout.temperature == 0:
        raise ConfigError(
            "rollout.temperature is 0: greedy samples are all the same, and a group of equals "
            "teaches nothing; set it above 0"
        )


def check_reward(reward: RewardConfig) -> None:
    """Refuse a reward that is two things at once, or nothing."""
    defaults = RewardConfig()
    if reward.parts:
        for key in ("function", "model", "model_precision", "options", "weight"):
            if getattr(reward, key) != getattr(defaults, key):
                raise ConfigError(
                    f"reward.{key} is {getattr(reward, key)!r}, but reward.parts names several "
                    f"rewards; move it to one of them, as reward.parts.NAME.{key}"
                )
        for name, part in reward.parts.items():
            _check_part(f"reward.parts.{name}", part)
        return
    if reward.model is not None and reward.function != defaults.function:
        raise ConfigError(
            f"reward.function is {reward.function!r} and reward.model is {reward.model!r}; a "
            "reward is one of them: leave the other out, or give each a table of its own in "
            "reward.parts"
        )
    _check_options("reward", next(iter(reward.named().values())))


def _check_part(key: str, part: RewardPart) -> None:
    if (part.function is None) == (part.model is None):
        found = "neither" if part.function is None else f"{part.function!r} and {part.model!r}"
        raise ConfigError(f"{key} needs a function or a model, and has {found}; give it one")
    _check_options(key, part)


def _check_options(key: str, part: RewardPart) -> None:
    if part.model is not None and part.options:
        raise ConfigError(
            f"{key}.options are keyword arguments of a function, but {key}.model is "
            f"{part.model!r}; leave them out"
        )


def check_samples(evaluation: EvaluationConfig) -> None:
    """Refuse an evaluation that draws several greedy samples of a problem."""
    check_greedy(
        evaluation.samples, evaluation.temperature, "evaluation.samples", "evaluation.temperature"
    )


def check_greedy(samples: int, temperature: float, samples_key: str, temperature_key: str) -> None:
    """Refuse several samples at temperature 0, which would all be the same; the keys are named as
    the user set them.
    """
    if temperature == 0 and samples > 1:
        raise ConfigError(
            f"{samples_key} is {samples}, but {temperature_key} is 0 and greedy samples are all "
            "the same; set a temperature above 0, or 1 sample"
        )


def check_has_sets(sets: Collection[str]) -> None:
    """Refuse to evaluate on no set at all."""
    if not sets:
        raise ConfigError(
            "data.eval names no set to evaluate on; add one, for example [data.eval.held_out]"
        )


def check_keeping(checkpoint: CheckpointConfig) -> None:
    """Refuse to keep special checkpoints where none are written."""
    if checkpoint.keep_last == 0 and (checkpoint.keep_every or checkpoint.keep_best):
        raise ConfigError(
            "checkpoint.keep_last is 0, which writes no checkpoint, so that keep_every and "
            "keep_best have none to keep; leave them out"
        )


def check_best(checkpoint: CheckpointConfig, figures: Collection[str]) -> None:
    """Refuse to keep the best checkpoint by a figure that is not among ``figures``, those that the
    run's evaluations give.
    """
    name = checkpoint.keep_best
    if name is not None and name not in figures:
        raise ConfigError(
            f"checkpoint.keep_best is {name!r}, which no evaluation gives; "
            + (
                f"name one of {', '.join(figures)}"
                if figures
                else "data.eval names no set: add one, or leave keep_best out"
            )
        )


def check_shape(shape: ModelShape) -> None:
    """Refuse a decoder whose heads have no whole size."""
    if shape.head_dim is None and shape.hidden_size % shape.num_heads:
        raise ConfigError(
            f"from_scratch.hidden_size is {shape.hidden_size}, which {shape.num_heads} heads do "
            "not divide; change one of them, or set from_scratch.head_dim"
        )


def _graded_figures(sets: Collection[str], evaluation: EvaluationConfig) -> list[str]:
    """What a reward measures on each set; pass@k for powers of two, where there are several
    samples.
    """
    counts = (
        [1 << power for power in range(evaluation.samples.bit_length())]
        if evaluation.samples > 1
        else []
    )
    figures = ["accuracy", *(f"pass@{k}" for k in counts)]
    return [f"eval/{name}/{figure}" for name in sets for figure in figures]
