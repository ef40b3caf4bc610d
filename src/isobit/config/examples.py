"""The table ``data`` of ``isobit sft``: where prompts come from together with the completions to be
learnt, or with pairs of answers of which one is preferred.
"""

from typing import Annotated, Literal

from pydantic import Field

from isobit.config.base import Strict
from isobit.config.data import CsvData, HfData, HubData, JsonlData, ParquetData, RowsData
from isobit.config.shape import MAX_POSITIONS


class AnswerColumns(Strict):
    """Which columns hold what is learnt."""

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


class JsonlExamples(JsonlData, AnswerColumns):
    """A JSONL file of prompts and the completions to be learnt, or of whole conversations."""


class CsvExamples(CsvData, AnswerColumns):
    """The same columns in a CSV file."""


class ParquetExamples(ParquetData, AnswerColumns):
    """The same columns in a Parquet file."""


class HfExamples(HfData, AnswerColumns):
    """The same columns in a Hugging Face dataset on disk."""


class HubExamples(HubData, AnswerColumns):
    """The same columns in a dataset of the hub."""


class RowsExamples(RowsData, AnswerColumns):
    """The same columns in rows given from Python."""


ExampleSource = Annotated[
    JsonlExamples | CsvExamples | ParquetExamples | HfExamples | HubExamples | RowsExamples,
    Field(discriminator="type"),
]


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
    """Of an example, prompt and completion together; of a pair, either conversation."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """What becomes of longer ones, in every set: ``refuse`` ends the run before it begins and names
    the first, ``drop`` leaves them out and says how many.
    """
    shuffle: bool = True
