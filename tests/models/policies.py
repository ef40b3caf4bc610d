"""What tests of models and of memory ask of a policy, and batches for it."""

from collections.abc import Iterable
from typing import Any

import torch

from isobit.config.model_shape import Family
from isobit.kernels.operands import DeltaShape
from isobit.models.config import Experts
from isobit.models.decoder import Scorable
from isobit.models.families import FAMILIES
from isobit.models.policy import Policy
from isobit.precision.quant_tensor import Side
from isobit.records.batch import PackedBatch

EXPERTS: dict[Family, Experts] = {
    "qwen3_moe": Experts(4, 2, 24, renormalise=False, dense_layers=(1,)),
    "mixtral": Experts(4, 2, 40, renormalise=True),
    "gpt_oss": Experts(4, 2, 40, renormalise=True),
    "qwen3_5_moe_text": Experts(4, 2, 40, renormalise=True, shared_size=56),
    "qwen3_next": Experts(4, 2, 24, renormalise=False, dense_layers=(1,), shared_size=56),
}
"""Of each family that has them, in three layers."""


def small_experts(family: Family, count: int, size: int) -> Experts | None:
    """Two for each token in every layer, and a shared one where the family has it."""
    names = FAMILIES[family].experts
    shared = None if names is None or names.shared_width is None else size
    return None if names is None else Experts(count, 2, size, True, shared_size=shared)


def whole_batch(
    token_ids: torch.Tensor, lengths: tuple[int, ...], targets: torch.Tensor | None = None
) -> PackedBatch:
    """A batch in which every token predicts a target, on the device of the ids."""
    device, tokens = token_ids.device, len(token_ids)
    rows, ones = torch.arange(tokens, device=device), torch.ones(tokens, device=device)
    counts = torch.tensor(lengths)
    return PackedBatch(
        token_ids,
        torch.cat([torch.arange(n, device=device) for n in lengths]),
        lengths,
        rows,
        token_ids if targets is None else targets,
        torch.arange(len(lengths)).repeat_interleave(counts).to(device),
        *(ones, ones, ones, ones),
    )


def delta_nets(family: Family, layers: int) -> dict[str, Any]:
    """What a ``ModelConfig`` of a hybrid family has beside others: a gated delta rule in all layers
    but the last.
    """
    if not FAMILIES[family].is_hybrid:
        return {}
    rule = DeltaShape(key_heads=2, value_heads=4, key_dim=16, value_dim=32, width=4)
    return {"delta": rule, "delta_layers": tuple(range(layers - 1))}


def disturbed(policy: Policy) -> Policy:
    """The same, with norms, biases and adapters that do something."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for master in policy.parameters():
            noise = torch.randn(master.shape, generator=generator)
            master += (0.1 if master.ndim == 1 else 0.05) * noise
    policy.publish()
    return policy


def published_tensors(policy: Scorable, sides: Iterable[Side]) -> list[torch.Tensor]:
    """What the sides read, the rotary tables included; a tensor of both sides is there twice."""
    tensors = list[torch.Tensor]()
    for side in sides:
        weights = policy.weights(side)
        tensors += [*weights.rope.tensors(), *weights.plain.values()]
        tensors += [] if weights.head is None else weights.head.tensors
        for linear in weights.linears.values():
            one = linear.matrix
            tensors += [one] if isinstance(one, torch.Tensor) else [one.values, one.scales]
            tensors += [] if linear.bias is None else [linear.bias]
    return tensors


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind the tensors."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@torch.no_grad()
def logits_of(policy: Policy, token_ids: torch.Tensor) -> torch.Tensor:
    """FP32 [T, V] of one sequence, by the training forward."""
    weights, count = policy.weights("training"), len(token_ids)
    attend = policy.backend.packed_attention(policy.flow.training, (count,), torch.arange(count))
    hidden = policy.decoder.hidden_states(weights, token_ids, attend)
    return policy.decoder.lm_head.logits(weights, hidden)
