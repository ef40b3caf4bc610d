"""A folder's tensors over its files: one file, or shards with an index that says where each is.

    model.safetensors                       all of them, where they fit
    model-00001-of-00003.safetensors, ...   or shards of at most so many bytes, in the order of the
                                            forward pass; a larger tensor has a shard of its own
    model.safetensors.index.json            of shards: ``weight_map``, tensor -> file, and
                                            ``metadata.total_size``, bytes of all tensors

transformers reads shards one after the other, and other loaders map one at a time: a matrix and its
scales are in the same one.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from isobit.models.tensor_file import FilePlan, write_tensors

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
SCALES_SUFFIX = "_scale_inv"
"""What a matrix's name ends with where its scales are meant."""

Layout = Mapping[str, torch.Tensor]
"""Tensors of a folder by name, as shapes and formats on the device ``meta``."""


def plan_shards(layout: Layout, limit: int = SHARD_BYTES) -> dict[str, list[str]]:
    """The names of each file's tensors, by the file's name; ``limit`` in bytes."""
    shards: list[list[str]] = [[]]
    size = 0
    for members in _kept_together(layout):
        more = sum(layout[name].nbytes for name in members)
        if shards[-1] and size + more > limit:
            shards.append([])
            size = 0
        shards[-1] += members
        size += more
    if len(shards) == 1:
        return {WEIGHTS_FILE: shards[0]}
    return {
        f"model-{number:05}-of-{len(shards):05}.safetensors": names
        for number, names in enumerate(shards, 1)
    }


def write_order(layout: Layout, limit: int = SHARD_BYTES) -> list[str]:
    """The names in the order in which ``write_shards`` asks for their values."""
    return [
        name
        for names in plan_shards(layout, limit).values()
        for name in FilePlan.of({name: layout[name] for name in names}).begins
    ]


def write_shards(
    folder: Path,
    layout: Layout,
    value: Callable[[str], torch.Tensor],
    limit: int = SHARD_BYTES,
) -> dict[str, str]:
    """Write ``value(name)`` for each name of the layout, one at a time, and the index where there
    are several files; -> the SHA-256 of each file of tensors.
    """
    shards = plan_shards(layout, limit)
    digests = {
        file: write_tensors(
            folder / file, {name: layout[name] for name in names}, value, {"format": "pt"}
        )
        for file, names in shards.items()
    }
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": total_bytes(layout)},
            "weight_map": {
                name: file for file, names in sorted(shards.items()) for name in sorted(names)
            },
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return digests


def total_bytes(layout: Layout) -> int:
    """Of all tensors."""
    return sum(tensor.nbytes for tensor in layout.values())


def _kept_together(layout: Layout) -> list[list[str]]:
    """A matrix with its scales, in the order of the layout; every other tensor alone."""
    groups: dict[str, list[str]] = {}
    for name in layout:
        groups.setdefault(name.removesuffix(SCALES_SUFFIX), []).append(name)
    return list(groups.values())
