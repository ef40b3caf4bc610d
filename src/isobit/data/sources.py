"""Rows of a dataset: JSONL, CSV and Parquet files, Hugging Face datasets on disk and of the hub,
reasoning-gym tasks, and rows passed from Python.

Every source gives the same ``Row``. Errors name the file and the line or row. Nothing is unpickled,
and only datasets of the hub are downloaded. Of rows passed from Python the configuration holds the
number and the digest, so that a run that is resumed with other rows is refused.
"""

import csv
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import count, islice
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from isobit.config.data import (
    DEFAULT_TOOLS,
    ColumnsData,
    CsvData,
    DataSource,
    HfData,
    HubData,
    JsonlData,
    ParquetData,
    ReasoningGymData,
    RowsData,
)
from isobit.data.hugging_face import dataset_folder, read_hugging_face
from isobit.data.tasks import TASK_COLUMN, create_task
from isobit.records.text import (
    VARIABLES_COLUMN,
    Messages,
    as_messages,
    read_prompt,
    read_tools,
    read_variables,
)
from isobit.starter import starter_folder
from isobit.util.errors import DataError


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
    found = list(rows)
    for place, row in enumerate(found):
        if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
            raise DataError(
                f"{key}: row {place} is {type(row).__name__} {row!r:.60}; expected a list of "
                "mappings, as [{'prompt': '3+4='}] (of a DataFrame: frame.to_dict('records'))"
            )
    made = GivenRows(found)
    return _GIVEN.setdefault(made.sha256, made)


def given_rows(sha256: str, count: int) -> Sequence[Mapping[str, Any]]:
    """The rows with a digest. Raises DataError if no ``GivenRows`` of it exists."""
    found = _GIVEN.get(sha256)
    if found is None:
        raise DataError(
            f"the data are {count} rows that were given from Python; give them again with "
            "isobit.train(.., data=rows, resume=True), or write them into a file, and name it"
        )
    return found.rows


def _plain(value: Any) -> Any:
    """JSON for other types: the elements of an array or a set, the text of anything else."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return value.tolist() if hasattr(value, "tolist") else str(value)


LONGEST_LINE = 1 << 26
"""Bytes; a device or a binary file without line ends would fill the memory."""


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of ``path`` with their line numbers from 1; blank lines are skipped, a byte order
    mark is allowed.

    Raises ``DataError`` for a file that cannot be read, bytes that are not UTF-8, and a line that
    is not one JSON object without repeated keys.
    """
    try:
        with path.open("rb") as lines:
            for number in count(1):
                line = lines.readline(LONGEST_LINE + 1)
                if not line:
                    return
                if len(line) > LONGEST_LINE:
                    raise DataError(f"{path}, line {number}: longer than {LONGEST_LINE:,} bytes")
                if line.strip():
                    yield number, _object(line, f"{path}, line {number}")
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"cannot read {path}: {reason}; expected a JSONL file") from error


class _TwiceError(Exception):
    """A key that occurs twice in one object."""


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _TwiceError(next(key for key in keys if keys.count(key) > 1))
    return made


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_object_of)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: byte {error.start + 1} of the line is not UTF-8; save the file as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{place}, column {error.colno}: not JSON ({error.msg}); expected one object a line"
        ) from error
    except _TwiceError as error:
        raise DataError(f"{place}: the key {error.args[0]!r} is there twice") from None
    except RecursionError as error:
        raise DataError(f"{place}: nested too deeply") from error
    except ValueError as error:  # Python converts no integer of more than some thousand digits
        raise DataError(f"{place}: a number has too many digits; write it as text") from error
    if not isinstance(value, dict):
        raise DataError(f"{place}: expected a JSON object, found {type(value).__name__}")
    return value


_ROWS_AT_ONCE = 1024
_BEYOND = "\0 beyond"
"""The key of values after the last column."""


def read_csv(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of ``path`` as text, with the numbers of their last lines.

    Raises ``DataError`` for a file that cannot be read or is not UTF-8, for missing or repeated
    column names, and for a row with fewer or more values than columns.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, restkey=_BEYOND, strict=True)
            names = list(rows.fieldnames or ())
            if "" in names or len(set(names)) < len(names):
                raise DataError(
                    f"{path}, line 1: expected a name for each column, and each once; found {names}"
                )
            for row in rows:
                if _BEYOND in row or None in row.values():
                    raise DataError(
                        f"{path}, line {rows.line_num}: not one value for each of the "
                        f"{len(names)} columns; quote text with commas or line breaks"
                    )
                yield rows.line_num, row
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; expected a CSV file") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8; save the file as UTF-8") from error
    except csv.Error as error:
        raise DataError(f"{path}: not CSV: {error}; JSONL holds any text") from error


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of ``path``. Raises ``DataError`` for a file that cannot be read as Parquet."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE):
                yield from batch.to_pylist()
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        raise DataError(f"cannot read {path}: {reason}; expected a Parquet file") from error
    except (pyarrow.ArrowException, ValueError) as error:
        raise DataError(f"{path}: not a Parquet file that can be read: {error}") from error


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
    if isinstance(source, ReasoningGymData):
        rows = list(_task_rows(source))
    else:
        rows = [
            _row(record, source, place) for place, record in islice(_records(source), source.limit)
        ]
    if not rows:
        raise DataError(f"{_describe(source)} has no rows; a run needs at least one prompt")
    return rows


def _records(source: ColumnsData) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(source, JsonlData | CsvData):
        path = source.path
        shipped = str(path).startswith(_SHIPPED)
        file = starter_folder() / str(path).removeprefix(_SHIPPED) if shipped else path
        lines = read_csv(path) if isinstance(source, CsvData) else read_jsonl(file)
        for line, record in lines:
            yield f"{path}, line {line}", record
        return
    match source:
        case HfData(path=path, split=split, limit=limit):
            name, rows = f"{path} [{split}]", read_hugging_face(path, split, limit)
        case HubData(dataset=dataset, split=split, limit=limit):
            folder = dataset_folder(source)
            name, rows = f"{dataset} [{split}]", read_hugging_face(folder, split, limit)
        case RowsData(sha256=sha256, count=count):
            name, rows = "the rows given", iter(given_rows(sha256, count))
        case _:
            assert isinstance(source, ParquetData)
            name, rows = str(source.path), read_parquet(source.path)
    for index, record in enumerate(rows):
        yield f"{name}, row {index}", record


def _describe(source: DataSource) -> str:
    match source:
        case ReasoningGymData(task=task):
            return f"reasoning-gym task {task!r}"
        case HubData(dataset=name):
            return f"dataset {name} of the hub"
        case RowsData():
            return "the list of rows"
        case _:
            return f"dataset {source.path}"


def _row(record: Mapping[str, Any], source: ColumnsData, place: str) -> Row:
    column = source.prompt
    _check_column(column, record, place)
    if isinstance(source, ParquetData | HfData | HubData):
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


def _check_column(column: str, record: Mapping[str, Any], place: str) -> None:
    if column not in record:
        near = get_close_matches(column, record, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DataError(
            f"{place}: no column {column!r}; the columns are "
            f"{', '.join(map(repr, record)) or 'none'}{hint}"
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
