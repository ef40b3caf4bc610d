"""AdamW on a GPU: one pass over master, gradient and moments, with the bits of ``isobit.kernels.adamw``.

An element costs 28 bytes with FP32 moments and 20 with BF16 ones, and the pass is as fast as the memory.  Division and square root are
the rounded ones, no product is fused with a sum, and the noise is a function of the element's number: nothing depends on the launch.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
# (Triton's types know neither launch options nor what a kernel computes with)

import torch
import triton
import triton.language as tl

from isobit.kernels.adamw import BF16_NAN, Factors
from isobit.kernels.hopper.noise import splitmix64

_WIDTH = 1024
_NAN = tl.constexpr(BF16_NAN)


@triton.jit
def _round_stochastically(x, noise):
    """FP32 -> BF16, up or down by uint32 noise in 0 .. 65535."""
    bits = (x.to(tl.uint32, bitcast=True) + noise) >> 16
    return tl.where(x == x, bits, _NAN).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit(do_not_specialize=["key"])
def _adamw_kernel(
    MASTER, GRAD, FIRST, SECOND, n, key, clip, beta1, rest1, beta2, rest2, root, epsilon, size, decay,
    WIDTH: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    """One program WIDTH elements of n."""
    element = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = element < n
    w = tl.load(MASTER + element, mask=inside, other=0.0)
    g = tl.load(GRAD + element, mask=inside, other=0.0) * clip
    m = tl.load(FIRST + element, mask=inside, other=0.0).to(tl.float32) * beta1 + g * rest1
    v = tl.load(SECOND + element, mask=inside, other=0.0).to(tl.float32) * beta2 + g * g * rest2
    quotient = tl.div_rn(m, tl.sqrt_rn(v) * root + epsilon)
    tl.store(MASTER + element, w - (w * decay + quotient * size), mask=inside)
    if NOISE:
        bits = splitmix64(key.to(tl.uint64), element.to(tl.uint64)).to(tl.uint32)
        m = _round_stochastically(m, bits & 0xFFFF)
        v = _round_stochastically(v, bits >> 16)
    tl.store(FIRST + element, m, mask=inside)
    tl.store(SECOND + element, v, mask=inside)


def adamw_step(
    master: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, factors: Factors, key: int | None
) -> None:
    """What ``isobit.kernels.adamw.adamw_step`` says, of tensors that it has checked; ``key`` is the noise's, None for FP32 moments."""
    n, f = master.numel(), factors
    _adamw_kernel[(triton.cdiv(n, _WIDTH),)](
        master, grad, exp_avg, exp_avg_sq, n, 0 if key is None else key,
        f.clip, f.beta1, f.rest1, f.beta2, f.rest2, f.root, f.epsilon, f.size, f.decay,
        _WIDTH, key is not None, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
