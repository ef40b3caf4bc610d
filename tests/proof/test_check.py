"""What a run does in a step where rollout and training part."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from isobit.cli.main import main
from isobit.config.load import dump_config
from isobit.config.precision import PrecisionConfig, Preset, named_precision
from isobit.config.recipes import RunConfig
from isobit.config.tables import CheckConfig
from isobit.kernels.spec import head
from isobit.precision.flow import LinearShape, PrecisionFlow, build_flow
from isobit.records.metrics import Metrics
from isobit.run import loop
from isobit.run.loop import train
from isobit.run.pending import GradedBatch
from isobit.run.rl_run import RlRun
from isobit.store.state import StateDigest
from isobit.training.checks import check_state, check_step
from isobit.training.comparison import Comparison, mismatch
from isobit.training.repeat import Repeat
from isobit.training.step import Findings
from isobit.util.errors import MismatchError
from tests.sites import shape_of_layers
from tests.tiny import json_lines

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
) -> Findings:
    """What a step found."""
    return Findings(comparison, apart or {}, repeat)


LEFT = StateDigest("0" * 16, "1" * 16, "2" * 16)


def test_a_state_that_is_not_what_was_left_is_named() -> None:
    assert check_state(CheckConfig(), LEFT, LEFT, True) == []
    changed = replace(LEFT, masters="3" * 16, moments="4" * 16)
    for check, exact in ((CheckConfig(on_mismatch="warn"), True), (CheckConfig(), False)):
        (line,) = check_state(check, LEFT, changed, exact)
        assert line.startswith("masters and moments in memory are not what the last update left; a")
    assert check_state(CheckConfig(on_mismatch="ignore"), LEFT, changed, True) == []
    for check, exact in ((CheckConfig(on_mismatch="stop"), False), (CheckConfig(), True)):
        with pytest.raises(MismatchError, match="masters and moments in memory"):
            check_state(check, LEFT, changed, exact)


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
    (line,) = check_step(CheckConfig(on_mismatch="warn"), flow("bf16"), step(PARTED), MODEL)
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


def test_by_default_an_exact_flow_stops_and_others_warn() -> None:
    with pytest.raises(MismatchError, match='is "stop", as by default in an exact flow'):
        check_step(CheckConfig(), flow("bf16"), step(PARTED), MODEL)
    far = step(PARTED, {"mismatch/ratio_min": 1.0, "mismatch/ratio_max": 200.0})
    for ours, one_function in ((flow("fp8-rollout"), True), (flow("bf16"), False)):
        (line,) = check_step(CheckConfig(), ours, far, MODEL, one_function)
        assert "beyond check.max_ratio" in line


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
    (line,) = check_step(CheckConfig(on_mismatch="warn"), ours, step(PARTED), MODEL)
    table = """'{preset = "fp8", attention = "int8"}'"""  # as a shell takes it
    assert f"isobit verify runs/a/model --precision {table} --bisect" in line


@pytest.mark.usefixtures("planted")
def test_a_run_that_warns_goes_on_and_counts(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(data={"eval": {}}, check={"on_mismatch": "warn"})
    assert train(config).tokens_differing > 0
    printed = capsys.readouterr().out
    assert printed.count("in a flow where none should") == config.training.steps, "once a step"
    assert f"isobit verify {config.output / 'model'} --precision fp8 --bisect" in printed


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize("old", ["auto", "recomputed"])
def test_an_exact_run_ends_before_it_learns_and_keeps_its_figures_and_weights(
    old: str,
    make_config: MakeConfig,
    tmp_path: Path,
    tiny_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_config(data={"eval": {}}, training={"old_log_probs": old})
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
    assert json_lines(config.output / "completions.jsonl")
    left, begun = (
        folder / "model.safetensors" for folder in (config.output / "model", tiny_folder)
    )
    assert left.read_bytes() == begun.read_bytes()


def damaged_batch(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One log-probability of the batch that is sampled after so many others is another."""
    whole, made = loop.collect, count(1)

    def collect(run: RlRun) -> GradedBatch:
        batch = whole(run)
        if next(made) != number:
            return batch
        (first, *others), *rest = [[*group.completions] for group in batch.groups]
        log_probs = list(first.log_probs)
        log_probs[0] = np.nextafter(np.float32(log_probs[0]), np.float32(-np.inf))
        damaged = replace(first, sequence=first.sequence.with_columns(log_probs=log_probs))
        groups = [
            replace(group, completions=completions)
            for group, completions in zip(batch.groups, [[damaged, *others], *rest], strict=True)
        ]
        return replace(batch, groups=groups)

    monkeypatch.setattr(loop, "collect", collect)


@pytest.mark.few(1)
@pytest.mark.parametrize("lag", [0, 1])
def test_a_fault_that_does_not_come_again_leaves_no_trace(
    lag: int, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The checkpoint behind the last good step is usable, also where the bad batch would wait."""
    sections = {"data": {"eval": {}}, "training": {"steps": 4}, "async": {"lag": lag}}
    whole = make_config(**sections, output=tmp_path / "whole")
    assert train(whole).tokens_differing == 0
    config = make_config(**sections)
    with monkeypatch.context() as patch:
        damaged_batch(3, patch)
        with pytest.raises(MismatchError, match=r"1 of \d+ log-probabilities differ"):
            train(config)
    ending = json.loads((config.output / "ending.json").read_text(encoding="utf-8"))
    assert ending["checkpoint"] == 2 - lag, "batch 3 is sampled in step 3, or ahead in step 2"
    train(config, resume=True)
    for name in ("model/model.safetensors", "digests.jsonl", "completions.jsonl"):
        assert (config.output / name).read_bytes() == (whole.output / name).read_bytes()


@pytest.mark.usefixtures("planted")
def test_a_run_that_has_warned_goes_on_so_where_the_recipe_leaves_it_open(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """Earlier versions recorded their default, which was to warn."""
    begun = {"data": {"eval": {}}, "check": {"on_mismatch": "warn"}}
    train(make_config(**begun, training={"steps": 1}))
    for steps in (2, 3):
        train(make_config(data={"eval": {}}, training={"steps": steps}), resume=True)
        assert 'check.on_mismatch is "warn", as the run has recorded' in capsys.readouterr().out
    with pytest.raises(MismatchError):
        train(
            make_config(**begun | {"check": {"on_mismatch": "stop"}}, training={"steps": 4}),
            resume=True,
        )


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize("check", [{}, {"on_mismatch": "stop"}])
def test_a_flow_of_two_functions_goes_on(check: dict[str, str], make_config: MakeConfig) -> None:
    config = make_config(data={"eval": {}}, precision="fp8-rollout", check=check)
    assert train(config).tokens_differing > 0


def test_a_micro_batch_that_does_not_repeat_stops_the_run_before_it_learns(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tiny_folder: Path
) -> None:
    found = Repeat(26, ("norm.weight",))
    monkeypatch.setattr("isobit.training.trainer.compare_passes", lambda _: found)
    config = make_config(data={"eval": {}}, check={"repeat_every": 1})
    with pytest.raises(MismatchError, match="computed twice"):
        train(config)
    left, begun = (
        folder / "model.safetensors" for folder in (config.output / "model", tiny_folder)
    )
    assert left.read_bytes() == begun.read_bytes()


def test_a_ratio_that_is_far_out_is_told_of_in_any_flow() -> None:
    """C6 31: a ratio of 141 was a figure only."""
    trained = torch.tensor([0.0, 4.95])
    far = step(EQUAL, mismatch(torch.zeros(2), trained))
    for preset in ("bf16", "fp8-rollout"):
        (line,) = check_step(CheckConfig(on_mismatch="warn"), flow(preset), far, MODEL)
        assert "reach from 1 to 141, beyond check.max_ratio = 100" in line
    below = step(EQUAL, mismatch(trained, torch.zeros(2)))
    assert len(check_step(CheckConfig(on_mismatch="warn"), flow("bf16"), below, MODEL)) == 1
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
