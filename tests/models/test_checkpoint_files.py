"""Shards and their index: what they agree on, and every way in which they do not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from isobit.models.checkpoint import open_checkpoint, read_json, weight_files
from isobit.models.safetensors import INDEX_FILE, WEIGHTS_FILE
from isobit.util.errors import ModelError

TENSORS = {name: torch.randn(3, 4) for name in "abcd"}
SHARDS = {"one.safetensors": ["a", "b"], "two.safetensors": ["c", "d"]}
MAP = {name: file for file, names in SHARDS.items() for name in names}


def write_index(folder: Path, content: object) -> None:
    (folder / INDEX_FILE).write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    for file, names in SHARDS.items():
        save_file({name: TENSORS[name] for name in names}, made / file)
    write_index(made, {"weight_map": MAP})
    return made


def test_tensors_of_shards_by_name(folder: Path) -> None:
    assert weight_files(folder) == [folder / file for file in SHARDS]
    tensors = open_checkpoint(folder)
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in tensors.items():
        assert (tensor.format, tensor.shape) == ("F32", (3, 4))
        assert torch.equal(tensor.mapped, TENSORS[name])
        assert tensor.file is tensors[SHARDS[MAP[name]][0]].file, "a shard is opened once"


def test_tensors_of_one_file(folder: Path) -> None:
    (folder / INDEX_FILE).unlink()
    save_file(TENSORS, folder / WEIGHTS_FILE)
    assert weight_files(folder) == [folder / WEIGHTS_FILE]
    assert open_checkpoint(folder).keys() == TENSORS.keys()
    write_index(folder, {"weight_map": dict.fromkeys(TENSORS, WEIGHTS_FILE)})
    assert open_checkpoint(folder).keys() == TENSORS.keys(), "an index of one file"


def test_the_links_of_the_hubs_cache_are_the_folders_own(folder: Path) -> None:
    blobs, snapshot = folder.parent / "blobs", folder.parent / "snapshots" / "0123"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate([*SHARDS, INDEX_FILE]):
        (folder / file).rename(blobs / str(number))
        (snapshot / file).symlink_to(Path("../../blobs") / str(number))
    assert open_checkpoint(snapshot).keys() == TENSORS.keys()
    linked = folder.parent / "linked"
    linked.symlink_to(snapshot)
    assert open_checkpoint(linked).keys() == TENSORS.keys(), "a folder may be a link itself"


def remapped(**changes: object) -> Callable[[Path], None]:
    return lambda folder: write_index(folder, {"weight_map": MAP | changes})


def indexed(content: object) -> Callable[[Path], None]:
    return lambda folder: write_index(folder, content)


def also_whole(folder: Path) -> None:
    save_file(TENSORS, folder / WEIGHTS_FILE)


def in_both(folder: Path) -> None:
    save_file({name: TENSORS[name] for name in "bcd"}, folder / "two.safetensors")


def outside(folder: Path) -> Path:
    path = folder.parent / "outside.safetensors"
    if not path.exists():
        save_file({"a": TENSORS["a"]}, path)
    return path


def by_absolute_path(folder: Path) -> None:
    remapped(a=str(outside(folder)))(folder)


def by_parent(folder: Path) -> None:
    remapped(a=f"../{outside(folder).name}")(folder)


def by_link(folder: Path) -> None:
    (folder / "link.safetensors").symlink_to(outside(folder))
    remapped(a="link.safetensors")(folder)


def whole_by_link(folder: Path) -> None:
    (folder / INDEX_FILE).unlink()
    (folder / WEIGHTS_FILE).symlink_to(outside(folder))


def truncated(folder: Path) -> None:
    path = folder / "two.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "two.safetensors").unlink(), "names two.safetensors, which is n"),
        (truncated, r"two\.safetensors is damaged: .* it is truncated"),
        (by_absolute_path, "outside.safetensors, which is outside of the folder"),
        (by_parent, r"\.\./outside.safetensors, which is outside of the folder"),
        (by_link, "is a link that leads out of the folder"),
        (whole_by_link, "is a link that leads out of the folder"),
        (also_whole, "holds both model.safetensors and model.safetensors.index.json"),
        (in_both, "b is in both .*one.safetensors and .*two.safetensors"),
        (remapped(a="two.safetensors"), "a is in two.safetensors, but it is in one.safetensors"),
        (remapped(e="two.safetensors"), "e is in two.safetensors, but it is in none of them"),
        (indexed({"weight_map": {n: MAP[n] for n in "abc"}}), r"two\.safetensors: d is not in mod"),
        (remapped(a="pytorch_model.bin"), "expected the name of a .safetensors file"),
        (remapped(a=7), "a is said to be in 7"),
        (remapped(a="\x1b[2J.safetensors"), r"\\x1b\[2J.safetensors', which is not there"),
        (remapped(a="\0.safetensors"), "outside of the folder"),
        (remapped(a="a" * 5000 + ".safetensors"), "which is not there"),
        (remapped(a="\ud800.safetensors"), "which is not there"),
        (indexed({}), "has no weight_map"),
        (indexed({"weight_map": {}}), "has no weight_map"),
        (indexed({"weight_map": [1]}), "has no weight_map"),
        (indexed([1]), "holds a list, expected an object"),
        (lambda folder: (folder / INDEX_FILE).write_text("{"), "is not valid JSON"),
        (lambda folder: (folder / INDEX_FILE).write_text('{"weight_map": 1, "weight_map": 2}'),
         "weight_map is there twice"),
        (lambda folder: (folder / INDEX_FILE).unlink(), "pickled weights"),
    ],
)  # fmt: skip
def test_index_and_files_that_disagree(
    folder: Path, damage: Callable[[Path], Any], message: str
) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=message) as caught:
        open_checkpoint(folder)
    assert str(caught.value).isprintable()


def test_json_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match=r"config\.json cannot be read: Is a directory"):
        read_json(tmp_path / "config.json")
