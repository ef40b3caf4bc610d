"""Runs with an environment: exact over all turns, resumed to equal bytes, replayed as recorded."""

import json
import math
import string
from collections import defaultdict
from collections.abc import Callable
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from pyarrow import parquet

from isobit.commands.diff import compare
from isobit.commands.evaluate import evaluate_folder
from isobit.commands.replay import replay
from isobit.commands.rollout import completion_lines, rollout_folder
from isobit.config.commands import GenerationConfig
from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import RunConfig
from isobit.config.rollout import RolloutConfig
from isobit.data.tool_calls import ToolCall
from isobit.environments.pool import Environments
from isobit.observe.console import silent
from isobit.observe.group_metrics import describe_failed_calls
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Episode
from isobit.rollout import episodes
from isobit.run.loop import train
from isobit.store.directory import RunDirectory
from isobit.util.errors import ConfigError, RewardError, ToolError
from tests.run import acting
from tests.tiny import json_lines
from tests.worlds import in_world

MakeConfig = Callable[..., RunConfig]
TOOLS = Path(__file__).parents[1] / "environments" / "tools.py"
HELD_OUT = {"type": "jsonl", "path": "starter:held_out.jsonl"}
STOPS = list(string.ascii_letters[:40])


@pytest.fixture
def acting_config(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> MakeConfig:
    monkeypatch.setattr(episodes, "read_turn", acting.reading(acting.parse))

    def make(name: str = "Counter", reward: str = "environment", **sections: Any) -> RunConfig:
        given: dict[str, Any] = {
            "environment": {"class": f"{TOOLS}:{name}", "max_turns": 6},
            "rollout": {"max_new_tokens": 60, "stop_tokens": STOPS},
            "checkpoint": {"every": 1},
            "data": {"eval": {"held_out": {**HELD_OUT, "limit": 2}}},
            "evaluation": {"every": 0},
            "precision": {"preset": "fp8"},
        }
        return make_config(reward, **{**given, **sections})

    return make


@pytest.mark.exhaustive
def test_a_run_compares_all_turns_and_evaluates_as_eval_does(
    acting_config: MakeConfig,
) -> None:
    config = acting_config()
    summary = train(config, silent())
    steps = [
        line for line in json_lines(config.output / "metrics.jsonl") if "episode/turns" in line
    ]
    assert len(steps) == 2
    assert min(line["episode/turns"] for line in steps) > 1.5
    assert min(line["rollout/kept_tokens"] for line in steps) > 0
    assert summary.tokens_differing == 0
    drawn = sum(line["log_prob_diff/tokens_compared"] for line in steps)
    assert summary.tokens_compared == drawn > 50
    assert summary.failed_rewards == 0
    assert {
        line["episode/failed/deadline"] for line in steps if "episode/failed/deadline" in line
    } <= {0}
    played = [line for line in json_lines(config.output / "completions.jsonl") if line["step"]]
    for line in played:
        told = [one["content"] for one in line["messages"] if one["role"] == "tool"]
        totals = [int(text.removeprefix("total ")) for text in told]
        assert totals == sorted(totals)
        assert line["reward"] == (totals[-1] if totals else 0)
    before = json_lines(config.output / "metrics.jsonl")[0]
    found = evaluate_folder(Path(config.model), config)["held_out"].scalars("held_out")
    figures = {name: value for name, value in found.items() if not math.isnan(value)}
    assert figures["eval/held_out/response_length"] > 10
    assert figures.items() <= before.items()


@pytest.mark.exhaustive
def test_a_run_killed_in_the_middle_of_episodes_is_resumed_to_equal_bytes(
    acting_config: MakeConfig, tmp_path: Path
) -> None:
    """By whatever processes: one trains and one samples until the second batch, two do both until
    the last evaluation, which the first layout does again.
    """
    credit = {"credit": "turn", "turn_gamma": 0.5, "normalise_by_std": False}
    lag = {"async": {"lag": 1}}
    whole = acting_config("Paced", algorithm=credit, tracking={"completions": "all"}, **lag)
    train(whole, silent())
    check_credit_by_turn(whole.output)
    counts = [len(line["answers"]) for line in json_lines(whole.output / "environment.jsonl")]
    assert len(counts) == 4, "an evaluation, two batches, an evaluation"
    killed = tmp_path / "killed"
    config = whole.model_dump(mode="json", by_alias=True) | {"output": str(killed)}
    deaths = {1: (sum(counts[:2]) + 4, 0), 0: (sum(counts[:3]) + 2, sum(counts[:2]))}
    for rollouters, dies in deaths.items():
        case = {"config": config | {"cluster": {"rollouters": rollouters}}, "dies": dies}
        with pytest.raises(AssertionError, match="exit -9") as died:
            in_world(2, "tests.run.acting:resume", case | {"counter": f"{killed}-{rollouters}"})
        assert "exit 77" not in str(died.value)
    in_world(2, "tests.run.acting:resume", {"config": config | {"cluster": {"rollouters": 1}}})
    found = compare(RunDirectory(whole.output), RunDirectory(killed))
    assert not found.differences
    assert any("environment.jsonl" in line for line in found.equal)


def check_credit_by_turn(output: Path) -> None:
    """Advantages of all tokens from what was written of texts and rewards alone."""
    groups = defaultdict[tuple[str, int], list[dict[str, Any]]](list)
    for row in parquet.read_table(output / "completions" / "step_000001.parquet").to_pylist():
        groups[row["prompt_id"], row["visit"]].append(row)
    several = 0
    for rows in groups.values():
        returns = [returns_of(row) for row in rows]
        for row, own in zip(rows, returns, strict=True):
            others = [[one[min(turn, len(one) - 1)] for one in returns] for turn in range(len(own))]
            expected = [one - fmean(all_) for one, all_ in zip(own, others, strict=True)]
            found = row["advantages"] or [row["advantage"]] * row["tokens"]
            assert len(found) == row["tokens"]
            distinct = [one for one, _ in groupby(found)]
            assert distinct == pytest.approx([one for one, _ in groupby(expected)], rel=1e-6)
            several += len(distinct) > 1
    assert several
    (figures,) = (
        one for one in json_lines(output / "metrics.jsonl") if one["step"] == 1 and "loss" in one
    )
    every = [row for rows in groups.values() for row in rows]
    assert figures["episode/turn_rewards"] == pytest.approx(
        fmean(sum(row["turn_rewards"]) for row in every)
    )
    first = [row["turn_rewards"][0] for row in every if len(row["turn_rewards"]) > 1]
    assert figures["episode/turn_reward/1"] == pytest.approx(fmean(first))


def returns_of(row: dict[str, Any]) -> list[float]:
    """From each turn on, with half of what comes later; ``Paced`` gives an eighth of the count."""
    messages = json.loads(row["messages"])
    told = [one["content"] for one in messages if one["role"] == "tool"]
    totals = [0, *(int(text.removeprefix("total ")) for text in told)]
    gains = [(after - before) / 8 for before, after in pairwise(totals)]
    # the last turn has called nothing, or its result found no room
    gains += [0.0] * (len(messages) - len(told) - len(gains))
    assert row["turn_rewards"] == gains
    found, following = list[float](), row["reward"]
    for gain in reversed(gains):
        found.append(gain + following)
        following = 0.5 * found[-1]
    return found[::-1]


@pytest.mark.exhaustive
def test_a_replay_from_the_record_asks_no_environment(
    acting_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        episodes,
        "read_turn",
        acting.reading(lambda text: [ToolCall("now", {})] if len(text) % 3 else []),
    )
    config = acting_config("Moody", "isobit.starter.tasks:correct_answer")
    assert train(config, silent()).tokens_differing == 0
    anew = replay(config.output, say=lambda _: None)
    assert anew.differences  # it never says the same twice

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an environment was asked")

    monkeypatch.setattr(Environments, "ask", refuse)
    assert not replay(config.output, say=lambda _: None, recorded_rewards=True).differences


@pytest.mark.exhaustive
def test_a_run_goes_on_with_tools_that_fail(
    acting_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["hang", "die", "flood", "control", "lie", "write_everywhere", "fail"]
    calls = [ToolCall(name, {}) for name in names]
    turns = iter(range(10**6))
    monkeypatch.setattr(
        episodes, "read_turn", acting.reading(lambda _: [calls[next(turns) % len(calls)]])
    )
    hostile = {"class": f"{TOOLS}:Hostile", "max_turns": 3, "deadline_s": 1.0}
    config = acting_config(
        environment=hostile, reward="isobit.starter.tasks:correct_answer",
        training={"prompts_per_step": 4, "samples_per_prompt": 4},
    )  # fmt: skip
    summary = train(config, silent())
    assert summary.tokens_differing == 0
    steps = [
        line for line in json_lines(config.output / "metrics.jsonl") if "episode/turns" in line
    ]
    kinds = {
        name.removeprefix("episode/failed/")
        for line in steps
        for name in line
        if "/failed/" in name
    }
    assert kinds >= {"deadline", "crash", "flood"}
    assert all(line["episode/results/cut"] + line["episode/results/error"] > 0 for line in steps)


@pytest.mark.exhaustive
def test_a_run_that_went_on_without_its_environment_and_a_set_is_replayed(
    acting_config: MakeConfig,
) -> None:
    """What it no longer has is neither missed in its figures nor looked for by the replay."""
    reward = "isobit.starter.tasks:correct_answer"
    sets = {"held_out": {**HELD_OUT, "limit": 2}, "more": {**HELD_OUT, "limit": 1}}
    acting = acting_config(reward=reward, data={"eval": sets}, evaluation={"every": 1})
    train(acting, silent())
    data = {"eval": {"held_out": sets["held_out"]}}
    alone = acting_config(reward=reward, data=data, evaluation={"every": 1}, environment=None)
    alone = alone.model_copy(update={"training": alone.training.model_copy(update={"steps": 4})})
    summary = train(alone, silent(), resume=True, allowed=["data.eval", "environment"])
    assert [*summary.evaluations] == ["held_out"]
    assert replay(alone.output, say=lambda _: None).differences == []


def test_a_run_whose_environment_always_fails_says_what_it_raised(
    acting_config: MakeConfig,
) -> None:
    says = r"no reward: reset: KeyError: 'nothing' \(tools\.py:\d+, in reset\)"
    with pytest.raises(RewardError, match=says):
        train(acting_config("Breaks", data={}), silent())


def test_calls_that_all_fail_are_told() -> None:
    sequence = TokenSequence.of_answer([5], [1, 2], given=[(3, 4)])

    def made(*results: tuple[str, str]) -> Completion:
        return Completion(sequence, "", "stop", Episode(("a", "b"), (results,)))

    broken, right = made(("error", "error: it broke"), ("malformed", "x")), made(("ok", "7"))
    said = describe_failed_calls([broken, made(("user", "Yes?")), broken])
    assert said == "all 2 calls of tools failed; the first was answered 'error: it broke'"
    assert describe_failed_calls([broken, right]) is None
    assert describe_failed_calls([made(("malformed", "x")), made()]) is None


@pytest.mark.exhaustive
def test_what_cannot_be_acted_in_is_refused(acting_config: MakeConfig) -> None:
    with pytest.raises(ToolError, match="has no class 'Contuer'"):
        train(acting_config("Contuer"), silent())
    with pytest.raises(ConfigError, match="calculator has neither get_reward nor get_turn_reward"):
        train(acting_config(environment={"class": "calculator"}), silent())


def test_completions_of_a_folder_call_tools(tiny_folder: Path, acting_config: MakeConfig) -> None:
    settings = GenerationConfig(
        precision=PrecisionConfig(preset="fp8"),
        rollout=RolloutConfig(max_new_tokens=60, stop_tokens=tuple(STOPS)),
        environment=acting_config().environment,
    )
    groups = rollout_folder(tiny_folder, ["1+2=", "3+4="], settings, samples=2)
    lines = [json.loads(line) for group in groups for line in completion_lines(group)]
    told = [one["content"] for line in lines for one in line["messages"] if one["role"] == "tool"]
    assert told
    assert all(text.startswith("total ") for text in told)
