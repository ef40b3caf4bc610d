"""Learning curves become a table that compares runs of one seed and learning rate; 8-bit moments
end where FP32 moments do.
"""

import gzip
import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common import read_rows
from experiments import moments
from experiments.curves import run_table
from experiments.moments import descend
from isobit.kernels.spec import optimiser


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
    rl = {"engine": "rl", "shape": "tiny", "mode": "fp8", "card": {"uuid": "A"}, "loss": 0.0}
    rl |= {"reward_mean": 0.5, "reward_std": 0.1, "tokens_compared": 5, "skipped": None}
    rl |= {"rollout_seconds": 1.0, "training_seconds": 1.0, "peak_gib": 1.0}
    rows = [*supervised("bf16", [9.0, 8.0]), *supervised("bf16", bf16), *supervised("fp8", fp8)]
    rows += [rl | {"step": 1, "tokens_differing": 0, "weight_bytes_changed": 0.009}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_table(tmp_path)
    assert "| tiny | fp8 | 0 | 0.0001 |" in capsys.readouterr().out
    table = json.loads((tmp_path / "table.json").read_text())
    reference, line = table["supervised"]
    assert reference["steps"] == 20 and reference["near_bf16"]
    assert line["halved"] and not line["near_bf16"]
    assert line["above_bf16"] == pytest.approx(0.006)
    (reinforced,) = table["reinforced"]
    assert reinforced["exact"] and not reinforced["changed_enough"] and reinforced["steps"] == 1


def test_runs_are_told_apart_by_seed_and_learning_rate(tmp_path: Path) -> None:
    runs = [("bf16", 1.0, 1e-4, {}), ("fp8", 1.001, 1e-4, {"seed": 0})]
    runs += [(mode, loss, 1e-4, {"seed": 1}) for mode, loss in (("bf16", 2.0), ("fp8", 2.1))]
    runs += [("bf16", 4.0, 3e-4, {"seed": 0}), ("fp8", 4.2, 3e-4, {"seed": 0})]
    runs += [("fp8", 4.1, 3e-4, {"seed": 0})]  # the last of several counts
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


def to_nearest(key: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """In the place of noise."""
    half = torch.full((count,), 1 << 15, dtype=torch.int32)
    return half, half


SEEDS = (0, 1)
wide = cache(partial(descend, "fp32", 0.999))
"""By seed."""


@pytest.mark.exhaustive
def test_nearest_rounding_freezes_the_second_moment_and_stochastic_rounding_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in SEEDS:
        loss, second = wide(seed)
        small_loss, small_second = descend("bf16", 0.999, seed)
        assert small_second == pytest.approx(second, rel=0.02)
        assert small_loss == pytest.approx(loss, rel=0.02)  # seeds differ by a tenth
        with monkeypatch.context() as patch:
            patch.setattr(optimiser, "_noise", to_nearest)
            nearest_loss, nearest_second = descend("bf16", 0.999, seed)
        assert (
            nearest_second > 4 * second
        )  # it stands where the large gradients left it, and so every step is too short
        assert nearest_loss > 1.8 * loss


@pytest.mark.exhaustive
def test_8_bit_moments_end_where_fp32_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in SEEDS:
        loss, second = wide(seed)
        small_loss, small_second = descend("fp8", 0.999, seed)
        assert small_second == pytest.approx(second, rel=0.03)
        assert small_loss == pytest.approx(loss, rel=0.05)
    monkeypatch.setattr(optimiser, "_noise", to_nearest)
    (loss, second), (nearest_loss, nearest_second) = wide(0), descend("fp8", 0.999, 0)
    assert abs(nearest_second / second - 1) > 0.2 and abs(nearest_loss / loss - 1) > 0.2


def test_the_table_holds_each_run_against_fp32_moments_of_its_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = {"engine": "decoder", "shape": "tiny", "beta2": 0.95, "rate": 1.0}
    runs = [("fp32", 0, 2.0), ("fp8", 0, 2.2), ("fp32", 1, 4.0), ("fp8", 1, 4.0)]
    rows = [
        common | {"moments": moments, "seed": seed, "loss": loss} for moments, seed, loss in runs
    ]
    rows.append(common | {"moments": "fp32", "rate": 1.01, "seed": 1, "loss": 5.0})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    moments.run_table(tmp_path)
    lines = capsys.readouterr().out.splitlines()[2:]
    assert lines == [
        "| decoder | tiny | 0.9500 | fp32 | 1.0000 | 2 | 3.0000 | 1.0000 | 0.0000 | - | - |",
        "| decoder | tiny | 0.9500 | fp8 | 1.0000 | 2 | 3.1000 | 1.0500 | 0.0500 | - | - |",
        "| decoder | tiny | 0.9500 | fp32 | 1.0100 | 1 | 5.0000 | 1.2500 | - | - | - |",
    ]
