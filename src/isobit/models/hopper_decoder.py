"""The decoder on a Hopper GPU: the function of ``isobit.models.decoder`` in fewer, fused
operations.

    each layer:  h, a = add_norm(h, x)      residual, RMSNorm and quantisation in one kernel (x: what the layer before has to add)
                 q                          rotary positions, norms of Q and K, quantisation and the
                                            write of K and V in one kernel
                 x    = o_proj(attention)
                 h, a = add_norm(h, x)
                 x    = down_proj(swiglu(gate_up_proj(a)))

The residual stream and everything between operators is BF16, rounded where the CPU rounds.  Rollout
and training call this one function; what differs is the ``HopperAttend`` that the caller brings:
pages or packed sequences.  Each result is shown to ``observe`` under the CPU's names, except the
rotated Q and K, which exist in registers only; what exists only quantised is made once more for an
observer.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from isobit.kernels.hopper.gemm import gemm_bf16, gemm_e4m3
from isobit.kernels.hopper.qkv import QkvTransform
from isobit.kernels.hopper.quantise import (
    QuantRows,
    quantise_rows,
    rms_norm_quantise,
    swiglu,
    swiglu_quantise,
)
from isobit.kernels.spec.linear import LinearWeight
from isobit.kernels.trace import is_observed, observe
from isobit.models.policy import Policy
from isobit.precision.formats import ScaleKind, Side
from isobit.precision.quant_tensor import QuantTensor

LinearInput = QuantRows | torch.Tensor
"""E4M3, in 1x128 groups for FProp, transposed in groups of 128 tokens for WGrad; or BF16 [T, K]."""


class HopperAttend(Protocol):
    """Attention of one layer: the fused rows of Q, K and V, BF16 [T, (H + 2 G) D] -> BF16 [T, H
    D].
    """

    def __call__(self, layer: int, qkv: torch.Tensor, transform: QkvTransform) -> torch.Tensor:
        """Attend in one layer."""
        ...


def hidden_states(
    policy: Policy,
    side: Side,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    attend: HopperAttend,
) -> torch.Tensor:
    """token_ids and positions int64 [T] -> hidden states BF16 [T, hidden], final norm applied.  No
    gradients.
    """
    forward = Forward(policy, side)
    h, x = forward.embed(token_ids), None
    for layer in range(policy.config.num_layers):
        h, a = forward.enter(layer, h, x)
        h, x = forward.layer(layer, h, a, attend)
    return forward.leave(h, x)[1]


@dataclass(frozen=True, slots=True)
class Input:
    """A linear's input: as FProp reads it, and as WGrad will, in a pass with a backward
    (``isobit.models.hopper_saving``).
    """

    read: LinearInput
    saved: LinearInput | None = None


@dataclass(frozen=True, slots=True)
class Attention:
    """What the first half of a layer made."""

    qkv: torch.Tensor
    out: Input
    """Of attention, [T, H D]: the output projection's input."""
    x: torch.Tensor
    """What it has to add to the residual stream."""


class Forward:
    """One forward pass over the weights of a side, step by step."""

    saves = False
    """Whether the inputs of linears are made for WGrad too."""

    def __init__(self, policy: Policy, side: Side) -> None:
        self.config, self.weights, self.rope = policy.config, policy.weights(side), policy.rope

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The residual stream at its start."""
        return observe(
            self.weights.plain["embed_tokens.weight"].index_select(0, token_ids), "embed_tokens"
        )

    def enter(
        self, layer: int, h: torch.Tensor, x: torch.Tensor | None
    ) -> tuple[torch.Tensor, Input]:
        """Add what the layer before left to add; -> the residual stream and its norm, as ``layer``
        takes them.
        """
        path = f"layers.{layer}"
        return self._add_norm(
            h, x, f"{path}.input_norm", f"{path}.qkv_proj", f"layers.{layer - 1}.mlp_residual"
        )

    def layer(
        self, layer: int, h: torch.Tensor, a: Input, attend: HopperAttend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer from its first norm on -> the residual stream, and what the next layer has to add
        to it.
        """
        h, b = self.enter_mlp(layer, h, self.attention(layer, a, attend).x)
        return h, self.down(layer, self.activation(layer, self.gate_up(layer, b)))

    def attention(self, layer: int, a: Input, attend: HopperAttend) -> Attention:
        """The first half of a layer."""
        path = f"layers.{layer}"
        qkv = self._linear(f"{path}.qkv_proj", a)
        out = self._input(
            f"{path}.o_proj", observe(attend(layer, qkv, self.transform(layer)), path, "attention")
        )
        return Attention(qkv, out, self._linear(f"{path}.o_proj", out))

    def enter_mlp(
        self, layer: int, h: torch.Tensor, x: torch.Tensor | None
    ) -> tuple[torch.Tensor, Input]:
        """Add what attention left to add; -> the residual stream and its norm."""
        path = f"layers.{layer}"
        return self._add_norm(
            h,
            x,
            f"{path}.post_attention_norm",
            f"{path}.gate_up_proj",
            f"{path}.attention_residual",
        )

    def gate_up(self, layer: int, b: Input) -> torch.Tensor:
        """Gate and up of a norm, BF16 [T, 2 I]."""
        return self._linear(f"layers.{layer}.gate_up_proj", b)

    def activation(self, layer: int, gate_up: torch.Tensor) -> Input:
        """silu(gate) * up, [T, I]."""
        path = f"layers.{layer}"
        if is_observed():
            observe(swiglu(gate_up), path, "activation")
        return self._gated(f"{path}.down_proj", gate_up)

    def down(self, layer: int, activation: Input) -> torch.Tensor:
        """What the MLP has to add to the residual stream that it read."""
        return self._linear(f"layers.{layer}.down_proj", activation)

    def leave(self, h: torch.Tensor, x: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """-> the residual stream at its end, and the final norm of it."""
        h, normed, _ = rms_norm_quantise(
            h, x, self.weights.plain["norm.weight"], self.config.rms_epsilon, scales=None, keep=True
        )
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

    def _add_norm(
        self, h: torch.Tensor, x: torch.Tensor | None, norm: str, linear: str, residual: str
    ) -> tuple[torch.Tensor, Input]:
        """-> the new residual stream, and its norm as ``linear`` reads it."""
        weight, scales = self.weights.plain[f"{norm}.weight"], self._scales(linear)
        keep = scales is None or self.saves or is_observed()
        h, normed, quantised = rms_norm_quantise(
            h, x, weight, self.config.rms_epsilon, scales, keep
        )
        if x is not None:
            observe(h, residual)
        if normed is not None:
            observe(normed, norm)
        return h, self._normed(linear, normed, quantised)

    def _linear(self, path: str, a: Input) -> torch.Tensor:
        """Without its bias, which the next kernel adds."""
        if isinstance(a.read, QuantRows):
            observe(a.read.values, path, "input", scales=a.read.scales)
        else:
            observe(a.read, path, "input")
        return observe(_product(a.read, self.weights.linears[path]), path)

    def _normed(
        self, linear: str, normed: torch.Tensor | None, quantised: QuantRows | None
    ) -> Input:
        """The input of a linear behind a norm, BF16 and quantised as far as asked for."""
        read = normed if quantised is None else quantised
        assert read is not None
        return Input(read)

    def _input(self, linear: str, x: torch.Tensor) -> Input:
        """The input of a linear, made of x BF16."""
        scales = self._scales(linear)
        return Input(x if scales is None else quantise_rows(x, scales))

    def _gated(self, linear: str, gate_up: torch.Tensor) -> Input:
        """The input of a linear, made of silu(gate) * up."""
        scales = self._scales(linear)
        return Input(swiglu(gate_up) if scales is None else swiglu_quantise(gate_up, scales))

    def _scales(self, linear: str) -> ScaleKind | None:
        """Those of its input; None where it stays in BF16."""
        site = self.weights.linears[linear].site
        return site.scales if site.forward == "e4m3" else None


def _product(a: LinearInput, weight: LinearWeight) -> torch.Tensor:
    """BF16 [T, N]."""
    if isinstance(a, QuantRows):
        assert isinstance(weight.matrix, QuantTensor)
        return gemm_e4m3(a, weight.matrix, weight.site.scales)
    assert isinstance(weight.matrix, torch.Tensor)
    return gemm_bf16(a, weight.matrix)
