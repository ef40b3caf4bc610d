"""The tensors of a model folder, over one file or shards with an index, strictly.

    weight_files        which files hold the weights
    open_checkpoint     every tensor of theirs by name; each file is opened and mapped once, and no
                        tensor is read

An index is a stranger's text that names files: it may name those of its folder alone, also where
symbolic links lead.  Index and headers must agree on where every tensor is, and no tensor is in two
files.  The hub's cache keeps a snapshot's files as links to ``blobs`` beside ``snapshots``: these
count as the folder's own.
"""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from isobit.models.safetensors import INDEX_FILE, WEIGHTS_FILE, TensorFile, parse_json
from isobit.util.errors import ModelError, shown
from isobit.util.files import lies_within


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor of a folder, not read yet."""

    name: str
    file: TensorFile

    @property
    def format(self) -> str:
        """As the file's header names it: "BF16", "F8_E4M3" ..."""
        return self.file.stored[self.name].format

    @property
    def shape(self) -> tuple[int, ...]:
        """From the header."""
        return self.file.stored[self.name].shape

    @property
    def mapped(self) -> torch.Tensor:
        """Its bytes in the file, as they are; read as they are looked at."""
        return self.file[self.name]

    def read_ahead(self) -> None:
        """Have the system begin to read it from the disk."""
        self.file.read_ahead(self.name)

    def __str__(self) -> str:
        """For a message: its file, and its name as it can be printed."""
        return f"{self.file.path}: {shown(self.name)}"


def open_checkpoint(folder: Path) -> dict[str, CheckpointTensor]:
    """Every tensor of a folder by name.  Raises ModelError for files that are missing, damaged or
    outside, and where index and headers disagree.
    """
    files = [TensorFile(path) for path in weight_files(folder)]
    tensors: dict[str, CheckpointTensor] = {}
    for file in files:
        for name in file:
            if name in tensors:
                raise ModelError(
                    f"{shown(name)} is in both {tensors[name].file.path} and {file.path}; expected "
                    "once"
                )
            tensors[name] = CheckpointTensor(name, file)
    if (folder / INDEX_FILE).is_file():
        _check_index(folder, tensors)
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder.  Raises ModelError where there are none, where one that
    the index names is missing or outside of the folder, and where two models are there.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        if not (folder / WEIGHTS_FILE).is_file():
            raise ModelError(
                f"{folder}: neither {WEIGHTS_FILE} nor {INDEX_FILE} is there; pickled weights "
                "(.bin, .pt) are not read"
            )
        return [_inside(folder, WEIGHTS_FILE, folder / WEIGHTS_FILE)]
    names = shard_names(folder)
    if WEIGHTS_FILE not in names and (folder / WEIGHTS_FILE).is_file():
        raise ModelError(
            f"{folder} holds both {WEIGHTS_FILE} and {INDEX_FILE}, which names other files; remove "
            "what belongs to another model"
        )
    return [_inside(folder, name, index) for name in names]


def shard_names(folder: Path) -> tuple[str, ...]:
    """What the index says that the files are called; the one file's name where there is none.
    Raises ModelError for an index that is damaged or names a file outside of the folder.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        return (WEIGHTS_FILE,)
    names = tuple(sorted(set(_weight_map(folder).values())))
    for name in names:
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\0" in name:
            raise ModelError(
                f"{index} names {shown(name)}, which is outside of the folder; expected a file in "
                "it"
            )
    return names


def _where_a_run_has_it(path: Path) -> str:
    """The directory of a run is no model folder, and holds one."""
    if not (path.parent / "run.json").is_file():
        return ""
    model = path.parent / "model"
    is_there = (model / path.name).is_file()
    return f"; {path.parent} is the directory of a run: " + (
        f"its model is {model}"
        if is_there
        else f"`isobit export {path.parent} --to FOLDER` makes a model of its newest checkpoint"
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a folder; raises ModelError for a file that is missing or none."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ModelError(f"{path} is missing{_where_a_run_has_it(path)}") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    return parse_json(content, str(path))


def _weight_map(folder: Path) -> dict[str, str]:
    """The index: tensor -> file."""
    index = folder / INDEX_FILE
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ModelError(f"{index} has no weight_map; expected one from tensors to files")
    for name, file in found.items():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise ModelError(
                f"{index}: {shown(name)} is said to be in {shown(file)}, expected the name of a "
                ".safetensors file"
            )
    return found


def _inside(folder: Path, name: str, named_by: Path) -> Path:
    """The path of a file that must be the folder's own."""
    path = folder / name
    if not _is_file(path):
        raise ModelError(f"{named_by} names {shown(name)}, which is not there")
    if not lies_within(path, folder):
        raise ModelError(
            f"{path} is a link that leads out of the folder, to {path.resolve()}; put the file "
            "itself there"
        )
    return path


def _is_file(path: Path) -> bool:
    """False for a name that no file can have."""
    try:
        return path.is_file()
    except OSError:
        return False


def _check_index(folder: Path, tensors: dict[str, CheckpointTensor]) -> None:
    """Each tensor is in the file that the index says, and in no file is another."""
    index, weight_map = folder / INDEX_FILE, _weight_map(folder)
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.path != folder / file:
            where = f"in {tensors[name].file.path.name}" if name in tensors else "in none of them"
            raise ModelError(
                f"{index} says that {shown(name)} is in {shown(file)}, but it is {where}"
            )
    for name, tensor in tensors.items():
        if name not in weight_map:
            raise ModelError(f"{tensor} is not in {INDEX_FILE}; expected every tensor there")
