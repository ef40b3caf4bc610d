"""Which library multiplies, and what is said where it is a fallback; decided without a GPU."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from isobit.kernels.hopper import gemm


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch):
    gemm.why_not_deep_gemm.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    yield
    gemm.why_not_deep_gemm.cache_clear()


def assert_fallbacks(reason: str) -> None:
    assert gemm.gemm_back_end("power_of_two") == "scaled_mm"
    assert gemm.gemm_back_end("fp32") == gemm.deep_gemm_or_triton() == "triton"
    described = gemm.describe_back_ends()
    assert described.pop("INT8 GEMM") == "Triton"
    assert len(described) == 4 and all(reason in text for text in described.values())
    assert gemm.describe_fallbacks() == [f"{name}: {text}" for name, text in described.items()]


def test_without_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "find_nvcc", lambda: None)
    assert_fallbacks("there is no nvcc")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert_fallbacks("not installed")


def test_with_a_package_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "find_nvcc", lambda: "/usr/bin/nvcc")
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    assert_fallbacks("does not load: ")


def test_with_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "find_nvcc", lambda: "/usr/bin/nvcc")
    monkeypatch.setitem(sys.modules, "deep_gemm", object())
    assert_fallbacks("another release")


def test_the_compiler_is_looked_for_where_deep_gemm_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "bin/nvcc"
    compiler.parent.mkdir()
    compiler.touch(mode=0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert gemm.find_nvcc() == str(compiler)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "elsewhere"))
    assert gemm.find_nvcc() is None


def test_threads_take_turns_in_deep_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = threading.Lock()

    def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        assert inside.acquire(blocking=False), "another thread is in it"
        time.sleep(0.005)  # others may run
        torch.mm(a, b.t(), out=out)
        inside.release()

    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(bf16_gemm_nt=product))
    ones = torch.ones(64, 64, dtype=torch.bfloat16)

    def multiply(_: int) -> torch.Tensor:
        return gemm.bf16_gemm_nt(ones, ones, back_end="deep_gemm")

    with ThreadPoolExecutor(3) as pool:
        assert all((made == 64).all() for made in pool.map(multiply, range(12)))
