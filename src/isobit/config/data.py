"""The table ``data`` of ``isobit train``: where prompts come from."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from isobit.config.base import Seed, Strict
from isobit.config.limits import MAX_COUNT
from isobit.config.shape import MAX_POSITIONS


class ReasoningGymData(Strict):
    """A procedural task of reasoning-gym, by name."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    """Name of the task, for example ``chain_sum``."""
    size: int = Field(default=1000, gt=0, le=MAX_COUNT)
    seed: Seed = 0
    options: dict[str, Any] = Field(default={})
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
    limit: int | None = Field(default=None, gt=0, le=MAX_COUNT)
    """Use that many rows from the start."""


class HfData(Strict):
    """A Hugging Face dataset on disk: a ``save_to_disk`` folder, or a folder of parquet, JSON or
    CSV files.
    """

    type: Literal["hf"] = "hf"
    path: Path
    split: str = "train"
    prompt: str = "prompt"
    limit: int | None = Field(default=None, gt=0, le=MAX_COUNT)


DataSource = Annotated[ReasoningGymData | JsonlData | HfData, Field(discriminator="type")]


class DataConfig(Strict):
    """Where prompts come from.  A training prompt that also stands in an evaluation set is dropped,
    and counted.
    """

    train: DataSource
    eval: dict[str, DataSource] = Field(default={})
    """Named evaluation sets."""
    chat: bool = True
    """Render prompts through the tokenizer's chat template, where it has one; otherwise the text is
    used as it stands.
    """
    max_prompt_tokens: int = Field(default=1024, gt=0, le=MAX_POSITIONS)
    """Longer prompts are refused, by id."""
    shuffle: bool = True
