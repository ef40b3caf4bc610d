"""The tables that are neither ``algorithm``, ``data`` nor ``reward``."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from isobit.config.base import (
    MAX_BATCH,
    MAX_COUNT,
    MAX_FACTOR,
    MAX_PROCESSES,
    MAX_STEPS,
    MAX_WAIT_S,
    HomeName,
    HomePath,
    Strict,
)
from isobit.util.errors import ConfigError


class AsyncConfig(Strict):
    """A fixed lag of the sampling weights. A run with a lag is as reproducible as one without."""

    lag: int = Field(default=0, ge=0, le=64)
    """How many steps sampling runs ahead of training: batch t is sampled by the weights after step
    t - 1 - lag. Raise it to 1 to keep rollouters and trainers busy at once.
    """


OnMismatch = Literal["warn", "stop", "ignore"]
ON_MISMATCH = get_args(OnMismatch)
"""What a run can do about a mismatch."""


class CheckConfig(Strict):
    """What a run does about a mismatch of log-probabilities, and after steps without a signal."""

    on_mismatch: Literal["auto"] | OnMismatch = "auto"
    """When the log-probabilities mismatch: stop ends the run before the update that would learn
    from them, warn prints a line once a step and goes on; auto stops in an exact flow and warns in
    others. The metrics count differing tokens in any case.
    """
    max_mean_diff: float | None = Field(default=None, gt=0, le=MAX_FACTOR)
    """Nats. In an exact flow any differing token is a mismatch; in other flows a mean absolute
    difference above this is, if it is set.
    """
    max_ratio: float | None = Field(default=100.0, gt=1, le=MAX_FACTOR)
    """The largest probability ratio of trainer and sampler before ``on_mismatch`` applies."""
    repeat_every: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps between checks for faulty hardware, which compute one micro-batch twice; 0 is never."""
    state: bool = True
    """Verify before each step that weights, masters and moments are unchanged in memory."""
    on_no_signal: Literal["warn", "stop", "ignore"] = "warn"
    """After ``no_signal_steps`` steps in a row in which every group had zero variance: warn prints
    a line, stop ends the run with a checkpoint. The metrics count such updates in any case.
    """
    no_signal_steps: int = Field(default=10, gt=0, le=MAX_STEPS)
    """Steps in a row without a signal before ``on_no_signal`` applies."""


class CheckpointConfig(Strict):
    """When the whole state of a run is written to ``checkpoints/``, and how many are kept. The last
    step, SIGTERM and Ctrl-C also write one.
    """

    every: int = Field(default=10, ge=0, le=MAX_STEPS)
    """Steps between checkpoints; 0 writes one only when the run ends or is interrupted."""
    keep_last: int = Field(default=2, ge=0, le=MAX_STEPS)
    """How many of the newest are kept; 0 writes none at all, so that the run cannot be resumed."""
    keep_every: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Also keep checkpoints of multiples of this many steps (a multiple of ``every``); 0 is off."""
    wait_for_space_s: float = Field(default=600.0, ge=0, le=MAX_WAIT_S)
    """Seconds that a run waits when the disk or a quota is full; 0 ends the run at once."""
    keep_best: str | None = None
    """Also keep the checkpoint with the highest value of this evaluation figure, for example
    ``eval/held_out/accuracy``; of ``isobit sft``'s ``eval/NAME/loss`` the lowest.
    """
    on_save: HomeName | tuple[HomeName, ...] | None = None
    """What is run after each complete checkpoint and model: a Python function by
    ``path/to/file.py:function`` or ``module:function``, which is given the folder's path, or a
    command as a list, in which ``{folder}`` is the path (by default it comes last). It is a process
    of its own, whose output is in ``on_save.log``; a failure is printed, and the run goes on.
    """
    on_save_limit_s: float = Field(default=3600.0, gt=0, le=MAX_WAIT_S)
    """Seconds after which ``on_save`` is killed, which counts as a failure."""


Launcher = Literal["local", "ray"]


class EngineConfig(Strict):
    rollout_tp: int = Field(default=1, gt=0, le=64)
    """Processes that share one engine, for a policy too large for one GPU; no bit changes."""


class ClusterConfig(Strict):
    """The processes of a run. No key changes what the run computes."""

    processes: int = Field(default=1, gt=0, le=MAX_PROCESSES)
    """The number of GPUs, or at most that of CPU cores; ``torchrun`` and SLURM override it."""
    launcher: Launcher = "local"
    """Who starts the processes: this command, or a Ray cluster (``pip install isobit[ray]``)."""
    restarts: int = Field(default=0, ge=0, le=MAX_COUNT)
    """How often all processes are restarted with ``--resume`` after one has died. A Ray cluster
    uses the remaining nodes, and fewer processes where they have no room for all.
    """
    rollout_tp: int = Field(default=1, gt=0, le=64)
    """Processes that share one engine, for ``isobit eval`` of a large policy; a run needs 1."""
    rollouters: int = Field(default=0, ge=0, le=MAX_PROCESSES)
    """How many processes, the last ones, only sample while the others train; it needs ``async.lag``
    of at least 1. With 0 every process alternates between the two.
    """

    @property
    def is_launched(self) -> bool:
        """Whether the command starts other processes and computes nothing itself."""
        return self.processes > 1 or self.launcher == "ray"


Family = Literal["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"]
"""The ``model_type`` of a Hugging Face ``config.json``."""

MIXTURES: tuple[Family, ...] = ("qwen3_moe", "mixtral")
"""Families with experts."""
WINDOWED: tuple[Family, ...] = ("mistral", "mixtral")
"""Families whose layers may have a sliding window."""

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linears that can have an adapter, by PEFT's names, in the order of the forward."""
ALL_LINEAR = "all-linear"

MAX_VOCAB_SIZE = 1 << 22
MAX_WIDTH = 1 << 20
"""Elements of a hidden state, a head, or an MLP."""
MAX_LAYERS = 1000
MAX_HEADS = 1024
MAX_EXPERTS = 512
MAX_POSITIONS = 1 << 20


class ModelShape(Strict):
    """A decoder with random weights; most names are those of a Hugging Face ``config.json``."""

    family: Family = "qwen3"
    hidden_size: int = Field(gt=0, le=MAX_WIDTH)
    intermediate_size: int = Field(gt=0, le=MAX_WIDTH)
    num_layers: int = Field(gt=0, le=MAX_LAYERS)
    num_heads: int = Field(gt=0, le=MAX_HEADS)
    num_kv_heads: int | None = Field(default=None, gt=0, le=MAX_HEADS)
    """By default ``num_heads``."""
    head_dim: int | None = Field(default=None, gt=0, le=MAX_WIDTH)
    """By default ``hidden_size`` over ``num_heads``."""
    vocab_size: int | None = Field(default=None, gt=0, le=MAX_VOCAB_SIZE)
    """By default the tokenizer's, rounded up to a multiple of 128."""
    max_positions: int = Field(default=512, gt=1, le=MAX_POSITIONS)
    """Tokens of the context."""
    rms_epsilon: float = Field(default=1e-6, ge=1e-30, le=1)
    rope_theta: float = Field(default=10000.0, ge=1.01, le=1e15)
    tied_embeddings: bool = True
    sliding_window: int | None = Field(default=None, gt=0, le=MAX_POSITIONS)
    """Keys that a query sees, in the families mistral and mixtral; by default all."""
    num_experts: int | None = Field(default=None, gt=0, le=MAX_EXPERTS)
    """Experts of each layer, in the families qwen3_moe and mixtral."""
    num_experts_per_tok: int = Field(default=2, gt=0, le=MAX_EXPERTS)
    """Experts of each token."""
    moe_intermediate_size: int | None = Field(default=None, gt=0, le=MAX_WIDTH)
    """Size of each expert in the family qwen3_moe; by default ``intermediate_size``."""


class EvaluationConfig(Strict):
    """Evaluation on every set of ``data.eval``; also before the first and after the last step."""

    every: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps between evaluations; 0 evaluates only before and after the run."""
    temperature: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """0 is greedy, with one sample of each prompt."""
    samples: int = Field(default=1, gt=0, le=MAX_BATCH)
    """Samples of each prompt at a temperature above 0, for mean@n and pass@k."""
    max_new_tokens: int | None = Field(default=None, gt=0, le=MAX_POSITIONS)
    """By default ``rollout.max_new_tokens``."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample among the likeliest tokens that together have this probability; by default
    ``rollout.top_p``.
    """


class LoraConfig(Strict):
    """LoRA: the model's weights stay as they are, and adapters of low rank learn. Keys are those of
    PEFT's ``LoraConfig``, except that dropout is always 0.
    """

    rank: int = Field(default=32, gt=0, le=1024)
    """Rows of A and columns of B; PEFT's ``r``."""
    alpha: float | None = Field(default=None, gt=0, le=MAX_FACTOR)
    """An adapter's output is multiplied by alpha / rank; by default alpha is twice the rank."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Linears that have an adapter: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and
    down_proj, or all-linear for all of them.
    """
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (arXiv 2312.03732)."""

    @field_validator("targets", mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("targets")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or any(name not in (*LORA_TARGETS, ALL_LINEAR) for name in value):
            raise ValueError(f"expected some of {', '.join((*LORA_TARGETS, ALL_LINEAR))}")
        return value

    @property
    def modules(self) -> tuple[str, ...]:
        """The targets in the order of the forward, each once."""
        return tuple(name for name in LORA_TARGETS if {name, ALL_LINEAR} & set(self.targets))


Preset = Literal[
    "fp32", "bf16", "fp8-rollout", "fp8-linear", "fp8", "int8-rollout", "int8-linear", "int8"
]


KvCalibration = Literal["trainer", "engine", "never"]


class PrecisionConfig(Strict):
    """The precision flow of both sides: a preset and changes to it. ``precision = "fp8"`` names a
    preset alone.
    """

    preset: Preset = "fp8"
    """fp8: linears, KV cache and attention in FP8 on both sides; fp8-linear: linears only;
    fp8-rollout: FP8 rollout only; int8, int8-linear and int8-rollout: likewise in INT8 behind a
    Hadamard matrix; bf16; fp32.
    """
    first_layers_bf16: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """How many of the first decoder layers stay in BF16, with their KV cache and attention."""
    last_layers_bf16: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """How many of the last decoder layers stay in BF16, with their KV cache and attention."""
    modules_bf16: tuple[str, ...] = ()
    """Linears kept in BF16, as ``layers.3.down_proj`` or, in every layer, ``down_proj``."""
    attention: Literal["fp8", "int8", "bf16"] | None = None
    """Format of Q, K, V and the KV cache, on the sides whose linears are in FP8 or INT8; by default
    the preset's.
    """
    wgrad: Literal["fp8", "bf16"] | None = None
    """Format of the operands of WGrad, where linears are in FP8 or INT8; by default FP8 in FP8
    flows and BF16 in INT8 flows.
    """
    head: Literal["bf16", "int8"] | None = None
    """Format in which lm_head makes the logits, in all flows but fp32; by default BF16."""
    scales: Literal["power_of_two", "fp32"] = "power_of_two"
    """Scales of the linears' FP8 operands; those of Q, K and V are powers of two in FP8, and
    scales of INT8 are FP32.
    """
    kv_scales: Literal["per_token", "per_tensor"] = "per_token"
    """Scales of Q, K and V: per_token has one a token and head; per_tensor one a layer for each,
    which `isobit train` calibrates, in the presets fp8 and fp8-rollout.
    """
    kv_calibration: KvCalibration = "trainer"
    """Where scales a tensor come from: trainer, the forward of the last update; engine, a forward
    of the next prompts after each update; never, the latter once before the first step.
    """

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"preset": value} if isinstance(value, str) else value

    @property
    def name(self) -> str:
        """See ``precision_name``."""
        return precision_name(self.model_dump(mode="json"))


def precision_name(table: Mapping[str, Any]) -> str:
    """How a recipe or ``--precision`` names a flow whose table this is, without what is as by
    default: ``fp8``, or ``{preset = "fp8", attention = "int8"}``.
    """
    defaults = PrecisionConfig().model_dump(mode="json")
    options = {key: value for key, value in table.items() if value != defaults.get(key)}
    if not options.keys() - {"preset"}:
        return str(table["preset"])
    text = ({"preset": table["preset"]} | options).items()
    return f"{{{', '.join(f'{key} = {json.dumps(value)}' for key, value in text)}}}"


def named_precision(precision: PrecisionConfig | str) -> PrecisionConfig:
    """The flow itself, or that of a preset's name. Raises ConfigError for an unknown name."""
    if isinstance(precision, PrecisionConfig):
        return precision
    if precision not in get_args(Preset):
        raise ConfigError(
            f"precision is {precision!r}; expected a PrecisionConfig or one of "
            f"{', '.join(map(repr, get_args(Preset)))}"
        )
    return PrecisionConfig.model_validate(precision)


class RolloutConfig(Strict):
    max_new_tokens: int = Field(default=512, gt=0, le=MAX_POSITIONS)
    """Longest completion, in tokens. The default is half of the model's context where that is less.
    """
    temperature: float = Field(default=1.0, ge=0, le=MAX_FACTOR)
    """Divides the logits; recorded and trained log-probabilities use it too."""
    top_k: int = Field(default=0, ge=-1, le=MAX_VOCAB_SIZE)
    """Sample among this many of the likeliest tokens; 0 or -1 is off."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample among the likeliest tokens that together have this probability; 1 is off."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Sample among tokens of at least this share of the largest probability; 0 is off."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a completion, besides the end token."""
    stop_tokens: tuple[str, ...] = ()
    """Tokens, as the tokenizer spells them, that end a completion besides the folder's
    ``eos_token_id``: for example the end of turn of a chat template that is new to the model.
    """
    special_tokens: Literal["hide", "show"] = "hide"
    """Whether the text of a completion, which rewards read, shows its special tokens. The one that
    ends it is never shown.
    """
    max_sequences: int = Field(default=256, gt=0, le=MAX_BATCH)
    """Sequences decoded at once."""
    max_batched_tokens: int | None = Field(default=None, gt=0, le=MAX_COUNT)
    """Tokens of one forward; by default 2048 on a CPU and 16384 on a GPU."""
    kv_pages: int | None = Field(default=None, gt=0, le=MAX_COUNT)
    """Pages of the KV cache, of 64 tokens on a CPU and 128 on a GPU; by default as many as
    ``max_sequences`` of full length need, within ``kv_memory_gib``.
    """
    kv_memory_gib: float | None = Field(default=None, gt=0, le=MAX_FACTOR)
    """Size of the KV cache; by default 2 on a CPU, and on a GPU what is free or planned."""

    @field_validator("top_k")
    @classmethod
    def _off_is_0(cls, value: int) -> int:
        """vLLM and verl switch it off by -1."""
        return max(value, 0)


ServerAddress = Annotated[str, Field(pattern=r"^https?://[^/?#\s]+/?$")]


class RunRolloutConfig(RolloutConfig):
    """How a run samples."""

    engine: Literal["native", "vllm", "http"] = "native"
    """native and http (``isobit serve`` at ``servers``) compute the trainer's function to the bit.
    vllm (``pip install isobit[vllm]``) does not: old log-probabilities are recomputed, and
    ``corrections`` is by default one of type tis.
    """
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of ``vllm.LLM``, for example ``{ enforce_eager = true }``."""
    servers: tuple[ServerAddress, ...] = ()
    """Where the engine http samples, as ``["http://host:8000"]``; of vllm, servers of its own."""
    server_key: Annotated[str, Field(pattern=r"^env:[A-Za-z_]\w*$")] | None = None
    """``env:NAME``: the variable of the environment with the servers' key."""
    weights_folder: HomePath | None = None
    """Through which vLLM's servers get weights: a folder that they have under the same path."""
    servers_timeout_s: float = Field(default=300.0, gt=0, le=MAX_WAIT_S)
    """How long a run waits while no server draws a token of its samples, whether one answers or
    not; then it ends, and can be resumed. A server that draws nothing for as long while others do
    is left out for a while.
    """

    @property
    def is_exact(self) -> bool:
        """Whether the engine can compute what the trainer does."""
        return self.engine != "vllm"

    @model_validator(mode="before")
    @classmethod
    def _of_any_rollout(cls, values: Any) -> Any:
        """What Python code makes as a ``RolloutConfig``, with the keys that it has set."""
        if isinstance(values, RolloutConfig) and not isinstance(values, RunRolloutConfig):
            return values.model_dump(exclude_unset=True)
        return values


TrackerName = Literal["wandb", "mlflow", "trackio", "swanlab", "tensorboard"]


class TrackingConfig(Strict):
    """Services that get the figures and sample completions of a run as well, and how many of its
    completions are kept.
    """

    to: tuple[TrackerName, ...] = ()
    """Any of wandb, mlflow, trackio and swanlab, each with ``pip install`` of its name. TensorBoard
    events are always written; ``tensorboard`` adds the sample completions to them as text.
    """
    project: str = Field(default="isobit", min_length=1, max_length=128)
    """The project of a service, or MLflow's experiment."""
    name: str | None = Field(default=None, min_length=1, max_length=128)
    """The run's name there; by default that of its directory."""
    tags: tuple[str, ...] = ()
    wandb: bool | str = False
    """The same as ``to = ["wandb"]``; a text is its project's name."""
    completions: Annotated[int, Field(ge=0, le=MAX_COUNT)] | Literal["all"] = 0
    """How many completions of each step, and of each set of an evaluation, are written to the
    folder ``completions`` as Parquet: a number, or ``all``. The best and the worst of four groups
    are in ``completions.jsonl`` in any case.
    """

    @field_validator("to", mode="before")
    @classmethod
    def _of_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    def services(self) -> dict[TrackerName, str]:
        """The project by service."""
        projects: dict[TrackerName, str] = dict.fromkeys(self.to, self.project)
        if self.wandb is not False:
            projects["wandb"] = self.wandb if isinstance(self.wandb, str) else self.project
        return projects


Recompute = Literal["none", "mlp", "full"]
OldLogProbs = Literal["auto", "recorded", "recomputed"]
Moments = Literal["fp32", "bf16", "fp8"]
"""Formats of AdamW's moments, from the largest to the smallest."""


class OptimisationConfig(Strict):
    """Steps, batches and the optimiser, for every kind of training."""

    steps: int = Field(default=20, gt=0, le=MAX_STEPS)
    """Steps of the whole run; ``data.epochs`` sets them instead."""
    prompts_per_step: int = Field(default=16, gt=0, le=MAX_BATCH)
    """Prompts of a step's batch."""
    tokens_per_microbatch: int = Field(default=4096, gt=0, le=MAX_COUNT)
    """Most tokens of one forward and backward; lower it if memory runs out."""
    slots: int = Field(default=1, gt=0, le=MAX_PROCESSES)
    """Partial sums of an update's gradient: micro-batch i goes to sum i mod ``slots``. On several
    hosts set it to their number or a multiple, so that gradients cross the network once for each
    sum. The bits of a run depend on it; more than one take 4 bytes a parameter on each host.
    """
    learning_rate: float = Field(default=1e-6, gt=0, le=MAX_FACTOR)
    """AdamW's learning rate after the warmup."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warmup; linear and cosine fall to ``min_learning_rate`` after the
    last update.
    """
    min_learning_rate: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """Where the schedules linear and cosine end."""
    warmup_updates: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Updates over which the learning rate rises linearly."""
    warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    """The same as a share of all updates of the run, rounded up."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_epsilon: float = Field(default=1e-8, gt=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    moments: Moments = "fp32"
    """Format of AdamW's moments: 8, 4 or 2 bytes a parameter for both, to save memory. ``bf16`` and
    ``fp8`` are rounded stochastically, and ``fp8`` has one scale for 128 elements.
    """
    offload_moments: bool = False
    """Keep AdamW's moments in host memory during generation, to free memory for the KV cache."""
    recompute: Recompute = "none"
    """What the backward recomputes to save memory: nothing, the MLPs, or whole layers."""
    router_balance: float = Field(default=0.001, ge=0, le=MAX_FACTOR)
    """Coefficient of the load-balancing loss of a mixture of experts, in each layer; 0 is off. The
    default is Qwen3-MoE's ``router_aux_loss_coef``, a tenth of what is usual in pre-training.
    """
    router_z: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """Coefficient of the router's z-loss, in each layer: the mean over tokens of the squared
    log-sum-exp of its logits, which keeps them small.
    """
    max_grad_norm: float = Field(default=1.0, gt=0, le=1e30)
    """Gradients with a larger norm are scaled down to it."""
    max_skipped_updates: int = Field(default=3, ge=0, le=MAX_COUNT)
    """Skipped updates in a row (loss or gradient norm not finite) before the run stops."""


class TrainingConfig(OptimisationConfig):
    samples_per_prompt: int = Field(default=16, gt=0, le=MAX_BATCH)
    """Completions of each prompt, which form a group. 1 is for ``reinforce_pp``, ``ppo`` and
    ``remax``, which do not compare them with each other.
    """
    updates_per_batch: int = Field(default=1, gt=0, le=MAX_BATCH)
    """Divide a step's batch by prompt into this many parts, with one update each."""
    epochs: int = Field(default=1, gt=0, le=1000)
    """Passes over a step's batch."""
    without_signal: Literal["skip", "take"] = "skip"
    """What becomes of an update in which every group has zero variance: skip leaves weights and
    moments unchanged; take applies AdamW's momentum and weight decay.
    """
    old_log_probs: OldLogProbs = "auto"
    """The denominator of the loss's ratio: recorded while sampling; recomputed by the trainer
    before the step's first update, with ``corrections`` for the difference; auto takes recorded in
    an exact flow and recomputed otherwise.
    """
