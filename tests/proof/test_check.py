"""What a run does in a step where rollout and training part."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from isobit.cli.main import main
from isobit.config.load import dump_config
from isobit.config.recipes import RunConfig
from isobit.config.tables import CheckConfig, PrecisionConfig, Preset, named_precision
from isobit.kernels.spec import head
from isobit.precision.flow import LinearShape, PrecisionFlow, build_flow
from isobit.proof.doctor_findings import check_state, check_step
from isobit.records.metrics import Metrics
from isobit.run.loop import train
from isobit.store.state import StateDigest
from isobit.training.comparison import Comparison, mismatch
from isobit.training.step import StepMetrics
from isobit.training.trainer import Repeat
from isobit.util.errors import MismatchError
from tests.sites import shape_of_layers

MakeConfig = Callable[..., RunConfig]
Action = Literal["warn", "stop", "ignore"]
MODEL = Path("runs/a/model")
EQUAL, PARTED = Comparison(8, 0, 0.0, 0.0), Comparison(8, 3, 0.5, 0.8)


def flow(precision: Preset | PrecisionConfig) -> PrecisionFlow:
    return build_flow(
        named_precision(precision),
        shape_of_layers(1, {"qkv_proj": LinearShape({"qkv_proj": 128}, 128)}),
    )


def step(
    comparison: Comparison, apart: Metrics | None = None, repeat: Repeat | None = None
) -> StepMetrics:
    """What a step found."""
    return StepMetrics({}, (), comparison, apart or {}, 8, 0, 8, True, repeat)


LEFT = StateDigest("0" * 16, "1" * 16, "2" * 16)


def test_a_state_that_is_not_what_was_left_is_named() -> None:
    assert check_state(CheckConfig(), LEFT, LEFT) == []
    changed = replace(LEFT, masters="3" * 16, moments="4" * 16)
    (line,) = check_state(CheckConfig(), LEFT, changed)
    assert line.startswith("masters and moments in memory are not what the last update left; a")
    assert check_state(CheckConfig(on_mismatch="ignore"), LEFT, changed) == []
    with pytest.raises(MismatchError, match="masters and moments in memory"):
        check_state(CheckConfig(on_mismatch="stop"), LEFT, changed)


@pytest.fixture
def make_config(make_config: MakeConfig, write_reward: Callable[[str], str]) -> MakeConfig:
    """Runs whose rewards differ within a group, so that there is something to learn."""
    reward = write_reward("return sum(completion.token_ids) / 1000")
    return lambda **sections: make_config(reward, **sections)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of every forward is recorded one unit in the last place too low."""
    exact = head.log_softmax

    def log_softmax(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        log_probs = exact(logits, temperatures)
        log_probs[0] = torch.nextafter(log_probs[0], torch.tensor(-torch.inf))
        return log_probs

    monkeypatch.setattr(head, "log_softmax", log_softmax)


@pytest.mark.parametrize("action", ["warn", "stop"])
def test_nothing_is_said_of_a_step_without_a_difference(action: Action) -> None:
    assert check_step(CheckConfig(on_mismatch=action), flow("bf16"), step(EQUAL), MODEL) == []


def test_one_differing_token_of_an_exact_flow_warns_and_names_the_command() -> None:
    (line,) = check_step(CheckConfig(), flow("bf16"), step(PARTED), MODEL)
    assert "3 of 8 log-probabilities differ" in line
    assert "isobit verify runs/a/model --precision bf16 --bisect" in line
    assert check_step(CheckConfig(on_mismatch="ignore"), flow("bf16"), step(PARTED), MODEL) == []


@pytest.mark.parametrize(("limit", "lines"), [(None, 0), (0.2, 0), (0.05, 1)])
def test_a_flow_of_two_functions_is_held_to_its_mean_difference(
    limit: float | None, lines: int
) -> None:
    found = check_step(CheckConfig(max_mean_diff=limit), flow("fp8-rollout"), step(PARTED), MODEL)
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
                CheckConfig(on_mismatch="stop", max_mean_diff=0.05),
                flow(preset),
                step(PARTED),
                MODEL,
            )


def test_the_advice_is_of_the_flow_with_its_options() -> None:
    ours = flow(PrecisionConfig(preset="fp8", attention="int8"))
    (line,) = check_step(CheckConfig(), ours, step(PARTED), MODEL)
    table = """'{preset = "fp8", attention = "int8"}'"""  # as a shell takes it
    assert f"isobit verify runs/a/model --precision {table} --bisect" in line


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


def test_a_ratio_that_is_far_out_is_told_of_in_any_flow() -> None:
    """C6 31: a ratio of 141 was a figure only."""
    trained = torch.tensor([0.0, 4.95])
    far = step(EQUAL, mismatch(torch.zeros(2), trained))
    for preset in ("bf16", "fp8-rollout"):
        (line,) = check_step(CheckConfig(), flow(preset), far, MODEL)
        assert "reach from 1 to 141, beyond check.max_ratio = 100" in line
    below = step(EQUAL, mismatch(trained, torch.zeros(2)))
    assert len(check_step(CheckConfig(), flow("bf16"), below, MODEL)) == 1
    assert check_step(CheckConfig(max_ratio=200), flow("bf16"), far, MODEL) == []
    assert check_step(CheckConfig(max_ratio=None), flow("bf16"), far, MODEL) == []
    with pytest.raises(MismatchError, match="probability ratios"):
        check_step(CheckConfig(on_mismatch="stop"), flow("fp8-rollout"), far, MODEL)


def test_a_micro_batch_that_did_not_repeat_is_told_of() -> None:
    found = step(EQUAL, repeat=Repeat(26, ("forward", "embed_tokens.weight")))
    (line,) = check_step(CheckConfig(), flow("fp8-rollout"), found, MODEL)
    assert "its forward and 1 of 26 gradients, embed_tokens.weight first" in line
    assert "isobit doctor" in line
    assert check_step(CheckConfig(), flow("bf16"), step(EQUAL, repeat=Repeat(26, ())), MODEL) == []
    with pytest.raises(MismatchError, match="computed twice"):
        check_step(CheckConfig(on_mismatch="stop"), flow("bf16"), found, MODEL)


def test_a_run_repeats_a_micro_batch_every_so_many_steps(make_config: MakeConfig) -> None:
    config = make_config(data={"eval": {}}, check={"repeat_every": 2})
    train(config)
    lines = [
        json.loads(text)
        for text in (config.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    found = [line.get("check/gradients_repeated") for line in lines]
    assert found[0] is None and found[1] > 0
    assert lines[1]["check/gradients_differing"] == lines[1]["check/forwards_differing"] == 0
