"""Models of the Hugging Face hub by name: ``org/name``, or ``org/name@revision`` with a branch, tag
or commit.

A model in the hub's cache (``HF_HOME``) is used without a request, even if the hub has a newer one;
name its commit to get that. Otherwise the config, the card, the tokenizer's files, the chat
template and the index of shards are fetched first, then the safetensors that the index names.
Nothing else is fetched: no pickle, and no code.
"""

import re
from pathlib import Path

from isobit.models.checkpoint import shard_names, weight_files
from isobit.models.safetensors import INDEX_FILE
from isobit.models.saving import (
    TEMPLATES,
    TEXT_FILES,
)
from isobit.util.errors import ModelError, hub_errors
from isobit.util.terminal import say

_NAME = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?", re.ASCII)
_DESCRIPTION = ("config.json", "README.md", INDEX_FILE, *TEXT_FILES, f"{TEMPLATES}/*.jinja")


_PLACES = {"runs", "run", "out", "output", "outputs", "checkpoints", "results", "tmp"}
"""Folders that runs are written to: ``runs/mine`` is a path, also where there is no ``runs``."""


def is_hub_name(name: str) -> bool:
    """Whether this can only be a model of the hub: ``org/name``, with no local folder ``org``."""
    match, first = _NAME.fullmatch(name), name.partition("/")[0]
    return (
        match is not None and ".." not in name and first not in _PLACES and not Path(first).exists()
    )


def hub_folder(name: str, weights: bool = True) -> Path:
    """The folder of a model's snapshot in the hub's cache, fetched if it is not there; without
    ``weights`` its config, tokenizer and index of shards are enough.

    Raises ModelError for a name that the hub does not know or does not give access to, for a model
    without safetensors, and for one that is not cached while offline.
    """
    match = _NAME.fullmatch(name)
    assert match is not None, name
    repository, revision = match["repository"], match["revision"]
    folder = _cached(repository, revision, weights)
    if folder is not None:
        return folder
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise ModelError(
            f"{name} is no folder here, and as a model of the hub it is not in the cache "
            f"{constants.HF_HUB_CACHE}, while HF_HUB_OFFLINE forbids to fetch it; name a folder, "
            "or fetch it once without HF_HUB_OFFLINE"
        )
    what = name if weights else f"config and tokenizer of {name}"
    say(f"isobit: fetching {what} from the hub to {constants.HF_HUB_CACHE}")
    folder = _fetched(name, repository, revision, _DESCRIPTION)
    if not weights:
        return folder
    # the revision is now a commit, the folder's name: both turns see the same files
    return _fetched(name, repository, folder.name, shard_names(folder))


def _cached(repository: str, revision: str | None, weights: bool) -> Path | None:
    """The snapshot's folder if it is complete, but for the weights where they are not wanted and
    the hub must not be asked; an interrupted fetch leaves only a part of it.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot = snapshot_download(
            repository, revision=revision, local_files_only=True, allow_patterns=["config.json"]
        )
    except (LocalEntryNotFoundError, ValueError):  # a name that no model can have
        return None
    folder = Path(snapshot)
    if not (folder / "config.json").is_file():
        return None
    try:
        return folder if weight_files(folder) else None
    except ModelError:
        return None if weights or not constants.HF_HUB_OFFLINE else folder


def _fetched(name: str, repository: str, revision: str | None, files: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download

    with hub_errors(
        ModelError,
        known=f"{name}: the hub has {repository}",
        unknown=f"{name} is no folder here, and the hub has no such model",
        failed=f"{name} is no folder here, and it cannot be fetched from the hub",
        remedy="name a folder",
        revision=revision,
    ):
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(files)))
