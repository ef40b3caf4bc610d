"""One checkpoint: a folder that is either whole or not there, in formats that hold no code.

    step_000010/
        masters.safetensors      FP32 masters, by name
        optimiser.safetensors    AdamW's moments and step counts: ``MASTER.exp_avg``,
                                 ``MASTER.exp_avg_sq``, ``MASTER.step``, and of 8-bit moments the
                                 scales, ``MASTER.exp_avg_scale``, ``MASTER.exp_avg_sq_scale``
        EXTRA.safetensors        tensors of what else has a state: a reference model that has been
                                 refreshed, for example (``isobit.store.training_run.Extra``)
        state.json               counters and cursors (``isobit.store.checkpoint.state``)
        manifest.json            format, step, resolved configuration, versions, figures of the
                                 evaluation, and size and SHA-256 of every other file; its own
                                 checksum is the last key

Writing: into the hidden ``.step_000010.partial``, the manifest last, every file and the folder
synced, then renamed, and the folder above synced.  A process killed at any point leaves a hidden
folder, which nobody reads and the next run removes.  Reading: nothing is used whose bytes are not
those of the manifest; safetensors itself does not notice a flipped bit.  Tensors go from their
device to the disk and back one by one.

Format 1 had no files of extras, and is read as one without.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from isobit.errors import CheckpointError
from isobit.files import check_free, commit_folder, disk_errors, file_sha256, sync
from isobit.models.tensor_file import TensorFile, write_tensors

FORMAT = 2
MASTERS, OPTIMISER, STATE, MANIFEST = (
    "masters.safetensors",
    "optimiser.safetensors",
    "state.json",
    "manifest.json",
)
_TENSORS = ".safetensors"
_NAME = re.compile(r"step_(\d{6,})")
_JSON_BYTES = 1 << 16
"""Room for headers and the two JSON files beside the tensors, generously."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a checkpoint of a run is to hold, while it is still in memory."""

    step: int
    masters: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    state: Mapping[str, Any]
    description: Mapping[str, Any]
    """For the manifest: ``config``, ``environment`` and ``evaluation``."""
    extras: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """Tensors of other files, by the file's name without its ending, and by their own."""

    @property
    def files(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Tensors by file and name."""
        extras = {f"{name}{_TENSORS}": tensors for name, tensors in self.extras.items() if tensors}
        assert not extras.keys() & {MASTERS, OPTIMISER}
        return {MASTERS: self.masters, OPTIMISER: self.moments, **extras}

    @property
    def num_bytes(self) -> int:
        """Bytes that the checkpoint will take on the disk, rounded up."""
        files = self.files.values()
        return (
            sum(tensor.nbytes for tensors in files for tensor in tensors.values())
            + len(json.dumps(self.state))
            + _JSON_BYTES
        )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk whose every byte was found to be as it was written."""

    folder: Path
    step: int
    state: Mapping[str, Any]
    manifest: Mapping[str, Any]

    def tensors(self) -> tuple[TensorFile, TensorFile]:
        """The masters and the optimiser's state, read as they are asked for."""
        return TensorFile(self.folder / MASTERS), TensorFile(self.folder / OPTIMISER)

    def extras(self) -> dict[str, TensorFile]:
        """The tensors of all other files, by the file's name without its ending."""
        names = [name for name in self.manifest["files"] if name.endswith(_TENSORS)]
        return {
            name.removesuffix(_TENSORS): TensorFile(self.folder / name)
            for name in names
            if name not in (MASTERS, OPTIMISER)
        }


def folder_name(step: int) -> str:
    """The name of a step's checkpoint folder: ``step_000010``."""
    return f"step_{step:06}"


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint folder's name; None for anything else, links included."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match and folder.is_dir() and not folder.is_symlink() else None


def folders_by_step(parent: Path) -> dict[int, Path]:
    """The checkpoints in a folder, damaged or not, in no order; none where there is no such
    folder.
    """
    folders = parent.iterdir() if parent.is_dir() else ()
    return {step: folder for folder in folders if (step := step_of(folder)) is not None}


def write_checkpoint(parent: Path, snapshot: Snapshot) -> Path:
    """Write a checkpoint that is not there yet.  Raises StorageError, leaving all others as they
    are, where it cannot be written.
    """
    folder = parent / folder_name(snapshot.step)
    what = f"the checkpoint of step {snapshot.step}"
    check_free(parent, snapshot.num_bytes, what)
    partial = parent / f".{folder.name}.partial"
    with disk_errors(parent, what, snapshot.num_bytes):
        try:
            partial.mkdir(parents=True)
            _write_files(partial, snapshot)
            commit_folder(partial, folder)
        except Exception:
            shutil.rmtree(partial, ignore_errors=True)  # its space is what the user needs now
            raise
    return folder


def _write_files(partial: Path, snapshot: Snapshot) -> None:
    state = json.dumps(snapshot.state, allow_nan=False).encode()
    (partial / STATE).write_bytes(state)
    digests = {
        name: write_tensors(partial / name, tensors, tensors.__getitem__)
        for name, tensors in snapshot.files.items()
    }
    digests[STATE] = hashlib.sha256(state).hexdigest()
    files = {}
    for name, digest in digests.items():
        sync(partial / name)
        files[name] = {"bytes": (partial / name).stat().st_size, "sha256": digest}
    content = {"format": FORMAT, "step": snapshot.step, **snapshot.description, "files": files}
    text = json.dumps({**content, "sha256": _json_sha256(content)}, indent=2, allow_nan=False)
    (partial / MANIFEST).write_text(text + "\n", encoding="utf-8")
    sync(partial / MANIFEST)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Check a checkpoint in full.  Raises CheckpointError with the file and what is wrong with
    it.
    """
    manifest = read_manifest(folder)
    for name, recorded in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        size = path.stat().st_size
        if size != recorded["bytes"]:
            raise CheckpointError(
                f"{path} has {size:,} bytes, but {recorded['bytes']:,} were written: it was cut or "
                "overwritten"
            )
        if file_sha256(path) != recorded["sha256"]:
            raise CheckpointError(
                f"{path} does not have the SHA-256 of what was written: its bytes have changed"
            )
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    return Checkpoint(folder, manifest["step"], state, manifest)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest alone, checked.  Raises CheckpointError for one that is missing, damaged, of
    another step or of a newer format.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error or 'it is empty'}") from None
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if not isinstance(version, int):
        raise CheckpointError(f"{path} is no manifest of a checkpoint")
    if version > FORMAT:
        raise CheckpointError(
            f"{path} has the format {version}, and this Isobit reads up to {FORMAT}: use a newer "
            "Isobit"
        )
    if manifest.pop("sha256", None) != _json_sha256(manifest):
        raise CheckpointError(f"{path} does not have its own checksum: its bytes have changed")
    if folder_name(manifest["step"]) != folder.name:
        raise CheckpointError(
            f"{path} is of step {manifest['step']}: it belongs to another checkpoint"
        )
    return manifest


def _json_sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
