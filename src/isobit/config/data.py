"""The tables ``data``, ``environment`` and ``reward``: prompts, completions and pairs of answers;
whose tools a model may call; and the rewards, the processes that compute them, and how many may
fail.

[reward]                              [reward.parts.correct]
function = "mine.py:score"            function = "math_verify"
options = { strict = true }           [reward.parts.helpful]
                                      model = "my-reward-model"
                                      weight = 0.1
"""

import re
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self, TypeAlias, TypeVar

from pydantic import BeforeValidator, Field, NaiveDatetime, model_validator
from pydantic_core import PydanticCustomError

from isobit.config.base import (
    MAX_COUNT,
    MAX_FACTOR,
    MAX_WAIT_S,
    HomeName,
    HomePath,
    Seed,
    Strict,
    path_at_home,
)
from isobit.config.tables import MAX_POSITIONS


class Source(Strict):
    system: str | None = None
    """A system message put before each prompt (needs a chat template)."""


class ReasoningGymData(Source):
    type: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    """Name of the task, for example ``chain_sum``."""
    size: int = Field(default=1000, gt=0, le=MAX_COUNT)
    """Number of entries."""
    seed: Seed = 0
    options: dict[str, Any] = Field(default={})
    """The task's own configuration."""


DEFAULT_TOOLS = "tools"


class ColumnsData(Source):
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
    if several and all(isinstance(one, str | Path) for one in several):
        found = [path_at_home(one) for one in several]
        return tuple(found) if several is value else found[0]
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
    """As ``environment.verifiers``."""
    options: dict[str, Any] = Field(default={})
    """As ``environment.options``."""
    split: Literal["train", "eval"] = "train"
    """``eval`` is its set for evaluation, or the same where it has no other."""


Weight = Annotated[float, Field(gt=0, le=MAX_FACTOR)]


SourceOfRows = TypeVar("SourceOfRows")


class Mixture(Strict, Generic[SourceOfRows]):
    """Several sources in one: the source of each row is drawn by weight, and its rows are taken in
    their order, as ``datasets.interleave_datasets`` does.
    """

    type: Literal["mixture"] = "mixture"
    sources: dict[str, SourceOfRows] = Field(min_length=1)
    """The sources, by names of your own."""
    weights: dict[str, Weight] = Field(default={})
    """How often each source is drawn, in proportion, by its name; 1 where nothing is said."""
    stop: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
    """When the mixture ends: after the last row of the source that ends first, or when every source
    was read to its end, while shorter ones begin again. An epoch sees the mixture once.
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


class MixtureData(Mixture[OneSource]):
    """Several sources of prompts in one."""


DataSource = Annotated[_Source | MixtureData, Field(discriminator="type")]


COMPRESSED = (".gz", ".bz2", ".xz")


def file_rows(path: Path) -> JsonlData | CsvData | ParquetData:
    """A file of rows of the kind that its suffix names; JSONL for any other suffix."""
    plain = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    match plain.suffix.lower():
        case ".csv":
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


class MixtureExamples(Mixture[OneExampleSource]):
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


WHOLE = "reward"
"""The name of the only reward where there are no parts."""
DEFAULT_FUNCTION = "reasoning_gym"
CODE_SECONDS = 5.0
"""The default of the option ``seconds`` of the grader ``code``."""
JUDGE_SECONDS = 60.0
"""The same of ``timeout_s`` of ``llm_judge``."""

PartName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class RewardPart(Strict):
    function: HomeName | None = None
    """As ``reward.function``."""
    model: HomeName | None = None
    """As ``reward.model``."""
    model_precision: Literal["fp8", "int8", "bf16"] = "fp8"
    """Precision of its decoder; the scalar head is BF16 with FP32 sums."""
    weight: float = Field(default=1.0, ge=-MAX_FACTOR, le=MAX_FACTOR)
    """Weight in the sum: negative for a penalty, 0 for a metric without effect on training."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments; "env:NAME" is an environment variable's value and is not written
    anywhere.
    """


class RewardConfig(Strict):
    function: HomeName = DEFAULT_FUNCTION
    """A built-in grader (``reasoning_gym`` is the task's own scorer), ``module:function`` or
    ``path/to/file.py:function``; the names of its parameters determine how it is called.
    """
    options: dict[str, Any] = Field(default={})
    """Keyword arguments; "env:NAME" is an environment variable's value and is not written
    anywhere.
    """
    model: HomeName | None = None
    """A reward model's folder or name of the hub, in place of a function."""
    model_precision: Literal["fp8", "int8", "bf16"] = "fp8"
    """Precision of its decoder; the scalar head is BF16 with FP32 sums."""
    weight: float = Field(default=1.0, ge=-MAX_FACTOR, le=MAX_FACTOR)
    """Factor of the reward."""
    parts: dict[PartName, RewardPart] = Field(default={})
    """Several rewards by name, added with their weights, instead of the one in this table."""
    offload: bool = False
    """Keep reward models in host memory except while they score, to free GPU memory."""
    max_failed_fraction: float = Field(default=0.5, ge=0, le=1)
    """Stop the run when a larger share of a step's rewards failed (an exception, a timeout, a crash
    or a value that is not finite); fewer are excluded and counted.
    """
    workers: int | None = Field(default=None, ge=1, le=256)
    """Processes that grade; by default one for each usable core, at most 4."""
    deadline_s: float = Field(default=10.0, ge=0.01, le=86_400)
    """Seconds for one completion; then its process is killed, and its reward counts as failed."""
    memory_mib: int = Field(default=2048, ge=256, le=1 << 20)
    """Private memory of each of these processes, without mapped libraries."""
    in_process: bool = False
    """Call functions in the trainer's process, without deadline, memory limit or crash
    protection.
    """

    def named(self) -> dict[str, RewardPart]:
        """The rewards by name: the parts, or the one of this table as ``reward``."""
        if self.parts:
            return dict(self.parts)
        return {
            WHOLE: RewardPart(
                function=self.function if self.model is None else None,
                model=self.model,
                model_precision=self.model_precision,
                weight=self.weight,
                options=self.options,
            )
        }


ToolFormat = Literal["hermes", "llama3", "mistral", "plain"]
"""How a model writes calls of tools (``isobit.data.tool_calls``)."""
ENVIRONMENTS = ("calculator", "guess", "python", "search")
"""Those that ship with Isobit (``isobit.environments.shipped``)."""


_SERVER = re.compile(r"(ws|http)s?://[^/\s]+")


class EnvironmentConfig(Strict):
    """The tools of an episode: a completion of several turns, with results of tools between."""

    factory: HomeName | None = Field(default=None, alias="class")
    """``path/to/file.py:Class`` or ``module:Class``, whose public methods are the tools, as in
    TRL's ``environment_factory``; or one that ships with Isobit: ``calculator``, ``guess``,
    ``python``, ``search``.
    """
    verifiers: HomeName | None = None
    """In place of ``class`` an environment of the package ``verifiers``: the name of an installed
    one, or a file with ``load_environment``.
    """
    openenv: str | None = None
    """In place of ``class`` the address of an OpenEnv server, such as ``ws://127.0.0.1:8000``."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of the class, of ``load_environment``, or of each reset of a server;
    "env:NAME" is an environment variable's value and is not written anywhere.
    """
    format: Literal["auto", "hermes", "llama3", "mistral", "plain"] = "auto"
    """How the model writes calls; auto asks the chat template, and takes plain without one."""
    max_turns: int = Field(default=8, gt=1, le=1000)
    """Turns of the model in an episode. The last one has to answer: it calls no tools. An episode
    with its results has at most ``rollout.max_new_tokens`` tokens behind the prompt.
    """
    max_result_tokens: int = Field(default=256, gt=0, le=MAX_COUNT)
    """Tokens of one result; the rest is cut off."""
    deadline_s: float = Field(default=10.0, gt=0, le=MAX_WAIT_S)
    """Seconds for the calls of one turn, after which the episode's process is killed."""
    episode_s: float = Field(default=60.0, gt=0, le=MAX_WAIT_S)
    """Seconds for all calls of an episode."""
    memory_mib: int = Field(default=1024, ge=64, le=MAX_COUNT)
    """Memory of an episode's process beyond that of the imports, and of each that it starts."""
    at_once: int = Field(default=32, gt=0, le=4096)
    """Episodes whose calls run at once; of an OpenEnv server, its sessions."""

    @property
    def kind(self) -> Literal["class", "verifiers", "openenv"]:
        """The key that names it."""
        if self.openenv is not None:
            return "openenv"
        return "class" if self.verifiers is None else "verifiers"

    @property
    def place(self) -> str:
        """Where it is."""
        return self.factory or self.verifiers or self.openenv or ""

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        given = [one for one in (self.factory, self.verifiers, self.openenv) if one is not None]
        reason = "needs one of class, verifiers and openenv, and no two" if len(given) != 1 else ""
        if self.openenv is not None and not _SERVER.match(self.openenv):
            reason = f'openenv is an address such as "ws://127.0.0.1:8000", not {self.openenv!r}'
        if reason:
            raise PydanticCustomError("environment", "{reason}", {"reason": reason})
        return self
