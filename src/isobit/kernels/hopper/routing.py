"""The router on Hopper: FP32 logits of BF16 rows, the experts that they choose, and the backward.

    logits   x router^T, the products' sums in FP32: the GEMM of lm_head (``gemm``), whose rows do
             not depend on the batch
    choice   softmax over all experts, the k largest by falling logit, of equal ones the lower
             index, weights divided by their sum where ``renormalise``: one kernel, one program a
             token, so a token's bits depend on its logits alone

A logit and its index are made one integer that orders as the choice does; so k distinct experts are
found even among NaN.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportReturnType=false
# (Triton's types know neither launch options nor what a kernel computes with)

import torch
import triton
import triton.language as tl

from isobit.kernels.hopper.gemm import bf16_gemm_nt
from isobit.kernels.operands import RouterLoss, Routing
from isobit.kernels.router_loss import logit_gradient


@triton.jit
def _order(logits, expert, NUM_EXPERTS: tl.constexpr, E: tl.constexpr):
    """FP32 logits -> int64 that fall as the choice does; a zero has no sign."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (rising.to(tl.int64) << 32) | (E - 1 - expert).to(tl.int64)
    return tl.where(expert < NUM_EXPERTS, key, -9223372036854775808)


@triton.jit
def _softmax(logits):
    """FP32, over all of them; -inf beyond the last expert."""
    powers = tl.exp(logits - tl.max(logits, 0))
    return tl.div_rn(powers, tl.sum(powers, 0))


@triton.jit
def _choose_kernel(
    LOGITS, EXPERTS, WEIGHTS,
    NUM_EXPERTS: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, RANKS: tl.constexpr,
    RENORMALISE: tl.constexpr,
):  # fmt: skip
    """One program a token; E and RANKS are NUM_EXPERTS and TOP_K as powers of two."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, E)
    at = LOGITS + token * NUM_EXPERTS + expert
    logits = tl.load(at, mask=expert < NUM_EXPERTS, other=float("-inf"))
    shares = _softmax(logits)
    keys = _order(logits, expert, NUM_EXPERTS, E)
    rank = tl.arange(0, RANKS)
    experts = tl.zeros([RANKS], tl.int32)
    weights = tl.zeros([RANKS], tl.float32)
    total = 0.0
    for j in range(TOP_K):
        best = tl.max(keys, 0)
        chosen = E - 1 - (best & 0xFFFFFFFF).to(tl.int32)
        weight = tl.sum(tl.where(expert == chosen, shares, 0.0), 0)
        experts = tl.where(rank == j, chosen, experts)
        weights = tl.where(rank == j, weight, weights)
        total += weight
        keys = tl.where(expert == chosen, -9223372036854775808, keys)
    if RENORMALISE:
        weights = tl.div_rn(weights, tl.zeros([RANKS], tl.float32) + total)
    tl.store(EXPERTS + token * TOP_K + rank, experts, mask=rank < TOP_K)
    tl.store(WEIGHTS + token * TOP_K + rank, weights, mask=rank < TOP_K)


def choose(logits: torch.Tensor, top_k: int, renormalise: bool) -> Routing:
    """FP32 logits [T, E] -> the choice."""
    tokens, num_experts = logits.shape
    experts = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    _choose_kernel[(tokens,)](
        logits, experts, weights, num_experts, triton.next_power_of_2(num_experts), top_k,
        triton.next_power_of_2(top_k), renormalise, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return Routing(experts, weights, logits)


def route(x: torch.Tensor, router: torch.Tensor, top_k: int, renormalise: bool) -> Routing:
    """x BF16 [T, C], the published router BF16 [E, C] -> the choice."""
    return choose(bf16_gemm_nt(x, router, torch.float32), top_k, renormalise)


@triton.jit
def _choose_backward_kernel(
    D_WEIGHTS, LOGITS, EXPERTS, WEIGHTS, D_LOGITS,
    NUM_EXPERTS: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr,
):  # fmt: skip
    """One program a token.  With p the softmax, w the weights and d their gradients:

    renormalised   d logit_e = w_e (d_e - sum_j w_j d_j) for the chosen alone
    else           d logit_e = p_e (d_e - sum_j w_j d_j), d_e = 0 for the others
    """
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, E)
    inside = expert < NUM_EXPERTS
    at = token * NUM_EXPERTS + expert
    factor = tl.zeros([E], tl.float32)
    if not RENORMALISE:
        factor = _softmax(tl.load(LOGITS + at, mask=inside, other=float("-inf")))
    d = tl.zeros([E], tl.float32)
    mean = 0.0
    for rank in range(TOP_K):
        chosen = tl.load(EXPERTS + token * TOP_K + rank)
        weight = tl.load(WEIGHTS + token * TOP_K + rank)
        slope = tl.load(D_WEIGHTS + token * TOP_K + rank)
        d = tl.where(expert == chosen, slope, d)
        if RENORMALISE:
            factor = tl.where(expert == chosen, weight, factor)
        mean += weight * slope
    tl.store(D_LOGITS + at, factor * (d - mean), mask=inside)


def route_backward(
    d_weights: torch.Tensor,
    x: torch.Tensor,
    routing: Routing,
    router: torch.Tensor,
    renormalise: bool,
    loss: RouterLoss | None,
    grad: torch.Tensor,
) -> torch.Tensor:
    """d_weights FP32 [T, k], x BF16 [T, C] -> the gradient of x, BF16; grad, FP32 [E, C], is added
    to.  Both products are in FP32: they are small.
    """
    d_logits = torch.empty_like(routing.logits)
    tokens, num_experts = d_logits.shape
    _choose_backward_kernel[(tokens,)](
        d_weights, routing.logits, routing.experts, routing.weights, d_logits,
        num_experts, triton.next_power_of_2(num_experts), d_weights.shape[1], renormalise,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    if loss is not None:
        d_logits += logit_gradient(routing, loss)
    grad += torch.mm(d_logits.t(), x.float())  # one finished sum, however cuBLAS cuts it
    return torch.mm(d_logits, router.float()).to(x.dtype)
