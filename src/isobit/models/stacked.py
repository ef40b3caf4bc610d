"""Experts that a folder has in one tensor a layer, as gpt-oss does: read as if each expert had
matrices of its own, and written back. With E experts and rows of gate and of up in turn:

    experts.gate_up_proj, .down_proj             [E, C, 2 I] and [E, I, C]: transposed
    experts.gate_up_proj_bias, .down_proj_bias   [E, 2 I] and [E, C]

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
    """The parts of an expert, whose rows are there in turn."""

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 3

    def joined(self, values: list[torch.Tensor]) -> torch.Tensor:
        """The numbers of all parts -> the folder's tensor."""
        experts, *sizes = self.shape
        rows = torch.stack(values).view(experts, self.turns, -1, *sizes[:-1])
        turned = rows.transpose(1, 2).flatten(1, 2)
        return turned.transpose(1, 2).contiguous() if self.is_matrix else turned


def stacks(config: ModelConfig) -> Iterator[Stack]:
    """Those of a decoder's folder, in the order of the forward; none in other families."""
    experts = config.experts
    if experts is None or not config.stacks_experts:
        return
    for name, master in build_decoder(config).masters().items():
        if ".experts." in name:
            parts, (matrix, kind) = tuple(master.parts), name.split(".")[-2:]
            before = parts[0].partition(".experts.")[0]
            own = f"{before}.experts.{matrix}" + ("_bias" if kind == "bias" else "")
            shape = (experts.count, *master.shape[1:], master.shape[0] // experts.count)
            yield Stack(own, name, parts, shape, len(parts) // experts.count)


@dataclass(frozen=True, slots=True)
class ExpertTensor(CheckpointTensor):
    """A part of a stacked tensor, ``name``: rows ``first``, ``first + step``, .. of one expert."""

    expert: int
    first: int
    step: int
    scales: CheckpointTensor | None  # of MXFP4

    @property
    def format(self) -> str:
        return self.file.stored[self.name].format if self.scales is None else MXFP4

    @property
    def shape(self) -> tuple[int, ...]:
        _, *sizes = self.file.stored[self.name].shape
        if self.scales is not None:
            return sizes[0] // self.step, _BLOCK * sizes[1]
        return sizes[-1] // self.step, *sizes[:-1]

    @property
    def num_bytes(self) -> int:
        whole = self.file[self.name].nbytes + (0 if self.scales is None else self.scales.num_bytes)
        return whole // (self.step * self.file.stored[self.name].shape[0])

    @property
    def mapped(self) -> torch.Tensor:
        """A copy of its numbers, in FP32 those of MXFP4."""
        rows = slice(self.first, None, self.step)
        stored = self.file[self.name][self.expert]
        if self.scales is not None:
            return dequantised(stored[rows], self.scales.mapped[self.expert, rows])
        return (stored.t() if stored.ndim == 2 else stored)[rows].contiguous()

    def read_ahead(self) -> None:
        if self.expert == self.first == 0:
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
    what config.json says. Raises ModelError for one that is missing or has another shape.
    """
    found = dict(stored)
    for stack in stacks(config):
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
        for index, part in enumerate(stack.parts):
            expert, first = divmod(index, stack.turns)
            found[part] = ExpertTensor(
                one.name, one.file, expert, first, stack.turns, stored[scales] if packed else None
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
