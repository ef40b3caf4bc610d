"""Which library multiplies, and what is said where it is a fallback; decided without a GPU."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from isobit.kernels.hopper import gemm


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch):
    gemm.why_not_deep_gemm.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    yield
    gemm.why_not_deep_gemm.cache_clear()


def assert_fallbacks(reason: str) -> None:
    assert gemm.gemm_back_end("power_of_two") == "scaled_mm"
    assert gemm.gemm_back_end("fp32") == gemm.bf16_back_end() == gemm.wgrad_back_end() == "triton"
    described = gemm.describe_back_ends()
    assert len(described) == 4 and all(reason in text for text in described.values())


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
