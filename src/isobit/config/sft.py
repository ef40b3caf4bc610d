"""What a run of ``isobit sft`` is: supervised fine-tuning, with the tables and names of
``isobit.config.schema`` where the two agree.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from isobit.config.schema import (
    CheckpointConfig,
    Device,
    EvaluationConfig,
    HfData,
    JsonlData,
    OptimisationConfig,
    PrecisionConfig,
    RewardConfig,
    RolloutConfig,
    Strict,
    TrackingConfig,
)


class ModelShape(Strict):
    """A decoder to be trained from random weights; the names are those of a Hugging Face
    ``config.json``.
    """

    family: Literal["llama", "qwen2", "qwen3"] = "qwen3"
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    num_kv_heads: int | None = Field(default=None, gt=0)
    """By default as many as ``num_heads``."""
    head_dim: int | None = Field(default=None, gt=0)
    """By default ``hidden_size`` over ``num_heads``."""
    vocab_size: int | None = Field(default=None, gt=0)
    """By default the tokenizer's, rounded up to a multiple of 128."""
    max_positions: int = Field(default=512, gt=1)
    """Tokens of the context."""
    rms_epsilon: float = Field(default=1e-6, gt=0)
    rope_theta: float = Field(default=10000.0, gt=0)
    tied_embeddings: bool = True


class JsonlExamples(JsonlData):
    """A JSONL file of prompts and the completions to be learnt, or of whole conversations."""

    completion: str = "completion"
    """Column that holds the text to be learnt, or it as chat messages."""
    messages: str | None = None
    """Column that holds whole conversations instead; every turn of the assistant is learnt, with
    all before it as its prompt.
    """


class HfExamples(HfData):
    """The same columns in a Hugging Face dataset on disk."""

    completion: str = "completion"
    messages: str | None = None


ExampleSource = Annotated[JsonlExamples | HfExamples, Field(discriminator="type")]


class SftDataConfig(Strict):
    """Where examples come from.  A training example whose prompt also stands in an evaluation set
    is dropped, and counted.
    """

    train: ExampleSource
    eval: dict[str, ExampleSource] = Field(default={})
    """Named held-out sets."""
    chat: bool = True
    """Render prompts through the tokenizer's chat template, where it has one; otherwise the text is
    used as it stands.
    """
    max_tokens: int = Field(default=2048, gt=0)
    """Longer examples, prompt and completion together, are refused, by id."""
    shuffle: bool = True


class SftConfig(Strict):
    """One run of supervised fine-tuning."""

    model: str = "starter"
    """A Hugging Face folder, or ``starter`` for the small model shipped with Isobit."""
    from_scratch: ModelShape | None = None
    """Start from random weights of this shape; ``model`` then gives its tokenizer and nothing
    else.
    """
    output: Path
    """The run's directory; it must be new or empty, or with ``--resume`` the one to go on in."""
    precision: PrecisionConfig = PrecisionConfig()
    device: Device = "auto"
    """``auto`` takes a Hopper GPU where there is one that computes the model."""
    seed: int = 0
    threads: int | None = Field(default=None, gt=0)
    """CPU threads; by default torch's choice.  Gradients repeat bit for bit at a fixed number."""
    data: SftDataConfig
    training: OptimisationConfig = OptimisationConfig()
    """A step learns from ``prompts_per_step`` prompts with their completions."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """When the loss of every held-out set is measured, and how completions are drawn where a reward
    grades them.
    """
    reward: RewardConfig | None = None
    """With a reward, an evaluation also completes the held-out prompts and grades them."""
    rollout: RolloutConfig = RolloutConfig()
    """How they are completed."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
