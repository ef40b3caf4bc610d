"""A device that a machine has and a command does not take gets a line."""

import pytest
import torch

from isobit.config.precision import PrecisionConfig
from isobit.errors import ConfigError
from isobit.models.config import ModelConfig
from isobit.models.device import choose_device

MODEL = ModelConfig("qwen3", 128, 128, 128, 2, 8, 2, 32, 256, 1e-6, 10000.0, tied_embeddings=True)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("preset", "reason"),
    [
        ("fp8", "the model has 8 query heads of 32 over 2 KV heads"),
        ("fp32", "precision 'fp32' is the CPU's reference"),
    ],
)
def test_the_models_heads_and_flow_decide(
    preset: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    precision = PrecisionConfig.model_validate({"preset": preset})
    assert choose_device("auto", MODEL, precision) == torch.device("cpu")
    assert f"isobit: computing on cpu, because {reason}" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=reason):
        choose_device("cuda", MODEL, precision)
    assert choose_device("cpu", MODEL, precision) == torch.device("cpu")
    assert capsys.readouterr().err == "", "what was asked for needs no reason"
