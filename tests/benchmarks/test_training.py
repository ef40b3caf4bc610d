"""``benchmarks/training.py``: its FLOPs, its table, and transformers' pass on a CPU; the native pass needs a GPU."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.models.config import ModelConfig

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    pytest.importorskip("triton", reason="the card is measured with Triton")
    return import_module("passes.cases"), import_module("passes.peer")


def test_flops_of_the_8b_shape(parts: Any) -> None:
    cases, _ = parts
    a_token = cases.flops(cases.Case("qwen3-8b", 4096, 2, False)) / 8192
    assert a_token == pytest.approx(6 * 7.57e9 + 3 * 4 * 2048 * 4096 * 36, rel=1e-3)


def test_transformers_pass_adds_up_gradients(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cases, peer = parts
    tiny = ModelConfig("qwen3", 128, 64, 96, 2, 4, 2, 16, 256, 1e-6, 1e4, tied_embeddings=False)
    monkeypatch.setattr(cases, "model_shape", lambda name: tiny)
    monkeypatch.setattr(peer, "CHUNK", 7)
    models: list[Any] = []
    import transformers

    exact = transformers.AutoModelForCausalLM.from_config
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", lambda *a, **k: models.append(exact(*a, **k)) or models[-1])
    for recompute in (False, True):
        one = peer.make_pass(cases.Case("tiny", 20, 3, recompute), "cpu")
        one()
        gradients = [parameter.grad.clone() for parameter in models[-1].parameters()]
        one()
        assert all(gradient.float().norm() > 0 for gradient in gradients)
        assert torch.allclose(models[-1].lm_head.weight.grad.float(), 2 * gradients[-1].float(), rtol=0.05, atol=1e-6)


def row(engine: str, mode: str, rate: float, uuid: str = "A", recompute: bool = False) -> dict[str, Any]:
    case = {"length": 4096, "sequences": 2, "recompute": recompute, "model_tflop_per_s": rate / 20, "peak_gib": 90.0}
    return {"engine": engine, "mode": mode, "shape": "qwen3-8b", "card": {"uuid": uuid}, "tokens_per_s": rate} | case


def test_ratios_are_taken_on_one_card_and_at_one_setting(tmp_path: Path) -> None:
    rows = [row("native", "fp8", 14000.0), row("native", "bf16", 10000.0), row("transformers", "bf16", 9000.0)]
    rows += [row("transformers", "bf16", 7000.0, recompute=True), row("native", "fp8", 15000.0, uuid="B")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    command = [sys.executable, BENCHMARKS / "training.py", "table", tmp_path]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "| 4,096 x 2 | isobit `fp8` | no | 14,000 | 700 | 1.40 | 1.56 | 90 |" in done.stdout
    assert "| 4,096 x 2 | isobit `fp8` | no | 15,000 | 750 | - | - | 90 |" in done.stdout
