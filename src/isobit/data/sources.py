"""Rows of a dataset: JSONL files, Hugging Face datasets on disk and reasoning-gym tasks.

Every source gives the same ``Row``: a prompt (text, or chat messages), the columns that a reward
function may read, and the place the row came from, which every later error names.  Nothing is
downloaded and nothing is unpickled.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from isobit.config.data import DataSource, HfData, JsonlData, ReasoningGymData
from isobit.data.hugging_face import read_hugging_face
from isobit.data.jsonl import read_jsonl
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
    match source:
        case ReasoningGymData():
            yield from _task_rows(source)
        case JsonlData(path=path, prompt=prompt, limit=limit):
            for line, record in islice(read_jsonl(_shipped(path)), limit):
                yield _row(record, prompt, f"{path}, line {line}")
        case HfData(path=path, split=split, prompt=prompt, limit=limit):
            for index, record in enumerate(read_hugging_face(path, split, limit)):
                yield _row(record, prompt, f"{path} [{split}], row {index}")


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
    return (
        f"reasoning-gym task {source.task!r}"
        if isinstance(source, ReasoningGymData)
        else f"dataset {source.path}"
    )


def _row(record: Mapping[str, Any], prompt_column: str, place: str) -> Row:
    if prompt_column not in record:
        near = get_close_matches(prompt_column, record, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DataError(
            f"{place}: no column {prompt_column!r}; the columns are "
            f"{', '.join(map(repr, record)) or 'none'}{hint}"
        )
    columns = {name: value for name, value in record.items() if name != prompt_column}
    return Row(_prompt(record[prompt_column], f"{place}, column {prompt_column!r}"), columns, place)


def _prompt(value: Any, place: str) -> str | Messages:
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and all(_is_message(item) for item in value):
        return tuple({"role": item["role"], "content": item["content"]} for item in value)
    raise DataError(
        f"{place}: expected text or a list of messages with 'role' and 'content', found "
        f"{_excerpt(value)}"
    )


def _is_message(item: Any) -> bool:
    return (
        isinstance(item, Mapping)
        and isinstance(item.get("role"), str)
        and isinstance(item.get("content"), str)
    )


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
        question = entry["question"]
        system = (
            ({"role": "system", "content": source.system},) if source.system is not None else ()
        )
        prompt = (*system, {"role": "user", "content": question}) if system else question
        yield Row(prompt, {**entry, TASK_COLUMN: identity}, place)
