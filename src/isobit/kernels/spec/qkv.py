"""What lies between the projection of Q, K and V and attention, and its way back.

    x = x + bias                  FP32 addition; Q, K and V, in models that have a bias
    x = RMSNorm(x)                Q and K, each head, in models that have these norms
    x = rotate(x)                 Q and K
    x = hadamard(x)               Q and K, where attention reads E4M3; Q's divided by H's size

Each result is rounded to the format between operators, the last one to E4M3 at once; on the way
back it is the one behind the rotation that is rounded.
"""

import torch

from isobit.kernels.operands import QkvGradients, QkvTransform
from isobit.kernels.rope import RopeTable
from isobit.kernels.spec.hadamard import hadamard, hadamard_size
from isobit.kernels.spec.norm import rms_norm, rms_norm_backward
from isobit.kernels.spec.rope import rotate
from isobit.kernels.trace import observe, rounded


def transform_qkv(
    layer: int, qkv: torch.Tensor, transform: QkvTransform, table: RopeTable
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T, (H + 2 G) D] -> q [T, H, D], k and v [T, G, D]; ``table`` holds the rows of the T
    positions.  Q and K are FP32 where they are times a Hadamard matrix.
    """
    q, k, v = _heads(with_bias(qkv, transform), transform)
    if transform.q_norm is not None and transform.k_norm is not None:
        q = observe(rms_norm(q, transform.q_norm, transform.epsilon), "layers", layer, "q_norm")
        k = observe(rms_norm(k, transform.k_norm, transform.epsilon), "layers", layer, "k_norm")
    wide = rotate(torch.cat([q, k], 1), table)
    q, k = (rounded(part, qkv.dtype) for part in wide.split([q.shape[1], k.shape[1]], 1))
    q, k = observe(q, "layers", layer, "rope.q"), observe(k, "layers", layer, "rope.k")
    if transform.hadamard:
        q, k = _through_hadamard(q, k)
        observe(q, "layers", layer, "hadamard.q")
        observe(k, "layers", layer, "hadamard.k")
    return q, k, v


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
    wide = torch.cat(_through_hadamard(dq, dk) if transform.hadamard else (dq, dk), 1)
    dq, dk = rotate(wide, table).to(qkv.dtype).split([dq.shape[1], dk.shape[1]], 1)
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


def _through_hadamard(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q [T, H, D] and K [T, G, D], or their gradients -> H q / n and H k, in FP32: H and 1 / n are
    their own transposes.
    """
    wide = hadamard(torch.cat([q, k], 1).float())
    q, k = wide.split([q.shape[1], k.shape[1]], 1)
    return q / hadamard_size(q.shape[-1]), k


def _heads(qkv: torch.Tensor, transform: QkvTransform) -> tuple[torch.Tensor, ...]:
    heads = qkv.view(qkv.shape[0], -1, transform.head_dim)
    keys = transform.num_kv_heads
    return heads.split([transform.num_heads, keys, keys], 1)
