"""The training forward on a Hopper GPU and the way back: what each layer saves, and its gradients, straight into the masters.

    forward, a layer    a = norm(h)   o = attention(Wqkv a)   h' = h + Wo o   b = norm(h')   h + 1 layer = h' + Wdown swiglu(Wgate_up b)

    backward            the same in reverse.  With d the gradient of the residual stream behind an operation:

        d y = d              DGrad: d x = d y W        WGrad: gradient of W += d y^T x        for each of the four linears
        d h = d + (gradient through the norm of h)     at both norms

The forward is ``isobit.models.hopper_decoder``, with the same bits: nothing is computed twice for the loss.  Gradients between operators
are BF16; those of the masters are FP32 and added up in place, one addition an element and micro-batch.  Everything has one fixed order.

A layer saves what its backward reads: the inputs of its norms, of RoPE and of SwiGLU in BF16, Q, K and V as encoded, the output of
attention, and each linear's input as WGrad wants it, quantised along the tokens (or in BF16).  ``recompute`` trades that memory for
operations that are done once more, to the same bits, on the way back: ``mlp`` leaves out what is behind the second norm, half of all, and
computes it again from the residual stream (one GEMM); ``full`` keeps the residual stream alone and computes the layer again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from isobit.config.schema import Recompute
from isobit.kernels.hopper import token_log_probs as head
from isobit.kernels.hopper.embedding_backward import embedding_backward
from isobit.kernels.hopper.linear_backward import dgrad, dgrad_bf16, wgrad, wgrad_bf16
from isobit.kernels.hopper.norm_backward import rms_norm_backward
from isobit.kernels.hopper.packed_attention import Attended, PackedAttention
from isobit.kernels.hopper.qkv_backward import qkv_backward
from isobit.kernels.hopper.quantise import QuantRows, quantise_rows, swiglu
from isobit.kernels.hopper.swiglu_backward import swiglu_backward, swiglu_backward_quantise
from isobit.kernels.hopper.token_groups import quantise_both, quantise_tokens, swiglu_tokens
from isobit.models.hopper_decoder import Forward, LayerResult, Normed
from isobit.models.policy import Policy
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import QuantTensor

WGradInput = QuantRows | torch.Tensor
"""A linear's input as WGrad reads it: X^T in E4M3 groups of 128 tokens, or X in BF16."""


@dataclass(frozen=True, slots=True)
class OutputGradient:
    """d y of a linear, as DGrad and WGrad read it."""

    rows: QuantRows | torch.Tensor
    tokens: WGradInput


@dataclass(frozen=True, slots=True)
class SavedMlp:
    """What the backward of an MLP reads."""

    gate_up: torch.Tensor
    normed: WGradInput
    """The input of gate and up."""
    activation: WGradInput
    """The input of down."""


@dataclass(frozen=True, slots=True)
class SavedLayer:
    """What the backward of a layer reads; the MLP's part is None where it is computed again."""

    h: torch.Tensor
    normed: WGradInput
    """The input of the Q, K and V projection."""
    qkv: torch.Tensor
    attended: Attended
    out: WGradInput
    """The input of the output projection."""
    h_mid: torch.Tensor
    mlp: SavedMlp | None


class PackedPass:
    """One forward over packed sequences, and its backward."""

    def __init__(
        self, policy: Policy, token_ids: torch.Tensor, positions: torch.Tensor, lengths: tuple[int, ...], recompute: Recompute
    ) -> None:
        """token_ids and positions int64 [T], on the GPU."""
        self._policy, self._token_ids, self._positions, self._recompute = policy, token_ids, positions, recompute
        self._forward = Forward(policy, "training", keep_norms=True)
        self._attend = PackedAttention(policy.flow.training, lengths, positions)
        self._saved: list[SavedLayer | torch.Tensor] = []
        self._last_h: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        """-> hidden states BF16 [T, hidden]."""
        h, x = self._forward.embed(self._token_ids), None
        for layer in range(self._policy.config.num_layers):
            h, a = self._forward.enter(layer, h, x)
            result = self._forward.layer(layer, h, a, self._attend)
            attended = self._attend.take()
            self._saved.append(h if self._recompute == "full" else self._save(layer, result, attended))
            h, x = result.h_mid, self._forward.down(layer, result.gate_up)
            del a, result, attended  # else all of it would stand beside the next layer's
        self._last_h, hidden = self._forward.leave(h, x)
        return hidden

    def backward(self, d_hidden: torch.Tensor) -> None:
        """Add the gradients of everything but lm_head to the masters' ``grad``; the pass is used up."""
        assert self._last_h is not None, "the forward comes first"
        d = self._norm("norm", d_hidden.contiguous(), self._last_h, None)
        self._last_h = None
        for layer in reversed(range(self._policy.config.num_layers)):
            d = self._layer_backward(layer, self._take(layer), d)
        embedding_backward(d, self._token_ids, self._gradient("embed_tokens.weight"))

    def _take(self, layer: int) -> SavedLayer:
        saved = self._saved.pop()
        if isinstance(saved, SavedLayer):
            return saved
        h, a = self._forward.enter(layer, saved, None)
        result = self._forward.layer(layer, h, a, self._attend)
        return self._save(layer, result, self._attend.take())

    def _save(self, layer: int, result: LayerResult, attended: Attended) -> SavedLayer:
        path = f"layers.{layer}"
        assert result.a.value is not None
        normed, out = self._wgrad_input(f"{path}.qkv_proj", result.a.value), self._wgrad_input(f"{path}.o_proj", result.out)
        mlp = None if self._recompute == "mlp" else self._save_mlp(layer, result.b, result.gate_up)
        return SavedLayer(result.h, normed, result.qkv, attended, out, result.h_mid, mlp)

    def _save_mlp(self, layer: int, b: Normed, gate_up: torch.Tensor) -> SavedMlp:
        path = f"layers.{layer}"
        assert b.value is not None
        normed = self._wgrad_input(f"{path}.gate_up_proj", b.value)
        return SavedMlp(gate_up, normed, self._activation_input(f"{path}.down_proj", gate_up))

    def _mlp_again(self, layer: int, h_mid: torch.Tensor) -> SavedMlp:
        _, b, gate_up = self._forward.gate_up(layer, h_mid, None)
        return self._save_mlp(layer, b, gate_up)

    def _layer_backward(self, layer: int, saved: SavedLayer, d: torch.Tensor) -> torch.Tensor:
        """The gradient of the residual stream behind a layer -> before it."""
        path = f"layers.{layer}"
        d_mid = self._mlp_backward(layer, saved.mlp or self._mlp_again(layer, saved.h_mid), saved.h_mid, d)
        d_out = self._linear_backward(f"{path}.o_proj", self._output_gradient(f"{path}.o_proj", d_mid), saved.out)
        d_qkv = self._qkv_backward(layer, saved, *self._attend.backward(saved.attended, d_out))
        d_a = self._linear_backward(f"{path}.qkv_proj", self._output_gradient(f"{path}.qkv_proj", d_qkv), saved.normed)
        return self._norm(f"{path}.input_norm", d_a, saved.h, d_mid)

    def _mlp_backward(self, layer: int, saved: SavedMlp, h_mid: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        """The gradient of the residual stream behind an MLP -> before its norm."""
        path = f"layers.{layer}"
        d_activation = self._linear_backward(f"{path}.down_proj", self._output_gradient(f"{path}.down_proj", d), saved.activation)
        d_gate_up = self._swiglu_backward(f"{path}.gate_up_proj", d_activation, saved.gate_up)
        d_b = self._linear_backward(f"{path}.gate_up_proj", d_gate_up, saved.normed)
        return self._norm(f"{path}.post_attention_norm", d_b, h_mid, d)

    def _linear_backward(self, path: str, dy: OutputGradient, x: WGradInput) -> torch.Tensor:
        """-> d x BF16 [T, K]; the gradient of W is added to the master's."""
        matrix, gradient = self._forward.weights.linears[path].matrix, self._gradient(f"{path}.weight")
        if isinstance(x, QuantRows):
            assert isinstance(dy.tokens, QuantRows)
            wgrad(dy.tokens, x, gradient)
        else:
            assert isinstance(dy.tokens, torch.Tensor)
            wgrad_bf16(dy.tokens, x, gradient)
        if isinstance(matrix, QuantTensor):
            assert isinstance(dy.rows, QuantRows)
            return dgrad(dy.rows, matrix, self._site(path).scales)
        assert isinstance(dy.rows, torch.Tensor)
        return dgrad_bf16(dy.rows, matrix)

    def _output_gradient(self, path: str, dy: torch.Tensor) -> OutputGradient:
        site = self._site(path)
        if site.forward != "e4m3":
            return OutputGradient(dy, dy)
        if site.wgrad != "e4m3":
            return OutputGradient(quantise_rows(dy, site.scales), dy)
        return OutputGradient(*quantise_both(dy, site.scales))

    def _swiglu_backward(self, path: str, d_activation: torch.Tensor, gate_up: torch.Tensor) -> OutputGradient:
        """d y of the gate and up projections, ``path``."""
        site = self._site(path)
        if site.forward == "e4m3" and site.wgrad == "e4m3":
            return OutputGradient(*swiglu_backward_quantise(d_activation, gate_up, site.scales))
        return self._output_gradient(path, swiglu_backward(d_activation, gate_up))

    def _qkv_backward(self, layer: int, saved: SavedLayer, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> torch.Tensor:
        path, config = f"layers.{layer}", self._policy.config
        q_norm, k_norm = (self._gradient(f"{path}.{name}.weight") if config.qk_norm else None for name in ("q_norm", "k_norm"))
        bias = self._gradient(f"{path}.qkv_proj.bias") if config.qkv_bias else None
        return qkv_backward(dq, dk, dv, saved.qkv, self._forward.transform(layer), self._positions, q_norm, k_norm, bias)

    def _norm(self, path: str, dy: torch.Tensor, h: torch.Tensor, d_residual: torch.Tensor | None) -> torch.Tensor:
        name = f"{path}.weight"
        return rms_norm_backward(
            dy, h, self._forward.weights.plain[name], self._policy.config.rms_epsilon, d_residual, self._gradient(name)
        )

    def _wgrad_input(self, path: str, x: torch.Tensor) -> WGradInput:
        site = self._site(path)
        return quantise_tokens(x, site.scales) if site.wgrad == "e4m3" else x

    def _activation_input(self, path: str, gate_up: torch.Tensor) -> WGradInput:
        site = self._site(path)
        return swiglu_tokens(gate_up, site.scales) if site.wgrad == "e4m3" else swiglu(gate_up)

    def _site(self, path: str) -> Site:
        return self._forward.weights.linears[path].site

    def _gradient(self, name: str) -> torch.Tensor:
        return gradient_of(self._policy, name)


def gradient_of(policy: Policy, name: str) -> torch.Tensor:
    """A master's FP32 gradient, to be added to; zeros where it has none yet."""
    master = policy.masters[name]
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    return master.grad


def packed_hidden_states(
    policy: Policy, token_ids: torch.Tensor, positions: torch.Tensor, lengths: tuple[int, ...], recompute: Recompute
) -> torch.Tensor:
    """``isobit.models.decoder.packed_hidden_states`` on a GPU, with gradients: hidden states BF16 [T, hidden]."""
    packed = PackedPass(policy, token_ids, positions, lengths, recompute)
    anchor = torch.zeros((), device=token_ids.device, requires_grad=True)  # makes autograd come back here
    return _HiddenStates.apply(anchor, packed.forward, packed.backward)  # pyright: ignore[reportReturnType]


class _HiddenStates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, forward: Callable[[], torch.Tensor], backward: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        ctx.backward_pass = backward
        return forward()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        ctx.backward_pass(gradients[0])
        return None, None, None


def token_log_probs(
    policy: Policy, hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``isobit.models.head.token_log_probs`` on a GPU, with gradients: log-probabilities and entropies FP32 [N]; the latter carry none."""
    return _TokenLogProbs.apply(hidden, policy, targets, temperatures)  # pyright: ignore[reportReturnType]


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, policy: Policy, targets: torch.Tensor, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, entropies = head.token_log_probs(hidden, policy.weights("training").plain["head"], targets, temperatures)
        ctx.save_for_backward(hidden, targets, temperatures)
        ctx.policy = policy
        ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, targets, temperatures = ctx.saved_tensors
        policy: Policy = ctx.policy
        weight, gradient = policy.weights("training").plain["head"], gradient_of(policy, policy.head_name)
        return head.token_log_probs_backward(hidden, weight, targets, temperatures, gradients[0], gradient), None, None, None
