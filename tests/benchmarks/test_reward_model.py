"""``benchmarks.reward_model``: its measures by hand, and both commands, small, on a CPU."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from benchmarks.reward_models import agreement, speed
from isobit.starter.tasks import final_answer, problems
from tools.starter.preferences import SIZES, preference_pairs

ROOT = Path(__file__).parents[2]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted(folder.glob("*-starter.jsonl")) + sorted(folder.glob("*-tiny.jsonl"))
        for line in path.read_text().splitlines()
    ]


def test_pairs_have_one_right_answer_and_the_recipes_files_are_these() -> None:
    for name, (held_out, count) in SIZES.items():
        of = problems(held_out)[:count]
        pairs = list(preference_pairs(of, Random(0)))
        for problem, pair in zip(of, pairs, strict=True):
            assert final_answer(pair["chosen"]) == str(sum(problem))
            assert final_answer(pair["rejected"]) != str(sum(problem))
            assert int(final_answer(pair["rejected"])) >= 0
            assert ("," in pair["rejected"]) == (pair["kind"] == "step")
        text = (ROOT / "recipes" / name).read_text(encoding="utf-8")
        assert [json.loads(line) for line in text.splitlines()] == pairs


def test_tau_and_errors_by_hand() -> None:
    a = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    assert agreement.kendall_tau(a, a) == 1.0
    assert agreement.kendall_tau(a, -a) == -1.0
    swapped = torch.tensor([1.0, 3.0, 2.0, 4.0], dtype=torch.float64)
    assert agreement.kendall_tau(a, swapped) == pytest.approx((5 - 1) / 6)
    tied = torch.tensor([1.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    assert agreement.kendall_tau(a, tied) == pytest.approx(5 / 30**0.5)
    exact = torch.tensor([[2.0, 0.0], [1.0, -1.0]], dtype=torch.float64)
    figures = agreement.compare(exact + torch.tensor([[0.1, 0.1], [0.1, 2.5]]), exact)
    assert figures["pairs_ranked_as_in_fp32"] == 0.5
    assert figures["score_std"] == pytest.approx((5 / 3) ** 0.5)
    assert figures["max_error_by_std"] == pytest.approx(2.5 / (5 / 3) ** 0.5)


def test_a_reward_model_is_trained_once_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "TRAIN", 12)
    monkeypatch.setattr(agreement, "HELD_OUT", 6)
    monkeypatch.setattr(agreement, "BATCH", 4)
    for _ in range(2):
        agreement.measure_agreement("bf16", steps=2, seed=0, threads=1, out=tmp_path)
    first, second = rows_of(tmp_path)[0::2], rows_of(tmp_path)[1::2]
    assert [row["scored_in"] for row in (first[0], second[0])] == ["bf16", "fp8"]
    assert first[0] == first[1], "the second call finds the trained model"
    assert first[0]["rms_error_by_std"] < second[0]["rms_error_by_std"] < 1
    assert first[0]["by_kind"].keys() == {"worked", "step", "number"}
    shares = [figures["accuracy"] for figures in first[0]["by_kind"].values()]
    assert first[0]["accuracy"] == pytest.approx(sum(shares) / 3)


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_scoring_is_timed(precision: str, tmp_path: Path) -> None:
    work = speed.Work(precision, "tiny", sequences=3, length=20, tokens_per_batch=40)
    speed.measure_speed(work, "cpu", tmp_path)
    (row,) = rows_of(tmp_path)
    assert (row["sequences"], row["length"], row["tokens_per_batch"]) == (3, 20, 40)
    assert row["tokens_per_s"] == pytest.approx(60 / row["seconds"])
    assert row["scores_that_differ_alone"] == 0


def test_flops_are_those_of_a_forward_without_lm_head() -> None:
    work = speed.Work("fp8", "qwen3-8b", 256, 2048, 16384)
    a_token = 2 * 6.95e9 + 4 * (2048 / 2) * 4096 * 36
    assert work.flops == pytest.approx(256 * 2048 * a_token, rel=1e-3)


def test_the_command_line_refuses_what_it_does_not_know() -> None:
    command = [sys.executable, "-m", "benchmarks.reward_model", "agreement", "--out", "x"]
    done = subprocess.run(
        [*command, "--trained-in", "fp4"], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "the precisions are fp32, bf16, fp8" in done.stderr
