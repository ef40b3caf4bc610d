"""What one side of the flow reads: published weights, the rotary table, and the back end that
computes with them.
"""

from dataclasses import dataclass, field

import torch

from isobit.kernels.backend import Backend
from isobit.kernels.operands import LinearWeight
from isobit.kernels.rope import RopeTable
from isobit.models.cut import WHOLE, TensorCut
from isobit.precision.flow import Graph


@dataclass(slots=True)
class Weights:
    """A LinearWeight for each linear by path, and the other tensors in the format between operators
    by the names of their masters; lm_head's matrix as ``head``.
    """

    backend: Backend
    rope: RopeTable
    graph: Graph
    linears: dict[str, LinearWeight] = field(default_factory=dict)
    plain: dict[str, torch.Tensor] = field(default_factory=dict)
    cut: TensorCut = WHOLE
    """Which part of each linear these are."""
