"""The exact backward of the same forward bits, and each linear's FP8 backward alone.

    dX = dY Wq      Wq the matrix that the forward multiplied with, dequantised
    dW = dY^T X     X in BF16, as it was before quantisation; dY in BF16, as operators hand it on

both in FP32.  While ``exact_backward`` is entered, the linears' backward computes these; on the way
each linear is also given the FP8 backward of the operands at hand, whose cosines with the exact one
hold the rounding errors of that linear and of no other.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from isobit.kernels.spec import linear
from isobit.kernels.spec.linear import LinearWeight
from isobit.models.policy import Policy

Alone = dict[str, tuple[float, float]]
"""By linear: the cosines of dX and of dW."""
Gradients = tuple[torch.Tensor, torch.Tensor]
"""dX [T, K] and dW [N, K], FP32."""


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of two tensors of one shape, in FP64."""
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


def exact_gradients(dy: torch.Tensor, x: torch.Tensor, weight: LinearWeight) -> Gradients:
    """Of dY [T, N] and X [T, K], both BF16."""
    return dy.float() @ weight.dequantised(), dy.float().t() @ x.float()


def fp8_gradients(dy: torch.Tensor, x: torch.Tensor, weight: LinearWeight) -> Gradients:
    """What the trainer computes from the same operands on their device."""
    if not dy.is_cuda:
        return linear.dgrad(dy, weight), linear.wgrad(dy, x, weight.site)
    from isobit.kernels.hopper import linear_backward, token_groups
    from isobit.precision.quant_tensor import QuantTensor

    assert isinstance(weight.matrix, QuantTensor)
    scales = weight.site.scales
    rows, tokens = token_groups.quantise_both(dy, scales)
    dw = torch.zeros((dy.shape[1], x.shape[1]), device=dy.device)
    linear_backward.wgrad(tokens, token_groups.quantise_tokens(x, scales), dw)
    return linear_backward.dgrad(rows, weight.matrix, scales).float(), dw


def cosines(dy: torch.Tensor, x: torch.Tensor, weight: LinearWeight) -> tuple[float, float]:
    """Of the FP8 dX and dW with the exact ones."""
    pairs = zip(fp8_gradients(dy, x, weight), exact_gradients(dy, x, weight), strict=True)
    dx, dw = (cosine(ours, exact) for ours, exact in pairs)
    return dx, dw


@contextmanager
def exact_backward(device: torch.device) -> Iterator[Alone]:
    """Backward passes inside are exact; -> what each linear did alone, filled in by them."""
    alone: Alone = {}
    with _on_cpu(alone) if device.type == "cpu" else _on_gpu(alone):
        yield alone


@contextmanager
def _on_cpu(alone: Alone) -> Iterator[None]:
    quantised: dict[str, Callable[..., torch.Tensor]] = {
        "dgrad": linear.dgrad,
        "wgrad": linear.wgrad,
    }
    dx_cosines: dict[str, float] = {}

    def dgrad(dy: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        dx = dy.float() @ weight.dequantised()
        dx_cosines[weight.site.name] = cosine(quantised["dgrad"](dy, weight), dx)
        return dx

    def wgrad(dy: torch.Tensor, x: torch.Tensor, site: linear.Site) -> torch.Tensor:
        dw = dy.float().t() @ x.float()
        alone[site.name] = dx_cosines[site.name], cosine(quantised["wgrad"](dy, x, site), dw)
        return dw

    with patch.object(linear, "dgrad", dgrad), patch.object(linear, "wgrad", wgrad):
        yield


@contextmanager
def _on_gpu(alone: Alone) -> Iterator[None]:
    from isobit.models.hopper_decoder import LinearInput
    from isobit.models.hopper_saving import SavingForward
    from isobit.models.hopper_training import OutputGradient, PackedPass

    from isobit.models import hopper_training

    class ExactForward(SavingForward):
        """Saves the inputs of linears in BF16."""

        def _wgrad_scales(self, linear: str) -> None:
            return None

    class ExactPass(PackedPass):
        """A pass whose backward quantises nothing."""

        def __init__(self, policy: Policy, *batch: Any) -> None:
            super().__init__(policy, *batch)
            self._saving = ExactForward(policy, "training")

        def _output_gradient(self, path: str, dy: torch.Tensor) -> OutputGradient:
            return OutputGradient(dy, dy)

        def _swiglu_backward(
            self, path: str, d_activation: torch.Tensor, gate_up: torch.Tensor
        ) -> OutputGradient:
            return self._output_gradient(
                path, hopper_training.swiglu_backward(d_activation, gate_up)
            )

        def _linear_backward(
            self, path: str, dy: OutputGradient, x: LinearInput | None
        ) -> torch.Tensor:
            assert isinstance(dy.rows, torch.Tensor)
            assert isinstance(x, torch.Tensor)
            weight = self._plain.weights.linears[path]
            dx, dw = exact_gradients(dy.rows, x, weight)
            alone[path] = cosines(dy.rows, x, weight)
            self._gradient(f"{path}.weight").add_(dw)
            return dx.bfloat16()

    with patch.object(hopper_training, "PackedPass", ExactPass):
        yield
