"""``benchmarks.reward_model``: its measures by hand, and both commands, small, on a CPU."""

import json
from pathlib import Path
from random import Random

import pytest
import torch

from benchmarks import reward_model
from isobit.starter.tasks import final_answer, problems
from tools.starter.preferences import SIZES, preference_pairs

ROOT = Path(__file__).parents[2]


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
    assert reward_model.kendall_tau(a, a) == 1.0
    assert reward_model.kendall_tau(a, -a) == -1.0
    swapped = torch.tensor([1.0, 3.0, 2.0, 4.0], dtype=torch.float64)
    assert reward_model.kendall_tau(a, swapped) == pytest.approx((5 - 1) / 6)
    tied = torch.tensor([1.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    assert reward_model.kendall_tau(a, tied) == pytest.approx(5 / 30**0.5)
    exact = torch.tensor([[2.0, 0.0], [1.0, -1.0]], dtype=torch.float64)
    figures = reward_model.compare(exact + torch.tensor([[0.1, 0.1], [0.1, 2.5]]), exact)
    assert figures["pairs_ranked_as_in_fp32"] == 0.5
    assert figures["score_std"] == pytest.approx((5 / 3) ** 0.5)
    assert figures["max_error_by_std"] == pytest.approx(2.5 / (5 / 3) ** 0.5)


def test_flops_are_those_of_a_forward_without_lm_head() -> None:
    work = reward_model.Work("fp8", "qwen3-8b", 256, 2048, 16384)
    a_token = 2 * 6.95e9 + 4 * (2048 / 2) * 4096 * 36
    assert work.flops == pytest.approx(256 * 2048 * a_token, rel=1e-3)
