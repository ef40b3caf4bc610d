"""Figures by documented names, in JSONL and TensorBoard.

Weights & Biases through a module that stands in for its package.
"""

import json
import math
import posixpath
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from isobit.config.recipes import RunConfig, SftConfig
from isobit.config.tables import TrackingConfig
from isobit.observe.group_metrics import length_metrics, reward_metrics
from isobit.observe.metrics import COLUMNS, MetricsWriter, MlflowTracker, open_trackers
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.run.loop import train
from isobit.run.sft import sft
from isobit.util.errors import ConfigError


def group(rewards: list[float | None], lengths: list[int]) -> Group:
    completions = [
        Completion(TokenSequence.of_answer((1,), (5,) * n), "", "length" if n == 4 else "stop")
        for n in lengths
    ]
    return Group(Prompt("set/0", "", (1, 2, 3)), 0, completions, rewards)


GROUPS = [group([1.0, None], [2, 4]), group([0.0, 0.5], [1, 1])]


def test_rewards_leave_out_those_that_failed() -> None:
    assert reward_metrics(GROUPS) == pytest.approx(
        {"reward/mean": 0.5, "reward/std": math.sqrt(1 / 6)}
    )


def test_lengths_are_of_all_completions() -> None:
    assert length_metrics(GROUPS) == {
        "response_length/mean": 2.0,
        "response_length/max": 4,
        "response_length/truncated": 0.25,
    }


def test_a_line_and_an_event_a_figure_are_there_once_written(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl", tmp_path / "tensorboard") as writer:
        for write in writer.writes(3, {"loss": 0.5, "grad_norm": math.nan}):
            write()
        assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
            "step": 3,
            "loss": 0.5,
            "grad_norm": None,
        }
        for write in writer.writes(4, {"loss": 0.25}):
            write()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(3, 0.5), (4, 0.25)]


MakeConfig = Callable[..., RunConfig]


class FakeWandb(SimpleNamespace):
    """Records what is sent to it."""

    def __init__(self) -> None:
        super().__init__(started=[], sent=[], exit_codes=[], refusal=None)

    def login(self) -> bool:
        if self.refusal:
            raise RuntimeError(self.refusal)
        return True

    def init(self, **options: Any) -> SimpleNamespace:
        self.started.append(options)
        return SimpleNamespace(
            log=lambda metrics, step: self.sent.append((step, metrics)), finish=self.finish
        )

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)

    def Table(self, columns: list[str], data: list[list[Any]]) -> list[dict[str, Any]]:  # noqa: N802
        return [dict(zip(columns, row, strict=True)) for row in data]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    return fake


def test_a_run_sends_every_figure_that_it_writes(wandb: FakeWandb, make_config: MakeConfig) -> None:
    config = make_config(tracking={"wandb": True})
    train(config)
    (started,) = wandb.started
    assert (started["project"], started["name"], started["config"]) == (
        "isobit",
        "run",
        config.model_dump(mode="json"),
    )
    figures = [(step, sent) for step, sent in wandb.sent if "completions" not in str(sent)]
    assert [step for step, _ in figures] == [0, 1, 2, 2]
    assert "eval/held_out/accuracy" in figures[0][1] and "reward/mean" in figures[1][1]
    tables = [(step, name) for step, sent in wandb.sent for name in sent if "completions" in name]
    assert tables == [
        (0, "completions/held_out"),
        (1, "completions/train"),
        (2, "completions/train"),
        (2, "completions/held_out"),
    ]
    assert wandb.exit_codes == [0]


def test_supervised_runs_send_theirs_too(
    wandb: FakeWandb, tiny_folder: Path, tmp_path: Path
) -> None:
    train_set = {"type": "jsonl", "path": "starter:train.jsonl", "completion": "answer", "limit": 4}
    training = {"steps": 2, "prompts_per_step": 2}
    config = {
        "model": str(tiny_folder),
        "output": tmp_path / "sft",
        "data": {"train": train_set},
        "training": training,
    }
    sft(SftConfig.model_validate(config | {"tracking": {"wandb": "sums"}}))
    assert [step for step, metrics in wandb.sent if "loss" in metrics] == [1, 2]


def test_a_run_that_fails_says_so_there(
    wandb: FakeWandb, make_config: MakeConfig, write_reward: Callable[[str], str]
) -> None:
    config = make_config(
        write_reward("return 1 / 0"), data={"eval": {}}, tracking={"wandb": "sums"}
    )
    with pytest.raises(Exception, match="ZeroDivisionError"):
        train(config)
    assert wandb.started[0]["project"] == "sums" and wandb.exit_codes == [1]


def test_a_resumed_run_goes_on_under_its_id(wandb: FakeWandb, tmp_path: Path) -> None:
    for name in ("a", "a", "b"):
        (tmp_path / name).mkdir(exist_ok=True)
        assert open_trackers(TrackingConfig(wandb=True), tmp_path / name, {})
    first, again, other = (started["id"] for started in wandb.started)
    assert first == again != other
    assert all(started["resume"] == "allow" for started in wandb.started)


def test_a_missing_package_is_said_before_anything_is_written(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type]
    config = make_config(tracking={"wandb": True})
    with pytest.raises(ConfigError, match="pip install wandb"):
        train(config)
    assert not config.output.exists() or not list(config.output.iterdir())


def test_a_login_that_fails_is_said_before_anything_is_written(
    wandb: FakeWandb, make_config: MakeConfig
) -> None:
    wandb.refusal = "No API key configured."
    config = make_config(tracking={"wandb": True})
    with pytest.raises(ConfigError, match=r"\(No API key configured\): run `wandb login`"):
        train(config)
    assert not config.output.exists() or not list(config.output.iterdir())


def test_without_the_setting_the_package_is_not_touched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type]
    assert open_trackers(TrackingConfig(), tmp_path, {}) == []


ROWS = [{"prompt": "a|b", "completion": "1\n2", "reward": 1.0, "answer": 3, "tokens": 2, "step": 1}]


class FakeLibrary(SimpleNamespace):
    """Stands in for trackio, swanlab or mlflow: records every call."""

    def __init__(self) -> None:
        super().__init__(calls=[])

    def __getattr__(self, name: str) -> Any:
        def call(*values: Any, **options: Any) -> Any:
            self.calls.append((name, values, options))
            return self if name in {"init", "start_run"} else (name, values, options)

        return call

    @property
    def info(self) -> SimpleNamespace:
        return SimpleNamespace(run_id="made by the server")

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(values, options) for made, values, options in self.calls if made == name]


def in_two_lives(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """A run that is tracked by a service, and resumed."""
    library = FakeLibrary()
    monkeypatch.setitem(sys.modules, name, library)  # type: ignore[arg-type]
    tracking = TrackingConfig.model_validate(
        {"to": name, "project": "p", "name": "n", "tags": ["t"]}
    )
    for step in (1, 2):
        trackers = open_trackers(tracking, tmp_path, {"model": "starter", "a": {"b c": 1}})
        jsonl, events = tmp_path / "m.jsonl", tmp_path / "tensorboard"
        with MetricsWriter(jsonl, events, trackers) as writer:
            for write in writer.writes(step, {"loss": 0.5}) + writer.tables(step, "train", ROWS):
                write()
    return library


def test_mlflow_goes_on_with_its_run_and_sets_parameters_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = in_two_lives("mlflow", tmp_path, monkeypatch)
    assert [values for values, _ in library.of("set_experiment")] == [("p",), ("p",)]
    first, again = (options for _, options in library.of("start_run"))
    assert (first["run_id"], again["run_id"]) == (None, "made by the server")
    assert first["run_name"] == "n" and first["tags"] == {"t": ""}
    assert library.of("log_params") == [(({"model": "starter", "a.b_c": "1"},), {})]
    assert [options["step"] for _, options in library.of("log_metrics")] == [1, 2]
    (text, place), _ = library.of("log_text")[0]
    assert place == "completions/train/step_000001.json"
    assert json.loads(text) == {
        "columns": list(COLUMNS),
        "data": [["a|b", "1\n2", 1.0, "3", None, 2]],
    }
    assert library.of("end_run") == [(("FINISHED",), {})] * 2


@pytest.mark.parametrize(("name", "key"), [("trackio", "name"), ("swanlab", "id")])
def test_trackio_and_swanlab_go_on_with_their_run(
    name: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = in_two_lives(name, tmp_path, monkeypatch)
    first, again = (options for _, options in library.of("init"))
    assert first == again and first["resume"] == "allow" and first["project"] == "p"
    assert len(first[key]) > 12
    logged = library.of("log")
    assert [options["step"] for _, options in logged] == [1, 1, 2, 2]
    assert logged[0][0] == ({"loss": 0.5},) and "completions/train" in logged[1][0][0]
    assert len(library.of("finish")) == 2


def test_a_service_that_fails_is_told_of_once_and_ends_nothing(tmp_path: Path) -> None:
    class Gone:
        service = "mlflow"

        def write(self, step: int, metrics: Any) -> None:
            raise ConnectionError("no route")

        def close(self, failed: bool) -> None:
            pass

    said: list[str] = []
    files = tmp_path / "metrics.jsonl", tmp_path / "tensorboard"
    with MetricsWriter(*files, [Gone()], said.append) as writer:  # type: ignore[list-item]
        for step in (1, 2, 3):
            for write in writer.writes(step, {"loss": 0.5}):
                write()
    assert len(said) == 2 and "mlflow" in said[0] and "ConnectionError: no route" in said[0]
    assert "failed 3 times" in said[1]
    assert len(files[0].read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("eval/math/pass@2", "eval/math/pass_at_2"),
        ("eval/math/accuracy", "eval/math/accuracy"),
        ("reward/no_reward/mean", "reward/no_reward/mean"),
        ("episode/failed/KeyError('a')", "episode/failed/KeyError__a__"),
        ("eval/../pass@1", "eval/_/pass_at_1"),
        ("eval//high", "eval/_/high"),
        ("eval/a+b, c/low", "eval/a_b_ c/low"),
    ],
)
def test_mlflow_takes_the_names_of_metrics(name: str, taken: str) -> None:
    tracker = object.__new__(MlflowTracker)
    tracker._library = MagicMock()
    tracker.write(3, {name: 0.5})
    tracker._library.log_metrics.assert_called_once_with({taken: 0.5}, step=3)
    assert re.fullmatch(r"[/\w.\- :]*", taken) and posixpath.normpath(taken) == taken


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio", "swanlab"])
def test_each_missing_package_is_named_with_the_line_that_installs_it(
    name: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    config = make_config(tracking={"to": [name]})
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        train(config)
    assert not config.output.exists()


def test_tensorboard_gets_completions_as_text_where_it_is_named(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(tracking={"to": ["tensorboard"]})
    train(config)
    events = EventAccumulator(str(config.output / "tensorboard")).Reload()
    found = events.Tensors("completions/train")
    assert [event.step for event in found] == [1, 2]
    assert found[0].tensor_proto.string_val[0].decode().startswith("| prompt | completion |")
