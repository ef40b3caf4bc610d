"""What smaller moments do over thousands of steps, by ``experiments.moments``; its decoder for a
few steps, and its table.
"""

import json
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from experiments import moments
from experiments.moments import descend
from isobit.kernels.spec import optimiser


def to_nearest(key: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """In the place of noise."""
    half = torch.full((count,), 1 << 15, dtype=torch.int32)
    return half, half


SEEDS = (0, 1)
wide = cache(partial(descend, "fp32", 0.999))
"""By seed."""


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
