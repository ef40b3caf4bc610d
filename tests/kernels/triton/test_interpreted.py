"""Kernels in Triton's interpreter, where integers and FP32 are as on a card."""

from pathlib import Path

import pytest

from tests.kernels.hopper.interpreted import run_interpreted


def test_some_products(tmp_path: Path) -> None:
    run_interpreted("tests.kernels.triton.interpreted_linear:quick", tmp_path)


def test_attention(tmp_path: Path) -> None:
    run_interpreted("tests.kernels.triton.interpreted_attention:quick", tmp_path)


@pytest.mark.exhaustive
def test_more_attention(tmp_path: Path) -> None:
    run_interpreted("tests.kernels.triton.interpreted_attention:whole", tmp_path)


def test_attention_backward(tmp_path: Path) -> None:
    run_interpreted("tests.kernels.triton.interpreted_attention_backward:quick", tmp_path)


@pytest.mark.exhaustive
def test_more_attention_backward(tmp_path: Path) -> None:
    run_interpreted("tests.kernels.triton.interpreted_attention_backward:whole", tmp_path)


def test_some_qkv(tmp_path: Path) -> None:
    run_interpreted("tests.kernels.triton.interpreted_qkv:quick", tmp_path)


@pytest.mark.exhaustive
def test_qkv(tmp_path: Path) -> None:
    run_interpreted("tests.kernels.triton.interpreted_qkv:main", tmp_path)


def test_e4m3(tmp_path: Path) -> None:
    run_interpreted("tests.kernels.triton.interpreted_e4m3:quick", tmp_path)


@pytest.mark.exhaustive
def test_more_e4m3(tmp_path: Path) -> None:
    run_interpreted("tests.kernels.triton.interpreted_e4m3:whole", tmp_path)


@pytest.mark.exhaustive
def test_all_products(tmp_path: Path) -> None:
    run_interpreted("tests.kernels.triton.interpreted_linear:whole", tmp_path)


def test_some_of_each_format(tmp_path: Path) -> None:
    run_interpreted("tests.kernels.triton.interpreted_products:quick", tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", ["whole", "bf16_experts", "e4m3_experts", "int8_experts"])
def test_backward_and_experts(what: str, tmp_path: Path) -> None:
    run_interpreted(f"tests.kernels.triton.interpreted_products:{what}", tmp_path)


@pytest.mark.exhaustive
def test_a_model(tmp_path: Path) -> None:
    run_interpreted("tests.kernels.triton.interpreted_model:quick", tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "what",
    [
        "bf16", "int8", "fp8", "adapters", "phi", "gemma", "gpt_oss", "gpt_oss_in_fp8",
        "experts_in_int8", "experts_in_fp8", "hybrid", "hybrid_with_experts",
        "hybrid_over_a_chunk", "hybrid_guesses", "adapters_of_a_shared_expert",
    ],
)  # fmt: skip
def test_models(what: str, tmp_path: Path) -> None:
    run_interpreted(f"tests.kernels.triton.interpreted_model:{what}", tmp_path)
