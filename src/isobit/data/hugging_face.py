"""Hugging Face datasets on disk: a ``save_to_disk`` folder, or a folder of parquet, JSON or CSV
files.

The ``datasets`` library reads both.  Files are converted into a temporary cache that goes away
afterwards, so that a changed file is never answered from an old one.
"""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from isobit.errors import DataError

DATA_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
SAVED_MARKERS = ("dataset_dict.json", "state.json")


def read_hugging_face(folder: Path, split: str, limit: int | None) -> Iterator[dict[str, Any]]:
    """The rows of one split, in order, at most ``limit`` of them.

    Raises ``DataError`` for a folder that is missing or holds no dataset, a split that does not
    exist, and files that cannot be parsed.
    """
    if not folder.is_dir():
        raise DataError(
            f"{folder} is not a folder; expected a save_to_disk folder or a folder of "
            f"{', '.join(DATA_SUFFIXES)} files"
        )
    if any((folder / marker).is_file() for marker in SAVED_MARKERS):
        yield from _take(_saved(folder, split), limit)
    elif any(path.suffix in DATA_SUFFIXES for path in folder.rglob("*")):
        with tempfile.TemporaryDirectory(prefix="isobit-data-") as cache:
            yield from _take(_files(folder, split, cache), limit)
    else:
        raise DataError(
            f"{folder} holds no dataset: neither {' nor '.join(SAVED_MARKERS)}, nor any "
            f"{', '.join(DATA_SUFFIXES)} file"
        )


def _take(dataset: Any, limit: int | None) -> Iterator[dict[str, Any]]:
    for index in range(len(dataset) if limit is None else min(limit, len(dataset))):
        yield dataset[index]


def _saved(folder: Path, split: str) -> Any:
    from datasets import DatasetDict, load_from_disk

    try:
        dataset = load_from_disk(str(folder))
    except Exception as error:  # the library raises many types for a damaged folder
        raise DataError(
            f"{folder} looks like a save_to_disk folder but cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error
    if isinstance(dataset, DatasetDict):
        return _split(dataset, split, folder)
    name = str(dataset.split or "train")
    return _split({name: dataset}, split, folder)


def _files(folder: Path, split: str, cache: str) -> Any:
    from datasets import load_dataset

    try:
        splits = load_dataset(str(folder), cache_dir=cache, keep_in_memory=True)
    # parse errors come wrapped in the library's own types, with the file's name in the message
    except Exception as error:
        cause = error.__cause__ or error
        raise DataError(
            f"the files of {folder} cannot be read: {type(cause).__name__}: {cause}"
        ) from error
    return _split(splits, split, folder)


def _split(splits: Mapping[Any, Any], split: str, folder: Path) -> Any:
    if split not in splits:
        raise DataError(
            f"{folder} has no split {split!r}; the splits are {', '.join(map(repr, splits))}"
        )
    return splits[split]
