"""``benchmarks.memory``: its tables are those of the page, and its two steps run, small, on a
CPU.
"""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmarks.comparison.card as card_module
from benchmarks import memory
from benchmarks.passes import turns
from isobit.models import shapes
from isobit.models.config import ModelConfig

ROOT = Path(__file__).parents[2]


def test_the_page_holds_the_tables() -> None:
    command = [sys.executable, "-m", "benchmarks.memory", "plan"]
    done = subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    for table in done.stdout.strip().split("\n\n"):
        assert table in page, (
            f"docs/memory.md has another table than benchmarks.memory plan:\n{table}"
        )


@pytest.mark.parametrize(("moments", "offload"), [("bf16", False), ("fp8", True)])
def test_a_measurement_says_what_was_planned_beside_what_was_found(
    moments: str,
    offload: bool,
    tiny: ModelConfig,
    card: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", tiny)
    monkeypatch.setattr(card_module, "measure_card", lambda: card)
    monkeypatch.setattr(turns, "device_memory", lambda: 80 << 30)
    monkeypatch.setattr(turns, "allocate_in_pages", lambda _: None)
    two_steps = turns.two_steps
    monkeypatch.setattr(
        turns,
        "two_steps",
        lambda case, moments, offload, kv: two_steps(case, moments, offload, kv, device="cpu"),
    )
    monkeypatch.setattr(turns, "SHORT", (3, 16))
    for name, value in (
        ("max_memory_allocated", 3 << 30),
        ("max_memory_reserved", 4 << 30),
        ("reset_peak_memory_stats", None),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
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
