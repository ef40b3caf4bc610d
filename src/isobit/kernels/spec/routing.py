"""Which experts a token goes to, and the gradient of that.

    logits    x router^T             FP32: operands on the grid, exact block products
    p         softmax over all experts
    chosen    the k largest logits; of equal ones the lower expert comes first
    weights   p of the chosen, in the order of their ranks; divided by their sum (added in that
              order) where they are renormalised

Every step works row by row in an order that depends on E and k alone, so a token's experts and
weights do not depend on what else is routed with it.  A NaN among the logits makes the weights NaN,
and so the token's output.

The choice has no gradient.  With d_w that of the weights, those of the logits are

    p_e (d_p_e - sum_i p_i d_p_i)      d_p is d_w at the chosen, 0 elsewhere
    w_j (d_w_j - sum_i w_i d_w_i)      renormalised: a softmax over the chosen alone

and the router's own losses add theirs (``isobit.kernels.router_loss``).
"""

import torch

from isobit.kernels.operands import RouterLoss, Routing
from isobit.kernels.router_loss import logit_gradient
from isobit.kernels.spec.gemm import grid_gemm_nt
from isobit.kernels.spec.grid import snap_rows
from isobit.kernels.spec.norm import row_sum


def route(x: torch.Tensor, router: torch.Tensor, top_k: int, renormalise: bool) -> Routing:
    """x [T, C] and the published router [E, C] -> the experts and weights of each token."""
    logits = grid_gemm_nt(snap_rows(x), snap_rows(router))
    experts = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = _softmax(logits).gather(1, experts)
    if renormalise:
        weights = weights / sum_of_ranks(weights)
    return Routing(experts.int(), weights, logits)


def route_backward(
    d_weights: torch.Tensor,
    x: torch.Tensor,
    routing: Routing,
    router: torch.Tensor,
    renormalise: bool,
    loss: RouterLoss | None,
    grad: torch.Tensor,
) -> torch.Tensor:
    """The gradient of the weights FP32 [T, k] and of the losses -> that of x [T, C]; grad, FP32 [E,
    C], += the router's.
    """
    chosen = routing.experts.long()
    if renormalise:
        d = routing.weights * (d_weights - (routing.weights * d_weights).sum(-1, keepdim=True))
        d_logits = torch.zeros_like(routing.logits).scatter_(1, chosen, d)
    else:
        p = _softmax(routing.logits)
        d_p = torch.zeros_like(p).scatter_(1, chosen, d_weights)
        d_logits = p * (d_p - (p * d_p).sum(-1, keepdim=True))
    if loss is not None:
        d_logits = d_logits + logit_gradient(routing, loss)
    grad.add_(d_logits.t() @ x.float())
    return (d_logits @ router.float()).to(x.dtype)


def sum_of_ranks(values: torch.Tensor) -> torch.Tensor:
    """FP32 [T, k, ...] -> [T, 1, ...]: added one rank after the other."""
    total = values[:, :1]
    for rank in range(1, values.shape[1]):
        total = total + values[:, rank : rank + 1]
    return total


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    """FP32 [T, E], each row in one order."""
    raised = torch.exp(logits - logits.amax(-1, keepdim=True))
    return raised / row_sum(raised)
