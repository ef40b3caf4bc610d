"""The table ``data``: sources of prompts, of completions and of pairs of answers."""

from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self, TypeAlias, TypeVar

from pydantic import BeforeValidator, Field, NaiveDatetime, model_validator
from pydantic_core import PydanticCustomError

from isobit.config.base import MAX_COUNT, MAX_FACTOR, HomeName, HomePath, Seed, Strict, path_at_home
from isobit.config.model_shape import MAX_POSITIONS


class PromptData(Strict):
    system: str | None = None
    """A system message put before each prompt (needs a chat template)."""


class ReasoningGymData(PromptData):
    type: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    """Name of the task, for example ``chain_sum``."""
    size: int = Field(default=1000, gt=0, le=MAX_COUNT)
    """Number of entries."""
    seed: Seed = 0
    options: dict[str, Any] = Field(default={})
    """The task's own configuration."""


DEFAULT_TOOLS = "tools"


class ColumnsData(PromptData):
    """Rows whose columns are the prompt, text or chat messages, and what the reward needs. A column
    ``chat_template_kwargs`` adds to ``data.chat_template_kwargs`` for its row.
    """

    prompt: str = "prompt"
    """Column that holds the prompt; text that is a conversation in JSON is read as one."""
    tools: str = DEFAULT_TOOLS
    """Column with the tools that the chat template is given, where there is one: a list of JSON
    schemas or its JSON text. Empty text gives it none.
    """
    limit: int | None = Field(default=None, gt=0, le=MAX_COUNT)
    """Use only this many rows from the start."""


def _paths(value: Any) -> Any:
    several = value if isinstance(value, list | tuple) else [value]
    if several and all(isinstance(path, str | Path) for path in several):
        expanded = [path_at_home(path) for path in several]
        return tuple(expanded) if several is value else expanded[0]
    raise PydanticCustomError("paths", "should be a path or a list of paths")


Paths = Annotated[Path | tuple[Path, ...], BeforeValidator(_paths)]


class JsonlData(ColumnsData):
    type: Literal["jsonl"] = "jsonl"
    path: Paths
    """The file, or a list of files, read one after another. A pattern (``part-*.jsonl``) stands for
    the files that match, by name, and files may be compressed (gz, bz2, xz). Of hf it is a folder.
    ``starter:train.jsonl`` and ``starter:held_out.jsonl`` are the starter model's problems.
    """


class CsvData(ColumnsData):
    """A CSV file in UTF-8 whose first line names the columns; every value is text."""

    type: Literal["csv"] = "csv"
    path: Paths


class ParquetData(ColumnsData):
    type: Literal["parquet"] = "parquet"
    path: Paths


class HfData(ColumnsData):
    """A Hugging Face dataset on disk: a ``save_to_disk`` folder, or a folder of files."""

    type: Literal["hf"] = "hf"
    path: HomePath
    split: str | None = "train"
    """Split of the dataset; ``isobit eval`` without ``--split`` takes the only one."""


class HubData(ColumnsData):
    """A dataset of the Hugging Face hub, from the local cache where it is there; the rest is
    downloaded, unless ``HF_HUB_OFFLINE`` forbids it.
    """

    type: Literal["hub"] = "hub"
    dataset: str = Field(pattern=r"^\w[\w.-]*/\w[\w.-]*(@\w[\w./-]*)?$")
    """Its name: ``org/name``, or ``org/name@revision`` with a branch, tag or commit."""
    subset: str | None = Field(default=None, pattern=r"^\w[\w.-]*(/\w[\w.-]*)*$")
    """The dataset's folder of files, such as ``main`` of ``openai/gsm8k``, if it has several."""
    split: str | None = "train"
    """Split of the dataset; ``isobit eval`` without ``--split`` takes the only one."""


class RowsData(ColumnsData):
    """Rows passed from Python, as ``isobit.train(data=[{..}, ..])``, identified by their digest."""

    type: Literal["rows"] = "rows"
    count: int = Field(ge=0, le=MAX_COUNT)
    """Number of rows."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Digest of all rows in order."""


class VerifiersData(ColumnsData):
    """The dataset of an environment of the package ``verifiers``."""

    type: Literal["verifiers"] = "verifiers"
    environment: HomeName
    """The environment's name or file, as in ``environment.verifiers``."""
    options: dict[str, Any] = Field(default={})
    """Its keyword arguments, as in ``environment.options``."""
    split: Literal["train", "eval"] = "train"
    """``eval`` is its set for evaluation, or the same where it has no other."""


Weight = Annotated[float, Field(gt=0, le=MAX_FACTOR)]
SourceOfRows = TypeVar("SourceOfRows")


class SourceMixture(Strict, Generic[SourceOfRows]):
    """Several sources in one: the source of each row is drawn by weight, and its rows are taken in
    their order, as ``datasets.interleave_datasets`` does.
    """

    type: Literal["mixture"] = "mixture"
    sources: dict[str, SourceOfRows] = Field(min_length=1)
    """The sources, by names of your own."""
    weights: dict[str, Weight] = Field(default={})
    """How often each source is drawn, in proportion, by its name; 1 where nothing is said."""
    stop: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
    """The end of the mixture: after the last row of the source that ends first, or once every
    source was read to its end, while shorter ones begin again. An epoch sees the mixture once.
    """
    seed: Seed = 0
    """Seed of the draws."""

    @model_validator(mode="after")
    def _weights_of_sources(self) -> Self:
        for name in self.weights:
            if name not in self.sources:
                known = ", ".join(self.sources)
                reason = f"has a weight of {name!r}, which is none of the sources ({known})"
                raise PydanticCustomError("weights", "{reason}", {"reason": reason})
        return self


_Source: TypeAlias = (
    ReasoningGymData
    | JsonlData
    | CsvData
    | ParquetData
    | HfData
    | HubData
    | VerifiersData
    | RowsData
)
OneSource = Annotated[_Source, Field(discriminator="type")]


class MixtureData(SourceMixture[OneSource]):
    """Several sources of prompts in one."""


DataSource = Annotated[_Source | MixtureData, Field(discriminator="type")]
COMPRESSED = (".gz", ".bz2", ".xz")


def file_rows(path: Path) -> JsonlData | CsvData | ParquetData:
    """A file of rows of the kind that its suffix names; JSONL for any other suffix."""
    plain = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    match plain.suffix.lower():
        case ".csv" | ".tsv":
            return CsvData(path=path)
        case ".parquet":
            return ParquetData(path=path)
        case _:
            return JsonlData(path=path)


TooLong = Literal["refuse", "drop", "cut"]


class ChatConfig(Strict):
    """How prompts are rendered."""

    chat: bool = True
    """Render prompts with the tokenizer's chat template, if it has one."""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Variables of the chat template, such as Qwen3's ``enable_thinking`` or gpt-oss's
    ``reasoning_effort``.
    """
    date: NaiveDatetime | None = None
    """The date for a chat template that writes one. By default the time when the run begins, which
    stays its date when it is resumed or replayed.
    """


class DataConfig(ChatConfig):
    """Training prompts that are also in an evaluation set are dropped and counted."""

    train: DataSource
    eval: dict[str, DataSource] = Field(default={})
    """Named evaluation sets."""
    max_prompt_tokens: int = Field(default=1024, gt=0, le=MAX_POSITIONS)
    """Largest length of a rendered prompt, which must also leave room for the longest completion
    (``max_new_tokens``) in the model's context.
    """
    too_long: TooLong = "refuse"
    """What becomes of longer prompts, in every set: ``refuse`` stops before the run starts,
    ``drop`` leaves them out, ``cut`` keeps their last tokens and a token that begins every
    sequence. The console tells how many.
    """
    shuffle: bool = True
    """Visit the prompts in another random order in each epoch."""
    epochs: float | None = Field(default=None, gt=0, le=MAX_COUNT)
    """How often the training prompts are visited, in place of ``training.steps``; a run then has as
    many steps as that needs.
    """
    streaming: bool = False
    """Keep the training prompts in a temporary file (in ``TMPDIR``) instead of in memory, for sets
    larger than that. No result depends on it.
    """


class AnswerColumns(Strict):
    completion: str = "completion"
    """Column that holds the completion, as text or chat messages."""
    messages: str | None = None
    """Column of whole conversations instead, in which every turn of the assistant is a
    completion.
    """
    chosen: str = "chosen"
    """Column that holds the better answer, for the objective ``preference``: text, chat messages,
    or the whole conversation with the prompt.
    """
    rejected: str = "rejected"
    """Column that holds the worse answer."""


class JsonlExamples(JsonlData, AnswerColumns):
    """A JSONL file of prompts and completions, or of whole conversations."""


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


OneExampleSource = Annotated[
    JsonlExamples | CsvExamples | ParquetExamples | HfExamples | HubExamples | RowsExamples,
    Field(discriminator="type"),
]


class MixtureExamples(SourceMixture[OneExampleSource]):
    """Several sources of examples in one."""


ExampleSource = Annotated[
    JsonlExamples
    | CsvExamples
    | ParquetExamples
    | HfExamples
    | HubExamples
    | RowsExamples
    | MixtureExamples,
    Field(discriminator="type"),
]


class SftDataConfig(ChatConfig):
    """Training examples whose prompt is also in an evaluation set are dropped and counted."""

    train: ExampleSource
    eval: dict[str, ExampleSource] = Field(default={})
    """Named held-out sets."""
    max_tokens: int = Field(default=2048, gt=0, le=MAX_POSITIONS)
    """Largest length of an example, or of either conversation of a pair."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """What becomes of longer ones, in every set: ``refuse`` stops before the run starts, ``drop``
    leaves them out and tells how many.
    """
    shuffle: bool = True
    """Visit the prompts in another random order in each epoch."""
    epochs: float | None = Field(default=None, gt=0, le=MAX_COUNT)
    """How often the training prompts are visited, in place of ``training.steps``; a run then has as
    many steps as that needs.
    """
    streaming: bool = False
    """Keep the training prompts in a temporary file (in ``TMPDIR``) instead of in memory, for sets
    larger than that. No result depends on it.
    """
