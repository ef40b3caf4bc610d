"""The table ``rollout``: sampling, and the engine that samples."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from isobit.config.base import MAX_BATCH, MAX_COUNT, MAX_FACTOR, MAX_WAIT_S, HomePath, Strict
from isobit.config.model_shape import MAX_POSITIONS, MAX_VOCAB_SIZE

MAX_DRAFT = 64
SpecialTokens = Literal["auto", "hide", "show"]


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
    special_tokens: SpecialTokens = "auto"
    """Whether the text of a completion, which rewards read, shows its special tokens. The one that
    ends it is never shown. ``auto`` hides them, but not where the chat template is gpt-oss's, whose
    channels they mark.
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

    speculation: int | None = Field(default=None, ge=0, le=MAX_DRAFT)
    """The most tokens that are guessed behind a sequence, from its prompt and from earlier answers
    to it, and verified in one forward. No token, log-probability or byte of a run depends on it. By
    default 7 where the engine has a GPU of its own that needs 0.5 ms or more for a step of one
    sequence, and else 0, which is off.
    """

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
    """The servers at which the engine http samples, such as ``["http://host:8000"]``; with the
    engine vllm, vLLM's own servers.  Each process of a run has some for itself.
    """
    server_key: Annotated[str, Field(pattern=r"^env:[A-Za-z_]\w*$")] | None = None
    """``env:NAME``: the variable of the environment with the servers' key."""
    weights_folder: HomePath | None = None
    """A folder through which vLLM's servers get weights; they have it under the same path."""
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
