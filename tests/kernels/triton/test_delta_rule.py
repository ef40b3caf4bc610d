"""The gated delta rule on GPUs, in Triton's interpreter (``interpreted_delta_rule``)."""

from pathlib import Path

import pytest

from tests.kernels.hopper.interpreted import run_interpreted

MODULE = "tests.kernels.triton.interpreted_delta_rule"


@pytest.mark.exhaustive  # tests/gpu/test_delta_rule.py has it on a card
def test_tokens_in_parts(tmp_path: Path) -> None:
    run_interpreted(f"{MODULE}:parts", tmp_path)


def test_gates(tmp_path: Path) -> None:
    run_interpreted(f"{MODULE}:gates", tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", ["ends", "contents", "accuracy", "forms", "rejected", "whole"])
def test_more(what: str, tmp_path: Path) -> None:
    run_interpreted(f"{MODULE}:{what}", tmp_path)
