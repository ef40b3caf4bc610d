"""The same decoder in plain FP32, by autograd, from the masters: what the gradients would be
without any rounding of operands.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from isobit.kernels.spec.qkv import RopeTable, rotate
from isobit.models.config import ModelConfig, inverse_frequencies
from isobit.models.policy import Policy


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
