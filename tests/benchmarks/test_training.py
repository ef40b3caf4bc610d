"""``benchmarks.training``: its FLOPs, its cases, its tables, and both engines' passes and steps,
small, on a CPU.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import PassCase, flops
from tests.forked import ran


def test_flops_of_the_8b_shape() -> None:
    a_token = flops(PassCase("fp8", 4096, 2, "none")) / 8192
    assert a_token == pytest.approx(6 * 7.57e9 + 3 * 4 * (4096 / 2) * 4096 * 36, rel=1e-3)


def pass_row(engine: str, mode: str, rate: float, uuid: str = "A", **other: Any) -> dict[str, Any]:
    case = {
        "kind": "pass",
        "length": 4096,
        "sequences": 2,
        "recompute": "none",
        "model_tflop_per_s": rate / 20,
        "peak_gib": 90.0,
    }
    return (
        {
            "engine": engine,
            "mode": mode,
            "shape": "qwen3-8b",
            "card": {"uuid": uuid},
            "tokens_per_s": rate,
        }
        | case
        | other
    )


def step_row(engine: str, mode: str, rate: float, **other: Any) -> dict[str, Any]:
    phases = {"forward": 2.0, "backward": 4.0, "optimiser": 0.25, "publish": 0.05}
    return pass_row(engine, mode, rate, kind="step", step_tokens=65536, phases_s=phases) | other


def table(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    done = ran("tests.forked:be_module", folder, "benchmarks.training", "table", str(folder))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ratios_of_passes_are_taken_on_one_card_and_at_one_setting(tmp_path: Path) -> None:
    rows = [
        pass_row("native", "fp8", 14000.0),
        pass_row("native", "bf16", 10000.0),
        pass_row("transformers", "bf16", 9000.0),
    ]
    rows += [
        pass_row("transformers", "bf16", 7000.0, recompute="full"),
        pass_row("native", "fp8", 15000.0, uuid="B"),
    ]
    failed = pass_row("native", "bf16", 0.0, sequences=4) | {"error": "out of memory"}
    failed.pop("tokens_per_s")
    shown = table(tmp_path, [*rows, failed, {"kind": "rl", "engine": "native"}])
    assert "| 4,096 x 2 | isobit `fp8` | none | 14,000 | 700 | 1.40 | 1.56 | 90 |" in shown
    assert "| 4,096 x 2 | isobit `fp8` | none | 15,000 | 750 | - | - | 90 |" in shown
    assert "| 4,096 x 4 | isobit `bf16` | none | out of memory |" in shown


def test_a_step_is_held_against_the_fastest_bf16_step_of_its_length(tmp_path: Path) -> None:
    rows = [
        step_row("native", "fp8", 12000.0, recompute="mlp"),
        step_row("native", "bf16", 8000.0),
        pass_row("native", "bf16", 10000.0),
    ]
    rows += [
        step_row("native", "bf16", 7500.0, recompute="full"),
        step_row("transformers", "bf16", 6000.0, recompute="full"),
    ]
    shown = table(tmp_path, rows)
    assert (
        "| 4,096 x 2 | isobit `fp8` | mlp | 65,536 | 2.00 | 4.00 | 0.25 | 0.05 | 12,000 | 1.50 | "
        "2.00 | 90 |" in shown
    )
    assert "| 4,096 x 2 | isobit `bf16` | none | 10,000 | 500 | 1.00 | - | 90 |" in shown
