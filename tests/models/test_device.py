"""The choice of the device: a Hopper GPU, the CPU with a line that says why, or a refusal."""

from dataclasses import replace

import pytest
import torch

from isobit.config.base import Device
from isobit.config.precision import PrecisionConfig
from isobit.errors import ConfigError
from isobit.kernels.backend import support
from isobit.models.config import ModelConfig
from isobit.models.device import choose_device

MODEL = ModelConfig("qwen3", 128, 128, 128, 2, 8, 2, 64, 256, 1e-6, 10000.0, tied_embeddings=True)
FP8 = PrecisionConfig(preset="fp8")


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("capability", "wanted", "chosen"),
    [
        ((9, 0), "auto", "cuda"),
        ((9, 0), "cuda", "cuda"),
        ((9, 0), "cpu", "cpu"),
        (None, "auto", "cpu"),
        ((8, 0), "auto", "cpu"),
    ],
)
def test_the_device(
    capability: tuple[int, int] | None, wanted: Device, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, capability)
    assert choose_device(wanted, MODEL, FP8).type == chosen


@pytest.mark.parametrize(
    ("capability", "reason"),
    [(None, "sees no NVIDIA GPU"), ((10, 0), r"NVIDIA Test is sm_100.*Hopper \(sm_90\) only")],
)
def test_a_gpu_that_cannot_be_used_is_refused_by_name(
    capability: tuple[int, int] | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, capability)
    with pytest.raises(ConfigError, match=reason):
        choose_device("cuda", MODEL, FP8)


def test_an_unused_gpu_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu(monkeypatch, (8, 0))
    choose_device("auto", MODEL, FP8)
    assert "computing on cpu, because NVIDIA Test is sm_80" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "precision", "reason"),
    [
        (replace(MODEL, head_dim=32), FP8, "8 query heads of 32 over 2 KV heads"),
        (MODEL, PrecisionConfig(preset="fp32"), "precision 'fp32' is the CPU's reference"),
    ],
)
def test_what_the_gpu_does_not_compute_runs_on_the_cpu_and_says_so(
    model: ModelConfig,
    precision: PrecisionConfig,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpu(monkeypatch, (9, 0))
    assert choose_device("auto", model, precision).type == "cpu"
    assert f"computing on cpu, because {reason}" in capsys.readouterr().err.replace(
        "the model has ", ""
    )
    with pytest.raises(ConfigError, match=reason):
        choose_device("cuda", model, precision)


@pytest.mark.parametrize(
    ("heads", "fits"),
    [
        ((32, 8, 128), True),
        ((16, 1, 64), True),
        ((32, 1, 128), False),
        ((8, 8, 96), False),
        ((9, 4, 64), False),
    ],
)
def test_heads_that_hopper_computes(heads: tuple[int, int, int], fits: bool) -> None:
    assert (support("cuda").model_problem(*heads, "fp8") is None) is fits
