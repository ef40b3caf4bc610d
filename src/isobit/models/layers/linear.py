"""A linear: its matrix, perhaps of several of the checkpoint's, and its three products.

    FProp  Y = X W^T       DGrad  dX = dY W       WGrad  dW += dY^T X

A bias is a master here, but is added by whoever reads Y (``QkvTransform``).
"""

from dataclasses import dataclass

import torch

from isobit.kernels.operands import LinearInput, Operand, OutputGradient
from isobit.kernels.trace import observe
from isobit.models.cut import Cuts
from isobit.models.layers.unit import Gradient, Master
from isobit.models.weights import Weights
from isobit.precision.flow import LinearShape, SiteShape


@dataclass(frozen=True, slots=True)
class Linear:
    """The linear ``path``, "layers.N.NAME", a site of the flow."""

    path: str
    shape: LinearShape
    checkpoint_path: str
    """Where the checkpoint has its matrices, up to their own names."""
    has_bias: bool = False

    def site(self, layer: int) -> SiteShape:
        """Its site in the flow, in layer ``layer``."""
        return SiteShape(self.path, "linear", layer, self.shape)

    def masters(self) -> dict[str, Master]:
        """The matrix, then the bias."""
        rows = self.shape.out_features
        shapes: dict[str, tuple[int, ...]] = {"weight": (rows, self.shape.in_features)}
        if self.has_bias:
            shapes["bias"] = (rows,)
        return {
            f"{self.path}.{name}": Master(
                shape,
                {
                    f"{self.checkpoint_path}.{part}.{name}": n
                    for part, n in self.shape.parts.items()
                },
                "matrix" if name == "weight" else "bias",
            )
            for name, shape in shapes.items()
        }

    def forward(self, weights: Weights, x: LinearInput) -> torch.Tensor:
        """[T, K] -> [T, N]."""
        observe_input(x, self.path)
        return observe(weights.backend.linear(x.read, weights.linears[self.path]), self.path)

    def joined(self, weights: Weights, x: LinearInput, cuts: Cuts) -> torch.Tensor:
        """``forward`` to the residual stream, of an input whose ``cuts`` ranks that share the
        weights have made: all of it is read, and all of [T, C] given.
        """
        cut = weights.cut
        return cut.columns(self.forward(weights, cut.input(weights.backend, x, cuts)), cut.hidden)

    def input(self, weights: Weights, x: torch.Tensor, save: bool) -> LinearInput:
        """x [T, K] as this linear reads it, with ``save`` also as its WGrad will."""
        return weights.backend.linear_input(x, weights.linears[self.path].site, save)

    def backward(
        self,
        weights: Weights,
        gradient: Gradient,
        dy: torch.Tensor | OutputGradient,
        x: Operand | None,
    ) -> torch.Tensor:
        """dY [T, N], as it is or as DGrad and WGrad read it -> dX [T, K]; the gradient of the
        matrix is added to.
        """
        assert x is not None, "the forward has saved"
        if isinstance(dy, torch.Tensor):
            dy = weights.backend.output_gradient(dy, weights.linears[self.path].site)
        weights.backend.wgrad(dy.tokens, x, gradient(f"{self.path}.weight"))
        return weights.backend.dgrad(dy.rows, weights.linears[self.path])


def observe_input(x: LinearInput, path: str) -> None:
    """Show the input of the linear ``path`` as FProp reads it."""
    if isinstance(x.read, torch.Tensor):
        observe(x.read, path, "input")
    else:
        observe(x.read.values, path, "input", scales=x.read.scales)
