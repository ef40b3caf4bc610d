"""The decoder on a Hopper GPU: the function of ``isobit.models.decoder`` in fewer, fused operations.

    each layer:  h, a = add_norm(h, x)      residual, RMSNorm and quantisation in one kernel (x: what the layer before has to add)
                 q                          rotary positions, norms of Q and K, quantisation and the write of K and V in one kernel
                 x    = o_proj(attention)
                 h, a = add_norm(h, x)
                 x    = down_proj(swiglu(gate_up_proj(a)))

The residual stream and everything between operators is BF16, rounded where the CPU rounds.  Rollout and training call this one
function; what differs is the ``HopperAttend`` that the caller brings: pages or packed sequences.  Each result is shown to
``observe`` under the CPU's names, except the rotated Q and K, which exist in registers only; what exists only quantised is made once
more for an observer.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from isobit.kernels.hopper.gemm import gemm_bf16, gemm_e4m3
from isobit.kernels.hopper.qkv import QkvTransform
from isobit.kernels.hopper.quantise import QuantRows, quantise_rows, rms_norm_quantise, swiglu, swiglu_quantise
from isobit.kernels.linear import LinearWeight
from isobit.kernels.trace import is_observed, observe
from isobit.models.policy import Policy
from isobit.precision.formats import Side
from isobit.precision.quant_tensor import QuantTensor

LinearInput = QuantRows | torch.Tensor
"""What a linear reads: E4M3 in 1x128 groups, or BF16 [T, K]."""


class HopperAttend(Protocol):
    """Attention of one layer: the fused rows of Q, K and V, BF16 [T, (H + 2 G) D] -> BF16 [T, H D]."""

    def __call__(self, layer: int, qkv: torch.Tensor, transform: QkvTransform) -> torch.Tensor:
        """Attend in one layer."""
        ...


def hidden_states(policy: Policy, side: Side, token_ids: torch.Tensor, positions: torch.Tensor, attend: HopperAttend) -> torch.Tensor:
    """token_ids and positions int64 [T] -> hidden states BF16 [T, hidden], final norm applied.  No gradients."""
    forward = Forward(policy, side)
    h, x = forward.embed(token_ids), None
    for layer in range(policy.config.num_layers):
        h, a = forward.enter(layer, h, x)
        result = forward.layer(layer, h, a, attend)
        h, x = result.h_mid, forward.down(layer, result.gate_up)
        del a, result  # else all of it would stand beside the next layer's
    return forward.leave(h, x)[1]


@dataclass(frozen=True, slots=True)
class Normed:
    """A norm of the residual stream: as the next linear reads it, and in BF16 where somebody wants that too."""

    read: LinearInput
    value: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerResult:
    """What a layer made on its way; all BF16 [T, ...]."""

    h: torch.Tensor
    """The residual stream that its first norm reads."""
    a: Normed
    qkv: torch.Tensor
    out: torch.Tensor
    """Of attention, [T, H D]."""
    h_mid: torch.Tensor
    """The residual stream that its second norm reads."""
    b: Normed
    gate_up: torch.Tensor


class Forward:
    """One forward pass over the weights of a side; ``keep_norms`` makes the norms in BF16 too, which the backward wants."""

    def __init__(self, policy: Policy, side: Side, keep_norms: bool = False) -> None:
        self.config, self.weights, self.rope = policy.config, policy.weights(side), policy.rope
        self._keep_norms = keep_norms

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The residual stream at its start."""
        return observe(self.weights.plain["embed_tokens.weight"].index_select(0, token_ids), "embed_tokens")

    def enter(self, layer: int, h: torch.Tensor, x: torch.Tensor | None) -> tuple[torch.Tensor, Normed]:
        """Add what the layer before left to add; -> the residual stream and its norm, as ``layer`` takes them."""
        path = f"layers.{layer}"
        return self._add_norm(h, x, f"{path}.input_norm", f"{path}.qkv_proj", f"layers.{layer - 1}.mlp_residual")

    def layer(self, layer: int, h: torch.Tensor, a: Normed, attend: HopperAttend) -> LayerResult:
        """A layer from its first norm to what gate and up make; ``down`` ends it."""
        path = f"layers.{layer}"
        qkv = self._linear(f"{path}.qkv_proj", a.read)
        out = observe(attend(layer, qkv, self.transform(layer)), path, "attention")
        x = self._linear(f"{path}.o_proj", self._quantise(f"{path}.o_proj", out))
        h_mid, b, gate_up = self.gate_up(layer, h, x)
        return LayerResult(h, a, qkv, out, h_mid, b, gate_up)

    def gate_up(self, layer: int, h: torch.Tensor, x: torch.Tensor | None) -> tuple[torch.Tensor, Normed, torch.Tensor]:
        """The MLP's first half, of the residual stream h + x; -> that stream, its norm, and what gate and up make of it."""
        path = f"layers.{layer}"
        h_mid, b = self._add_norm(h, x, f"{path}.post_attention_norm", f"{path}.gate_up_proj", f"{path}.attention_residual")
        return h_mid, b, self._linear(f"{path}.gate_up_proj", b.read)

    def down(self, layer: int, gate_up: torch.Tensor) -> torch.Tensor:
        """What the MLP has to add to the residual stream that it read."""
        path = f"layers.{layer}"
        return self._linear(f"{path}.down_proj", self._activation(path, gate_up))

    def leave(self, h: torch.Tensor, x: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """-> the residual stream at its end, and the final norm of it."""
        h, normed, _ = rms_norm_quantise(h, x, self.weights.plain["norm.weight"], self.config.rms_epsilon, scales=None, keep=True)
        observe(h, f"layers.{self.config.num_layers - 1}.mlp_residual")
        assert normed is not None
        return h, observe(normed, "norm")

    def transform(self, layer: int) -> QkvTransform:
        """What the kernel between the qkv GEMM and attention needs of a layer."""
        config, plain, path = self.config, self.weights.plain, f"layers.{layer}"
        return QkvTransform(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            self.rope.cos,
            self.rope.sin,
            config.rms_epsilon,
            plain[f"{path}.q_norm.weight"] if config.qk_norm else None,
            plain[f"{path}.k_norm.weight"] if config.qk_norm else None,
            self.weights.linears[f"{path}.qkv_proj"].bias,
        )

    def _add_norm(self, h: torch.Tensor, x: torch.Tensor | None, norm: str, linear: str, residual: str) -> tuple[torch.Tensor, Normed]:
        """-> the new residual stream, and its norm as ``linear`` reads it."""
        site = self.weights.linears[linear].site
        scales = site.scales if site.forward == "e4m3" else None
        weight, keep = self.weights.plain[f"{norm}.weight"], scales is None or self._keep_norms or is_observed()
        h, normed, quantised = rms_norm_quantise(h, x, weight, self.config.rms_epsilon, scales, keep)
        if x is not None:
            observe(h, residual)
        if normed is not None:
            observe(normed, norm)
        read = normed if quantised is None else quantised
        assert read is not None
        return h, Normed(read, normed)

    def _linear(self, path: str, a: LinearInput) -> torch.Tensor:
        """Without its bias, which the next kernel adds."""
        weight = self.weights.linears[path]
        if isinstance(a, QuantRows):
            observe(a.values, path, "input", scales=a.scales)
        else:
            observe(a, path, "input")
        return observe(_product(a, weight), path)

    def _quantise(self, linear: str, x: torch.Tensor) -> LinearInput:
        site = self.weights.linears[linear].site
        return quantise_rows(x, site.scales) if site.forward == "e4m3" else x

    def _activation(self, path: str, gate_up: torch.Tensor) -> LinearInput:
        site = self.weights.linears[f"{path}.down_proj"].site
        if site.forward != "e4m3":
            return observe(swiglu(gate_up), path, "activation")
        if is_observed():
            observe(swiglu(gate_up), path, "activation")
        return swiglu_quantise(gate_up, site.scales)


def _product(a: LinearInput, weight: LinearWeight) -> torch.Tensor:
    """BF16 [T, N]."""
    if isinstance(a, QuantRows):
        assert isinstance(weight.matrix, QuantTensor)
        return gemm_e4m3(a, weight.matrix, weight.site.scales)
    assert isinstance(weight.matrix, torch.Tensor)
    return gemm_bf16(a, weight.matrix)
