"""Published matrices of which each rank of a few holds its rows, and which are whole while they are
asked for.

    rows      those that rollout multiplies by (``isobit.models.tensor_parallel``), in memory that
              all of these ranks can read
    whole     what ``Weights.linears`` gives of a matrix: joined from the rows of all, and kept
              until a matrix of another layer is asked for

So training and scoring read a layer at a time.  A rank reads the rows of others without a word, at
any time but in a publication, which all ranks make together layer by layer.
"""

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import cast

import torch

from isobit.kernels.operands import LinearWeight, Operand
from isobit.models.layers import Master, Weights
from isobit.models.tensor_parallel import TensorParallel
from isobit.precision.quant_tensor import Int8Rows, QuantisedWeight, QuantTensor, Side

_ALIGNED = 256
"""Bytes of which each tensor's place is a multiple."""
Key = tuple[str, int]
"""A linear's path, and which of its matrices: the sides may have two."""


class Slices:
    """The matrices of both sides of a policy, cut for the ranks of ``split``."""

    def __init__(
        self,
        split: TensorParallel,
        masters: Mapping[str, Master],
        sides: Mapping[Side, Weights],
    ) -> None:
        self.split, self._sides = split, sides
        self._parts = {
            name.rpartition(".")[0]: master.modules
            for name, master in masters.items()
            if master.kind == "matrix"
        }
        self._shapes: dict[Key, tuple[int, ...]] = {}
        """The parts that a whole matrix in blocks says it has."""
        self._own: dict[Key, Operand] = {}
        self._of_all: dict[Key, list[list[torch.Tensor]]] = {}
        """Values and scales of each rank's rows."""
        self._whole: dict[Key, Operand] = {}
        self._layer = ""

    @torch.no_grad()
    def keep(self, path: str) -> None:
        """Keep this rank's rows of the matrices that have just been published of a linear."""
        cut: dict[int, Operand] = {}
        for weights in self._sides.values():
            matrix = weights.linears[path].matrix
            if id(matrix) not in cut:
                key = path, len(cut)
                self._shapes[key] = getattr(matrix, "parts", ())
                cut[id(matrix)] = self._own[key] = self.split.rows(matrix, self._parts[path])
            weights.linears[path] = replace(weights.linears[path], matrix=cut[id(matrix)])

    @torch.no_grad()
    def share(self) -> None:
        """Let all ranks read all rows, and both sides whole matrices.  All ranks together."""
        world = self.split.world
        needed = sum(_room(x.nbytes) for own in self._own.values() for x in _tensors(own))
        shapes = [[list(x.shape) for x in _tensors(own)] for own in self._own.values()]
        layouts = world.all_gather((needed, shapes))
        room = max(size for size, _ in layouts)
        memory = world.shared(room, next(iter(self._sides.values())).backend.device)
        for of_rank, (_, shapes) in zip(memory, layouts, strict=True):
            at = 0
            for (key, own), of_matrix in zip(self._own.items(), shapes, strict=True):
                views: list[torch.Tensor] = []
                for tensor, shape in zip(_tensors(own), of_matrix, strict=True):
                    size = torch.Size(shape).numel() * tensor.itemsize
                    views.append(of_rank[at : at + size].view(tensor.dtype).view(shape))
                    at += _room(size)
                self._of_all.setdefault(key, []).append(views)
        keys: dict[int, Key] = {id(own): key for key, own in self._own.items()}
        for weights in self._sides.values():
            linears = {path: (keys[id(one.matrix)], one) for path, one in weights.linears.items()}
            weights.linears = GatheredLinears(self, linears)
        for key, own in self._own.items():  # a copy is freed when the next matrix has its place
            self._own[key] = _with_tensors(own, self._of_all[key][world.rank])
            _copy(self._own[key], own)
            for weights in self._sides.values():
                held = cast("GatheredLinears", weights.linears).held
                if held[key[0]][0] == key:
                    held[key[0]] = key, replace(held[key[0]][1], matrix=self._own[key])
        self.meet()

    def own(self, side: Side) -> dict[str, LinearWeight]:
        """The linears of a side with this rank's rows of their matrices, and of their biases."""
        linears = self._sides[side].linears
        assert isinstance(linears, GatheredLinears)
        return {
            path: replace(
                one,
                matrix=self._own[key],
                bias=one.bias if one.bias is None else self.split.rows(one.bias, self._parts[path]),
            )
            for path, (key, one) in linears.held.items()
        }

    @torch.no_grad()
    def whole(self, key: Key) -> Operand:
        """A whole matrix, the same object until a matrix of another layer is asked for."""
        layer = key[0].split(".")[1]
        if layer != self._layer:
            self.forget()
            self._layer = layer
        if key not in self._whole:
            tensors = self.split.joined_rows(self._of_all[key], self._parts[key[0]])
            self._whole[key] = _with_tensors(self._own[key], tensors, self._shapes[key])
        return self._whole[key]

    def forget(self) -> None:
        """Free what was gathered."""
        self._whole.clear()
        self._layer = ""

    @torch.no_grad()
    def store(self, paths: Collection[str]) -> None:
        """Take this rank's rows of the whole matrices of a layer, which have changed in place on
        all ranks.  All ranks together.
        """
        self.meet()
        for key, own in self._own.items():
            if key[0] in paths:
                _copy(own, self.split.rows(self.whole(key), self._parts[key[0]]))

    def meet(self) -> None:
        """Wait until all ranks have read or written what they were asked to.  All together."""
        next(iter(self._sides.values())).backend.synchronize()
        self.split.world.barrier("published rows")


class GatheredLinears(MutableMapping[str, LinearWeight]):
    """The linears of a side by path, of which a matrix is gathered when it is asked for."""

    def __init__(self, slices: Slices, held: dict[str, tuple[Key, LinearWeight]]) -> None:
        self._slices, self.held = slices, held

    def __getitem__(self, path: str) -> LinearWeight:
        key, linear = self.held[path]
        return replace(linear, matrix=self._slices.whole(key))

    def __setitem__(self, path: str, linear: LinearWeight) -> None:
        raise NotImplementedError("published matrices change in place")

    def __delitem__(self, path: str) -> None:
        raise NotImplementedError("published matrices stay")

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


def _room(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _tensors(matrix: Operand) -> list[torch.Tensor]:
    if isinstance(matrix, torch.Tensor):
        return [matrix]
    assert isinstance(matrix, QuantisedWeight), "a weight is a matrix or in 8 bits"
    return [matrix.values, matrix.scales]


def _with_tensors(
    like: Operand, tensors: Sequence[torch.Tensor], parts: tuple[int, ...] | None = None
) -> Operand:
    """The same kind of matrix, of other tensors; in blocks of other ``parts``, if they are
    given.
    """
    if isinstance(like, torch.Tensor):
        return tensors[0]
    values, scales = tensors
    if isinstance(like, Int8Rows):
        return Int8Rows(values, scales)
    assert isinstance(like, QuantTensor), "a weight is a matrix or in 8 bits"
    return QuantTensor(values, scales, "128x128", like.parts if parts is None else parts)


def _copy(to: Operand, source: Operand) -> None:
    for mine, tensor in zip(_tensors(to), _tensors(source), strict=True):
        mine.view(torch.uint8).copy_(tensor.view(torch.uint8))
