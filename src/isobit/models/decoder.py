"""The decoder: token ids in, final hidden states out, the same code in rollout and in training.

    h = embed(ids)
    each layer:  h += o_proj(attend(rope(norm(q)), rope(norm(k)), v)),   (q, k, v) = qkv_proj(rms_norm(h))
                 h += down_proj(swiglu(gate_up_proj(rms_norm(h))))
    return rms_norm(h)

The residual stream and everything between operators is BF16 (FP32 in the ``fp32`` flow).  What
differs between the sides is how queries find their keys, pages or packed sequences: that is the
``Attend`` that the caller brings.  T tokens stand end to end, without padding. ``observe`` shows
each result to ``isobit verify --bisect`` and otherwise does nothing.
"""

from typing import Protocol

import torch

from isobit.config.schema import Recompute
from isobit.kernels.spec.embedding import embedding
from isobit.kernels.spec.linear import linear
from isobit.kernels.spec.packed_attention import PackedAttention
from isobit.kernels.spec.rms_norm import rms_norm
from isobit.kernels.spec.rope import RopeTable, rope
from isobit.kernels.spec.swiglu import swiglu
from isobit.kernels.trace import observe
from isobit.models.policy import Policy, PublishedWeights
from isobit.precision.formats import Side


class Attend(Protocol):
    """Attention of one layer: q [T, H, D], k and v [T, G, D], after rotary positions -> [T, H,
    D].
    """

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attend in one layer."""
        ...


def hidden_states(
    policy: Policy, side: Side, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend
) -> torch.Tensor:
    """token_ids and positions int64 [T] -> hidden states [T, hidden], final norm applied; gradients
    reach the masters if they are on.
    """
    weights = policy.weights(side)
    forward = _Forward(policy, weights, policy.rope.rows(positions), attend)
    h = observe(
        embedding(
            token_ids,
            weights.plain["embed_tokens.weight"],
            policy.masters.get("embed_tokens.weight"),
        ),
        "embed_tokens",
    )
    for layer in range(policy.config.num_layers):
        h = observe(h + forward.attention(layer, h), "layers", layer, "attention_residual")
        h = observe(h + forward.mlp(layer, h), "layers", layer, "mlp_residual")
    return forward.norm("norm", h)


def packed_hidden_states(
    policy: Policy,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    lengths: tuple[int, ...],
    recompute: Recompute = "none",
) -> torch.Tensor:
    """The training forward over whole sequences laid end to end, on the policy's device: int64 [T]
    each -> [T, hidden].

    ``recompute`` is what a GPU's backward computes again (``isobit.models.hopper_training``); no
    bit depends on it.
    """
    if policy.device.type == "cpu":
        return hidden_states(
            policy, "training", token_ids, positions, PackedAttention(policy.flow, lengths)
        )
    from isobit.kernels.hopper import packed_attention
    from isobit.models import hopper_decoder

    token_ids, positions = token_ids.to(policy.device), positions.to(policy.device)
    if torch.is_grad_enabled():
        from isobit.models import hopper_training

        return hopper_training.packed_hidden_states(
            policy, token_ids, positions, lengths, recompute
        )
    attend = packed_attention.PackedAttention(policy.flow.training, lengths, positions)
    return hopper_decoder.hidden_states(policy, "training", token_ids, positions, attend)


class _Forward:
    """One forward pass: the weights of a side and the rotary rows of its tokens."""

    def __init__(
        self, policy: Policy, weights: PublishedWeights, rope_rows: RopeTable, attend: Attend
    ) -> None:
        self.config, self.masters, self.weights = policy.config, policy.masters, weights
        self.rope_rows, self.attend = rope_rows, attend

    def attention(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        path, config = f"layers.{layer}", self.config
        qkv = self.linear(f"{path}.qkv_proj", self.norm(f"{path}.input_norm", h))
        heads = qkv.view(h.shape[0], -1, config.head_dim)
        q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], 1)
        if config.qk_norm:
            q, k = self.norm(f"{path}.q_norm", q), self.norm(f"{path}.k_norm", k)
        q, k = rope(torch.cat([q, k], 1), self.rope_rows).split(
            [config.num_heads, config.num_kv_heads], 1
        )
        q, k = observe(q, path, "rope.q"), observe(k, path, "rope.k")
        out = observe(self.attend(layer, q, k, v), path, "attention")
        return self.linear(f"{path}.o_proj", out.reshape(h.shape[0], -1))

    def mlp(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        path = f"layers.{layer}"
        gate_up = self.linear(f"{path}.gate_up_proj", self.norm(f"{path}.post_attention_norm", h))
        return self.linear(f"{path}.down_proj", observe(swiglu(gate_up), path, "activation"))

    def norm(self, path: str, x: torch.Tensor) -> torch.Tensor:
        name = f"{path}.weight"
        return observe(
            rms_norm(x, self.weights.plain[name], self.masters.get(name), self.config.rms_epsilon),
            path,
        )

    def linear(self, path: str, x: torch.Tensor) -> torch.Tensor:
        return observe(
            linear(
                x,
                self.weights.linears[path],
                self.masters.get(f"{path}.weight"),
                self.masters.get(f"{path}.bias"),
            ),
            path,
        )
