"""What lies between the projection of Q, K and V and attention, and its way back.

    x = x + bias                  FP32 addition; Q, K and V, in models that have a bias
    x = RMSNorm(x)                Q and K, each head, in models that have these norms
    x = rotate(x)                 Q and K

Each result is rounded to the format between operators.
"""

import torch

from isobit.kernels.operands import QkvGradients, QkvTransform
from isobit.kernels.rope import RopeTable
from isobit.kernels.spec.norm import rms_norm, rms_norm_backward
from isobit.kernels.spec.rope import rotate, rotated_wide
from isobit.kernels.trace import observe, rounded


def transform_qkv(
    layer: int, qkv: torch.Tensor, transform: QkvTransform, table: RopeTable
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T, (H + 2 G) D] -> q [T, H, D], k and v [T, G, D]; ``table`` holds the rows of the T
    positions.
    """
    q, k, v = _heads(with_bias(qkv, transform), transform)
    if transform.q_norm is not None and transform.k_norm is not None:
        q = observe(rms_norm(q, transform.q_norm, transform.epsilon), "layers", layer, "q_norm")
        k = observe(rms_norm(k, transform.k_norm, transform.epsilon), "layers", layer, "k_norm")
    wide = rotated_wide(torch.cat([q, k], 1), table)
    q, k = (rounded(part, qkv.dtype) for part in wide.split([q.shape[1], k.shape[1]], 1))
    return observe(q, "layers", layer, "rope.q"), observe(k, "layers", layer, "rope.k"), v


def qkv_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    qkv: torch.Tensor,
    transform: QkvTransform,
    positions: torch.Tensor,
    grads: QkvGradients,
) -> torch.Tensor:
    """dq [T, H, D], dk and dv [T, G, D] -> the gradient of ``qkv``, [T, (H + 2 G) D]."""
    table = RopeTable(transform.cos, transform.sin).rows(positions).backward()
    dq, dk = rotate(torch.cat([dq, dk], 1), table).split([dq.shape[1], dk.shape[1]], 1)
    q_norm, k_norm, epsilon = transform.q_norm, transform.k_norm, transform.epsilon
    if q_norm is not None and k_norm is not None:
        assert grads.q_norm is not None
        assert grads.k_norm is not None
        q, k, _ = _heads(with_bias(qkv, transform), transform)
        dq = rms_norm_backward(dq, q, q_norm, epsilon, None, grads.q_norm)
        dk = rms_norm_backward(dk, k, k_norm, epsilon, None, grads.k_norm)
    d_qkv = torch.cat([dq, dk, dv], 1).view(qkv.shape)
    if grads.bias is not None:
        grads.bias.add_(d_qkv.float().sum(0))
    return d_qkv


def with_bias(qkv: torch.Tensor, transform: QkvTransform) -> torch.Tensor:
    """Rounded once, from FP32."""
    if transform.bias is None:
        return qkv
    return (qkv.float() + transform.bias.float()).to(qkv.dtype)


def _heads(qkv: torch.Tensor, transform: QkvTransform) -> tuple[torch.Tensor, ...]:
    heads = qkv.view(qkv.shape[0], -1, transform.head_dim)
    keys = transform.num_kv_heads
    return heads.split([transform.num_heads, keys, keys], 1)
