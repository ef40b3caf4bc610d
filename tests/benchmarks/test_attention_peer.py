"""FlashAttention 3 beside our attention: what is asked of it, and that its absence or failure is a
row and no more.
"""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import attention_peer


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Any:
    on_cpu = {
        name: getattr(torch, name)
        for name in ("randn", "full", "arange", "empty", "randperm", "tensor")
    }
    for name, make in on_cpu.items():
        monkeypatch.setattr(
            torch,
            name,
            lambda *a, make=make, **k: make(
                *a, **{key: v for key, v in k.items() if key != "device"}
            ),
        )
    return attention_peer


class FlashAttention(ModuleType):
    """Checks the layouts of its operands as the wheel's interface describes them; fails in FP8 with
    pages of 16.
    """

    def __init__(self) -> None:
        super().__init__("vllm.vllm_flash_attn")
        self.schedules: list[dict[str, Any]] = []

    def fa_version_unsupported_reason(self, version: int) -> str | None:
        assert version == 3
        return None

    def get_scheduler_metadata(self, **arguments: Any) -> str:
        self.schedules.append(arguments)
        return "schedule"

    def flash_attn_varlen_func(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        max_seqlen_q: int,
        cu_seqlens_q: Any,
        max_seqlen_k: int,
        **other: Any,
    ) -> None:
        assert other["causal"] and other["fa_version"] == 3 and other["out"].dtype == torch.bfloat16
        assert q.dtype == k.dtype == v.dtype and q.shape == other["out"].shape
        batch = cu_seqlens_q.numel() - 1
        assert (
            cu_seqlens_q.dtype == torch.int32
            and cu_seqlens_q[-1] == q.shape[0] == batch * max_seqlen_q
        )
        if q.dtype == torch.float8_e4m3fn:
            assert all(other[f"{name}_descale"].shape == (batch, 8) for name in "qkv")
        else:
            assert "q_descale" not in other
        if max_seqlen_q > 1:
            assert k.shape == v.shape == (q.shape[0], 8, 128) and torch.equal(
                other["cu_seqlens_k"], cu_seqlens_q
            )
            return
        page, table = k.shape[1], other["block_table"]
        assert k.shape == v.shape == (table.numel(), page, 8, 128) and table.shape == (
            batch,
            max_seqlen_k // page,
        )
        assert table.dtype == other["seqused_k"].dtype == torch.int32 and set(
            other["seqused_k"].tolist()
        ) == {max_seqlen_k}
        assert other["scheduler_metadata"] == "schedule" and self.schedules[-1]["page_size"] == page
        if q.dtype == torch.float8_e4m3fn and page == 16:
            raise RuntimeError("no kernel\nfor this")


def rows(peer: Any) -> list[dict[str, Any]]:
    def seconds(work: Any) -> float:
        work()
        return 0.5

    return list(peer.peer_rows([(2, 256)], [(2, 64)], seconds))


def test_every_case_has_a_row_and_a_failure_is_one(
    peer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, vllm = FlashAttention(), ModuleType("vllm")
    vllm.vllm_flash_attn = library  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", library)
    found = rows(peer)
    assert [(row["form"], row.get("page"), "error" in row) for row in found] == [
        ("FA3 BF16", 16, False),
        ("FA3 BF16", 128, False),
        ("FA3 BF16", None, False),
        ("FA3 FP8", 16, True),
        ("FA3 FP8", 128, False),
        ("FA3 FP8", None, False),
    ]
    assert found[1]["tb_per_s"] == pytest.approx(2 * 2 * 256 * 8 * 128 * 2 / 0.5 / 1e12)
    assert found[3]["error"] == "RuntimeError: no kernel"
    assert found[5]["tflop_per_s"] == pytest.approx(2 * 2 * 64**2 * 32 * 128 / 0.5 / 1e12)


def test_without_vllm_one_row_says_so(peer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert rows(peer) == [
        {
            "form": "FA3",
            "skipped": "ModuleNotFoundError: import of vllm halted; None in sys.modules",
        }
    ]
