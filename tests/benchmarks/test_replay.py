"""``benchmarks.replay`` on the tiny model: every replayed log-probability is compared with that of
the weights that drew it.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import replay
from isobit.config.recipes import RunConfig
from isobit.models.frozen import FrozenPolicy

MakeConfig = Callable[..., RunConfig]
WriteReward = Callable[[str], str]


@pytest.fixture
def config(make_config: MakeConfig, write_reward: WriteReward) -> RunConfig:
    """Three steps of six completions, half of each batch replayed from the second on."""
    return make_config(
        write_reward("return float(completion.token_ids[0] % 2)"),
        replay={"fraction": 0.5, "max_staleness": 4},
        training={"steps": 3, "epochs": 2},
    )


def test_replayed_log_probabilities_are_those_of_their_weights(config: RunConfig) -> None:
    steps: list[replay.Row] = []
    row = replay.run(config, steps.append)
    assert [step["replayed"] for step in steps] == [0, 6, 6]
    assert steps[0]["ess"] is steps[0]["staleness"] is None and steps[0]["compared"] == 0
    assert row["compared"] == sum(step["compared"] for step in steps) > 30
    assert row["differing"] == row["fresh_differing"] == 0 < row["fresh_compared"]
    assert 0 < row["ess"] < 1, "the weights have moved"
    assert steps[1]["staleness"] == 2.0 and 2.0 <= steps[2]["staleness"] <= 4.0
    assert (row["seed"], row["steps"]) == (0, 3)
    assert {"accuracy_before", "accuracy_after"} < row.keys()


def test_other_weights_than_those_that_drew_are_noticed(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the step before."""
    made: list[FrozenPolicy] = []
    real = FrozenPolicy.of

    def of_before(policy: object) -> FrozenPolicy:
        made.append(real(policy))  # pyright: ignore[reportArgumentType]
        return made[max(0, len(made) - 2)]

    monkeypatch.setattr(FrozenPolicy, "of", of_before)
    steps: list[replay.Row] = []
    row = replay.run(config, steps.append)
    assert steps[1]["differing"] == 0, "drawn by the first weights, which have none before"
    assert 0 < steps[2]["differing"] == row["differing"] and row["max_abs_diff"] > 0


def test_the_command_prints_and_keeps_a_line_a_step_and_one_a_seed(
    config: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[list[str]] = []

    def load(_: Path, words: list[str]) -> RunConfig:
        asked.append(words)
        output = words[words.index("--output") + 1]
        training = config.training.model_copy(update={"steps": 2})
        return config.model_copy(update={"output": Path(output), "training": training})

    out = tmp_path / "results" / "replay.jsonl"
    monkeypatch.setattr(replay, "load_config", load)
    monkeypatch.setattr(sys, "argv", ["replay", "--out", str(out), "--steps", "2", "--seeds", "2"])
    replay.main()
    assert capsys.readouterr().out == out.read_text()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row.get("step", "run") for row in rows] == [1, 2, "run"] * 2
    assert all(row["differing"] == 0 for row in rows) and rows[2]["device"]
    options = dict(zip(asked[1][::2], asked[1][1::2], strict=True))
    assert (options["--seed"], options["--training.steps"]) == ("1", "2")
    assert (options["--replay.fraction"], options["--replay.max_staleness"]) == ("0.5", "4")
