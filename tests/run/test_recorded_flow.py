"""Runs of earlier versions, whose records have no format for the backward of INT8, go on and are
replayed with the one that they had: DGrad in FP8 and WGrad in BF16.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.cli.served_run import began_with
from isobit.cli.train import run_train
from isobit.commands.diff import diff
from isobit.commands.export import find_source
from isobit.commands.replay import replay
from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import RunConfig
from isobit.observe.run_record import read_run
from isobit.run.loop import train
from isobit.store.checkpoint import _json_sha256
from isobit.util.errors import ConfigError
from tests.tiny import small_run

MakeConfig = Callable[..., RunConfig]
BEFORE = {"preset": "int8", "dgrad": "fp8", "wgrad": "bf16"}
NAME = '{preset = "int8", dgrad = "fp8", wgrad = "bf16"}'
SETTINGS: dict[str, Any] = {
    "threads": 1,
    "training": {"steps": 3, "schedule": "constant"},
    "checkpoint": {"every": 1},
    "evaluation": {"every": 0},
}
SHORT: dict[str, Any] = {**SETTINGS, "training": {"steps": 1, "schedule": "constant"}}
COMPARED = ("digests.jsonl", "model/model.safetensors")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


REWARD = f"{__name__}:first_token"


def first_token(prompt: Any, completion: Any) -> float:
    return float(completion.token_ids[0] % 3)


@pytest.fixture
def make_run(make_config: MakeConfig) -> MakeConfig:
    """Runs whose rewards differ within a group, so that a backward counts."""
    return partial(make_config, REWARD)


def as_recorded_before(
    root: Path, change: Callable[[dict[str, Any]], None], table: str = "precision"
) -> None:
    """Give a table of a run's manifest and of those of its checkpoints the form of an earlier
    version.
    """
    for path in (root / "run.json", *root.glob("checkpoints/*/manifest.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        change(content["config"][table])
        if "sha256" in content:
            del content["sha256"]
            content["sha256"] = _json_sha256(content)
        path.write_text(json.dumps(content), encoding="utf-8")


def without_values(table: dict[str, Any]) -> None:
    table.update(dgrad=None, wgrad=None)


def without_keys(table: dict[str, Any]) -> None:
    for key in ("dgrad", "wgrad", "head"):  # head came later than wgrad
        del table[key]


@pytest.fixture(scope="module")
def whole(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("recorded") / "whole"
    torch.set_num_threads(1)
    train(small_run(tiny_folder, place, REWARD, precision=BEFORE, **SETTINGS))
    return place


@pytest.mark.few(1)
@pytest.mark.parametrize("change", [without_values, without_keys])
def test_a_run_of_an_earlier_version_goes_on_with_its_backward(
    change: Callable[[dict[str, Any]], None],
    make_run: MakeConfig,
    whole: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cut = make_run(precision=BEFORE, **SHORT)
    train(cut)
    as_recorded_before(cut.output, change)
    assert read_run(cut.output).flow == NAME
    assert began_with(cut.output)["precision"] == PrecisionConfig.model_validate(BEFORE).model_dump(
        mode="json"
    )
    exported = find_source(cut.output, 1, print).precision
    assert exported is not None and exported.name == NAME
    if change is without_keys:
        run_train([str(cut.output), "--resume", "--training.steps", "3"])
    else:
        train(make_run(precision="int8", **SETTINGS), resume=True)
    for name in COMPARED:
        assert (cut.output / name).read_bytes() == (whole / name).read_bytes(), name
    assert read_run(cut.output).flow == NAME
    assert not diff(cut.output, whole).notes
    as_recorded_before(cut.output, change)
    capsys.readouterr()
    assert replay(cut.output, 2).differences == []


def test_what_a_recipe_names_counts_and_what_it_leaves_open_is_the_runs(
    make_run: MakeConfig,
) -> None:
    train(make_run(precision=BEFORE, **SHORT))
    as_recorded_before(make_run().output, without_values)
    named = {"preset": "int8", "wgrad": "int8"}
    with pytest.raises(ConfigError, match=r"1 key differs.*\n.*precision.wgrad: 'bf16' in the run"):
        train(make_run(precision=named, **SETTINGS), resume=True)


def test_a_new_run_records_the_backward_that_it_has(make_run: MakeConfig, whole: Path) -> None:
    config = make_run(precision="int8", **SHORT)
    train(config)
    table = json.loads((config.output / "run.json").read_text())["config"]["precision"]
    assert (table["dgrad"], table["wgrad"]) == ("int8", "int8")
    assert read_run(config.output).flow == "int8"
    train(make_run(precision="int8", **SHORT), resume=True)
    ours, theirs = ((one / COMPARED[0]).read_text().splitlines() for one in (config.output, whole))
    assert ours[0] != theirs[0], "the two backwards give other weights"


NOTICE = "the recipe names no precision"


def naming_none(config: RunConfig) -> RunConfig:
    values = config.model_dump(exclude_unset=True)
    del values["precision"]
    return RunConfig.model_validate(values)


def test_a_recipe_that_names_no_precision_is_told_once(
    make_run: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    first = naming_none(make_run(**SHORT))
    train(first)
    said = capsys.readouterr().out
    assert said.count(NOTICE) == 1 and 'precision = "fp8" keeps' in said
    assert read_run(first.output).flow == "int8"
    train(naming_none(make_run(**SETTINGS)), resume=True)
    assert NOTICE not in capsys.readouterr().out
    replay(first.output, 1)
    assert NOTICE not in capsys.readouterr().out


def test_a_run_of_an_earlier_version_goes_on_in_fp8_where_its_recipe_names_none(
    make_run: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(make_run(output=tmp_path / "whole", precision="fp8", **SETTINGS))
    cut = make_run(precision="fp8", **SHORT)
    train(cut)
    as_recorded_before(cut.output, without_keys)
    train(naming_none(make_run(**SETTINGS)), resume=True)
    assert NOTICE not in capsys.readouterr().out
    for name in COMPARED:
        assert (cut.output / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert read_run(cut.output).flow == "fp8"


def test_a_run_whose_version_lacked_keys_of_today_goes_on(
    make_run: MakeConfig, whole: Path
) -> None:
    cut = make_run(precision=BEFORE, **SHORT)
    train(cut)
    for table, key in (("algorithm", "clip"), ("training", "rate_by_ess"), ("async", "lag")):
        as_recorded_before(cut.output, lambda found, key=key: found.pop(key), table)
    train(make_run(precision=BEFORE, **SETTINGS), resume=True)
    for name in COMPARED:
        assert (cut.output / name).read_bytes() == (whole / name).read_bytes(), name


def test_settings_and_bits_are_refused_in_one_message(
    make_run: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(make_run(**SHORT))
    monkeypatch.setattr("isobit.store.class_of_bits.kernels_sha256", lambda: "0" * 64)
    changed = make_run(**SETTINGS, seed=5)
    for allowed in ((), ("bits.device",)):
        with pytest.raises(ConfigError) as refused:
            train(changed, resume=True, allowed=allowed)
        said = str(refused.value)
        assert "seed: 0 in the run, 5 now" in said and "bits.kernels: SHA-256" in said
        assert "--allow-change seed,bits.kernels;" in said
        assert "may compute other bits" in said
    with pytest.raises(ConfigError) as refused:
        train(changed, resume=True, allowed=["bits"])
    assert "bits.kernels" not in str(refused.value)
    train(changed, resume=True, allowed=["seed", "bits"])


@pytest.mark.exhaustive
def test_a_run_of_an_earlier_version_goes_on_without_special_tokens_where_its_recipe_leaves_that(
    make_run: MakeConfig,
) -> None:
    def hidden(table: dict[str, Any]) -> None:
        assert table["special_tokens"] == "auto"
        table["special_tokens"] = "hide"

    train(make_run(**SHORT))
    as_recorded_before(make_run().output, hidden, "rollout")
    named = {**make_run().rollout.model_dump(exclude_unset=True), "special_tokens": "auto"}
    with pytest.raises(
        ConfigError, match=r"rollout\.special_tokens: 'hide' in the run, 'auto' now"
    ):
        train(make_run(**SETTINGS, rollout=named), resume=True)
    train(make_run(**SETTINGS), resume=True)
    recorded = json.loads((make_run().output / "run.json").read_text(encoding="utf-8"))
    assert recorded["config"]["rollout"]["special_tokens"] == "hide"
