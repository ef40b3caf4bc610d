"""The table ``async``: by how many steps sampling runs ahead of learning.

The table ``check``: what a run does where rollout and training are found to differ, and where
its rewards have nothing to teach.

The table ``checkpoint``: when a run's whole state is written, and which of its states stay.

The table ``cluster``: the processes of a run.  None of its keys changes a byte of what the run
learns.

The table ``from_scratch`` of ``isobit sft``: a decoder that no model folder describes.

The table ``evaluation``: when the policy is measured, and how it answers then.

The table ``precision``: the formats of rollout and training together, as a preset and choices on
top of it.  A recipe that says ``precision = "fp8"`` names the preset alone.

The table ``reference``: the model that a KL penalty holds the policy to.

The table ``replay``: completions of earlier steps that are learnt from again.

The table ``rollout``: how completions are drawn, and the sizes of the engine's batch and
cache.

The table ``tracking``: services that a run sends its figures to.

The table ``training``: steps, batches and the optimiser.

Two numbers set the batch: prompts a step (``prompts_per_step``) and tokens a micro-batch
(``tokens_per_microbatch``).
"""

from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from isobit.config.base import (
    MAX_BATCH,
    MAX_COUNT,
    MAX_FACTOR,
    MAX_PROCESSES,
    MAX_STEPS,
    MAX_WAIT_S,
    Strict,
)
from isobit.util.errors import ConfigError


class AsyncConfig(Strict):
    """A fixed lag: a run with it is as reproducible, and as resumable, as one without."""

    lag: int = Field(default=0, ge=0, le=64)
    """Steps that the weights which sample a step's batch are behind those that learn from it: batch
    t is sampled wholly by the weights after step t - 1 - lag, the first ``lag`` + 1 batches by
    those that the run begins with.  The loss's ratio is taken to the recorded log-probabilities,
    exact for the weights of then.
    """


class CheckConfig(Strict):
    """What a run does in a step where rollout and training part (every response token has a
    log-probability from both), and after steps without a signal.
    """

    on_mismatch: Literal["warn", "stop", "ignore"] = "warn"
    """warn: a line on the console, once a step; stop: end the run; the metrics count differing
    tokens in any case.
    """
    max_mean_diff: float | None = Field(default=None, gt=0, le=MAX_FACTOR)
    """Nats.  In an exact flow one differing token is a mismatch; in the others a mean absolute
    difference above this, if it is set.
    """
    max_ratio: float | None = Field(default=100.0, gt=1, le=MAX_FACTOR)
    """The largest probability ratio of trainer and sampler, in either direction, that a step may
    have without being told of as ``on_mismatch`` says; sampled by weights that are long gone, or by
    another program, tokens can be far out.
    """
    repeat_every: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Every so many steps one micro-batch's forward and backward are computed twice and their bits
    compared: an alarm for a processor, memory or kernel that errs now and then.  0: never.
    """
    state: bool = True
    """Whether weights, masters and moments are read again before a step learns, and compared with
    what the last update left: an alarm for a memory that loses bits.
    """
    on_no_signal: Literal["warn", "stop", "ignore"] = "warn"
    """Where ``no_signal_steps`` steps in a row had nothing to learn from, since all rewards of each
    prompt were equal.  warn: a line on the console, and one after each further so many; stop: end
    the run with a checkpoint; the metrics count such updates in any case.
    """
    no_signal_steps: int = Field(default=10, gt=0, le=MAX_STEPS)


class CheckpointConfig(Strict):
    """When the whole state of a run is written to ``checkpoints/`` in its directory, and how many
    of them stay.

    Beside the rules below there is one after the last step, and one where SIGTERM or Ctrl-C ends
    the run.
    """

    every: int = Field(default=10, ge=0, le=MAX_STEPS)
    """Steps between checkpoints; 0 is only at the end or when the run is interrupted."""
    keep_last: int = Field(default=2, ge=0, le=MAX_STEPS)
    """Keep that many of the newest; 0 writes none at all, for a disk that has no room: a run that
    ends early then begins anew.
    """
    keep_every: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Also keep those of every that many steps (a multiple of ``every``); 0 keeps none for this
    reason.
    """
    wait_for_space_s: float = Field(default=600.0, ge=0, le=MAX_WAIT_S)
    """Seconds that a run waits, trying again, where the disk or a quota is full: what was learnt
    since the last checkpoint is not lost if somebody frees some space; 0 ends the run at once.
    """
    keep_best: str | None = None
    """Also write and keep the one with the highest value of this evaluation figure, for example
    ``eval/held_out/accuracy``; of ``isobit sft``'s ``eval/NAME/loss`` the lowest.
    """


Launcher = Literal["local", "ray"]


class EngineConfig(Strict):
    """Who samples, where nothing is trained."""

    rollout_tp: int = Field(default=1, gt=0, le=64)
    """Processes that share one engine, for a policy that one GPU cannot hold: each has a part of
    every linear's outputs, and the bits are those of one.
    """


class ClusterConfig(Strict):
    """Who computes."""

    processes: int = Field(default=1, gt=0, le=MAX_PROCESSES)
    """One a GPU, or on CPUs as many as there are cores for.  Under ``torchrun`` or SLURM the
    processes that are there are taken, whatever this says.
    """
    launcher: Launcher = "local"
    """Who starts them: this command, on this machine, or a Ray cluster (``pip install
    isobit[ray]``).
    """
    restarts: int = Field(default=0, ge=0, le=MAX_COUNT)
    """After the death of a process all are started again with ``--resume``, at most so often; on a
    Ray cluster on the nodes that are left, and in fewer processes where these have no room for all.
    """
    rollout_tp: int = Field(default=1, gt=0, le=64)
    """Processes that share one engine, for a policy that one GPU cannot hold: each has a part of
    every linear's outputs, and the bits are those of one.  ``isobit eval`` takes it; in a run
    published weights are whole on every GPU.
    """
    rollouters: int = Field(default=0, ge=0, le=MAX_PROCESSES)
    """Processes, the last of them, that only sample, while the others train; 0 lets all do both in
    turn.  It takes ``async.lag`` of at least 1 to keep both busy.
    """

    @property
    def is_launched(self) -> bool:
        """Whether the command starts others and computes nothing itself."""
        return self.processes > 1 or self.launcher == "ray"


Family = Literal["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"]
"""As the ``model_type`` of a Hugging Face ``config.json``."""

MIXTURES: tuple[Family, ...] = ("qwen3_moe", "mixtral")
"""Families that have experts."""
WINDOWED: tuple[Family, ...] = ("mistral", "mixtral")
"""Families whose layers may all have a sliding window."""

MAX_VOCAB_SIZE = 1 << 22
MAX_WIDTH = 1 << 20
"""Elements of a hidden state, a head, or within an MLP."""
MAX_LAYERS = 1000
MAX_HEADS = 1024
MAX_EXPERTS = 512
MAX_POSITIONS = 1 << 20
"""More than any model that there is; a number beyond is a mistake, which would otherwise show as a
plan without end or a machine without memory."""


class ModelShape(Strict):
    """A decoder to be trained from random weights; the names are those of a Hugging Face
    ``config.json``.
    """

    family: Family = "qwen3"
    hidden_size: int = Field(gt=0, le=MAX_WIDTH)
    intermediate_size: int = Field(gt=0, le=MAX_WIDTH)
    num_layers: int = Field(gt=0, le=MAX_LAYERS)
    num_heads: int = Field(gt=0, le=MAX_HEADS)
    num_kv_heads: int | None = Field(default=None, gt=0, le=MAX_HEADS)
    """By default as many as ``num_heads``."""
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
    """Keys that a query sees, in the families mistral and mixtral; by default all before it."""
    num_experts: int | None = Field(default=None, gt=0, le=MAX_EXPERTS)
    """Experts of each layer, in the families qwen3_moe and mixtral."""
    num_experts_per_tok: int = Field(default=2, gt=0, le=MAX_EXPERTS)
    """Experts that a token goes to."""
    moe_intermediate_size: int | None = Field(default=None, gt=0, le=MAX_WIDTH)
    """Of each expert of the family qwen3_moe; by default ``intermediate_size``."""


class EvaluationConfig(Strict):
    """Periodic evaluation on every set of ``data.eval``; also before the first and after the last
    step.
    """

    every: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps between evaluations; 0 is only before and after."""
    temperature: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """0 is greedy, one sample a problem."""
    samples: int = Field(default=1, gt=0, le=MAX_BATCH)
    """Samples a problem when the temperature is above 0: gives mean@n and pass@k."""
    max_new_tokens: int | None = Field(default=None, gt=0, le=MAX_POSITIONS)
    """By default as in ``rollout``."""


Preset = Literal["fp32", "bf16", "fp8-rollout", "fp8-linear", "fp8"]


class PrecisionConfig(Strict):
    """The precision flow of both sides: a preset and the choices on top of it."""

    preset: Preset = "fp8"
    """fp8: linears, KV cache and attention in FP8 on both sides; fp8-linear: linears only; bf16;
    fp32; fp8-rollout: FP8 rollout only.
    """
    first_layers_bf16: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """Keep that many of the first decoder layers in BF16, KV cache and attention included."""
    last_layers_bf16: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """Keep that many of the last decoder layers in BF16, KV cache and attention included."""
    modules_bf16: tuple[str, ...] = ()
    """Linears kept in BF16, by full path (``layers.3.down_proj``) or by name in every layer
    (``down_proj``).
    """
    wgrad: Literal["fp8", "bf16"] = "fp8"
    """Operands of the weight gradient's GEMM."""
    scales: Literal["power_of_two", "fp32"] = "power_of_two"
    """Scales of the linears' operands; those of Q, K and V are always powers of two."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"preset": value} if isinstance(value, str) else value


def named_precision(precision: PrecisionConfig | str) -> PrecisionConfig:
    """The flow itself, or the one of a preset's name.  Raises ConfigError for another name."""
    if isinstance(precision, PrecisionConfig):
        return precision
    if precision not in get_args(Preset):
        raise ConfigError(
            f"precision is {precision!r}; expected a PrecisionConfig or one of "
            f"{', '.join(map(repr, get_args(Preset)))}"
        )
    return PrecisionConfig.model_validate(precision)


class ReferenceConfig(Strict):
    """The reference model: frozen weights in the flow's formats, a byte a linear weight in
    ``fp8``.  It is there where ``algorithm.kl_coefficient`` is above 0.
    """

    model: str | None = None
    """A Hugging Face folder or a name of the hub, with the policy's vocabulary, or ``starter``; by
    default what ``model`` names.
    """
    refresh_every: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps after which it takes the policy's weights of that moment; 0 is never."""
    offload: bool = False
    """Keep it in host memory except while it scores, which leaves a GPU more memory for the KV
    cache and for training; a CPU ignores it.
    """


class ReplayConfig(Strict):
    """Experience replay.  Off as long as ``fraction`` is 0."""

    fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of each step's batch that is replayed; a step's own completions are the rest."""
    max_staleness: int = Field(default=4, gt=0, le=MAX_COUNT)
    """Updates of the weights since a completion was sampled, after which it is dropped."""
    max_mib: float = Field(default=256.0, gt=0, le=MAX_COUNT)
    """What the buffer holds at most, in MiB; the oldest go first."""
    sampling: Literal["uniform", "advantage"] = "uniform"
    """Every completion alike, or in proportion to the size of its advantage: those of level groups
    then never come again.
    """


class RolloutConfig(Strict):
    """How the native engine generates."""

    max_new_tokens: int = Field(default=512, gt=0, le=MAX_POSITIONS)
    temperature: float = Field(default=1.0, ge=0, le=MAX_FACTOR)
    top_k: int = Field(default=0, ge=0, le=MAX_VOCAB_SIZE)
    """0 is off."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, lt=1)
    stop_strings: tuple[str, ...] = ()
    max_sequences: int = Field(default=256, gt=0, le=MAX_BATCH)
    """Sequences decoded at once."""
    max_batched_tokens: int | None = Field(default=None, gt=0, le=MAX_COUNT)
    """Tokens of one forward: decoding sequences first, the rest for chunks of prompts.  By default
    2048 on a CPU and 16384 on a GPU.
    """
    kv_pages: int | None = Field(default=None, gt=0, le=MAX_COUNT)
    """Pages of the KV cache, of 64 tokens on a CPU and 128 on a GPU; by default as many as
    ``max_sequences`` of full length need, within ``kv_memory_gib``.
    """
    kv_memory_gib: float | None = Field(default=None, gt=0, le=MAX_FACTOR)
    """By default 2 on a CPU, and on a GPU what is free when the engine starts, or what the plan of
    a training run leaves.
    """


class TrackingConfig(Strict):
    """Where a run sends its figures, beside ``metrics.jsonl`` and TensorBoard, which it always
    writes.
    """

    wandb: bool | str = False
    """Weights & Biases: ``true`` for the project ``isobit``, or a project's name; needs ``pip
    install wandb``.
    """


Recompute = Literal["none", "mlp", "full"]
OldLogProbs = Literal["auto", "recorded", "recomputed"]
Moments = Literal["fp32", "bf16", "fp8"]
"""Formats of AdamW's moments, from the largest to the smallest."""


class OptimisationConfig(Strict):
    """Steps, batches and the optimiser: what every kind of training has."""

    steps: int = Field(default=20, gt=0, le=MAX_STEPS)
    prompts_per_step: int = Field(default=16, gt=0, le=MAX_BATCH)
    tokens_per_microbatch: int = Field(default=4096, gt=0, le=MAX_COUNT)
    slots: int = Field(default=1, gt=0, le=MAX_PROCESSES)
    """Sums in which an update's gradient is added up: micro-batch i goes to sum i mod ``slots``,
    and then the sums are added in their order.  On several hosts set it to their number, or a
    multiple: each computes sums of its own, and gradients cross the network once for each of them
    rather than once a micro-batch.  The bits of a run depend on it, and not on hosts or processes.
    More than one take 4 more bytes a parameter, shared out among the processes of a host.
    """
    learning_rate: float = Field(default=1e-6, gt=0, le=MAX_FACTOR)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate behind the warmup: it stays, falls along a line, or as half a cosine;
    the last two would reach 0 right after the last update.
    """
    warmup_updates: int = Field(default=0, ge=0, le=MAX_COUNT)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_epsilon: float = Field(default=1e-8, gt=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    moments: Moments = "fp32"
    """Format of AdamW's moments: 8, 4 or 2 bytes a parameter for the two, for a policy that fills
    the memory.  The smaller ones are rounded stochastically; ``fp8`` has a scale for 128 elements,
    and elements far below their group's largest move less than in the others.
    """
    offload_moments: bool = False
    """Keep AdamW's moments in host memory while the engine generates, which leaves a GPU more
    memory for the KV cache; a CPU ignores it.
    """
    recompute: Recompute = "none"
    """What the backward computes again, to the same bits, instead of keeping it: nothing, the MLP
    of each layer, or all of each layer.
    """
    router_balance: float = Field(default=0.001, ge=0, le=MAX_FACTOR)
    """Coefficient of the load-balancing loss of a mixture of experts, in each layer: the mean over
    sequences of what is 1 where all experts are chosen equally often.  0 switches it off.  The
    default is what Qwen3-MoE was published with (``router_aux_loss_coef``), a tenth of what models
    are pre-trained with: it keeps experts in use, and hardly moves a router that is balanced.
    """
    router_z: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """Coefficient of the router's z-loss, in each layer: the mean over tokens of the squared
    log-sum-exp of its logits.  It keeps logits small, which a router in low precision needs; this
    one computes in FP32.
    """
    max_grad_norm: float = Field(default=1.0, gt=0, le=1e30)
    max_skipped_updates: int = Field(default=3, ge=0, le=MAX_COUNT)
    """Stop after that many updates in a row were skipped because loss or gradient norm was
    not finite.
    """


class TrainingConfig(OptimisationConfig):
    """How the policy learns from its own completions."""

    samples_per_prompt: int = Field(default=16, gt=1, le=MAX_BATCH)
    updates_per_batch: int = Field(default=1, gt=0, le=MAX_BATCH)
    """Cut a step's batch by prompt into that many parts, one update each."""
    epochs: int = Field(default=1, gt=0, le=1000)
    """Go over a step's batch that often."""
    without_signal: Literal["skip", "take"] = "skip"
    """An update that has nothing to learn from, since all rewards of each of its prompts are equal:
    left out, so that weights and moments stay as they are; or taken, by AdamW's momentum and weight
    decay alone.
    """
    old_log_probs: OldLogProbs = "auto"
    """Which log-probabilities the loss's ratio is taken to: those recorded while sampling; those of
    the trainer's forward before its first update of a step, with ``corrections`` for the distance
    between the two; or by default the recorded ones in an exact flow and the trainer's elsewhere.
    """
