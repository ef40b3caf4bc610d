"""``experiments.learning`` at the size of a CPU: both kinds of run, and what its table makes of
their rows.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import read_rows
from experiments.curves import run_table


def supervised(
    mode: str, losses: list[float], rate: float = 1e-4, **seed: int
) -> list[dict[str, Any]]:
    common = {"engine": "sft", "shape": "tiny", "mode": mode, "card": {"uuid": "A"}} | seed
    step = {"seconds": 0.5, "skipped": None, "learning_rate": rate}
    steps = [common | step | {"step": i, "loss": loss} for i, loss in enumerate(losses, 1)]
    return [*steps, common | {"step": len(losses), "held_out_loss": losses[-1]}]


def test_the_table_says_what_holds_and_what_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bf16, fp8 = [4.0] * 10 + [1.0] * 10, [4.0] * 10 + [1.006] * 10
    rl = {
        "engine": "rl",
        "shape": "tiny",
        "mode": "fp8",
        "card": {"uuid": "A"},
        "loss": 0.0,
        "reward_mean": 0.5,
        "reward_std": 0.1,
    }
    rl |= {
        "tokens_compared": 5,
        "skipped": None,
        "rollout_seconds": 1.0,
        "training_seconds": 1.0,
        "peak_gib": 1.0,
    }
    rows = [*supervised("bf16", [9.0, 8.0]), *supervised("bf16", bf16), *supervised("fp8", fp8)]
    rows += [rl | {"step": 1, "tokens_differing": 0, "weight_bytes_changed": 0.009}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_table(tmp_path)
    assert "| tiny | fp8 | 0 | 0.0001 |" in capsys.readouterr().out
    table = json.loads((tmp_path / "table.json").read_text())
    reference, line = table["supervised"]
    assert (reference["steps"], reference["near_bf16"], line["near_bf16"], line["halved"]) == (
        20,
        True,
        False,
        True,
    )
    assert line["above_bf16"] == pytest.approx(0.006)
    (reinforced,) = table["reinforced"]
    assert (reinforced["exact"], reinforced["changed_enough"], reinforced["steps"]) == (
        True,
        False,
        1,
    )


def test_runs_are_told_apart_by_seed_and_learning_rate(tmp_path: Path) -> None:
    runs = [
        ("bf16", 1.0, 1e-4, {}),
        ("fp8", 1.001, 1e-4, {"seed": 0}),
        ("bf16", 2.0, 1e-4, {"seed": 1}),
        ("fp8", 2.1, 1e-4, {"seed": 1}),
    ]
    runs += [
        ("bf16", 4.0, 3e-4, {"seed": 0}),
        ("fp8", 4.2, 3e-4, {"seed": 0}),
        ("fp8", 4.1, 3e-4, {"seed": 0}),
    ]
    rows = [
        row
        for mode, loss, rate, seed in runs
        for row in supervised(mode, [9.0, *[loss] * 10], rate, **seed)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_table(tmp_path)
    lines = json.loads((tmp_path / "table.json").read_text())["supervised"]
    assert [
        (line["mode"], line["seed"], line["learning_rate"], round(line["above_bf16"], 6))
        for line in lines
    ] == [
        ("bf16", 0, 1e-4, 0.0),
        ("fp8", 0, 1e-4, 0.001),
        ("bf16", 1, 1e-4, 0.0),
        ("fp8", 1, 1e-4, 0.05),
        ("bf16", 0, 3e-4, 0.0),
        ("fp8", 0, 3e-4, 0.025),
    ]


def test_curves_that_were_compressed_are_read_in_their_files_order(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"step": 1}\n{"step": 2}\n'))
    (tmp_path / "b.jsonl").write_text('{"step": 3}\n')
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2, 3]
