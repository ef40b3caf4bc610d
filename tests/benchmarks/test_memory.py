"""``benchmarks.memory``: its tables are those of the page, and its two steps run, small, on a
CPU.
"""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmarks.comparison.card as card_module
from benchmarks import memory
from benchmarks.comparison import device
from benchmarks.passes import turns
from isobit.kernels.spec.backend import SpecBackend
from isobit.models import config
from isobit.models.config import ModelConfig
from tests.forked import ran

ROOT = Path(__file__).parents[2]


def test_the_page_holds_the_tables(tmp_path: Path) -> None:
    done = ran("tests.forked:be_module", tmp_path, "benchmarks.memory", "plan")
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    for table in done.stdout.strip().split("\n\n"):
        assert table in page, (
            f"docs/memory.md has another table than benchmarks.memory plan:\n{table}"
        )


class CardMemory:
    """A card's memory of 80 GiB, of which 3 are in use whenever somebody looks."""

    def available(self) -> int:
        return 80 << 30

    def peak(self) -> int:
        return 3 << 30

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def allocate_in_pages(self) -> None:
        pass

    reset_peak = release_cached = allocate_in_pages


@pytest.mark.parametrize(("moments", "offload"), [("bf16", False), ("fp8", True)])
def test_a_measurement_says_what_was_planned_beside_what_was_found(
    moments: str,
    offload: bool,
    tiny: ModelConfig,
    card: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(config.SHAPES, "tiny", tiny)
    monkeypatch.setattr(card_module, "measure_card", lambda: card)
    memory_of_card = CardMemory()
    monkeypatch.setattr(device, "card_memory", lambda: memory_of_card)
    monkeypatch.setattr(SpecBackend, "memory", memory_of_card)
    two_steps = turns.two_steps
    monkeypatch.setattr(
        turns,
        "two_steps",
        lambda case, moments, offload, kv: two_steps(case, moments, offload, kv, device="cpu"),
    )
    monkeypatch.setattr(turns, "SHORT", (3, 16))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 4 << 30)
    case = {"shape": "tiny", "precision": "fp8", "recompute": "mlp", "tokens": 200, "length": 100}
    memory.measure(
        Namespace(
            **case, moments=moments, offload_moments=offload, kv_memory_gib=None, out=tmp_path
        )
    )
    (row,) = [
        json.loads(line)
        for path in tmp_path.glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert (row["moments"], row["offload_moments"]) == (moments, offload)
    assert (row["mode"], row["length"], row["sequences"], row["recompute"], row["card"]) == (
        "fp8",
        100,
        2,
        "mlp",
        card,
    )
    assert row["peak_gib"] == {"rollout": 3.0, "training": 3.0} and row["reserved_gib"] == {
        "rollout": 4.0,
        "training": 4.0,
    }
    for phase in ("rollout", "training"):
        assert sum(row[f"{phase}_parts_gib"].values()) == pytest.approx(row["planned_gib"][phase])
    seconds = row["seconds"]
    assert seconds.keys() == {
        "rollout",
        "training",
        *({"offload", "moments to the GPU", "moments to the host"} if offload else ()),
    }
    assert (
        not offload
        or seconds["training"]
        > seconds["offload"]
        >= seconds["moments to the GPU"] + seconds["moments to the host"]
    )
    assert (row["kind"], row["kv_tokens"]) == ("memory", 128 * row["kv_pages"])
