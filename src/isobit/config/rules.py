"""The rules across fields: settings that are each allowed but contradict one another.

Ranges of single fields are in the tables. Rules that need the model, the tokenizer or the memory
are checked where these are known. Every function raises ConfigError with the keys, their values and
what to change.
"""

from collections.abc import Collection

from isobit.config.algorithm import (
    AlgorithmConfig,
    LossConfig,
    StepConfig,
    TokenClipConfig,
    check_corrections,
    check_credit,
    check_teacher,
)
from isobit.config.base import MAX_BATCH
from isobit.config.data import (
    CODE_SECONDS,
    JUDGE_SECONDS,
    MixtureExamples,
    RewardConfig,
    RewardPart,
)
from isobit.config.recipes import RunConfig, SftConfig, check_lora
from isobit.config.tables import (
    CheckpointConfig,
    ClusterConfig,
    EvaluationConfig,
    OptimisationConfig,
    RolloutConfig,
    TrainingConfig,
)
from isobit.util.errors import ConfigError


def check_run(config: RunConfig) -> None:
    sets = config.data.eval
    check_schedule(config.training)
    check_batch(config.training, config.rollout)
    check_algorithm(config.algorithm, config.rollout)
    check_teacher(config.teacher, config.algorithm, config.replay.fraction > 0)
    if config.teacher is None or not config.teacher.only:
        check_groups(config.algorithm, config.training)
    check_corrections(config.corrections)
    check_reward(config.reward)
    check_samples(config.evaluation)
    check_off_policy(config)
    check_calibration(config)
    check_asynchrony(config)
    check_layout(config)
    check_lora(config)
    check_engine(config)
    check_credit(config.algorithm, config.environment is not None, config.replay.fraction)
    check_keeping(config.checkpoint)
    check_best(config.checkpoint, _graded_figures(sets, config.evaluation))


def check_off_policy(config: RunConfig) -> None:
    """Refuse corrections of ratios that are all 1, and replay with a KL penalty in the reward."""
    algorithm, training = config.algorithm, config.training
    if config.corrections and training.old_log_probs == "recorded":
        raise ConfigError(
            "training.old_log_probs is 'recorded', so that all ratios of corrections are 1; set it "
            "to 'recomputed' (or out in a flow that is not exact), or leave corrections out"
        )
    if config.replay.fraction > 0 and algorithm.kl_coefficient > 0 and algorithm.kl_in == "reward":
        raise ConfigError(
            "algorithm.kl_in is 'reward', and replay.fraction is above 0: a replayed completion "
            "keeps its old advantage, without the current penalty; set algorithm.kl_in = "
            "'loss', or leave the replay out"
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


def check_asynchrony(config: RunConfig) -> None:
    """Refuse a lag with calibration, which needs the weights that sampled, and with a replay buffer
    whose completions are too old before their first replay.
    """
    lag, algorithm, training = config.asynchrony.lag, config.algorithm, config.training
    if not lag:
        return
    if isinstance(algorithm, TokenClipConfig) and algorithm.calibrate_every:
        raise ConfigError(
            f"async.lag is {lag}, and algorithm.calibrate_every {algorithm.calibrate_every}, which "
            "needs the weights that sampled the batch; leave one of them out"
        )
    behind = (lag + 1) * training.updates_per_batch * training.epochs
    if config.replay.fraction > 0 and config.replay.max_staleness < behind:
        raise ConfigError(
            f"replay.max_staleness is {config.replay.max_staleness}, but with async.lag = {lag} a "
            f"completion is {behind} updates old when it could first be replayed; set "
            f"max_staleness to {behind} or more, or lower async.lag"
        )


def check_layout(config: RunConfig) -> None:
    """Refuse rollouters without a lag, and engines shared by several processes."""
    cluster = config.cluster
    if cluster.rollouters and not config.asynchrony.lag:
        raise ConfigError(
            f"cluster.rollouters is {cluster.rollouters}, but async.lag is 0: rollouters and "
            "trainers would wait for each other; set async.lag = 1, or rollouters = 0"
        )
    check_own_engine(cluster)


def check_engine(config: RunConfig) -> None:
    """Refuse another engine where it would be shared, and options of one that is not there."""
    rollout, cluster, engine = config.rollout, config.cluster, config.rollout.engine
    served = engine == "http" or (engine == "vllm" and bool(rollout.servers))
    if rollout.engine_options and (engine != "vllm" or served):
        raise ConfigError(
            "rollout.engine_options are arguments of vllm.LLM in the run's process, and "
            f"rollout.engine is {engine!r}{' with servers' if served else ''}; leave them out, or "
            "set rollout.engine = 'vllm' without rollout.servers"
        )
    if bool(rollout.servers) != served or (rollout.server_key and not served):
        raise ConfigError(
            f"rollout.engine is {engine!r}, and rollout.servers {list(rollout.servers)}: with the "
            "engine 'http', and of vLLM's servers with 'vllm', servers and server_key say where it "
            "samples, and with no other"
        )
    if (rollout.weights_folder is not None) != (served and engine == "vllm"):
        raise ConfigError(
            f"rollout.weights_folder is {rollout.weights_folder}, and rollout.engine {engine!r} "
            f"with {len(rollout.servers)} servers: vLLM's servers, and no others, need a folder "
            "that they have under the same path; name one, on a shared disk or in /dev/shm"
        )
    if engine == "native":
        return
    if cluster.is_launched or cluster.rollouters:
        raise ConfigError(
            f"rollout.engine is {engine!r}, which runs in the process of a run that has "
            "one, and cluster asks for others; leave it out, or set rollout.engine = 'native'"
        )
    if config.training.old_log_probs == "recorded" and not rollout.is_exact:
        raise ConfigError(
            f"training.old_log_probs is 'recorded', and rollout.engine = {engine!r} "
            "records those of another function than the trainer's; leave it out"
        )
    if engine == "http" and config.precision.kv_scales == "per_tensor":
        raise ConfigError(
            "precision.kv_scales is 'per_tensor', whose scales are not sent to servers "
            "(rollout.engine = 'http'); leave kv_scales out, or set rollout.engine = 'native'"
        )
    if len(set(rollout.servers)) < len(rollout.servers):
        raise ConfigError("rollout.servers names a server twice; name each once")


def check_own_engine(cluster: ClusterConfig) -> None:
    if cluster.rollout_tp > 1:
        raise ConfigError(
            f"cluster.rollout_tp is {cluster.rollout_tp}, but a run's published weights are whole "
            "on every GPU; set it to 1 (`isobit rollout`, `eval` and `verify` take more)"
        )


def check_sft(config: SftConfig) -> None:
    if config.cluster.rollouters:
        raise ConfigError(
            f"cluster.rollouters is {config.cluster.rollouters}, but fine-tuning learns from given "
            "completions; set it to 0"
        )
    check_own_engine(config.cluster)
    check_lora(config)
    if config.teacher is not None and config.objective != "distil":
        raise ConfigError(
            f"teacher is set, but objective is {config.objective!r}, which has none; set objective "
            "to 'distil', or leave the teacher out"
        )
    if config.precision.kv_scales == "per_tensor":
        raise ConfigError("precision.kv_scales = 'per_tensor' is for isobit train; leave it out")
    check_schedule(config.training)
    sets, figures = config.data.eval, [f"eval/{name}/loss" for name in config.data.eval]
    if config.objective == "preference":
        check_preference(config)
        figures += [f"eval/{name}/{figure}" for name in sets for figure in ("accuracy", "margin")]
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


def check_preference(config: SftConfig) -> None:
    """Refuse a reward and whole conversations for a reward model, which trains on pairs only."""
    if config.reward is not None:
        raise ConfigError(
            'reward is set, but objective is "preference": a reward model gives no completions; '
            "leave the reward out"
        )
    tables = {"data.train": config.data.train}
    tables |= {f"data.eval.{name}": source for name, source in config.data.eval.items()}
    sources = [
        (f"{key}.sources.{name}", one)
        for key, table in tables.items()
        if isinstance(table, MixtureExamples)
        for name, one in table.sources.items()
    ]
    sources += [(key, one) for key, one in tables.items() if not isinstance(one, MixtureExamples)]
    for key, source in sources:
        if source.messages is not None:
            raise ConfigError(
                f'{key}.messages is set, but objective is "preference", which learns from pairs: '
                "name their columns in the keys `prompt`, `chosen` and `rejected`"
            )


def check_schedule(training: OptimisationConfig) -> None:
    """Refuse two lengths of the warmup, and a smallest learning rate that is never reached."""
    if training.warmup_ratio and training.warmup_updates:
        raise ConfigError(
            f"training.warmup_ratio is {training.warmup_ratio:g}, and training.warmup_updates "
            f"{training.warmup_updates}, which both set the warmup; leave one of them out"
        )
    least = training.min_learning_rate
    if least and training.schedule == "constant":
        raise ConfigError(
            f"training.min_learning_rate is {least:g}, but training.schedule is 'constant', which "
            "never falls; set it to 'linear' or 'cosine'"
        )
    if least > training.learning_rate:
        raise ConfigError(
            f"training.min_learning_rate is {least:g}, above training.learning_rate = "
            f"{training.learning_rate:g}; set it below"
        )


def check_batch(training: TrainingConfig, rollout: RolloutConfig) -> None:
    """Refuse batches that cannot be divided into their updates, that are too large or greedy."""
    if training.updates_per_batch > training.prompts_per_step:
        raise ConfigError(
            f"training.updates_per_batch is {training.updates_per_batch}, but a step has "
            f"{training.prompts_per_step} prompts (training.prompts_per_step), one for each update"
        )
    completions = training.prompts_per_step * training.samples_per_prompt
    if completions > MAX_BATCH:
        raise ConfigError(
            f"training.prompts_per_step is {training.prompts_per_step:,} and samples_per_prompt "
            f"{training.samples_per_prompt:,}; a step has at most {MAX_BATCH:,} completions"
        )
    if rollout.temperature == 0:
        raise ConfigError(
            "rollout.temperature is 0: greedy samples are all the same, so that every group has "
            "zero variance; set it above 0"
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


GROUPLESS = ("reinforce_pp", "ppo")
"""Algorithms in whose advantages the group of a completion has no part."""
ONE_SAMPLE = (*GROUPLESS, "remax", "custom")
"""Algorithms that learn from a single completion of a prompt, or may."""


def _check_clip(config: TokenClipConfig) -> None:
    if config.covariance == "clip_cov" and config.covariance_low >= config.covariance_high:
        raise ConfigError(
            f"algorithm.covariance_low is {config.covariance_low:g} and covariance_high "
            f"{config.covariance_high:g}, which leaves no token to pick; set low below high"
        )
    if config.covariance == "kl_cov" and (config.dual_clip is not None or config.calibrate_every):
        key = "calibrate_every" if config.dual_clip is None else "dual_clip"
        raise ConfigError(
            f"algorithm.{key} is set, but covariance 'kl_cov' takes the place of every clip; leave "
            "one of them out"
        )


def check_reward(reward: RewardConfig) -> None:
    """Refuse both a function and a model in one reward, and time limits beyond the deadline."""
    defaults = RewardConfig()
    _check_seconds(reward)
    if reward.parts:
        for key in ("function", "model", "model_precision", "options", "weight"):
            if getattr(reward, key) != getattr(defaults, key):
                raise ConfigError(
                    f"reward.{key} is {getattr(reward, key)!r}, but reward.parts names several "
                    f"rewards; move it to one of them, as reward.parts.NAME.{key}"
                )
        for name, part in reward.parts.items():
            key = f"reward.parts.{name}"
            if (part.function is None) == (part.model is None):
                both = f"{part.function!r} and {part.model!r}"
                found = "neither" if part.function is None else both
                raise ConfigError(
                    f"{key} needs a function or a model, and has {found}; give it one"
                )
            _check_options(key, part)
        return
    if reward.model is not None and reward.function != defaults.function:
        raise ConfigError(
            f"reward.function is {reward.function!r} and reward.model is {reward.model!r}; a "
            "reward is one of them: leave the other out, or make both reward.parts"
        )
    _check_options("reward", next(iter(reward.named().values())))


def _check_seconds(reward: RewardConfig) -> None:
    """Code over ``seconds`` scores 0 and a judge over ``timeout_s`` says so, but a grading over the
    deadline is left out, with its process.
    """
    if reward.in_process:
        return
    bounds = {
        "code": ("seconds", CODE_SECONDS, "code that hangs would be left out instead of scored 0"),
        "llm_judge": ("timeout_s", JUDGE_SECONDS, "a slow judge would cost the process that asks"),
    }
    for name, part in reward.named().items():
        option, default, effect = bounds.get(part.function or "", ("", 0.0, ""))
        seconds = part.options.get(option, default)
        if isinstance(seconds, (int, float)) and seconds >= reward.deadline_s:
            key = f"reward.parts.{name}" if reward.parts else "reward"
            given = "" if option in part.options else " by default"
            raise ConfigError(
                f"{key}.options.{option} of the grader {part.function!r} is {seconds:g}{given}, "
                f"but reward.deadline_s is {reward.deadline_s:g}: {effect}; set {option} below the "
                "deadline"
            )


def _check_options(key: str, part: RewardPart) -> None:
    if part.model is not None and part.options:
        raise ConfigError(
            f"{key}.options are keyword arguments of a function, but {key}.model is "
            f"{part.model!r}; leave them out"
        )


def check_samples(evaluation: EvaluationConfig) -> None:
    check_greedy(
        evaluation.samples, evaluation.temperature, "evaluation.samples", "evaluation.temperature"
    )


def check_greedy(samples: int, temperature: float, samples_key: str, temperature_key: str) -> None:
    """Refuse several samples at temperature 0; the error names the keys as the user set them."""
    if temperature == 0 and samples > 1:
        raise ConfigError(
            f"{samples_key} is {samples}, but {temperature_key} is 0 and greedy samples are all "
            "the same; set a temperature above 0, or 1 sample"
        )


def check_has_sets(sets: Collection[str]) -> None:
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
    every, kept = checkpoint.every, checkpoint.keep_every
    if kept and (every == 0 or kept % every):
        raise ConfigError(
            f"checkpoint.keep_every is {kept}, but checkpoint.every is {every}, so that not every "
            f"{kept}th step has a checkpoint to keep; make keep_every a multiple of every"
        )


def check_best(checkpoint: CheckpointConfig, figures: Collection[str]) -> None:
    """Refuse a ``keep_best`` that is not one of ``figures``, which the evaluations give."""
    name = checkpoint.keep_best
    advice = "data.eval names no set: add one, or leave keep_best out"
    if figures:
        advice = f"name one of {', '.join(figures)}"
    if name is not None and name not in figures:
        raise ConfigError(f"checkpoint.keep_best is {name!r}, which no evaluation gives; {advice}")


def _graded_figures(sets: Collection[str], evaluation: EvaluationConfig) -> list[str]:
    """The figures of graded evaluations; with several samples, pass@k for powers of two."""
    figures = ["accuracy"]
    if evaluation.samples > 1:
        figures += [f"pass@{1 << power}" for power in range(evaluation.samples.bit_length())]
    return [f"eval/{name}/{figure}" for name in sets for figure in figures]
