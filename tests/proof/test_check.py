"""What a run does in a step where rollout and training part."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch

from isobit.cli.main import main
from isobit.config.check import CheckConfig
from isobit.config.load import dump_config
from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.run import RunConfig
from isobit.errors import MismatchError
from isobit.kernels.spec import sampling
from isobit.precision.flow import LinearShape, PrecisionFlow, build_flow
from isobit.proof.check import check_step
from isobit.run.rl.loop import train
from isobit.training.comparison import Comparison
from tests.sites import shape_of_layers

MakeConfig = Callable[..., RunConfig]
Action = Literal["warn", "stop", "ignore"]
MODEL = Path("runs/a/model")
EQUAL, PARTED = Comparison(8, 0, 0.0, 0.0), Comparison(8, 3, 0.5, 0.8)


def flow(preset: Preset) -> PrecisionFlow:
    return build_flow(
        PrecisionConfig(preset=preset),
        shape_of_layers(1, {"qkv_proj": LinearShape({"qkv_proj": 128}, 128)}),
    )


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of every forward is recorded one unit in the last place too low."""
    exact = sampling.log_softmax

    def log_softmax(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        log_probs = exact(logits, temperatures)
        log_probs[0] = torch.nextafter(log_probs[0], torch.tensor(-torch.inf))
        return log_probs

    monkeypatch.setattr(sampling, "log_softmax", log_softmax)


@pytest.mark.parametrize("action", ["warn", "stop"])
def test_nothing_is_said_of_a_step_without_a_difference(action: Action) -> None:
    assert check_step(CheckConfig(on_mismatch=action), flow("bf16"), EQUAL, MODEL) == []


def test_one_differing_token_of_an_exact_flow_warns_and_names_the_command() -> None:
    (line,) = check_step(CheckConfig(), flow("bf16"), PARTED, MODEL)
    assert "3 of 8 log-probabilities differ" in line
    assert "isobit verify runs/a/model --precision bf16 --bisect" in line
    assert check_step(CheckConfig(on_mismatch="ignore"), flow("bf16"), PARTED, MODEL) == []


@pytest.mark.parametrize(("limit", "lines"), [(None, 0), (0.2, 0), (0.05, 1)])
def test_a_flow_of_two_functions_is_held_to_its_mean_difference(
    limit: float | None, lines: int
) -> None:
    found = check_step(CheckConfig(max_mean_diff=limit), flow("fp8-rollout"), PARTED, MODEL)
    assert len(found) == lines
    assert all(
        "0.1 nats on average, more than check.max_mean_diff = 0.05" in line for line in found
    )


def test_stop_raises_whatever_the_flow() -> None:
    for preset in ("fp8", "fp8-rollout"):
        with pytest.raises(
            MismatchError, match=f"isobit verify runs/a/model --precision {preset} --bisect"
        ):
            check_step(
                CheckConfig(on_mismatch="stop", max_mean_diff=0.05), flow(preset), PARTED, MODEL
            )


@pytest.mark.usefixtures("planted")
def test_a_run_that_warns_goes_on_and_counts(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(data={"eval": {}})
    assert train(config).tokens_differing > 0
    printed = capsys.readouterr().out
    assert printed.count("in a flow where none should") == config.training.steps, "once a step"
    assert f"isobit verify {config.output / 'model'} --precision fp8 --bisect" in printed


@pytest.mark.usefixtures("planted")
def test_a_run_told_to_stop_ends_after_the_step_and_keeps_its_figures_and_weights(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(data={"eval": {}}, check={"on_mismatch": "stop"})
    recipe = tmp_path / "run.toml"
    recipe.write_text(dump_config(config), encoding="utf-8")
    assert main(["train", str(recipe)]) == MismatchError.exit_code == 3
    assert (
        f"isobit verify {config.output / 'model'} --precision fp8 --bisect"
        in capsys.readouterr().err
    )
    (line,) = [
        json.loads(text)
        for text in (config.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert line["step"] == 1 and line["log_prob_diff/tokens_differing"] > 0
    assert (config.output / "model" / "model.safetensors").exists()


def test_an_exact_run_told_to_stop_runs_to_its_end(make_config: MakeConfig) -> None:
    config = make_config(data={"eval": {}}, check={"on_mismatch": "stop"})
    assert train(config).tokens_differing == 0
