"""Any number of ranks writes and reads the same checkpoint; if one cannot write, none has."""

import hashlib
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch

from isobit.config.training import TrainingConfig
from isobit.kernels.noise import check_moments, num_groups
from isobit.models import safetensors
from isobit.models import shapes as model_shapes
from isobit.models.decoder import build_decoder
from isobit.models.safetensors import added_up, checksum, checksum_of, write_tensors
from isobit.parallel.ownership import Ownership
from isobit.parallel.world import ALONE, World
from isobit.store import checkpoint as checkpoint_format
from isobit.store.checkpoint import Snapshot, read_checkpoint, write_checkpoint
from isobit.store.directory import RunDirectory
from isobit.store.newest import newest_usable
from isobit.store.state import CheckpointShare
from isobit.training.optimiser import build_optimiser
from isobit.util.errors import CheckpointError, IsobitError
from tests.worlds import in_world

SHAPES = {
    "qkv": (640, 64), "odd": (300, 65), "norm": (192,), "head": (1000, 64), "small": (96, 3),
    "one": (1, 64),
}  # fmt: skip
PARTS = {"qkv": (256, 192, 192)}
FORMATS = ("fp32", "bf16", "fp8")
CHUNK_BYTES = 10_000


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor of any bytes."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(shape, dtype=dtype).nbytes
    data = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    return data.view(dtype).view(shape)


def whole_tensors(moments: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Masters and AdamW's state of the whole policy."""
    seeds = iter(range(1000))
    dtypes = {"fp32": (torch.float32,) * 2, "bf16": (torch.bfloat16,) * 2}
    first, second = dtypes.get(moments, (torch.float8_e4m3fn, torch.uint8))
    masters = {name: drawn(shape, torch.float32, next(seeds)) for name, shape in SHAPES.items()}
    state: dict[str, torch.Tensor] = {}
    for name, shape in SHAPES.items():
        state[f"{name}.step"] = torch.tensor(7.0)
        state[f"{name}.exp_avg"] = drawn(shape, first, next(seeds))
        state[f"{name}.exp_avg_sq"] = drawn(shape, second, next(seeds))
        if moments == "fp8":
            groups = (num_groups(masters[name].numel()),)
            for kind in ("exp_avg_scale", "exp_avg_sq_scale"):
                state[f"{name}.{kind}"] = drawn(groups, torch.uint8, next(seeds))
    return masters, state


def own(
    world: World, moments: str
) -> tuple[CheckpointShare, dict[str, torch.Tensor], dict[str, Any]]:
    """What a rank has of them, cut by hand."""
    masters, state = whole_tensors(moments)
    ownership = Ownership.of(SHAPES, PARTS, world.size)
    for name, shape in SHAPES.items():
        rows = ownership.rows(name, world.rank)
        width = masters[name].numel() // shape[0]
        groups = slice(-(-rows.start * width // 128), -(-rows.stop * width // 128))
        masters[name] = masters[name][rows]
        for kind in ("exp_avg", "exp_avg_sq"):
            state[f"{name}.{kind}"] = state[f"{name}.{kind}"][rows]
            if moments == "fp8":
                state[f"{name}.{kind}_scale"] = state[f"{name}.{kind}_scale"][groups]
    return CheckpointShare(SHAPES, ownership, world.rank), masters, state


def write(world: World, parent: Path, moments: str, step: int = 5) -> Path:
    """A checkpoint in small chunks."""
    share, masters, state = own(world, moments)
    extras = {"diary": {"pages": drawn((77,), torch.int32, 5)}, "empty": {}}
    description = {"config": {"seed": 1}, "environment": {}, "evaluation": {}}
    content = Snapshot(
        step, share.masters(masters), share.moments(state), {"files": {}}, description, extras
    )
    with patch.object(checkpoint_format, "CHUNK_BYTES", CHUNK_BYTES):
        return write_checkpoint(parent, content, world)


def reads_its_own(world: World, folder: Path, moments: str) -> bool:
    """Whether a rank finds its rows of masters and moments in a checkpoint, and nothing else."""
    share, masters, state = own(world, moments)
    read_masters, read_state = read_checkpoint(folder, world).tensors()
    pairs = ((masters, share.own_masters(read_masters)), (state, share.own_moments(read_state)))
    return all(
        wanted.keys() == found.keys()
        and all(
            found[name].shape == tensor.shape and torch.equal(bits(found[name]), bits(tensor))
            for name, tensor in wanted.items()
        )
        for wanted, found in pairs
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers: NaN is equal to itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def raised(attempt: Callable[[], object]) -> str:
    """The kind and the text of what an attempt raises."""
    try:
        attempt()
    except IsobitError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def everything(world: World, parent: str) -> dict[str, Any]:
    """All that is shown of several ranks, in one world."""
    place = Path(parent)
    written = {moments: str(write(world, place / moments, moments)) for moments in FORMATS}
    own_rows = [reads_its_own(world, Path(written[moments]), moments) for moments in FORMATS]
    from_one = [reads_its_own(world, place.parent / "1" / moments / "step_000005", moments)
                for moments in FORMATS]  # fmt: skip
    return {
        "written": written, "own rows": own_rows, "from one": from_one,
        "full disk": on_a_full_disk(world, place / "fp8"),
        "left": sorted(path.name for path in (place / "fp8").iterdir()),
        "still good": reads_its_own(world, Path(written["fp8"]), "fp8"),
        "damaged": damaged(world, place / "damaged"),
    }  # fmt: skip


def on_a_full_disk(world: World, parent: Path) -> str:
    """What a rank raises while the last rank's disk fills up in the middle of its masters."""
    pwrite, calls = os.pwrite, iter(range(1000))

    def full(descriptor: int, data: memoryview, place: int) -> int:
        if world.rank == world.size - 1 and next(calls) == 3:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data, place)

    with patch.object(safetensors.os, "pwrite", full):
        text = raised(lambda: write(world, parent, "fp8", step=6))
    world.barrier("rank 0 has removed what there was")
    return text


def damaged(world: World, root: Path) -> list[str]:
    """What a rank says of a flipped byte in a checkpoint, and which one it goes on from."""
    directory, said = RunDirectory(root), list[str]()
    write(world, directory.checkpoints, "bf16", step=3)
    newer = write(world, directory.checkpoints, "bf16", step=4)
    if world.rank == 0:
        flip(newer / "optimiser.safetensors")
    world.barrier("damaged")
    text = raised(lambda: read_checkpoint(newer, world))
    found = newest_usable(directory, said.append, world)
    assert found is not None
    return [text, found.folder.name, *said]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 0x10
    path.write_bytes(content)


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what one process writes: ``1/FORMAT/step_000005``."""
    place = tmp_path_factory.mktemp("ranks")
    for moments in FORMATS:
        write(ALONE, place / "1" / moments, moments)
    return place


def test_one_process_writes_safetensors_and_a_digest_for_each_chunk(
    alone: Path, tmp_path: Path
) -> None:
    for moments in FORMATS:
        folder = alone / "1" / moments / "step_000005"
        for name, tensors in zip(
            ("masters.safetensors", "optimiser.safetensors"), whole_tensors(moments), strict=True
        ):
            write_tensors(tmp_path / name, tensors, tensors.__getitem__)
            data = (folder / name).read_bytes()
            assert (tmp_path / name).read_bytes() == data
            entry = read_checkpoint(folder).manifest["files"][name]
            assert entry["bytes"] == len(data)
            assert entry["sha256"] == [
                hashlib.sha256(data[begin : begin + CHUNK_BYTES]).hexdigest()
                for begin in range(0, len(data), CHUNK_BYTES)
            ]
            assert len(entry["sha256"]) > 4
        assert reads_its_own(ALONE, folder, moments)
        diary = read_checkpoint(folder).extras()["diary"]
        assert torch.equal(diary["pages"], drawn((77,), torch.int32, 5))


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 3])
def test_several_ranks(size: int, alone: Path) -> None:
    found = in_world(size, f"{__name__}:everything", str(alone / str(size)))
    for moments in FORMATS:
        written = Path(found[0]["written"][moments])
        assert content_of(written) == content_of(alone / "1" / moments / "step_000005")
        assert reads_its_own(ALONE, written, moments)
    last = size - 1
    for one in found:
        assert one["own rows"] == one["from one"] == [True] * 3
        assert one["full disk"].startswith(f"NoSpaceError: rank {last} on ")
        for text in ("the checkpoint of step 6 could not be written", "No space left", "needed: "):
            assert text in one["full disk"]
        assert one["left"] == ["step_000005"]
        assert one["still good"]
        assert one["damaged"] == found[0]["damaged"]
    text, used, *said = found[0]["damaged"]
    assert text.startswith("CheckpointError: ")
    assert text.endswith("optimiser.safetensors does not have the SHA-256 of what was written: its "
                         "bytes have changed")  # fmt: skip
    assert used == "step_000003"
    assert said[-1] == "using the one before it: step_000003"


def test_every_chunk_is_looked_at(alone: Path, tmp_path: Path) -> None:
    good = alone / "1" / "fp8" / "step_000005"
    copy = tmp_path / good.name
    shutil.copytree(good, copy)
    for name, entry in read_checkpoint(good).manifest["files"].items():
        for number in range(len(entry["sha256"])):
            data = bytearray((good / name).read_bytes())
            data[min((number + 1) * CHUNK_BYTES, len(data)) - 1] ^= 1
            (copy / name).write_bytes(data)
            with pytest.raises(CheckpointError, match="its bytes have changed"):
                read_checkpoint(copy)
        shutil.copyfile(good / name, copy / name)


class Untouched:
    """A back end whose update computes nothing, and checks what a back end checks."""

    def adamw_step(
        self, master: Any, grad: Any, m: Any, v: Any, _: Any, key: Any, scales: Any, first: int
    ) -> None:
        check_moments(master, grad, m, v, key, scales, first)


def moments_of(
    shapes: Mapping[str, tuple[int, ...]], moments: Any, ownership: Ownership, rank: int
) -> dict[str, torch.Tensor]:
    """What a rank's optimiser holds after an update, without numbers."""
    masters: dict[str, torch.nn.Parameter] = {}
    first_rows: dict[str, int] = {}
    for name, shape in shapes.items():
        rows = ownership.rows(name, rank)
        own = torch.empty((rows.stop - rows.start, *shape[1:]), device="meta")
        masters[name], first_rows[name] = torch.nn.Parameter(own), rows.start
        masters[name].grad = torch.empty_like(own)
    optimiser = build_optimiser(
        masters, TrainingConfig(moments=moments), cast("Any", Untouched()), first_rows=first_rows
    )
    optimiser.step()
    return {
        f"{name}.{kind}": tensor
        for name, master in masters.items()
        for kind, tensor in optimiser.state[master].items()
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", model_shapes.SHAPES)
def test_shares_of_every_named_model_make_up_the_whole(shape: str) -> None:
    """With two layers, which have all kinds of masters; a cut depends on the masters before it.
    Every tensor of the state has each of its bytes on one rank, and its checksum can be computed
    there: the kernels accept rows from any byte on.
    """
    described = build_decoder(replace(model_shapes.model_shape(shape), num_layers=2))
    shapes = {name: master.shape for name, master in described.masters().items()}
    for size, moments in product((*range(2, 9), 12, 16), FORMATS):
        ownership = described.ownership(size)
        own, ends = dict[str, torch.Tensor](), dict[str, int]()
        wholes: dict[str, tuple[int, ...]] = {}
        for rank in range(size):
            own = moments_of(shapes, moments, ownership, rank)
            for key, part in CheckpointShare(shapes, ownership, rank).moments(own).items():
                if not part.rows.numel():
                    continue
                placed = safetensors.placed(key, part)
                assert placed.first_byte == ends.get(key, 0), (key, size, moments)
                assert wholes.setdefault(key, part.shape) == part.shape
                ends[key] = placed.first_byte + part.rows.nbytes
        names = [key for key in own if not key.endswith(".step")]
        assert len(names) == len(shapes) * (4 if moments == "fp8" else 2)
        for key in names:
            expected = math.prod(wholes[key]) * own[key].element_size()
            assert ends[key] == expected, (key, size, moments)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 16])
def test_a_digest_of_shares_is_that_of_the_whole(size: int) -> None:
    """Also of scales whose shares begin within a word: Qwen3-32B's norms have 40."""
    width, groups = 5120, num_groups(5120)
    whole = {"norm.exp_avg_scale": drawn((groups,), torch.uint8, 1)}
    ownership = Ownership.of({"norm": (width,)}, {}, size)
    parts = []
    for rank in range(size):
        share = CheckpointShare({"norm": (width,)}, ownership, rank)
        rows = ownership.rows("norm", rank)
        own = whole["norm.exp_avg_scale"][num_groups(rows.start) : num_groups(rows.stop)]
        parts.append(checksum(share.moments({"norm.exp_avg_scale": own}).items()))
    assert added_up(parts) == checksum_of(whole)
