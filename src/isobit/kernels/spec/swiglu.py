"""SwiGLU: y = silu(gate) * up for the fused rows (gate, up), with silu(x) = x / (1 + exp(-x)) in
FP32.

torch's own ``silu`` and ``sigmoid`` round differently in the vector body and in the scalar tail of
a loop, so a token's bits would depend on its place; ``exp`` and the division do not.
"""

from typing import Any

import torch


def swiglu_forward(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 C] -> [T, C] in the dtype of the input."""
    gate, up = gate_up.float().chunk(2, -1)
    return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up.dtype)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """``swiglu_forward``, differentiable."""
    return _SwiGlu.apply(gate_up) if torch.is_grad_enabled() else swiglu_forward(gate_up)  # pyright: ignore[reportReturnType]


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        return swiglu_forward(gate_up)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.float().chunk(2, -1)
        dy = gradients[0].float()
        sigmoid = 1.0 / (1.0 + torch.exp(-gate))
        silu = gate * sigmoid
        d_gate = dy * up * (sigmoid + silu * (1.0 - sigmoid))
        return torch.cat([d_gate, dy * silu], -1).to(gate_up.dtype)
