"""What attention of the CPU specification takes while it runs, counted, is within its plan."""

import pytest
import torch

from isobit.kernels.operands import QkvTransform, RopeTable
from isobit.kernels.sizes import AttentionShape
from isobit.kernels.spec import attention, sizes
from isobit.kernels.spec.attention import PackedAttention
from isobit.precision.flow import Graph, Site
from tests.memory.meta_memory import LiveBytes

HEADS = [(4, 2, 32), (4, 2, 80), (4, 1, 256), (2, 2, 256)]
LENGTHS = [(1200,), (200,) * 12]


@pytest.mark.few(1)
@pytest.mark.parametrize("lengths", LENGTHS, ids=["long", "short"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_attention_is_within_its_plan(
    heads: int, kv_heads: int, dim: int, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (attention, sizes):
        monkeypatch.setattr(module, "GROUP_TOKENS", 1200)
    graph = Graph((Site("layers.0.attention", "attention", "bf16"),), "bf16")
    table = RopeTable.build(0.1 ** torch.arange(dim // 2, dtype=torch.float64), max(lengths))
    transform = QkvTransform(heads, kv_heads, dim, table.cos, table.sin, 1e-6, None, None, None)
    shape, tokens = AttentionShape(heads, kv_heads, dim), sum(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths])
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).bfloat16()
    attend = PackedAttention(graph, lengths, positions)
    planned = sizes._attention(shape, tokens, max(lengths))
    with LiveBytes() as forward:
        output, attended = attend.attend(0, qkv, transform)
    kept = output.nbytes + tokens * sizes.encoded(shape, "bf16")
    assert forward.peak <= planned + kept
    with LiveBytes() as backward:
        gradients = attend.backward(attended, torch.randn_like(output))
    assert planned / 3 < backward.peak - sum(x.nbytes for x in gradients) <= planned
