"""Three backward passes to compare with one in 8 bits: an exact one over the same forward bits,
each linear's alone, and plain FP32 by autograd.

    dX = dY Wq      Wq the matrix that the forward multiplied with, dequantised; of INT8 the numbers
                    before the Hadamard matrix
    dW = dY^T X     X in BF16, as it was before quantisation; dY in BF16

both in FP32.  Within ``exact_backward`` a policy trains on a back end that saves BF16 operands and
multiplies them so.  Each linear also computes its flow's backward of the operands at hand: its
cosine with the exact one has the rounding error of that linear alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from isobit.kernels.backend import Backend
from isobit.kernels.operands import (
    Gate,
    LinearInput,
    LinearWeight,
    Normed,
    Operand,
    OutputGradient,
    RopeTable,
)
from isobit.kernels.spec.linear import dequantised
from isobit.kernels.spec.qkv import rotate
from isobit.models.config import ModelConfig, inverse_frequencies
from isobit.models.policy import Policy
from isobit.precision.flow import Site

Alone = dict[str, tuple[float, float]]
"""By linear: the cosines of dX and of dW."""
Gradients = tuple[torch.Tensor, torch.Tensor]
"""dX [T, K] and dW [N, K], FP32."""


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """The cosine of two tensors of one shape, in FP64."""
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


def exact_gradients(dy: torch.Tensor, x: torch.Tensor, weight: LinearWeight) -> Gradients:
    """The exact dX and dW of BF16 dY [T, N] and X [T, K]."""
    return dy.float() @ dequantised(weight), dy.float().t() @ x.float()


def flow_gradients(
    dy: torch.Tensor, x: torch.Tensor, weight: LinearWeight, backend: Backend
) -> Gradients:
    """What the trainer computes from the same operands on their device."""
    gradient = backend.output_gradient(dy, weight.site)
    saved = backend.linear_input(x, weight.site, save=True).saved
    assert saved is not None
    dw = torch.zeros((dy.shape[1], x.shape[1]), device=dy.device)
    backend.wgrad(gradient.tokens, saved, dw, weight.site)
    return backend.dgrad(gradient.rows, weight).float(), dw


def cosines(
    dy: torch.Tensor, x: torch.Tensor, weight: LinearWeight, backend: Backend
) -> tuple[float, float]:
    """The cosines of the flow's dX and dW with the exact ones."""
    pairs = zip(flow_gradients(dy, x, weight, backend), exact_gradients(dy, x, weight), strict=True)
    dx, dw = (cosine(ours, exact) for ours, exact in pairs)
    return dx, dw


@contextmanager
def exact_backward(policy: Policy, compares: bool = True) -> Iterator[Alone]:
    """Backward passes of the policy inside are exact; -> what each linear did alone, filled in by
    them if it ``compares``, which takes as long again.
    """
    weights, alone = policy.weights("training"), Alone()
    inner = weights.backend
    weights.backend = cast(Backend, ExactBackward(inner, alone if compares else None))
    try:
        yield alone
    finally:
        weights.backend = inner


class ExactBackward:
    """A back end with the forward of ``inner`` and an exact backward of the linears; ``alone`` gets
    what theirs would have been.
    """

    def __init__(self, inner: Backend, alone: Alone | None) -> None:
        self._inner, self._alone = inner, alone
        self._x: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def add_rms_norm(
        self,
        h: torch.Tensor,
        x: torch.Tensor | None,
        weight: torch.Tensor,
        epsilon: float,
        site: Site | None,
        save: bool = False,
        keep: bool = False,
    ) -> Normed:
        """Saves the norm itself."""
        normed = self._inner.add_rms_norm(h, x, weight, epsilon, site, save, keep)
        if normed.input is None or not save:
            return normed
        assert normed.norm is not None
        return replace(normed, input=LinearInput(normed.input.read, normed.norm))

    def linear_input(self, x: torch.Tensor, site: Site, save: bool = False) -> LinearInput:
        """Saves x itself."""
        return LinearInput(self._inner.linear_input(x, site).read, x if save else None)

    def swiglu_input(
        self, gate_up: torch.Tensor, site: Site, save: bool = False, gate: Gate = "silu"
    ) -> LinearInput:
        """Saves the activation itself."""
        read = self._inner.swiglu_input(gate_up, site, False, gate).read
        return LinearInput(read, self._inner.swiglu(gate_up, gate) if save else None)

    def swiglu_saved(self, gate_up: torch.Tensor, site: Site, gate: Gate = "silu") -> Operand:
        """The activation itself."""
        return self._inner.swiglu(gate_up, gate)

    def output_gradient(self, dy: torch.Tensor, site: Site) -> OutputGradient:
        """dY as it is."""
        return OutputGradient(dy, dy)

    def swiglu_backward(
        self,
        d_activation: torch.Tensor,
        gate_up: torch.Tensor,
        site: Site,
        gate: Gate = "silu",
    ) -> OutputGradient:
        """The gradient as it is: of a site that is BF16 throughout, since kernels quantise for
        DGrad what the forward quantises.
        """
        plain = replace(site, forward="bf16", dgrad="bf16", wgrad="bf16")
        return self._inner.swiglu_backward(d_activation, gate_up, plain, gate)

    def wgrad(self, dy: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, site: Site) -> None:
        """Exact; the linear's name comes with its DGrad, which is next."""
        grad.add_(dy.float().t() @ x.float())
        self._x = x

    def dgrad(self, dy: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """Exact; then both products once more as the flow has them."""
        assert self._x is not None, "WGrad comes before DGrad"
        if self._alone is not None:
            self._alone[weight.site.name] = cosines(dy, self._x, weight, self._inner)
        self._x = None
        return (dy.float() @ dequantised(weight)).to(dy.dtype)


def plain_gradients(policy: Policy, ids: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean of -log p over all predicted tokens of ids, int64 [S, L], and its gradients by
    master.
    """
    masters = {
        name: master.detach().clone().requires_grad_() for name, master in policy.masters.items()
    }
    with sdpa_kernel(SDPBackend.MATH):
        logits = _logits(policy.config, masters, ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        found = torch.autograd.grad(loss, list(masters.values()))
    return float(loss.detach()), dict(zip(masters, found, strict=True))


def _logits(
    config: ModelConfig, masters: dict[str, torch.Tensor], ids: torch.Tensor
) -> torch.Tensor:
    batch, length = ids.shape
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    table = RopeTable.build(inverse_frequencies(config), length, config.attention_scaling).to(
        ids.device
    )
    table = table.rows(torch.arange(length, device=ids.device).repeat(batch))

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], masters[f"{name}.weight"], config.rms_epsilon)

    def attend(path: str, a: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            F.linear(a, masters[f"{path}.qkv_proj.weight"])
            .view(batch * length, -1, dim)
            .split([heads, kv_heads, kv_heads], 1)
        )
        q, k = rotate(norm(f"{path}.q_norm", q), table), rotate(norm(f"{path}.k_norm", k), table)
        q, k, v = (x.reshape(batch, length, -1, dim).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(out.transpose(1, 2).flatten(2), masters[f"{path}.o_proj.weight"])

    def mlp(path: str, b: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(b, masters[f"{path}.gate_up_proj.weight"]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, masters[f"{path}.down_proj.weight"])

    h = F.embedding(ids, masters["embed_tokens.weight"])
    for layer in range(config.num_layers):
        path = f"layers.{layer}"
        h = h + attend(path, norm(f"{path}.input_norm", h))
        h = h + mlp(path, norm(f"{path}.post_attention_norm", h))
    return F.linear(norm("norm", h), masters["lm_head.weight"])
