"""A checkpoint: a folder that is either whole or absent, in formats that hold no code.

    step_000010/
        masters.safetensors      FP32 masters, by name
        optimiser.safetensors    AdamW's moments and step counts: ``MASTER.exp_avg``,
                                 ``MASTER.exp_avg_sq``, ``MASTER.step``, and of 8-bit moments the
                                 scales, ``MASTER.exp_avg_scale``, ``MASTER.exp_avg_sq_scale``
        EXTRA.safetensors        tensors of other parts with a state, such as a refreshed reference
                                 model (``isobit.store.training_run.Extra``)
        state.json               counters and cursors (``isobit.store.state``)
        manifest.json            format, step, resolved configuration, versions, figures of the
                                 evaluation, and of every other file the size and the SHA-256 of
                                 each chunk of ``chunk_bytes``; its own checksum is the last key

All ranks write their rows of masters and moments into the hidden ``.step_000010.partial``, then
read chunks back, chunk i of all files on rank i mod W.  Rank 0 writes the manifest last, syncs
every file and the folder, renames it and syncs the parent.  A process killed at any point leaves a
hidden folder, which the next run removes.  No byte depends on the number of ranks.  Reading checks
every digest, since safetensors does not notice a flipped bit.  Tensors are written and read one by
one.
"""

import hashlib
import json
import re
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from isobit.models.safetensors import (
    FilePlan,
    Slice,
    TensorFile,
    create_file,
    plan_slices,
    write_slices,
)
from isobit.parallel.world import (
    ALONE,
    World,
    broadcast,
    interleaved,
    run_and_gather,
    write_on_all,
    write_on_first,
)
from isobit.util.disk_space import check_free, disk_errors
from isobit.util.errors import CheckpointError
from isobit.util.files import commit_folder, sync
from isobit.util.plain_files import open_plain, read_plain

CHUNK_BYTES = 64 << 20
_READ_BYTES = 1 << 20
_THREADS = 4  # of a process; one hashes 0.5 to 2 GB/s


@dataclass(frozen=True, slots=True)
class Chunk:
    file: str
    begin: int
    end: int


def chunks_of(sizes: Mapping[str, int], chunk_bytes: int) -> list[Chunk]:
    """The chunks of files of these sizes, in their order; an empty file has one, empty."""
    return [
        Chunk(file, begin, min(begin + chunk_bytes, size))
        for file, size in sizes.items()
        for begin in range(0, max(size, 1), chunk_bytes)
    ]


def own_digests(world: World, folder: Path, chunks: Sequence[Chunk]) -> list[str]:
    """SHA-256 of the rank's chunks.  Raises OSError where one cannot be read."""

    def digest(chunk: Chunk) -> str:
        made = _sha256(folder, chunk)
        world.pulse.beat()
        return made

    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(digest, chunks[world.rank :: world.size]))


def first_damage(
    world: World, folder: Path, chunks: Sequence[Chunk], expected: Sequence[str]
) -> str | None:
    """What is wrong with the first damaged chunk, on every rank; None where all are intact."""
    mine = range(world.rank, len(chunks), world.size)

    def damage_at(place: int) -> str | None:
        path = folder / chunks[place].file
        try:
            is_intact = _sha256(folder, chunks[place]) == expected[place]
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
        finally:
            world.pulse.beat()
        if is_intact:
            return None
        return f"{path} does not have the SHA-256 of what was written: its bytes have changed"

    def look() -> list[tuple[int, str]]:
        with ThreadPoolExecutor(_THREADS) as threads:
            found = threads.map(damage_at, mine)
            return [(place, text) for place, text in zip(mine, found, strict=True) if text]

    problems = [problem for found in run_and_gather(world, look) for problem in found]
    return min(problems)[1] if problems else None


def _sha256(folder: Path, chunk: Chunk) -> str:
    """SHA-256 of a chunk, whose file is opened again so that a network file system shows what other
    hosts have written.
    """
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
    with open_plain(folder / chunk.file) as file:
        file.seek(chunk.begin)
        left = chunk.end - chunk.begin
        while left and (count := file.readinto(buffer[:left])):
            digest.update(buffer[:count])
            left -= count
    return digest.hexdigest()


FORMAT = 3
MASTERS, OPTIMISER = "masters.safetensors", "optimiser.safetensors"
STATE, MANIFEST = "state.json", "manifest.json"
_TENSORS = ".safetensors"
_NAME = re.compile(r"step_(\d{6,})")
_JSON_BYTES = 1 << 16  # a generous bound for headers and the two JSON files


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a checkpoint will hold, still in memory."""

    step: int
    masters: Mapping[str, Slice]
    """This rank's rows (``isobit.store.state``); the same names on all ranks."""
    moments: Mapping[str, Slice]
    state: Mapping[str, Any]  # rank 0's is written
    description: Mapping[str, Any]
    """Entries of the manifest: ``config``, ``environment`` and ``evaluation``; rank 0's is
    written.
    """
    extras: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """Tensors of other files, by file name without ending and by name; rank 0 writes them."""

    def files(self, rank: int) -> dict[str, Mapping[str, Slice]]:
        """What a rank writes, by file and tensor."""
        part = Slice.whole if rank == 0 else Slice.none
        extras = {
            f"{file}{_TENSORS}": {name: part(tensor) for name, tensor in tensors.items()}
            for file, tensors in self.extras.items()
            if tensors
        }
        assert not extras.keys() & {MASTERS, OPTIMISER}
        return {MASTERS: self.masters, OPTIMISER: self.moments, **extras}

    @property
    def num_bytes(self) -> int:
        """Bytes on disk, rounded up."""
        files = self.files(0).values()
        return (
            sum(one.num_bytes for slices in files for one in slices.values())
            + len(json.dumps(self.state))
            + _JSON_BYTES
        )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk whose every byte was checked."""

    folder: Path
    step: int
    state: Mapping[str, Any]
    manifest: Mapping[str, Any]

    def tensors(self) -> tuple[TensorFile, TensorFile]:
        """The masters and the optimiser's state, read on access."""
        return TensorFile(self.folder / MASTERS), TensorFile(self.folder / OPTIMISER)

    def extras(self) -> dict[str, TensorFile]:
        """The tensors of the other files, by file name without its ending."""
        names = [name for name in self.manifest["files"] if name.endswith(_TENSORS)]
        return {
            name.removesuffix(_TENSORS): TensorFile(self.folder / name)
            for name in names
            if name not in (MASTERS, OPTIMISER)
        }


def folder_name(step: int) -> str:
    return f"step_{step:06}"


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint folder's name; None for anything else, links included."""
    match = _NAME.fullmatch(folder.name)
    try:
        return int(match[1]) if match and stat.S_ISDIR(folder.lstat().st_mode) else None
    except OSError:  # it cannot even be looked at
        return None


def folders_by_step(parent: Path) -> dict[int, Path]:
    """The checkpoints in a folder, damaged or not, unordered."""
    folders = parent.iterdir() if parent.is_dir() else ()
    return {step: folder for folder in folders if (step := step_of(folder)) is not None}


def write_checkpoint(parent: Path, snapshot: Snapshot, world: World = ALONE) -> Path:
    """Write a new checkpoint, on all ranks together.  Raises StorageError on all where it cannot be
    written, and leaves the other checkpoints as they are.
    """
    folder = parent / folder_name(snapshot.step)
    partial = parent / f".{folder.name}.partial"
    what, num_bytes = f"the checkpoint of step {snapshot.step}", snapshot.num_bytes
    files = snapshot.files(world.rank)
    plans = {name: plan_slices(slices) for name, slices in files.items()}
    _check_alike(world, plans)

    def create() -> None:
        check_free(parent, num_bytes, what)
        with disk_errors(parent, what, num_bytes):
            _create(partial, plans, snapshot.state)

    def write() -> None:
        with disk_errors(parent, what, num_bytes):
            for name, slices in files.items():
                if any(one.rows.numel() for one in slices.values()):
                    write_slices(partial / name, plans[name], slices, world.pulse.beat)

    def read_back() -> list[str]:
        with disk_errors(parent, what, num_bytes):
            return own_digests(world, partial, chunks)

    def commit() -> None:
        with disk_errors(parent, what, num_bytes):
            _write_manifest(partial, snapshot, sizes, chunks, interleaved(digests))
            commit_folder(partial, folder)

    try:
        write_on_first(world, create)
        write_on_all(world, write)
        names = (*files, STATE)
        sizes = broadcast(world, lambda: {name: (partial / name).stat().st_size for name in names})
        chunks = chunks_of(sizes, CHUNK_BYTES)
        digests = write_on_all(world, read_back)
        write_on_first(world, commit)
    except Exception:
        if world.rank == 0:  # its space is what the user needs now
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def _check_alike(world: World, plans: Mapping[str, FilePlan]) -> None:
    """Assert that all ranks plan the same files."""
    headers = b"".join(plan.header for plan in plans.values())
    digests = world.all_gather(hashlib.sha256(headers).hexdigest())
    assert len(set(digests)) == 1, f"ranks plan other files: {digests}"


def _create(partial: Path, plans: Mapping[str, FilePlan], state: Mapping[str, Any]) -> None:
    partial.mkdir(parents=True)
    for name, plan in plans.items():
        create_file(partial / name, plan)
    (partial / STATE).write_bytes(json.dumps(state, allow_nan=False).encode())
    for file in partial.iterdir():
        sync(file)
    sync(partial)


def _write_manifest(
    partial: Path,
    snapshot: Snapshot,
    sizes: Mapping[str, int],
    chunks: Sequence[Chunk],
    digests: Sequence[str],
) -> None:
    files: dict[str, Any] = {name: {"bytes": size, "sha256": []} for name, size in sizes.items()}
    for chunk, digest in zip(chunks, digests, strict=True):
        files[chunk.file]["sha256"].append(digest)
    content = {
        "format": FORMAT,
        "step": snapshot.step,
        **snapshot.description,
        "chunk_bytes": CHUNK_BYTES,
        "files": files,
    }
    text = json.dumps({**content, "sha256": _json_sha256(content)}, indent=2, allow_nan=False)
    (partial / MANIFEST).write_text(text + "\n", encoding="utf-8")
    sync(partial / MANIFEST)


def read_checkpoint(folder: Path, world: World = ALONE) -> Checkpoint:
    """Check a checkpoint in full; collective.  Raises CheckpointError with the file, on all."""

    def described() -> str:
        manifest = read_manifest(folder)
        _check_sizes(folder, manifest)
        return json.dumps(manifest)

    manifest = json.loads(_broadcast_or_raise(world, described))
    chunks, expected = _recorded(manifest)
    damage = first_damage(world, folder, chunks, expected)
    if damage is not None:
        raise CheckpointError(damage)
    state = _broadcast_or_raise(world, lambda: _read_text(folder / STATE))
    return Checkpoint(folder, manifest["step"], json.loads(state), manifest)


def _broadcast_or_raise(world: World, make: Callable[[], str]) -> str:
    """What rank 0 makes, on every rank; its CheckpointError is raised on all."""

    def attempt() -> dict[str, str]:
        try:
            return {"made": make()}
        except CheckpointError as error:
            return {"problem": str(error)}

    outcome = broadcast(world, attempt)
    if "problem" in outcome:
        raise CheckpointError(outcome["problem"])
    return outcome["made"]


def _read_text(path: Path) -> str:
    """Raises CheckpointError for any error of the operating system."""
    try:
        return read_plain(path, largest=None).decode("utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _check_sizes(folder: Path, manifest: Mapping[str, Any]) -> None:
    for name, recorded in manifest["files"].items():
        path = folder / name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {_reason(error)}") from None
        if size != recorded["bytes"]:
            raise CheckpointError(
                f"{path} has {size:,} bytes, but {recorded['bytes']:,} were written: it was cut or "
                "overwritten"
            )


def _recorded(manifest: Mapping[str, Any]) -> tuple[list[Chunk], list[str]]:
    """The chunks of a manifest's files, and their digests."""
    files = manifest["files"]
    sizes = {name: recorded["bytes"] for name, recorded in files.items()}
    chunks = chunks_of(sizes, manifest["chunk_bytes"])
    digests = [digest for recorded in files.values() for digest in recorded["sha256"]]
    assert len(chunks) == len(digests), "a manifest with its own checksum has a digest a chunk"
    return chunks, digests


def read_manifest(folder: Path) -> dict[str, Any]:
    """The checked manifest.  Raises CheckpointError; also for another step or format."""
    path = folder / MANIFEST
    text = _read_text(path)
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error or 'it is empty'}") from None
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if not isinstance(version, int):
        raise CheckpointError(f"{path} is no manifest of a checkpoint")
    if version != FORMAT:
        raise CheckpointError(
            f"{path} has the format {version}, and this Isobit reads {FORMAT}: use "
            f"{'a newer' if version > FORMAT else 'an older'} Isobit"
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
