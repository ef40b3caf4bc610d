"""What a run is, as strict pydantic models: every default is written here once, every number has a
range, no torch is imported.

A run reads ``precision = "fp8"`` and sets both sides, rollout and training, with it.  Two numbers
set the batch: prompts a step (``training.prompts_per_step``) and tokens a micro-batch
(``training.tokens_per_microbatch``).
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Preset = Literal["fp32", "bf16", "fp8-rollout", "fp8-linear", "fp8"]
Device = Literal["auto", "cpu", "cuda"]
Recompute = Literal["none", "mlp", "full"]
Moments = Literal["fp32", "bf16", "fp8"]
"""From the largest to the smallest."""


class Strict(BaseModel):
    """Base of all configuration: an unknown key is an error, values are checked, nothing changes
    after loading.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class PrecisionConfig(Strict):
    """The precision flow of both sides: a preset and the choices on top of it."""

    preset: Preset = "fp8"
    """fp8: linears, KV cache and attention in FP8 on both sides; fp8-linear: linears only; bf16;
    fp32; fp8-rollout: FP8 rollout only.
    """
    first_layers_bf16: int = Field(default=0, ge=0)
    """Keep that many of the first decoder layers in BF16, KV cache and attention included."""
    last_layers_bf16: int = Field(default=0, ge=0)
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


class ReasoningGymData(Strict):
    """A procedural task of reasoning-gym, by name."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    """Name of the task, for example ``chain_sum``."""
    size: int = Field(default=1000, gt=0)
    seed: int = 0
    options: dict[str, Any] = {}
    """The task's own configuration."""
    system: str | None = None
    """A system message put before each question (needs a chat template)."""


class JsonlData(Strict):
    """A JSONL file; ``prompt`` holds text or a list of chat messages, the other columns go to the
    reward.
    """

    type: Literal["jsonl"] = "jsonl"
    path: Path
    """``starter:train.jsonl`` and ``starter:held_out.jsonl`` are the problems shipped with the
    starter model.
    """
    prompt: str = "prompt"
    """Column that holds the prompt."""
    limit: int | None = Field(default=None, gt=0)
    """Use that many rows from the start."""


class HfData(Strict):
    """A Hugging Face dataset on disk: a ``save_to_disk`` folder, or a folder of parquet, JSON or
    CSV files.
    """

    type: Literal["hf"] = "hf"
    path: Path
    split: str = "train"
    prompt: str = "prompt"
    limit: int | None = Field(default=None, gt=0)


DataSource = Annotated[ReasoningGymData | JsonlData | HfData, Field(discriminator="type")]


class DataConfig(Strict):
    """Where prompts come from.  A training prompt that also stands in an evaluation set is dropped,
    and counted.
    """

    train: DataSource
    eval: dict[str, DataSource] = {}
    """Named evaluation sets."""
    chat: bool = True
    """Render prompts through the tokenizer's chat template, where it has one; otherwise the text is
    used as it stands.
    """
    max_prompt_tokens: int = Field(default=1024, gt=0)
    """Longer prompts are refused, by id."""
    shuffle: bool = True


class RewardConfig(Strict):
    """How completions are graded."""

    function: str = "reasoning_gym"
    """``module:function``, ``path/to/file.py:function``, or ``reasoning_gym`` for the task's own
    scorer.
    """
    max_failed_fraction: float = Field(default=0.5, ge=0, le=1)
    """Stop the run when a larger share of a step's rewards raised or was not finite; below it they
    are excluded and counted.
    """


class RolloutConfig(Strict):
    """How the native engine generates."""

    max_new_tokens: int = Field(default=512, gt=0)
    temperature: float = Field(default=1.0, ge=0)
    top_k: int = Field(default=0, ge=0)
    """0 is off."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, lt=1)
    stop_strings: tuple[str, ...] = ()
    max_sequences: int = Field(default=256, gt=0)
    """Sequences decoded at once."""
    max_batched_tokens: int | None = Field(default=None, gt=0)
    """Tokens of one forward: decoding sequences first, the rest for chunks of prompts.  By default
    2048 on a CPU and 16384 on a GPU.
    """
    kv_pages: int | None = Field(default=None, gt=0)
    """Pages of the KV cache, of 64 tokens on a CPU and 128 on a GPU; by default as many as
    ``max_sequences`` of full length need, within ``kv_memory_gib``.
    """
    kv_memory_gib: float | None = Field(default=None, gt=0)
    """By default 2 on a CPU, and on a GPU what is free when the engine starts, or what the plan of
    a training run leaves.
    """


class AlgorithmConfig(Strict):
    """The objective.  The family grows here; GRPO's switches cover clip-higher, Dr. GRPO's
    normalisation and both means.
    """

    name: Literal["grpo"] = "grpo"
    clip_low: float = Field(default=0.2, ge=0)
    clip_high: float = Field(default=0.28, ge=0)
    """Above ``clip_low`` is DAPO's clip-higher."""
    loss_mean: Literal["token", "sequence"] = "token"
    """Mean over all response tokens of an optimiser step, or over sequences of each one's mean."""
    normalise_by_std: bool = True
    """Divide a group's centred rewards by their standard deviation (GRPO); false is Dr. GRPO."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of a KL penalty to a reference model; not available yet: anything but 0 is refused."""


class OptimisationConfig(Strict):
    """Steps, batches and the optimiser: what every kind of training has."""

    steps: int = Field(default=20, gt=0)
    prompts_per_step: int = Field(default=16, gt=0)
    tokens_per_microbatch: int = Field(default=4096, gt=0)
    learning_rate: float = Field(default=1e-6, gt=0)
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_updates: int = Field(default=0, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_epsilon: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
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
    """What a GPU's backward computes again, to the same bits, instead of keeping it: nothing, the
    MLP of each layer, or all of each layer. A CPU ignores it.
    """
    max_grad_norm: float = Field(default=1.0, gt=0)
    max_skipped_updates: int = Field(default=3, ge=0)
    """Stop after that many optimiser steps in a row were skipped because loss or gradient norm was
    not finite.
    """


class TrainingConfig(OptimisationConfig):
    """How the policy learns from its own completions."""

    samples_per_prompt: int = Field(default=16, gt=1)
    updates_per_batch: int = Field(default=1, gt=0)
    """Cut a step's batch by prompt into that many parts, one optimiser step each."""
    epochs: int = Field(default=1, gt=0)
    """Go over a step's batch that often."""


class EvaluationConfig(Strict):
    """Periodic evaluation on every set of ``data.eval``; also before the first and after the last
    step.
    """

    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 is only before and after."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy, one sample a problem."""
    samples: int = Field(default=1, gt=0)
    """Samples a problem when the temperature is above 0: gives mean@n and pass@k."""
    max_new_tokens: int | None = Field(default=None, gt=0)
    """By default as in ``rollout``."""


class CheckpointConfig(Strict):
    """When the whole state of a run is written to ``checkpoints/`` in its directory, and how many
    of them stay.

    Beside the rules below there is one after the last step, and one where SIGTERM or Ctrl-C ends
    the run.
    """

    every: int = Field(default=10, ge=0)
    """Steps between checkpoints; 0 is only at the end or when the run is interrupted."""
    keep_last: int = Field(default=2, ge=0)
    """Keep that many of the newest; 0 writes none at all, for a disk that has no room: a run that
    ends early then begins anew.
    """
    keep_every: int = Field(default=0, ge=0)
    """Also keep those of every that many steps (a multiple of ``every``); 0 keeps none for this
    reason.
    """
    keep_best: str | None = None
    """Also write and keep the one with the highest value of this evaluation figure, for example
    ``eval/held_out/accuracy``; of ``isobit sft``'s ``eval/NAME/loss`` the lowest.
    """

    @model_validator(mode="after")
    def _none_or_some(self) -> "CheckpointConfig":
        if self.keep_last == 0 and (self.keep_every or self.keep_best):
            raise ValueError(
                "keep_last = 0 writes no checkpoint, so that keep_every and keep_best have none to "
                "keep; leave them out"
            )
        return self


class CheckConfig(Strict):
    """What a run does in a step where rollout and training part: every response token has a
    log-probability from both.
    """

    on_mismatch: Literal["warn", "stop", "ignore"] = "warn"
    """warn: a line on the console, once a step; stop: end the run; the metrics count differing
    tokens in any case.
    """
    max_mean_diff: float | None = Field(default=None, gt=0)
    """Nats.  In an exact flow one differing token is a mismatch; in the others a mean absolute
    difference above this, if it is set.
    """


class TrackingConfig(Strict):
    """Where a run sends its figures, beside ``metrics.jsonl`` and TensorBoard, which it always
    writes.
    """

    wandb: bool | str = False
    """Weights & Biases: ``true`` for the project ``isobit``, or a project's name; needs ``pip
    install 'isobit[wandb]'``.
    """


class RunConfig(Strict):
    """One training run."""

    model: str = "starter"
    """A Hugging Face folder, or ``starter`` for the small model shipped with Isobit."""
    output: Path
    """The run's directory; it must be new or empty, or with ``--resume`` the one to go on in."""
    precision: PrecisionConfig = PrecisionConfig()
    device: Device = "auto"
    """``auto`` takes a Hopper GPU where there is one that computes the model."""
    seed: int = 0
    threads: int | None = Field(default=None, gt=0)
    """CPU threads; by default torch's choice.  Gradients repeat bit for bit at a fixed number."""
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    check: CheckConfig = CheckConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()


class GenerationConfig(Strict):
    """What ``isobit rollout`` takes of a run's settings."""

    precision: PrecisionConfig = PrecisionConfig()
    device: Device = "auto"
    rollout: RolloutConfig = RolloutConfig()


class VerifyConfig(Strict):
    """What ``isobit verify`` takes of a run's settings: the check chooses its own rollouts."""

    precision: PrecisionConfig = PrecisionConfig()
    device: Device = "auto"
