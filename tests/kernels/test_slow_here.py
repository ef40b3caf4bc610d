"""A run is told what its flow does slowly on the card that it has."""

from types import SimpleNamespace

import pytest
import torch

from isobit.config.precision import PrecisionConfig
from isobit.kernels.backend import name_fallbacks
from isobit.kernels.triton.slow import slow_here, slow_on
from isobit.memory.cards import GPUS
from isobit.models.decoder import decoder_shape
from isobit.models.shapes import model_shape
from isobit.precision.flow import PrecisionFlow, build_flow

SHAPE = decoder_shape(model_shape("qwen3-0.6b"))


def flow(preset: str) -> PrecisionFlow:
    return build_flow(PrecisionConfig.model_validate(preset), SHAPE)


@pytest.mark.parametrize(
    ("name", "generation", "preset", "said"),
    [
        ("rtx4090", 8, "int8", []),
        ("rtx4090", 8, "fp8", ["at a quarter of INT8's rate"]),
        ("rtx4090", 8, "bf16", ["multiplies BF16 with FP32 sums at a quarter"]),
        ("l40s", 8, "fp8", ["at half of INT8's rate"]),
        ("a100-80", 8, "bf16", []),
        ("h200", 9, "int8", ["train at half of the speed of the back end 'hopper'"]),
        ("h200", 9, "fp8-rollout", ["at half of INT8's rate", "train at half of the speed"]),
        ("b200", 10, "int8", ["about half (an estimate)"]),
        ("rtx5090", 12, "int8-linear", []),
    ],
)
def test_what_is_slow_is_said_with_a_factor(
    name: str, generation: int, preset: str, said: list[str]
) -> None:
    sheet = GPUS[name].sheet
    assert sheet is not None
    found = slow_on(flow(preset), sheet.device, generation)
    assert len(found) == len(said)
    assert all(words in line for words, line in zip(said, found, strict=True))


def test_it_is_said_once_for_all_flows_where_there_is_a_card(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cuda = torch.device("cuda")
    assert slow_here(flow("fp8"), torch.device("cpu")) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA GeForce RTX 3090")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    backend = SimpleNamespace(fallbacks=lambda flow: slow_here(flow, cuda))
    for preset in ("fp8", "fp8-rollout", "int8"):
        name_fallbacks(backend, flow(preset))  # pyright: ignore[reportArgumentType]
    shown = "".join(capsys.readouterr())
    assert shown.count("isobit: FP8 products run as such of FP16 on this NVIDIA GeForce") == 1
