"""The rules across fields: settings that are each allowed but contradict one another.

Ranges of single fields are in the tables. Rules that need the model, the tokenizer or the memory
are checked where these are known. Every function raises ConfigError with the keys, their values and
what to change.
"""

from collections.abc import Collection

from isobit.config.algorithm import TokenClipConfig
from isobit.config.algorithm_rules import (
    check_algorithm,
    check_calibration,
    check_corrections,
    check_credit,
    check_groups,
    check_off_policy,
    check_teacher,
)
from isobit.config.base import MAX_BATCH
from isobit.config.data import MixtureExamples
from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import Recipe, RunConfig, SftConfig
from isobit.config.reward import CODE_SECONDS, JUDGE_SECONDS, RewardConfig, RewardPart
from isobit.config.rollout import RolloutConfig, RunRolloutConfig
from isobit.config.tables import CheckpointConfig, ClusterConfig, EvaluationConfig
from isobit.config.training import OptimisationConfig, TrainingConfig
from isobit.util.errors import ConfigError
from isobit.util.terminal import counted


def check_run(config: RunConfig) -> None:
    sets = config.data.eval
    check_schedule(config.training)
    check_batch(config.training, config.rollout)
    check_algorithm(config.algorithm, config.rollout)
    check_teacher(config.teacher, config.algorithm, config.replay.fraction > 0)
    if config.teacher is None or not config.teacher.only:
        check_groups(config.algorithm, config.training)
    check_corrections(config.corrections)
    check_reward(config.reward, config.environment is not None)
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


def check_asynchrony(config: RunConfig) -> None:
    """Refuse samples that are older than the step that learns from them with calibration, which
    needs the weights that sampled, and with a replay buffer whose completions are too old before
    their first replay; and what a free schedule does not know of.
    """
    asynchrony, algorithm, training = config.asynchrony, config.algorithm, config.training
    key, older = "lag", asynchrony.lag
    if asynchrony.max_staleness is not None:
        _check_free(config)
        key, older = "max_staleness", asynchrony.max_staleness
    if not older:
        return
    if isinstance(algorithm, TokenClipConfig) and algorithm.calibrate_every:
        raise ConfigError(
            f"async.{key} is {older}, and algorithm.calibrate_every {algorithm.calibrate_every}, "
            "which needs the weights that sampled the batch; leave one of them out"
        )
    behind = (older + 1) * training.updates_per_batch * training.epochs
    if config.replay.fraction > 0 and config.replay.max_staleness < behind:
        raise ConfigError(
            f"replay.max_staleness is {config.replay.max_staleness}, but with async.{key} = "
            f"{older} a completion is {behind} updates old when it could first be replayed; set "
            f"replay.max_staleness to {behind} or more, or lower async.{key}"
        )


def _check_free(config: RunConfig) -> None:
    """Refuse what needs a batch that is sampled at once."""
    rollout, algorithm = config.rollout, config.algorithm
    reasons = {
        f"async.lag is {config.asynchrony.lag}: one of the two says what is sampled when": bool(
            config.asynchrony.lag
        ),
        f"rollout.engine is {rollout.engine!r}, and 'native' and 'http' let half-done samples "
        "go": rollout.engine == "vllm",
        "precision.kv_scales is 'per_tensor', whose scales are set between two batches": (
            config.precision.kv_scales == "per_tensor"
        ),
        "algorithm.dynamic_sampling replaces groups of a batch": algorithm.dynamic_sampling,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise ConfigError(
                f"async.max_staleness is {config.asynchrony.max_staleness}, but {reason}; leave "
                "one of them out"
            )


def check_layout(config: RunConfig) -> None:
    """Refuse rollouters of a synchronous run, and engines shared by several processes."""
    cluster, asynchrony = config.cluster, config.asynchrony
    if cluster.rollouters and not asynchrony.lag and asynchrony.max_staleness is None:
        raise ConfigError(
            f"cluster.rollouters is {cluster.rollouters}, but async.lag is 0: rollouters and "
            "trainers would wait for each other; set async.lag = 1 or async.max_staleness, or "
            "rollouters = 0"
        )
    check_sharing(config)


def check_started(config: Recipe, processes: int) -> None:
    """Refuse rollouters, servers and engines that do not go with the number of processes that a run
    has, which torchrun may have started.
    """
    started = counted(processes, "processes", "process")
    rollouters, rollout = config.cluster.rollouters, config.rollout
    if rollouters >= processes:
        raise ConfigError(
            f"cluster.rollouters is {rollouters}, but the run has {started}, of which at least "
            "one has to train; start more (--cluster.processes N), or set cluster.rollouters = 0, "
            "with which all sample and train in turn: the bytes are the same"
        )
    if not isinstance(rollout, RunRolloutConfig):
        return
    if rollout.engine == "http" and 0 < len(rollout.servers) < processes:
        raise ConfigError(
            f"rollout.servers names {len(rollout.servers)}, and the run has {started}, each of "
            "which samples at servers of its own: start as many servers as processes, or lower "
            "cluster.processes"
        )
    if processes > 1:
        _check_shared(rollout.engine, f"{started} were started")


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
    if rollout.speculation:
        raise ConfigError(
            f"rollout.speculation is the native engine's, and rollout.engine is {engine!r}; leave "
            "it out, and give it to each server of Isobit's as --rollout.speculation"
        )
    _check_processes(engine, cluster)
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
    if len({one.rstrip("/").lower() for one in rollout.servers}) < len(rollout.servers):
        raise ConfigError("rollout.servers names a server twice; name each once")


def _check_processes(engine: str, cluster: ClusterConfig) -> None:
    """Refuse processes that do not go with an engine elsewhere."""
    if cluster.rollouters:
        raise ConfigError(
            f"rollout.engine is {engine!r}, and cluster.rollouters {cluster.rollouters}, which "
            "sample instead of it; leave one of them out"
        )
    if cluster.is_launched:
        _check_shared(engine, "cluster asks for several")


def _check_shared(engine: str, why: str) -> None:
    """Refuse an engine that several processes cannot have."""
    if engine == "vllm":
        raise ConfigError(
            f"rollout.engine is 'vllm', which samples for a run of one process, and {why}; start "
            "one, or set rollout.engine to 'native' or 'http'"
        )


def check_sharing(config: Recipe) -> None:
    """Refuse engines of several processes where samples come from elsewhere, or read more than the
    matrices that processes share.
    """
    sharing, rollout = config.cluster.rollout_tp, config.rollout
    if sharing == 1:
        return
    engine = rollout.engine if isinstance(rollout, RunRolloutConfig) else "native"
    reasons = {
        f"cluster.rollouters is {config.cluster.rollouters}, each of which has an engine": (
            config.cluster.rollouters > 0
        ),
        f"rollout.engine is {engine!r}, and only the native one is shared": engine != "native",
        "lora is set, and adapters are not shared": config.lora is not None,
        "precision.kv_scales is 'per_tensor', and such scales are not shared": (
            config.precision.kv_scales == "per_tensor"
        ),
        "async.max_staleness is set, and half-done samples are not shared": (
            isinstance(config, RunConfig) and config.asynchrony.max_staleness is not None
        ),
        "without a reward nothing is generated": config.reward is None,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise ConfigError(
                f"cluster.rollout_tp is {sharing}, but {reason}; set cluster.rollout_tp = 1, or "
                "leave the other out"
            )


def check_sft(config: SftConfig) -> None:
    if config.cluster.rollouters:
        raise ConfigError(
            f"cluster.rollouters is {config.cluster.rollouters}, but fine-tuning learns from given "
            "completions; set it to 0"
        )
    check_sharing(config)
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
        (f"{key}.sources.{name}", source)
        for key, table in tables.items()
        if isinstance(table, MixtureExamples)
        for name, source in table.sources.items()
    ]
    sources += [
        (key, table) for key, table in tables.items() if not isinstance(table, MixtureExamples)
    ]
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


def check_reward(reward: RewardConfig, acts: bool = False) -> None:
    """Refuse both a function and a model in one reward, time limits beyond the deadline, and what
    an environment gives where no environment ``acts``.
    """
    defaults = RewardConfig()
    _check_seconds(reward)
    for name, part in reward.named().items():
        if part.function == "environment" and not acts:
            raise ConfigError(
                f"{f'reward.parts.{name}' if reward.parts else 'reward'}.function is "
                "'environment', the reward that an environment gives, and there is none; name one "
                "in environment.class, or another reward"
            )
    if reward.parts:
        for key in ("function", "model", "options", "weight"):
            if getattr(reward, key) != getattr(defaults, key):
                raise ConfigError(
                    f"reward.{key} is {getattr(reward, key)!r}, but reward.parts names several "
                    f"rewards; move it to one of them, as reward.parts.NAME.{key}"
                )
        for name, part in reward.parts.items():
            key = f"reward.parts.{name}"
            if (part.function is None) == (part.model is None):
                both = f"{part.function!r} and {part.model!r}"
                named = "neither" if part.function is None else both
                raise ConfigError(
                    f"{key} needs a function or a model, and has {named}; give it one"
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


def check_lora(config: Recipe) -> None:
    """Refuse what adapters do not go with, by the key."""
    if config.lora is None:
        return
    precision = config.precision
    if precision.wgrad not in ("bf16", PrecisionConfig(preset=precision.preset).wgrad):
        raise ConfigError(
            f"precision.wgrad is {precision.wgrad!r}, but with [lora] no matrix of the "
            "model has a gradient, and WGrad of adapters is in BF16; leave it out"
        )
    if isinstance(config, SftConfig):
        if config.objective == "preference":
            raise ConfigError(
                'lora is set, and objective is "preference": a reward model has a score head that '
                "adapters' files do not hold; leave [lora] out"
            )
        return
    calibrated = getattr(config.algorithm, "calibrate_every", 0)
    for key, value, reason in (
        ("rollout.engine", config.rollout.engine, "adapters are published to the native engine"),
        ("reference.refresh_every", config.reference.refresh_every, "the reference is the base"),
        ("reference.offload", config.reference.offload, "the reference is the policy's own base"),
        ("algorithm.calibrate_every", calibrated, "a BF16 shadow is made of masters"),
    ):
        if value and value != "native":
            raise ConfigError(
                f"{key} is {value!r} and lora is set, but {reason}; leave one of them out"
            )
