"""``benchmarks.training``: its FLOPs, its cases, its tables, and both engines' passes and steps,
small, on a CPU.
"""

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isobit.models import config
from isobit.models.config import ModelConfig
from isobit.util.errors import ConfigError
from tests.forked import ran


@pytest.fixture
def parts(
    tiny: ModelConfig, card: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> SimpleNamespace:
    """The modules, with a tiny model under every name and one repetition."""
    names = ("cases", "native", "peer", "phases", "timing")
    found = SimpleNamespace(**{name: import_module(f"benchmarks.passes.{name}") for name in names})
    monkeypatch.setattr(found.timing, "measure_card", lambda: card)
    monkeypatch.setattr(found.timing, "REPEATS", 1)
    monkeypatch.setattr(found.timing, "STEP_REPEATS", 1)
    monkeypatch.setattr(found.peer, "CHUNK", 7)
    monkeypatch.setattr(found.timing, "allocate_in_pages", lambda: None)
    monkeypatch.setitem(config.SHAPES, "tiny", tiny)
    return found


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]


def test_flops_of_the_8b_shape(parts: Any) -> None:
    a_token = parts.cases.flops(parts.cases.Case("fp8", 4096, 2, "none")) / 8192
    assert a_token == pytest.approx(6 * 7.57e9 + 3 * 4 * (4096 / 2) * 4096 * 36, rel=1e-3)


def test_cases_are_read_and_refused(parts: Any) -> None:
    case = parts.cases.parse_case("fp8-linear:16384x4:mlp")
    assert case == parts.cases.Case("fp8-linear", 16384, 4, "mlp")
    assert case.tokens == 65536
    for wrong in (
        "fp4:4096x2:none",
        "fp8:4096:none",
        "fp8:4096x2:some",
        "fp8:4096x0:none",
        "fp8:1x2:none",
    ):
        with pytest.raises(Exception, match="write PRECISION:LENGTHxSEQUENCES:RECOMPUTE"):
            parts.cases.parse_case(wrong)
    with pytest.raises(
        ConfigError,
        match="bf16:4096x2:mlp: transformers trains in bf16, and recomputes none or full",
    ):
        parts.cases.check_peer([parts.cases.parse_case("bf16:4096x2:mlp")])


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_a_pass_of_each_engine_is_timed(engine: str, parts: Any, tmp_path: Path) -> None:
    module = parts.native if engine == "native" else parts.peer
    case = parts.cases.Case("bf16", 20, 3, "full", "tiny")
    parts.timing.measure_passes(
        lambda case: module.make_pass(case, "cpu"), engine, [case], tmp_path
    )
    (row,) = rows_of(tmp_path)
    assert (row["kind"], row["engine"], row["length"], row["sequences"], row["recompute"]) == (
        "pass",
        engine,
        20,
        3,
        "full",
    )
    assert row["tokens_per_s"] == pytest.approx(60 / row["seconds"])


@pytest.mark.parametrize(
    ("engine", "mode"), [("native", "bf16"), ("native", "fp8"), ("transformers", "bf16")]
)
def test_a_step_of_each_engine_has_all_phases(
    engine: str, mode: str, parts: Any, tmp_path: Path
) -> None:
    module = parts.native if engine == "native" else parts.peer
    case = parts.cases.Case(mode, 20, 3, "none", "tiny")
    parts.timing.measure_steps(
        lambda case, count: module.make_step(case, count, "cpu"), engine, [case], 150, tmp_path
    )
    (row,) = rows_of(tmp_path)
    assert (row["kind"], row["step_tokens"]) == ("step", 180), (
        "three micro-batches of 60 tokens hold 150"
    )
    assert row["phases_s"].keys() >= {"forward", "backward", "optimiser", "publish"}
    assert sum(row["phases_s"].values()) == pytest.approx(row["seconds"])


def test_a_case_that_does_not_fit_leaves_a_row_and_the_next_is_measured(
    parts: Any, tmp_path: Path
) -> None:
    def make(case: Any) -> Any:
        if case.length == 40:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return parts.native.make_pass(case, "cpu")

    cases = [parts.cases.Case("bf16", length, 2, "none", "tiny") for length in (40, 20)]
    parts.timing.measure_passes(make, "native", cases, tmp_path)
    failed, measured = rows_of(tmp_path)
    assert failed["error"] == "out of memory" and "tokens_per_s" not in failed
    assert measured["length"] == 20 and "error" not in measured


def test_phases_interrupt_each_other_and_add_up(
    parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    monkeypatch.setattr(parts.phases, "perf_counter", lambda: next(times))
    phases = parts.phases.Phases(on_gpu=False)
    phases.start()
    with phases("backward"), phases("forward"):
        pass
    assert phases.stop() == {"other": 1.0 + 5.0, "backward": 2.0 + 4.0, "forward": 3.0}


def test_the_peers_pass_adds_up_gradients(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[Any] = []
    made = parts.peer.PeerModel.__init__
    monkeypatch.setattr(
        parts.peer.PeerModel,
        "__init__",
        lambda self, *a: (made(self, *a), models.append(self.model))[0],
    )
    for recompute in ("none", "full"):
        one = parts.peer.make_pass(parts.cases.Case("bf16", 20, 3, recompute, "tiny"), "cpu")
        one()
        gradients = [parameter.grad.clone() for parameter in models[-1].parameters()]
        one()
        assert all(gradient.float().norm() > 0 for gradient in gradients)
        assert torch.allclose(
            models[-1].lm_head.weight.grad.float(), 2 * gradients[-1].float(), rtol=0.05, atol=1e-6
        )


def test_the_peers_optimiser_moves_masters_and_publishes_their_rounding(parts: Any) -> None:
    model = torch.nn.Linear(64, 32).bfloat16()
    before = model.weight.detach().float()
    optimiser = parts.peer.PeerOptimiser(
        model, parts.native.TrainingConfig(moments="bf16", learning_rate=0.01)
    )
    gradients = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].clone()
    optimiser.step(parts.phases.Phases(on_gpu=False))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(model.weight, optimiser._masters[0].bfloat16())
    step = optimiser._masters[0] - before
    assert torch.allclose(step, -0.01 * gradients["weight"].float().sign(), atol=1e-4), (
        "the first step of AdamW"
    )


def pass_row(engine: str, mode: str, rate: float, uuid: str = "A", **other: Any) -> dict[str, Any]:
    case = {
        "kind": "pass",
        "length": 4096,
        "sequences": 2,
        "recompute": "none",
        "model_tflop_per_s": rate / 20,
        "peak_gib": 90.0,
    }
    return (
        {
            "engine": engine,
            "mode": mode,
            "shape": "qwen3-8b",
            "card": {"uuid": uuid},
            "tokens_per_s": rate,
        }
        | case
        | other
    )


def step_row(engine: str, mode: str, rate: float, **other: Any) -> dict[str, Any]:
    phases = {"forward": 2.0, "backward": 4.0, "optimiser": 0.25, "publish": 0.05}
    return pass_row(engine, mode, rate, kind="step", step_tokens=65536, phases_s=phases) | other


def table(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    done = ran("tests.forked:be_module", folder, "benchmarks.training", "table", str(folder))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ratios_of_passes_are_taken_on_one_card_and_at_one_setting(tmp_path: Path) -> None:
    rows = [
        pass_row("native", "fp8", 14000.0),
        pass_row("native", "bf16", 10000.0),
        pass_row("transformers", "bf16", 9000.0),
    ]
    rows += [
        pass_row("transformers", "bf16", 7000.0, recompute="full"),
        pass_row("native", "fp8", 15000.0, uuid="B"),
    ]
    failed = pass_row("native", "bf16", 0.0, sequences=4) | {"error": "out of memory"}
    failed.pop("tokens_per_s")
    shown = table(tmp_path, [*rows, failed, {"kind": "rl", "engine": "native"}])
    assert "| 4,096 x 2 | isobit `fp8` | none | 14,000 | 700 | 1.40 | 1.56 | 90 |" in shown
    assert "| 4,096 x 2 | isobit `fp8` | none | 15,000 | 750 | - | - | 90 |" in shown
    assert "| 4,096 x 4 | isobit `bf16` | none | out of memory |" in shown


def test_a_step_is_held_against_the_fastest_bf16_step_of_its_length(tmp_path: Path) -> None:
    rows = [
        step_row("native", "fp8", 12000.0, recompute="mlp"),
        step_row("native", "bf16", 8000.0),
        pass_row("native", "bf16", 10000.0),
    ]
    rows += [
        step_row("native", "bf16", 7500.0, recompute="full"),
        step_row("transformers", "bf16", 6000.0, recompute="full"),
    ]
    shown = table(tmp_path, rows)
    assert (
        "| 4,096 x 2 | isobit `fp8` | mlp | 65,536 | 2.00 | 4.00 | 0.25 | 0.05 | 12,000 | 1.50 | "
        "2.00 | 90 |" in shown
    )
    assert "| 4,096 x 2 | isobit `bf16` | none | 10,000 | 500 | 1.00 | - | 90 |" in shown
