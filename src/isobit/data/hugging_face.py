"""Hugging Face datasets: a ``save_to_disk`` folder, a folder of parquet, JSON or CSV files, and
datasets of the hub.

The ``datasets`` library reads the folders, with a temporary cache, so that a changed file is never
answered from an old one. A folder is untrusted: its README may name files anywhere, which the
library would read or download. So every path that a README or a saved dataset names must be in the
folder, which is checked before the library sees it. Images and similar columns are refused: a row
may name any path or address to read them from.

Of a dataset of the hub only the files of rows are downloaded, no code and no README. What is in the
hub's cache (``HF_HOME``) is used without a request, even where the hub has a newer version; name a
commit to get that. The list of the dataset's files is kept beside the snapshot, as
``<cache>/datasets--org--name/isobit-<commit>.json``, to recognise an interrupted download.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from isobit.config.data import HubData
from isobit.util.errors import DataError, hub_errors
from isobit.util.files import lies_within
from isobit.util.plain_files import check_plain, read_plain
from isobit.util.terminal import say

DATA_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
SAVED_MARKERS = ("dataset_dict.json", "state.json")
_CARDS = ("README.md", ".huggingface.yaml")
"""Files that assign the files of a folder to splits."""
_PLACES = ("data_files", "data_dir")
"""The keys of a card that name files."""
_READERS = ("arrow", "csv", "json", "parquet")
"""Modules of the library that read rows of text and numbers."""


def read_hugging_face(
    folder: Path, split: str | None, limit: int | None
) -> Iterator[dict[str, Any]]:
    """The rows of one split, in order, at most ``limit``; with None, of the only split.

    Raises ``DataError`` for a folder that is missing or holds no dataset, an unknown split, files
    that cannot be parsed, places outside the folder, and columns that are neither text nor numbers.
    """
    if not folder.is_dir():
        raise DataError(
            f"{folder} is not a folder of save_to_disk or of {', '.join(DATA_SUFFIXES)} files"
        )
    _check_plain(folder)
    if any((folder / marker).is_file() for marker in SAVED_MARKERS):
        yield from _take(_saved(folder, split), limit, folder)
    elif any(path.suffix in DATA_SUFFIXES for path in folder.rglob("*")):
        with tempfile.TemporaryDirectory(prefix="isobit-data-") as cache:
            yield from _take(_files(folder, split, cache), limit, folder)
    else:
        raise DataError(
            f"{folder} holds no dataset: neither {' nor '.join(SAVED_MARKERS)}, nor any "
            f"{', '.join(DATA_SUFFIXES)} file"
        )


def _check_plain(folder: Path) -> None:
    """Raise ``DataError`` for a pipe or a device, which the library would open and wait for."""
    for path in folder.rglob("*"):
        try:
            if not path.is_dir():
                check_plain(path)
        except FileNotFoundError:  # a link to nothing, which the library reports if it needs it
            continue
        except OSError as error:
            raise DataError(f"{path} {error.strerror}; remove it from the dataset") from None


def _take(dataset: Any, limit: int | None, folder: Path) -> Iterator[dict[str, Any]]:
    from datasets.features import Json
    from datasets.features.features import require_decoding

    for name, feature in dataset.features.items():
        if require_decoding(feature) and not isinstance(feature, Json):
            raise DataError(
                f"{folder}: the column {name!r} holds {type(feature).__name__}; leave it out"
            )
    for index in range(len(dataset) if limit is None else min(limit, len(dataset))):
        yield dataset[index]


def _saved(folder: Path, split: str | None) -> Any:
    from datasets import DatasetDict, load_from_disk

    _check_saved(folder)
    try:
        dataset = load_from_disk(str(folder.resolve()))
    except Exception as error:  # the library raises many types for a damaged folder
        raise DataError(
            f"{folder} looks like a save_to_disk folder but cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error
    if isinstance(dataset, DatasetDict):
        return _split(dataset, split, folder)
    name = str(dataset.split or "train")
    return _split({name: dataset}, split, folder)


def _check_saved(folder: Path) -> None:
    """Raise ``DataError`` if the folder's own lists name a file outside it."""
    for path in sorted(folder.rglob("*.json")):
        if path.name == "dataset_dict.json":
            named = _json(path).get("splits")
        elif path.name == "state.json":
            files = _json(path).get("_data_files")
            files = files if isinstance(files, list) else []
            named = [file.get("filename") if isinstance(file, dict) else file for file in files]
        else:
            continue
        for name in named if isinstance(named, list) else [named]:
            _check_place(name, path)
            if not lies_within(path.parent / str(name), folder):
                raise _outside(name, path)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_plain(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}, expected an object")
    return content


def _files(folder: Path, split: str | None, cache: str) -> Any:
    from datasets import load_dataset_builder

    _check_cards(folder)
    try:
        # the absolute path: the library would take "csv" for the name of its own reader
        builder = load_dataset_builder(str(folder.resolve()), cache_dir=cache)
        _check_files(folder, builder)
        builder.download_and_prepare()
        splits: Any = builder.as_dataset(in_memory=True)
    except DataError:
        raise
    # parse errors are wrapped in the library's own types, with the file's name in the message
    except Exception as error:
        cause = error.__cause__ or error
        raise DataError(
            f"the files of {folder} cannot be read: {type(cause).__name__}: {cause}"
        ) from error
    return _split(splits, split, folder)


def _check_cards(folder: Path) -> None:
    """Raise ``DataError`` if the folder's README names a place outside it."""
    from huggingface_hub import DatasetCard

    for card in (folder / name for name in _CARDS):
        if not card.is_file():
            continue
        text = read_plain(card).decode("utf-8", "replace")
        if card.suffix != ".md":
            if "\n---" in f"\n{text}":
                raise DataError(f"{card} has several YAML documents; expected one, without ---")
            text = f"---\n{text}\n---\n"
        try:  # by the parser that the library itself will use
            found = DatasetCard(text, ignore_metadata_errors=True).data.to_dict()
        except Exception as error:  # YAML's own, Unicode's, and those of the library's checks
            reason = (str(error).splitlines() or [""])[0]
            raise DataError(
                f"{card}: its YAML cannot be read: {type(error).__name__}: {reason}"
            ) from None
        for place in _places(found):
            _check_place(place, card)


def _places(value: Any, named: bool = False) -> Iterator[Any]:
    """Every text below one of the keys ``_PLACES``, at any depth."""
    if isinstance(value, dict):
        for key, below in value.items():
            if key != "split":
                yield from _places(below, named or key in _PLACES)
    elif isinstance(value, list):
        for below in value:
            yield from _places(below, named)
    elif named and value is not None:
        yield value


def _check_place(name: Any, named_by: Path) -> None:
    """Raise ``DataError`` for anything but a relative path within a folder."""
    pure = PurePosixPath(name) if isinstance(name, str) else PurePosixPath("/")
    if pure.is_absolute() or ".." in pure.parts or "~" in pure.parts[:1] or "\0" in str(name):
        raise _outside(name, named_by)
    if "://" in str(name) or "::" in str(name):
        raise _outside(name, named_by)


def _outside(name: Any, named_by: Path) -> DataError:
    return DataError(
        f"{named_by} names {str(name)[:200]!r}, which is outside of the folder; expected files in "
        "it: nothing is fetched, and nothing else on this machine is read"
    )


def _check_files(folder: Path, builder: Any) -> None:
    """Raise ``DataError`` if the library chose files outside the folder, or of another kind."""
    reader = type(builder).__module__.rpartition(".")[2]
    if reader not in _READERS:
        raise DataError(
            f"{folder}: its files are read as {reader}, but a dataset of text is "
            f"{', '.join(DATA_SUFFIXES)}; remove the others, or name them in README.md"
        )
    for files in (builder.config.data_files or {}).values():
        for file in files:
            if not lies_within(Path(str(file)), folder):
                raise _outside(file, folder)


def _split(splits: Mapping[Any, Any], split: str | None, folder: Path) -> Any:
    if split is None and len(splits) == 1:
        return next(iter(splits.values()))
    if split is None:
        raise DataError(
            f"{folder} has the splits {', '.join(map(repr, splits))}; say which (--split NAME)"
        )
    if split not in splits:
        raise DataError(
            f"{folder} has no split {split!r}; the splits are {', '.join(map(repr, splits))}"
        )
    return splits[split]


def dataset_folder(source: HubData) -> Path:
    """The folder of the dataset's rows in the hub's cache, downloaded if it is missing.

    Raises DataError for a dataset that the hub does not have or give, a subset that is missing or
    has to be named, and a dataset that is not cached while offline.
    """
    from huggingface_hub import constants

    repository, _, revision = source.dataset.partition("@")
    folder = _cached(repository, revision or None)
    if folder is not None and (_is_whole(folder, source) or constants.HF_HUB_OFFLINE):
        chosen_files(_files_below(folder), source)
        return folder / (source.subset or "")
    if constants.HF_HUB_OFFLINE:
        raise DataError(
            f"the dataset {source.dataset} is not in the hub's cache {constants.HF_HUB_CACHE}, and "
            "HF_HUB_OFFLINE forbids to fetch it; fetch it once without HF_HUB_OFFLINE, or name "
            'files (type = "parquet", "jsonl", "csv" or "hf")'
        )
    say(f"isobit: fetching the dataset {source.dataset} from the hub to {constants.HF_HUB_CACHE}")
    return _fetched(source, repository, revision or None) / (source.subset or "")


def chosen_files(files: Sequence[str], source: HubData) -> list[str]:
    """The dataset's files with rows of the subset. Raises DataError if there are none, and if rows
    are in several folders and no subset is named.
    """
    rows = [name for name in files if PurePosixPath(name).suffix in DATA_SUFFIXES]
    folders = sorted({str(PurePosixPath(name).parent) for name in rows})
    if not rows:
        raise DataError(
            f"the dataset {source.dataset} has no {', '.join(DATA_SUFFIXES)} file; convert it"
        )
    if source.subset is None:
        if len(folders) > 1:
            raise DataError(
                f"the dataset {source.dataset} has rows in {len(folders)} folders: "
                f"{', '.join(folders[:20])}; name one of them as `subset`"
            )
        return rows
    chosen = [name for name in rows if PurePosixPath(source.subset) in PurePosixPath(name).parents]
    if not chosen:
        raise DataError(
            f"the dataset {source.dataset} has no subset {source.subset!r}; its folders with rows "
            f"are {', '.join(folders[:20])}"
        )
    return chosen


def _cached(repository: str, revision: str | None) -> Path | None:
    """The cached snapshot, which may be incomplete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                repository, repo_type="dataset", revision=revision, local_files_only=True
            )
        )
    except (LocalEntryNotFoundError, ValueError):
        return None
    return folder if _files_below(folder) else None


def _is_whole(folder: Path, source: HubData) -> bool:
    """Whether all files of rows in the commit's list are there."""
    try:
        files = json.loads(read_plain(_list_of(folder)))
    except (OSError, ValueError):
        return False
    return all((folder / name).is_file() for name in chosen_files(files, source))


def _list_of(snapshot: Path) -> Path:
    return snapshot.parent.parent / f"isobit-{snapshot.name}.json"


def _files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _fetched(source: HubData, repository: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    with hub_errors(
        DataError,
        known=f"the hub has the dataset {repository}",
        unknown=f"the hub has no dataset {repository}",
        failed=f"the dataset {source.dataset} cannot be fetched from the hub",
        remedy="name files",
        revision=revision,
    ):
        info = HfApi().dataset_info(repository, revision=revision)
        files = [sibling.rfilename for sibling in info.siblings or ()]
        chosen = chosen_files(files, source)
        # with its revision, the snapshot is found again under that name
        folder = Path(
            snapshot_download(
                repository, repo_type="dataset", revision=revision, allow_patterns=chosen
            )
        )
        if folder.name == info.sha:
            _list_of(folder).write_text(json.dumps(files), encoding="utf-8")
        return folder
