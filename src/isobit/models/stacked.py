"""Experts that a folder has in one tensor a layer: read as if each expert had matrices of its own.
gpt-oss always has them so, and they are written back. With E experts and rows of gate and of up in
turn:

    experts.gate_up_proj, .down_proj             [E, C, 2 I] and [E, I, C]: transposed
    experts.gate_up_proj_bias, .down_proj_bias   [E, 2 I] and [E, C]

Folders of Qwen3.5 and Qwen3-Next may have them so, and are written with matrices of each expert, as
transformers writes them. All rows of gate stand before those of up:

    experts.gate_up_proj, .down_proj             [E, 2 I, C] and [E, C, I]

In place of a matrix [E, K, N] a folder may have MXFP4 (OCP Microscaling Formats 1.0), which
``quantization_config`` announces. It is dequantised while it is read, and not written:

    X_blocks    U8 [E, N, K / 32, 16]: 32 numbers in E2M1, the first of two in a byte's lower half
    X_scales    U8 [E, N, K / 32]: their common factor, 2^(byte - 127); 255 is NaN
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from isobit.models.config import ModelConfig
from isobit.models.decoder import build_decoder
from isobit.models.safetensors import CheckpointTensor
from isobit.util.errors import ModelError

MXFP4 = "MXFP4"  # a format of ``ExpertTensor``
_BLOCK = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Stack:
    """One tensor of a folder."""

    name: str
    master: str
    parts: tuple[str, ...]  # by the names of experts of their own, expert after expert
    shape: tuple[int, ...]
    turns: int
    """The parts of an expert."""
    is_transposed: bool = True
    """Whether columns are the tensor's last axis but one, and rows of parts are there in turn."""

    def rows(self, part: int, columns: int) -> slice:
        """Those of a part of an expert's ``columns`` rows."""
        if self.is_transposed:
            return slice(part, columns, self.turns)
        each = columns // self.turns
        return slice(part * each, (part + 1) * each, 1)

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 3

    def part(self, values: torch.Tensor, index: int) -> torch.Tensor:
        """The numbers of part number ``index`` in the folder's tensor."""
        expert, place = divmod(index, self.turns)
        turned = self.is_transposed and self.is_matrix
        one = values[expert].t() if turned else values[expert]
        return one[self.rows(place, len(one))]

    def joined(self, values: list[torch.Tensor]) -> torch.Tensor:
        """The numbers of all parts -> the folder's tensor."""
        experts, *sizes = self.shape
        rows = torch.stack(values).view(experts, self.turns, -1, *sizes[:-1])
        turned = rows.transpose(1, 2).flatten(1, 2)
        return turned.transpose(1, 2).contiguous() if self.is_matrix else turned


def stacks(config: ModelConfig) -> Iterator[Stack]:
    """Those of every folder of a decoder, in the order of the forward; none in other families."""
    if config.stacks_experts:
        yield from _stacks(config, is_transposed=True)


def readable_stacks(config: ModelConfig) -> Iterator[Stack]:
    """Those that a folder has, or may have in place of matrices of each expert."""
    if config.may_stack_experts:
        yield from _stacks(config, is_transposed=config.stacks_experts)


def _stacks(config: ModelConfig, is_transposed: bool) -> Iterator[Stack]:
    experts = config.experts
    assert experts is not None, "a decoder with experts"
    for name, master in build_decoder(config).masters().items():
        if ".experts." in name:
            parts, (matrix, kind) = tuple(master.parts), name.split(".")[-2:]
            before = parts[0].partition(".experts.")[0]
            own = f"{before}.experts.{matrix}" + ("_bias" if kind == "bias" else "")
            rows = master.shape[0] // experts.count
            shape = (*master.shape[1:], rows) if is_transposed else (rows, *master.shape[1:])
            turns = len(parts) // experts.count
            yield Stack(own, name, parts, (experts.count, *shape), turns, is_transposed)


@dataclass(frozen=True, slots=True)
class ExpertTensor(CheckpointTensor):
    """A part of a stacked tensor, ``name``: some rows of one expert."""

    expert: int
    rows: slice
    is_transposed: bool
    scales: CheckpointTensor | None  # of MXFP4

    @property
    def format(self) -> str:
        return self.file.stored[self.name].format if self.scales is None else MXFP4

    @property
    def shape(self) -> tuple[int, ...]:
        _, *sizes = self.file.stored[self.name].shape
        if self.scales is not None:
            return self._count, _BLOCK * sizes[1]
        return self._count, *(sizes[:-1] if self.is_transposed else sizes[1:])

    @property
    def num_bytes(self) -> int:
        whole = self.file[self.name].nbytes + (0 if self.scales is None else self.scales.num_bytes)
        experts, *sizes = self.file.stored[self.name].shape
        rows = sizes[-1 if self.is_transposed and self.scales is None else 0]
        return whole * self._count // (experts * rows)

    @property
    def _count(self) -> int:
        return len(range(self.rows.start, self.rows.stop, self.rows.step))

    @property
    def mapped(self) -> torch.Tensor:
        """A copy of its numbers, in FP32 those of MXFP4."""
        stored, rows = self.file[self.name][self.expert], self.rows
        if self.scales is not None:
            return dequantised(stored[rows], self.scales.mapped[self.expert, rows])
        turned = self.is_transposed and stored.ndim == 2
        return (stored.t() if turned else stored)[rows].contiguous()

    def read_ahead(self) -> None:
        if self.expert == self.rows.start == 0:
            self.file.read_ahead(self.name)
            if self.scales is not None:
                self.scales.read_ahead()


def dequantised(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """MXFP4 of N rows, [N, K / 32, 16] and [N, K / 32], both uint8 -> FP32 [N, K]. Every number is
    exact, in BF16 too; a factor beyond FP32 makes an infinity.
    """
    values = torch.tensor((*_E2M1, *(-one for one in _E2M1)), dtype=torch.float32)
    halves = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    factors = scales.view(torch.float8_e8m0fnu).float()
    return values[halves.int()].mul_(factors[..., None]).flatten(1)


def expert_tensors(
    config: ModelConfig, stored: Mapping[str, CheckpointTensor], in_mxfp4: bool
) -> dict[str, CheckpointTensor]:
    """The tensors of a folder with those of every expert in place of stacked ones; ``in_mxfp4`` is
    what config.json says. Raises ModelError for one that is missing where all folders have it, or
    has another shape, and for experts that are there twice.
    """
    found = dict(stored)
    for stack in readable_stacks(config):
        if not config.stacks_experts and stack.name not in stored:
            continue
        blocks, scales = f"{stack.name}_blocks", f"{stack.name}_scales"
        packed, shape = in_mxfp4 and stack.is_matrix, stack.shape
        wanted = {stack.name: shape}
        if packed:
            experts, columns, rows = shape
            grid = experts, rows, columns // _BLOCK
            wanted = {blocks: (*grid, _BLOCK // 2), scales: grid}
        for name, expected in wanted.items():
            if name not in stored:
                said = "says MXFP4" if in_mxfp4 else "has no quantization_config of MXFP4"
                raise ModelError(f"the tensor {name} is missing; config.json {said}")
            tensor = found.pop(name)
            if tensor.shape != expected or packed != (tensor.format == "U8"):
                raise ModelError(
                    f"{tensor} is {tensor.format} of the shape {tensor.shape}, but config.json "
                    f"asks for {expected}" + (" in U8, of MXFP4" if packed else "")
                )
        one = stored[next(iter(wanted))]
        columns = shape[-1] if stack.is_transposed else shape[1]
        for index, part in enumerate(stack.parts):
            if part in stored:
                raise ModelError(f"{one} has all experts of a layer, and {part} is there beside it")
            expert, place = divmod(index, stack.turns)
            found[part] = ExpertTensor(
                *(one.name, one.file, expert, stack.rows(place, columns), stack.is_transposed),
                stored[scales] if packed else None,
            )
    return found


def stacked_layout(
    config: ModelConfig,
    layout: Mapping[str, torch.Tensor],
    value: Callable[[str], torch.Tensor],
) -> tuple[dict[str, torch.Tensor], Callable[[str], torch.Tensor]]:
    """A folder's tensors, on the device ``meta``, and their values, of those that have every expert
    for itself.
    """
    by_part = {part: stack for stack in stacks(config) for part in stack.parts}
    by_name = {stack.name: stack for stack in by_part.values()}
    made: dict[str, torch.Tensor] = {}
    for name, tensor in layout.items():
        stack = by_part.get(name)
        if stack is None:
            made[name] = tensor
        else:
            made[stack.name] = tensor.new_empty(stack.shape)

    def joined(name: str) -> torch.Tensor:
        stack = by_name.get(name)
        return value(name) if stack is None else stack.joined([value(one) for one in stack.parts])

    return made, joined
