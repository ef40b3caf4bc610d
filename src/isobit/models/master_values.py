"""A master as a model folder has it: FP32 numbers, or bytes and scales that a linear takes as they
are or quantises anew.
"""

import torch

from isobit.precision.flow import Site
from isobit.precision.quant_tensor import (
    Int8Rows,
    QuantisedWeight,
    QuantTensor,
    dequantise,
    num_blocks,
)
from isobit.util.errors import ModelError

MasterValues = torch.Tensor | QuantisedWeight  # what a folder has for a master


def is_taken(site: Site, stored: QuantisedWeight) -> bool:
    """Whether a linear multiplies with a folder's bytes and scales as they are."""
    if isinstance(stored, Int8Rows):
        return site.forward == "int8"
    return site.forward == "e4m3" and (site.scales == "fp32" or _are_powers_of_two(stored.scales))


def master_of(stored: QuantisedWeight) -> torch.Tensor:
    """The FP32 numbers that a folder's bytes stand for. Raises ModelError for INT8."""
    if isinstance(stored, Int8Rows):
        raise ModelError(
            "the model's folder is in INT8, whose integers are used as they are: by a flow whose "
            "linears are in INT8 in rollout and training (int8, int8-linear), to sample or to "
            "train [lora]; for other flows and to train all weights name the folder that it was "
            "exported from"
        )
    master = torch.empty(stored.values.shape, dtype=torch.float32, device=stored.values.device)
    rows = master.split(list(stored.parts))
    for target, part in zip(rows, parts_of(stored), strict=True):
        target.copy_(dequantise(part))
    return master


def parts_of(matrix: QuantTensor) -> list[QuantTensor]:
    """The parts of a fused matrix, not copied."""
    values = matrix.values.split(list(matrix.parts))
    scales = matrix.scales.split([num_blocks(part) for part in matrix.parts])
    return [QuantTensor(v, s, "128x128") for v, s in zip(values, scales, strict=True)]


class ScaleConversion:
    """The error of quantising matrices again whose FP32 scales the flow does not have.

    relative error = sqrt(sum (new - old)^2 / sum old^2)
    """

    def __init__(self) -> None:
        self._squares: dict[str, torch.Tensor] = {}  # [error, old], FP64, by the linear's name

    def add(self, name: str, old: QuantTensor, new: QuantTensor) -> None:
        """Count one matrix, without waiting for its device."""
        sums = torch.zeros(2, dtype=torch.float64, device=old.values.device)
        for before, after in zip(parts_of(old), parts_of(new), strict=True):
            numbers = dequantise(before)
            sums[1] += numbers.square().sum(dtype=torch.float64)
            sums[0] += numbers.sub_(dequantise(after)).square_().sum(dtype=torch.float64)
        self._squares[name] = sums

    def __len__(self) -> int:
        return len(self._squares)

    def error(self) -> float:
        """The relative error of all matrices together."""
        return _relative(torch.stack(list(self._squares.values())).sum(0))

    def worst(self) -> tuple[str, float]:
        """The matrix with the largest relative error, and that error."""
        return max(self.errors().items(), key=lambda pair: pair[1])

    def errors(self) -> dict[str, float]:
        """The relative error of each matrix."""
        return {name: _relative(sums) for name, sums in self._squares.items()}

    def __str__(self) -> str:
        name, worst = self.worst()
        return (
            f"the folder's FP8 has FP32 scales, and the flow powers of two: {len(self)} matrices "
            f"were quantised anew, which adds a relative error of {self.error():.2%} (rms; worst "
            f'{name}, {worst:.2%}); precision.scales = "fp32" takes them as they are'
        )


def _are_powers_of_two(scales: torch.Tensor) -> bool:
    """Whether no mantissa bit is set in positive FP32 numbers."""
    return not bool(scales.view(torch.int32).bitwise_and(0x7FFFFF).any())


def _relative(sums: torch.Tensor) -> float:
    error, old = sums.tolist()
    return (error / old) ** 0.5 if old else 0.0
