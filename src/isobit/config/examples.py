"""The table ``data`` of ``isobit sft``: where prompts come from together with the completions to be
learnt, or with pairs of answers of which one is preferred.
"""

from typing import Annotated

from pydantic import Field

from isobit.config.base import Strict
from isobit.config.data import HfData, JsonlData
from isobit.config.shape import MAX_POSITIONS


class JsonlExamples(JsonlData):
    """A JSONL file of prompts and the completions to be learnt, or of whole conversations."""

    completion: str = "completion"
    """Column that holds the text to be learnt, or it as chat messages."""
    messages: str | None = None
    """Column that holds whole conversations instead; every turn of the assistant is learnt, with
    all before it as its prompt.
    """
    chosen: str = "chosen"
    """Column that holds the better answer, where ``objective`` is ``preference``: text, chat
    messages, or the whole conversation with the prompt in front.
    """
    rejected: str = "rejected"
    """Column that holds the worse one."""


class HfExamples(HfData):
    """The same columns in a Hugging Face dataset on disk."""

    completion: str = "completion"
    messages: str | None = None
    chosen: str = "chosen"
    rejected: str = "rejected"


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
    max_tokens: int = Field(default=2048, gt=0, le=MAX_POSITIONS)
    """Longer examples, prompt and completion together, are refused, by id; so is a pair of which
    one conversation is longer.
    """
    shuffle: bool = True
