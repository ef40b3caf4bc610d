"""Rows of a dataset: JSONL, CSV and Parquet files, Hugging Face datasets on disk and of the hub,
reasoning-gym tasks, and rows given from Python.

Every source gives the same ``Row``: a prompt (text, or chat messages), the columns that a reward
function may read, and the place the row came from, which every later error names.  Nothing is
unpickled, and nothing downloaded but a dataset of the hub that a source names as one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from isobit.config.data import (
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
from isobit.data.given import given_rows
from isobit.data.hub import dataset_folder
from isobit.data.hugging_face import read_hugging_face
from isobit.data.jsonl import read_jsonl
from isobit.data.tables import read_csv, read_parquet
from isobit.data.tasks import TASK_COLUMN, create_task
from isobit.errors import DataError
from isobit.starter import starter_folder

_SHIPPED = "starter:"

Messages: TypeAlias = tuple[dict[str, str], ...]
"""Chat messages, each with ``role`` and ``content``."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a dataset.  ``columns`` are all columns but the prompt's; ``place`` is its file
    and line or row, for errors.
    """

    prompt: str | Messages
    columns: Mapping[str, Any]
    place: str


def load_rows(source: DataSource) -> list[Row]:
    """All rows of ``source``, in order, cut to its ``limit``.

    Raises ``DataError`` for a missing or damaged file, a column or task that does not exist, a
    prompt that is neither text nor messages, and a dataset without rows.
    """
    rows = list(_rows(source))
    if not rows:
        raise DataError(f"{_describe(source)} has no rows; a run needs at least one prompt")
    return rows


def _rows(source: DataSource) -> Iterator[Row]:
    if isinstance(source, ReasoningGymData):
        yield from _task_rows(source)
        return
    for place, record in islice(_records(source), source.limit):
        yield _row(record, source.prompt, source.system, place)


def _records(source: ColumnsData) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The place of each row, and its columns."""
    match source:
        case HfData(path=path, split=split, limit=limit):
            name, rows = f"{path} [{split}]", read_hugging_face(path, split, limit)
        case HubData(dataset=dataset, split=split, limit=limit):
            folder = dataset_folder(source)
            name, rows = f"{dataset} [{split}]", read_hugging_face(folder, split, limit)
        case RowsData(sha256=sha256, count=count):
            name, rows = "the rows given", iter(given_rows(sha256, count))
        case ParquetData(path=path):
            name, rows = str(path), read_parquet(path)
        case _:
            yield from _lines(source)
            return
    for index, record in enumerate(rows):
        yield f"{name}, row {index}", record


def _lines(source: ColumnsData) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Likewise, of a file of text."""
    assert isinstance(source, JsonlData | CsvData)
    path = source.path
    rows = read_csv(path) if isinstance(source, CsvData) else read_jsonl(_shipped(path))
    for line, record in rows:
        yield f"{path}, line {line}", record


def _shipped(path: Path) -> Path:
    """``starter:NAME`` is a file shipped with the starter model; any other path stands for
    itself.
    """
    return (
        starter_folder() / str(path).removeprefix(_SHIPPED)
        if str(path).startswith(_SHIPPED)
        else path
    )


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


def _row(record: Mapping[str, Any], prompt_column: str, system: str | None, place: str) -> Row:
    if prompt_column not in record:
        near = get_close_matches(prompt_column, record, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DataError(
            f"{place}: no column {prompt_column!r}; the columns are "
            f"{', '.join(map(repr, record)) or 'none'}{hint}"
        )
    columns = {name: value for name, value in record.items() if name != prompt_column}
    return row_of(
        record[prompt_column], columns, f"{place}, column {prompt_column!r}", place, system
    )


def row_of(
    prompt: Any,
    columns: Mapping[str, Any],
    where: str,
    place: str | None = None,
    system: str | None = None,
) -> Row:
    """A row with a prompt of text or messages, behind a system message.  Raises ``DataError`` for
    another prompt, with ``where`` it stands.
    """
    place = place or where
    return Row(_with_system(_prompt(prompt, where), system, place), columns, place)


def _prompt(value: Any, place: str) -> str | Messages:
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and all(_is_message(item) for item in value):
        return tuple(
            {"role": item["role"], "content": message_text(item["content"], place)}
            for item in value
        )
    raise DataError(
        f"{place}: expected text or a list of messages with 'role' and 'content', found "
        f"{_excerpt(value)}"
    )


def _is_message(item: Any) -> bool:
    return (
        isinstance(item, Mapping)
        and isinstance(item.get("role"), str)
        and (isinstance(item.get("content"), str) or _is_parts(item.get("content")))
    )


def _is_parts(content: Any) -> bool:
    """Whether the content of a message is a list of parts: ``[{"type": "text", "text": ".."}]``."""
    return (
        isinstance(content, Sequence)
        and not isinstance(content, str)
        and len(content) > 0
        and all(isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in content)
    )


def message_text(content: str | Sequence[Mapping[str, Any]], place: str) -> str:
    """The text of a message; its parts, if it has some, one behind the other.  Raises DataError for
    a part that is no text.
    """
    if isinstance(content, str):
        return content
    for part in content:
        if part["type"] != "text" or not isinstance(part.get("text"), str):
            raise DataError(
                f"{place}: a message has a part of type {part['type']!r}; only parts of text can "
                "be read: {'type': 'text', 'text': '..'}"
            )
    return "".join(part["text"] for part in content)


def _with_system(prompt: str | Messages, system: str | None, place: str) -> str | Messages:
    """The prompt behind the source's system message, as messages then."""
    if system is None:
        return prompt
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
    if messages[0]["role"] == "system":
        raise DataError(
            f"{place}: the prompt begins with a system message, and the key `system` of its source "
            "gives another; leave the key out, or the message"
        )
    return ({"role": "system", "content": system}, *messages)


def _excerpt(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def _task_rows(source: ReasoningGymData) -> Iterator[Row]:
    """The entry of the task is kept as it is, with the task's name and options beside it: the
    scorer is rebuilt from those.
    """
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
        except (
            Exception
        ) as error:  # a task's generator may raise anything for options that passed its own checks
            raise DataError(
                f"{place}: cannot be generated with options {source.options}: "
                f"{type(error).__name__}: {error}"
            ) from error
        prompt = _with_system(entry["question"], source.system, place)
        yield Row(prompt, {**entry, TASK_COLUMN: identity}, place)
