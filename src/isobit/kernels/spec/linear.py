"""The linear layer: FProp, DGrad and WGrad in the formats of its site.

    FProp  Y  = X W^T    forward format; its rows must be the same bits for every batch: exact GEMM (``isobit.kernels.spec.gemm``)
    DGrad  dX = dY W     E4M3: dY in 1x128 groups along N; W's 128x128 blocks are the forward's own, read transposed
    WGrad  dW = dY^T X   E4M3: both operands in groups of 128 tokens, quantised straight from BF16

Y and dX are rounded to the format between operators, dW is FP32 and belongs to the FP32 master.  No
bit of the backward has to agree with a rollout, so its GEMMs are plain FP32 over the dequantised
operands: they repeat at a fixed number of threads. A bias is added in FP32 before Y is rounded.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from isobit.kernels.spec.e4m3 import decode_e4m3
from isobit.kernels.spec.gemm import gemm_e4m3, gemm_snapped
from isobit.kernels.spec.grid import snap_rows
from isobit.kernels.spec.quantise import quantise_blocks, quantise_rows, quantise_tokens
from isobit.kernels.trace import observe
from isobit.precision.flow import Site
from isobit.precision.formats import BLOCK, DTYPES, ScaleKind
from isobit.precision.quant_tensor import QuantTensor


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """What a linear reads, made once per publish: E4M3 blocks, or BF16 or FP32 rows on the grid;
    and its bias.
    """

    site: Site
    matrix: QuantTensor | torch.Tensor
    bias: torch.Tensor | None = None

    @classmethod
    def publish(
        cls, site: Site, master: torch.Tensor, bias: torch.Tensor | None = None
    ) -> "LinearWeight":
        """Quantise or snap the master [N, K]: from its BF16 rounding, except in FP32."""
        weight = cls(site, _published(site, master.detach()))
        return weight if bias is None else weight.with_bias(bias)

    def with_bias(self, bias: torch.Tensor) -> "LinearWeight":
        """The same matrix with a bias, from its master [N]."""
        return replace(
            self,
            bias=bias.detach().to(
                torch.float32 if self.site.forward == "fp32" else torch.bfloat16, copy=True
            ),
        )

    def overwrite(self, master: torch.Tensor) -> torch.Tensor:
        """Publish newer values of the matrix into the same tensors; -> how many numbers are others
        now, int64, on their device.

        In E4M3 a number is its byte, and scales do not count.
        """
        master = master.detach()
        if isinstance(self.matrix, QuantTensor) and master.is_cuda:
            from isobit.kernels.hopper.publish import publish_blocks

            changed = torch.empty(self.matrix.scales.shape, dtype=torch.int32, device=master.device)
            publish_blocks(master, self.matrix, self.site.scales, changed)
            return changed.sum()
        made = _published(self.site, master)
        changed = (_numbers(made) != _numbers(self.matrix)).sum()
        self.matrix.copy_(made)  # pyright: ignore[reportArgumentType] (both of one kind: the site says which)
        return changed

    def dequantised(self) -> torch.Tensor:
        """FP32 [N, K]: the matrix that the forward multiplies with."""
        if isinstance(self.matrix, torch.Tensor):
            return self.matrix.float()
        values, scales = decode_e4m3(self.matrix.values), self.matrix.scales
        blocks = values.view(scales.shape[0], BLOCK, scales.shape[1], BLOCK)
        return (blocks * scales[:, None, :, None]).view_as(values)


def _published(site: Site, master: torch.Tensor) -> QuantTensor | torch.Tensor:
    """The matrix that a device's GEMM reads."""
    if master.is_cuda:
        return _published_on_gpu(site, master)
    source = master if site.forward == "fp32" else master.bfloat16()
    return quantise_blocks(source, site.scales) if site.forward == "e4m3" else snap_rows(source)


def _published_on_gpu(site: Site, master: torch.Tensor) -> QuantTensor | torch.Tensor:
    if site.forward != "e4m3":
        return master.to(DTYPES[site.forward], copy=True)
    from isobit.kernels.hopper.publish import publish_blocks

    made = QuantTensor.empty_blocks(*master.shape, device=master.device)
    publish_blocks(master, made, site.scales)
    return made


def _numbers(matrix: QuantTensor | torch.Tensor) -> torch.Tensor:
    return matrix.values.view(torch.uint8) if isinstance(matrix, QuantTensor) else matrix


def linear_forward(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """[M, K] -> [M, N] in the dtype of x; the bits of a row depend on that row alone."""
    if isinstance(weight.matrix, QuantTensor):
        quantised = quantise_rows(x, weight.site.scales)
        observe(quantised.values, weight.site.name, "input", scales=quantised.scales)
        y = gemm_e4m3(quantised, weight.matrix)
    else:
        y = gemm_snapped(observe(snap_rows(x), weight.site.name, "input"), weight.matrix)
    if weight.bias is not None:
        y += weight.bias.float()
    return y.to(x.dtype)


def linear(
    x: torch.Tensor,
    weight: LinearWeight,
    master: torch.Tensor | None,
    bias_master: torch.Tensor | None = None,
) -> torch.Tensor:
    """``linear_forward`` whose gradients reach x, the FP32 master [N, K] and the FP32 bias [N],
    where there are any.
    """
    if not torch.is_grad_enabled():
        return linear_forward(x, weight)
    return _Linear.apply(x, master, bias_master, weight)  # pyright: ignore[reportReturnType]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        master: torch.Tensor,
        bias_master: torch.Tensor | None,
        weight: LinearWeight,
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return linear_forward(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (dy,) = gradients
        (x,) = ctx.saved_tensors
        weight: LinearWeight = ctx.weight
        dy = dy.contiguous()
        dx = dgrad(dy, weight).to(x.dtype) if ctx.needs_input_grad[0] else None
        dw = wgrad(dy, x, weight.site) if ctx.needs_input_grad[1] else None
        db = dy.float().sum(0) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None


def dgrad(dy: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """dX [M, K] in FP32, from dY [M, N]."""
    left = (
        dequantise_rows(quantise_rows(dy, weight.site.scales))
        if weight.site.dgrad == "e4m3"
        else dy.float()
    )
    return left @ weight.dequantised()


def wgrad(dy: torch.Tensor, x: torch.Tensor, site: Site) -> torch.Tensor:
    """dW [N, K] in FP32, from dY [T, N] and X [T, K]."""
    if site.wgrad != "e4m3":
        return dy.float().t() @ x.float()
    return _token_grouped(dy, site.scales).t() @ _token_grouped(x, site.scales)


def dequantise_rows(x: QuantTensor) -> torch.Tensor:
    """1x128 groups -> FP32 [M, K]."""
    values = decode_e4m3(x.values)
    return values.view(*x.scales.shape, BLOCK).mul_(x.scales[..., None]).view_as(values)


def _token_grouped(x: torch.Tensor, scales: ScaleKind) -> torch.Tensor:
    """Quantise along tokens and dequantise: FP32 [T, C]."""
    quantised = quantise_tokens(x, scales)
    values = decode_e4m3(quantised.values)
    for group, scale in zip(values.split(BLOCK), quantised.scales, strict=True):
        group.mul_(scale)
    return values
