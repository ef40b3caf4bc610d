"""Rows of a dataset: JSONL, CSV and Parquet files, Hugging Face datasets on disk and of the hub,
reasoning-gym tasks, environments of verifiers, and rows passed from Python.

Every source gives the same ``Row``. Errors name the file and the line or row. Nothing is unpickled,
and only datasets of the hub are downloaded. Of rows passed from Python the configuration holds the
number and the digest, so that a run that is resumed with other rows is refused.
"""

import glob
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from isobit.config.data import (
    DEFAULT_TOOLS,
    ColumnsData,
    CsvData,
    DataSource,
    HfData,
    HubData,
    JsonlData,
    MixtureData,
    ParquetData,
    ReasoningGymData,
    RowsData,
    SourceMixture,
    VerifiersData,
)
from isobit.data.hugging_face import dataset_folder, read_hugging_face
from isobit.data.readers import read_csv, read_jsonl, read_parquet
from isobit.data.tasks import TASK_COLUMN, create_task, read_verifiers
from isobit.records.messages import (
    VARIABLES_COLUMN,
    Messages,
    as_messages,
    read_prompt,
    read_tools,
    read_variables,
)
from isobit.starter import starter_folder
from isobit.util.errors import DataError
from isobit.util.terminal import counted, say


class GivenRows:
    """Rows that are found by their digest as long as this object exists."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = rows
        digest = hashlib.sha256()
        for row in rows:
            digest.update(json.dumps(row, sort_keys=True, default=_plain).encode() + b"\n")
        self.sha256 = digest.hexdigest()


_GIVEN: WeakValueDictionary[str, GivenRows] = WeakValueDictionary()


def give_rows(rows: Iterable[Any], key: str) -> GivenRows:
    """Rows for the table ``key`` of a recipe; the caller must hold the result during the run.
    Raises DataError for anything but mappings.
    """
    listed = list(rows)
    for place, row in enumerate(listed):
        if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
            raise DataError(
                f"{key}: row {place} is {type(row).__name__} {row!r:.60}; expected a list of "
                "mappings, as [{'prompt': '3+4='}] (of a DataFrame: frame.to_dict('records'))"
            )
    held = GivenRows(listed)
    return _GIVEN.setdefault(held.sha256, held)


def given_rows(sha256: str, count: int) -> Sequence[Mapping[str, Any]]:
    """The rows with a digest. Raises DataError if no ``GivenRows`` of it exists."""
    held = _GIVEN.get(sha256)
    if held is None:
        raise DataError(
            f"the data are {count} rows that were given from Python; give them again with "
            "isobit.train(.., data=rows, resume=True), or write them into a file, and name it"
        )
    return held.rows


def _plain(value: Any) -> Any:
    """JSON for other types: the elements of an array or a set, the text of anything else."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return value.tolist() if hasattr(value, "tolist") else str(value)


_SHIPPED = "starter:"


@dataclass(frozen=True, slots=True)
class Row:
    """One row; ``columns`` are all but the prompt's, ``place`` is its file and line, for errors."""

    prompt: str | Messages
    columns: Mapping[str, Any]
    place: str
    tools: Sequence[Mapping[str, Any]] | None = None
    """JSON schemas of the tools that the chat template is given."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template for this row alone."""


def load_rows(source: DataSource) -> list[Row]:
    """The rows of ``source``, in order, at most its ``limit``.

    Raises ``DataError`` for a missing or damaged file, an unknown column or task, a prompt that is
    neither text nor messages, and a dataset without rows.
    """
    return list(iter_rows(source))


def iter_rows(source: DataSource) -> Iterator[Row]:
    """``load_rows``, one row in memory at a time. Raises as it does, in between."""
    if isinstance(source, MixtureData):
        yield from mixed(source, iter_rows)
        return
    if isinstance(source, ReasoningGymData):
        rows = _task_rows(source)
    else:
        rows = (
            _row(record, source, place) for place, record in islice(_records(source), source.limit)
        )
    row = None
    for row in rows:
        yield row
    if row is None:
        raise DataError(f"{_describe(source)} has no rows; a run needs at least one prompt")


_Source = TypeVar("_Source")
_Item = TypeVar("_Item")
_DRAWN_AT_ONCE = 1000  # as in datasets: the draws depend on it


def mixed(
    mixture: SourceMixture[_Source], read: Callable[[_Source], Iterator[_Item]]
) -> Iterator[_Item]:
    """The items of a mixture, of which ``read`` gives those of one source, anew at each call.

    The draws are those of ``datasets.interleave_datasets`` for the same probabilities and seed.
    """
    import numpy

    sources, weights = list(mixture.sources), mixture.weights
    shares = [weights.get(name, 1.0) for name in sources]
    probabilities = [share / math.fsum(shares) for share in shares]
    generator = numpy.random.default_rng(mixture.seed)
    ahead = {name: _Ahead(read, mixture.sources[name]) for name in sources}
    taken, ended = Counter[str](), set[str]()
    while len(ended) < (len(sources) if mixture.stop == "all_exhausted" else 1):
        for place in generator.choice(len(sources), size=_DRAWN_AT_ONCE, p=probabilities):
            name = sources[int(place)]
            yield ahead[name].take()
            taken[name] += 1
            if ahead[name].ended:
                ended.add(name)
            if len(ended) == (len(sources) if mixture.stop == "all_exhausted" else 1):
                break
    counts = ", ".join(f"{taken[name]} of {name}" for name in sources)
    say(f"isobit: mixture of {counted(taken.total(), 'rows')}: {counts} ({mixture.stop})")


class _Ahead(Generic[_Source, _Item]):
    """The items of a source in an endless loop, with one read ahead to know the end."""

    def __init__(self, read: Callable[[_Source], Iterator[_Item]], source: _Source) -> None:
        self._read = read
        self._source = source
        self._items = read(source)
        self._next = next(self._items)
        self.ended = False
        """Whether the item taken last was the last one."""

    def take(self) -> _Item:
        item = self._next
        try:
            self._next, self.ended = next(self._items), False
        except StopIteration:
            self._items, self.ended = self._read(self._source), True
            self._next = next(self._items)
        return item


def _records(source: ColumnsData) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(source, JsonlData | CsvData):
        for path in source_files(source.path):
            read = read_csv if isinstance(source, CsvData) else read_jsonl
            for place, record in read(_file_of(path)):
                yield f"{path}, {place}", record
        return
    if isinstance(source, ParquetData):
        for path in source_files(source.path):
            for index, record in enumerate(read_parquet(path)):
                yield f"{path}, row {index}", record
        return
    name, rows = _named(source)
    for index, record in enumerate(rows):
        yield f"{name}, row {index}", record


def _file_of(path: Path) -> Path:
    """The file of a path, which may be one of the package's own. Raises DataError for a name that
    leads out of their folder.
    """
    if not str(path).startswith(_SHIPPED):
        return path
    folder = starter_folder()
    file = folder / str(path).removeprefix(_SHIPPED)
    if not file.absolute().is_relative_to(folder.absolute()) or ".." in file.parts:
        names = ", ".join(sorted(one.name for one in folder.glob("*.jsonl")))
        raise DataError(f"{path}: {_SHIPPED} names a file of the package: {names}")
    return file


def _named(source: ColumnsData) -> tuple[str, Iterator[Mapping[str, Any]]]:
    """The rows of a source without files of rows, and its name."""
    match source:
        case HfData(path=path, split=split, limit=limit):
            return f"{path} [{split}]", read_hugging_face(path, split, limit)
        case HubData(dataset=dataset, split=split, limit=limit):
            return f"{dataset} [{split}]", read_hugging_face(dataset_folder(source), split, limit)
        case VerifiersData(environment=place, split=split):
            return f"{place} [{split}]", read_verifiers(place, source.options, split)
        case _:
            assert isinstance(source, RowsData)
            return "the rows given", iter(given_rows(source.sha256, source.count))


def _describe(source: DataSource) -> str:
    match source:
        case ReasoningGymData(task=task):
            return f"reasoning-gym task {task!r}"
        case HubData(dataset=name):
            return f"dataset {name} of the hub"
        case VerifiersData(environment=place):
            return f"the dataset of {place}"
        case RowsData():
            return "the list of rows"
        case MixtureData():
            return "the mixture"
        case _:
            return f"dataset {source.path}"


def _row(record: Mapping[str, Any], source: ColumnsData, place: str) -> Row:
    column = source.prompt
    _check_column(column, record, place, _NAMED_IN)
    if isinstance(source, ParquetData | HfData | HubData | VerifiersData):
        # Arrow knows no missing key: each struct has the keys of all, and null for most
        read = {column, source.tools, VARIABLES_COLUMN}
        record = {name: _without_nulls(v) if name in read else v for name, v in record.items()}
    if source.tools not in (DEFAULT_TOOLS, ""):
        _check_column(source.tools, record, place)
    return row_of(
        record[column],
        {name: value for name, value in record.items() if name != column},
        f"{place}, column {column!r}",
        place,
        source.system,
        record.get(source.tools),
        record.get(VARIABLES_COLUMN),
    )


_NAMED_IN = (
    "name it in the key `prompt` of the data, as data.train.prompt or, of `isobit eval`, "
    "--data.eval.NAME.prompt"
)


def _check_column(column: str, record: Mapping[str, Any], place: str, advice: str = "") -> None:
    if column in record:
        return
    near = get_close_matches(column, record, n=1)
    talks = [name for name in record if name in ("messages", "conversations", "conversation")]
    if column == "prompt" and talks:
        advice = (
            "whole conversations are named by the key messages of the source, as in "
            f'data.train.messages = "{talks[0]}" (isobit sft), and as prompts by prompt = '
            f'"{talks[0]}"'
        )
    elif near:
        advice = f"did you mean {near[0]!r}?{f' {advice[0].upper()}{advice[1:]}' if advice else ''}"
    raise DataError(
        f"{place}: no column {column!r}; the columns are "
        f"{', '.join(map(repr, record)) or 'none'}{f'; {advice}' if advice else ''}"
    )


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def row_of(
    prompt: Any,
    columns: Mapping[str, Any],
    where: str,
    place: str | None = None,
    system: str | None = None,
    tools: Any = None,
    variables: Any = None,
) -> Row:
    """A row with a prompt of text or messages, after an optional system message, with ``tools`` and
    ``variables`` for the chat template. Raises ``DataError``, naming ``where``, for anything else.
    """
    place = place or where
    return Row(
        _with_system(read_prompt(prompt, where), system, place),
        columns,
        place,
        read_tools(tools, place),
        read_variables(variables, place),
    )


def _with_system(prompt: str | Messages, system: str | None, place: str) -> str | Messages:
    """The prompt as messages after the source's system message, if it has one."""
    if system is None:
        return prompt
    messages = as_messages(prompt)
    if messages[0]["role"] == "system":
        raise DataError(
            f"{place}: the prompt begins with a system message, and `system` gives another; "
            "leave one of them out"
        )
    return ({"role": "system", "content": system}, *messages)


def _task_rows(source: ReasoningGymData) -> Iterator[Row]:
    """Rows with the task's entry, and its name and options, to build the scorer again."""
    task = create_task(source.task, size=source.size, seed=source.seed, options=source.options)
    identity = {
        "task": source.task,
        "seed": source.seed,
        "size": source.size,
        "options": source.options,
    }
    for index in range(source.size):
        place = f"reasoning-gym task {source.task!r}, entry {index}"
        try:
            entry = task[index]
        except Exception as error:  # generators raise anything for options that passed the checks
            raise DataError(
                f"{place}: cannot be generated with options {source.options}: "
                f"{type(error).__name__}: {error}"
            ) from error
        prompt = _with_system(entry["question"], source.system, place)
        yield Row(prompt, {**entry, TASK_COLUMN: identity}, place)


def source_files(given: Path | tuple[Path, ...]) -> list[Path]:
    """The files that a key ``path`` names, in the order of the list, those of a pattern by name.

    Raises ``DataError`` for a pattern without files and for a file that is named twice.
    """
    files: list[Path] = []
    for path in (given,) if isinstance(given, Path) else given:
        if not glob.has_magic(str(path)) or path.exists():
            files.append(path)
            continue
        names = sorted(glob.glob(str(path), recursive=True))
        matches = [Path(name) for name in names if not Path(name).is_dir()]
        if not matches:
            listed = str(path).startswith("[") and "," in str(path)
            raise DataError(
                f"no file matches {path}; "
                + (
                    """a list on the command line is written '["a.jsonl", "b.jsonl"]'"""
                    if listed
                    else "correct the pattern, or name the files"
                )
            )
        files += matches
    for index, path in enumerate(files):
        if path in files[:index]:
            raise DataError(
                f"{path} is named twice; name it once (a mixture's `weights` repeat a source)"
            )
    return files
