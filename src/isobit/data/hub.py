"""Datasets of the Hugging Face hub: fetched once, then a folder of files like any other.

What is in the hub's cache (``HF_HOME``) is taken from there without a request, also where the hub
has a newer one: to have that, name its commit.  A fetch begins with the list of the dataset's
files, which is kept beside the snapshot:

    <cache>/datasets--org--name/isobit-<commit>.json

so that a fetch that was interrupted is told from a whole one.  Only files of rows are fetched: no
code, and no README, whose settings could name files elsewhere.
"""

import json
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from isobit.config.data import HubData
from isobit.data.hugging_face import DATA_SUFFIXES
from isobit.errors import DataError
from isobit.hub import hub_errors
from isobit.terminal import say


def dataset_folder(source: HubData) -> Path:
    """The folder of the dataset's rows in the hub's cache, fetched where it is not there.

    Raises DataError for a name that the hub does not know or does not give, for a subset that is
    not there or has to be named, and for a dataset that is not cached while offline.
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
    """Of a dataset's files those with rows of the subset.  Raises DataError where there are none,
    and where no subset is named and rows lie in several folders.
    """
    rows = [name for name in files if PurePosixPath(name).suffix in DATA_SUFFIXES]
    folders = sorted({str(PurePosixPath(name).parent) for name in rows})
    if not rows:
        raise DataError(
            f"the dataset {source.dataset} has no {', '.join(DATA_SUFFIXES)} file; a dataset that "
            "is made by a script is not read: convert it to Parquet"
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
    """The snapshot as far as it is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = Path(
            snapshot_download(
                repository, repo_type="dataset", revision=revision, local_files_only=True
            )
        )
    except (LocalEntryNotFoundError, ValueError):
        return None
    return found if _files_below(found) else None


def _is_whole(folder: Path, source: HubData) -> bool:
    """Whether every file of rows is there that the list of its commit has."""
    try:
        files = json.loads(_list_of(folder).read_text(encoding="utf-8"))
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
        found = HfApi().dataset_info(repository, revision=revision)
        files = [sibling.rfilename for sibling in found.siblings or ()]
        chosen = chosen_files(files, source)
        # asked for by its revision, the snapshot is found again under that name
        folder = Path(
            snapshot_download(
                repository, repo_type="dataset", revision=revision, allow_patterns=chosen
            )
        )
        if folder.name == found.sha:
            _list_of(folder).write_text(json.dumps(files), encoding="utf-8")
        return folder
