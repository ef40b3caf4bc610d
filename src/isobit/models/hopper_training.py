"""The training forward on a Hopper GPU and the way back: what each layer saves, and its gradients,
straight into the masters.

    forward, a layer    a = norm(h)   o = attention(Wqkv a)   h' = h + Wo o   b = norm(h')   h + 1 layer = h' + Wdown swiglu(Wgate_up b)

    backward            the same in reverse.  With d the gradient of the residual stream behind an
                        operation:

        d y = d              DGrad: d x = d y W        WGrad: gradient of W += d y^T x        for each of the four linears
        d h = d + (gradient through the norm of h)     at both norms

The forward is ``isobit.models.hopper_decoder``, with the same bits: nothing is computed twice for
the loss.  Gradients between operators are BF16; those of the masters are FP32 and added up in
place, one addition an element and micro-batch.  Everything has one fixed order.

A layer saves what its backward reads: the inputs of its norms, of RoPE and of SwiGLU in BF16, Q, K
and V as encoded, the output of attention, and each linear's input as WGrad wants it, quantised
along the tokens (or in BF16).  ``recompute`` trades that memory for operations that are done once
more, to the same bits, on the way back: ``mlp`` leaves out what is behind the second norm, half of
all, and computes it again from the residual stream (one GEMM); ``full`` keeps the residual stream
alone and computes the layer again.  What will be computed again is made at first as rollout makes
it, without WGrad's copies.
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
from isobit.kernels.hopper.quantise import QuantRows, quantise_rows
from isobit.kernels.hopper.swiglu_backward import swiglu_backward, swiglu_backward_quantise
from isobit.kernels.hopper.token_groups import quantise_both
from isobit.models.hopper_decoder import Forward, LinearInput
from isobit.models.hopper_saving import SavingForward
from isobit.models.policy import Policy
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import QuantTensor


@dataclass(frozen=True, slots=True)
class OutputGradient:
    """d y of a linear, as DGrad and WGrad read it."""

    rows: LinearInput
    tokens: LinearInput


@dataclass(frozen=True, slots=True)
class SavedAttention:
    """What the backward of a layer's first half reads."""

    h: torch.Tensor
    """The residual stream that its norm reads."""
    normed: LinearInput | None
    """The input of the Q, K and V projection, as all inputs here as WGrad reads it."""
    qkv: torch.Tensor
    attended: Attended
    out: LinearInput | None
    """The input of the output projection."""


@dataclass(frozen=True, slots=True)
class SavedMlp:
    """What the backward of a layer's second half reads."""

    h: torch.Tensor
    """The residual stream that its norm reads."""
    normed: LinearInput | None
    """The input of gate and up."""
    gate_up: torch.Tensor
    activation: LinearInput | None
    """The input of down."""


Saved = torch.Tensor | tuple[SavedAttention, torch.Tensor | SavedMlp]
"""Of a layer; the residual stream alone in the place of what is computed again."""


class PackedPass:
    """One forward over packed sequences, and its backward."""

    def __init__(
        self,
        policy: Policy,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: tuple[int, ...],
        recompute: Recompute,
    ) -> None:
        """token_ids and positions int64 [T], on the GPU."""
        self._policy, self._token_ids, self._positions, self._recompute = (
            policy,
            token_ids,
            positions,
            recompute,
        )
        self._plain, self._saving = Forward(policy, "training"), SavingForward(policy, "training")
        self._attend = PackedAttention(policy.flow.training, lengths, positions)
        self._saved: list[Saved] = []
        self._last_h: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        """-> hidden states BF16 [T, hidden]."""
        h, x = self._plain.embed(self._token_ids), None
        for layer in range(self._policy.config.num_layers):
            h, x = self._layer(layer, h, x)
        self._last_h, hidden = self._plain.leave(h, x)
        return hidden

    def _layer(
        self, layer: int, h: torch.Tensor, x: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream and what to add to it -> the same behind a layer, which is saved as
        far as it is not computed again.
        """
        if self._recompute == "full":
            h, a = self._plain.enter(layer, h, x)
            self._saved.append(h)
            h, x = self._plain.layer(layer, h, a, self._attend)
            self._attend.take()
            return h, x
        attention, x = self._attention(layer, h, x)
        forward = self._plain if self._recompute == "mlp" else self._saving
        h, b = forward.enter_mlp(layer, attention.h, x)
        gate_up = forward.gate_up(layer, b)
        activation = forward.activation(layer, gate_up)
        self._saved.append(
            (attention, SavedMlp(h, b.saved, gate_up, activation.saved) if forward.saves else h)
        )
        return h, forward.down(layer, activation)

    def _attention(
        self, layer: int, h: torch.Tensor, x: torch.Tensor | None
    ) -> tuple[SavedAttention, torch.Tensor]:
        """The first half of a layer: what its backward reads, and what it has to add to the
        residual stream.
        """
        h, a = self._saving.enter(layer, h, x)
        made = self._saving.attention(layer, a, self._attend)
        return SavedAttention(h, a.saved, made.qkv, self._attend.take(), made.out.saved), made.x

    def backward(self, d_hidden: torch.Tensor) -> None:
        """Add the gradients of everything but lm_head to the masters' ``grad``; the pass is used
        up.
        """
        assert self._last_h is not None, "the forward comes first"
        d = self._norm("norm", d_hidden.contiguous(), self._last_h, None)
        self._last_h = None
        for layer in reversed(range(self._policy.config.num_layers)):
            d = self._layer_backward(layer, d)
        embedding_backward(d, self._token_ids, self._gradient("embed_tokens.weight"))

    def _layer_backward(self, layer: int, d: torch.Tensor) -> torch.Tensor:
        """The gradient of the residual stream behind a layer -> before it."""
        attention, mlp = self._take(layer)
        d = self._mlp_backward(layer, mlp, d)
        del mlp  # else it would stand beside the gradients of attention
        return self._attention_backward(layer, attention, d)

    def _take(self, layer: int) -> tuple[SavedAttention, SavedMlp]:
        """What the backward of a layer reads, computed again where it was not saved."""
        saved = self._saved.pop()
        if isinstance(saved, torch.Tensor):
            attention, x = self._attention(layer, saved, None)
            return attention, self._mlp_again(layer, attention.h, x)
        attention, mlp = saved
        return attention, mlp if isinstance(mlp, SavedMlp) else self._mlp_again(layer, mlp, None)

    def _mlp_again(self, layer: int, h: torch.Tensor, x: torch.Tensor | None) -> SavedMlp:
        """A layer's second half but for its end, which no gradient needs."""
        h, b = self._saving.enter_mlp(layer, h, x)
        gate_up = self._saving.gate_up(layer, b)
        return SavedMlp(h, b.saved, gate_up, self._saving.activation_saved(layer, gate_up))

    def _attention_backward(
        self, layer: int, saved: SavedAttention, d: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of the residual stream behind attention -> before its norm."""
        path = f"layers.{layer}"
        d_out = self._linear_backward(
            f"{path}.o_proj", self._output_gradient(f"{path}.o_proj", d), saved.out
        )
        d_qkv = self._qkv_backward(layer, saved.qkv, *self._attend.backward(saved.attended, d_out))
        d_a = self._linear_backward(
            f"{path}.qkv_proj", self._output_gradient(f"{path}.qkv_proj", d_qkv), saved.normed
        )
        return self._norm(f"{path}.input_norm", d_a, saved.h, d)

    def _mlp_backward(self, layer: int, saved: SavedMlp, d: torch.Tensor) -> torch.Tensor:
        """The gradient of the residual stream behind an MLP -> before its norm."""
        path = f"layers.{layer}"
        d_activation = self._linear_backward(
            f"{path}.down_proj", self._output_gradient(f"{path}.down_proj", d), saved.activation
        )
        d_gate_up = self._swiglu_backward(f"{path}.gate_up_proj", d_activation, saved.gate_up)
        d_b = self._linear_backward(f"{path}.gate_up_proj", d_gate_up, saved.normed)
        return self._norm(f"{path}.post_attention_norm", d_b, saved.h, d)

    def _linear_backward(
        self, path: str, dy: OutputGradient, x: LinearInput | None
    ) -> torch.Tensor:
        """-> d x BF16 [T, K]; the gradient of W is added to the master's."""
        assert x is not None, "a forward that saves came before"
        matrix, gradient = (
            self._plain.weights.linears[path].matrix,
            self._gradient(f"{path}.weight"),
        )
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

    def _swiglu_backward(
        self, path: str, d_activation: torch.Tensor, gate_up: torch.Tensor
    ) -> OutputGradient:
        """d y of the gate and up projections, ``path``."""
        site = self._site(path)
        if site.forward == "e4m3" and site.wgrad == "e4m3":
            return OutputGradient(*swiglu_backward_quantise(d_activation, gate_up, site.scales))
        return self._output_gradient(path, swiglu_backward(d_activation, gate_up))

    def _qkv_backward(
        self, layer: int, qkv: torch.Tensor, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> torch.Tensor:
        path, config = f"layers.{layer}", self._policy.config
        q_norm, k_norm = (
            self._gradient(f"{path}.{name}.weight") if config.qk_norm else None
            for name in ("q_norm", "k_norm")
        )
        bias = self._gradient(f"{path}.qkv_proj.bias") if config.qkv_bias else None
        return qkv_backward(
            dq, dk, dv, qkv, self._plain.transform(layer), self._positions, q_norm, k_norm, bias
        )

    def _norm(
        self, path: str, dy: torch.Tensor, h: torch.Tensor, d_residual: torch.Tensor | None
    ) -> torch.Tensor:
        name = f"{path}.weight"
        return rms_norm_backward(
            dy,
            h,
            self._plain.weights.plain[name],
            self._policy.config.rms_epsilon,
            d_residual,
            self._gradient(name),
        )

    def _site(self, path: str) -> Site:
        return self._plain.weights.linears[path].site

    def _gradient(self, name: str) -> torch.Tensor:
        return gradient_of(self._policy, name)


def gradient_of(policy: Policy, name: str) -> torch.Tensor:
    """A master's FP32 gradient, to be added to; zeros where it has none yet."""
    master = policy.masters[name]
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    return master.grad


def packed_hidden_states(
    policy: Policy,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    lengths: tuple[int, ...],
    recompute: Recompute,
) -> torch.Tensor:
    """``isobit.models.decoder.packed_hidden_states`` on a GPU, with gradients: hidden states BF16
    [T, hidden].
    """
    packed = PackedPass(policy, token_ids, positions, lengths, recompute)
    anchor = torch.zeros(
        (), device=token_ids.device, requires_grad=True
    )  # makes autograd come back here
    return _HiddenStates.apply(anchor, packed.forward, packed.backward)  # pyright: ignore[reportReturnType]


class _HiddenStates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        forward: Callable[[], torch.Tensor],
        backward: Callable[[torch.Tensor], None],
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
    """``isobit.models.head.token_log_probs`` on a GPU, with gradients: log-probabilities and
    entropies FP32 [N]; the latter carry none.
    """
    return _TokenLogProbs.apply(hidden, policy, targets, temperatures)  # pyright: ignore[reportReturnType]


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        policy: Policy,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, entropies = head.token_log_probs(
            hidden, policy.weights("training").plain["head"], targets, temperatures
        )
        ctx.save_for_backward(hidden, targets, temperatures)
        ctx.policy = policy
        ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, targets, temperatures = ctx.saved_tensors
        policy: Policy = ctx.policy
        weight, gradient = (
            policy.weights("training").plain["head"],
            gradient_of(policy, policy.head_name),
        )
        return (
            head.token_log_probs_backward(
                hidden, weight, targets, temperatures, gradients[0], gradient
            ),
            None,
            None,
            None,
        )
