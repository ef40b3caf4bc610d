"""Runs of two steps: what they leave behind, that they repeat, and that what they save loads
elsewhere.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import isobit.run.loop
from isobit.config.precision import Preset
from isobit.config.recipes import RunConfig
from isobit.models.folder import load_model
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion
from isobit.run.loop import train
from isobit.run.rl_run import RlRun
from isobit.store.state import StateDigest, state_digest
from isobit.util.errors import MismatchError, RewardError
from tests.sequences import group_of
from tests.tiny import json_lines as lines

MakeConfig = Callable[..., RunConfig]
LENGTH_REWARD = "return float(len(completion.token_ids) > 4 or completion.token_ids[0] % 2)"


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", get_args(Preset))
def test_every_preset_trains(
    preset: str, make_config: MakeConfig, write_reward: Callable[[str], str], tiny_folder: Path
) -> None:
    config = make_config(
        write_reward("return float(completion.token_ids[0] % 2)"), precision={"preset": preset}
    )
    summary = train(config)
    assert summary.tokens_compared == summary.tokens_generated > 0
    assert (summary.tokens_differing > 0) == preset.endswith("-rollout")
    before, after = (
        load_file(folder / "model.safetensors") for folder in (tiny_folder, summary.model)
    )
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_the_baseline_of_a_greedy_episode_has_the_rewards_of_its_turns() -> None:
    for turns, reward, expected in [
        (None, 0.5, 0.5),
        ((0.25, 0.0), 0.5, 0.75),
        ((0.25, 0.0), None, None),
        ((math.nan, 0.0), 0.5, None),
    ]:
        sequence = TokenSequence.of_answer([5], [7, 9, 7], given=[(2, 3)])
        one = Completion(sequence.with_columns(turn_rewards=turns), "", "stop")
        assert isobit.run.loop._baseline(group_of([one], [reward])) == expected


def test_the_directory_holds_what_the_run_did(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(evaluation={"every": 1})
    summary = train(config)
    root = config.output
    written = json.loads((root / "summary.json").read_text())
    figures = (
        "accuracy_before",
        "accuracy_after",
        "problems",
        "tokens_compared",
        "tokens_differing",
        "train_seconds",
    )
    assert [written[name] for name in figures] == [getattr(summary, name) for name in figures]
    assert written["problems"] == 5
    manifest = json.loads((root / "run.json").read_text())
    assert manifest["config"] == config.model_dump(mode="json")
    assert manifest["device"]["threads"] == 1
    assert manifest["precision"]["exact"]
    assert [line["step"] for line in lines(root / "metrics.jsonl")] == [0, 1, 1, 2, 2]
    assert {line["source"] for line in lines(root / "completions.jsonl")} == {"train", "held_out"}
    assert list((root / "tensorboard").iterdir())
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2].startswith(f"files: {root}")
    assert any(
        f"0 of {summary.tokens_compared} log-probabilities differ" in line for line in printed[-5:]
    )


def test_a_run_repeats_its_bits(make_config: MakeConfig, tmp_path: Path) -> None:
    first, second = (train(make_config(output=tmp_path / name)) for name in ("a", "b"))
    for name in ("completions.jsonl", "model/model.safetensors"):
        assert (first.directory / name).read_bytes() == (second.directory / name).read_bytes()
    for a, b in zip(
        lines(tmp_path / "a" / "metrics.jsonl"),
        lines(tmp_path / "b" / "metrics.jsonl"),
        strict=True,
    ):
        timed = {name for name in a if name.startswith(("time/", "tokens_per_s/"))}
        assert {name: a[name] for name in a.keys() - timed} == {
            name: b[name] for name in b.keys() - timed
        }


def test_the_result_loads_in_transformers_and_here(make_config: MakeConfig) -> None:
    config = make_config()
    summary = train(config)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        summary.model, dtype=torch.float32, output_loading_info=True
    )
    model, loading = loaded
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(summary.model)
    assert (
        tokenizer("1+2=")["input_ids"]
        == load_model(config.model, config.precision).tokenizer("1+2=")["input_ids"]
    )
    embedding = load_model(summary.model, config.precision).policy.masters["embed_tokens.weight"]
    assert torch.equal(model.get_input_embeddings().weight, embedding)


def test_rewards_that_fail_are_excluded_counted_and_said(
    make_config: MakeConfig, write_reward: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    body = (
        "token = sum(completion.token_ids) % 3; "
        "return 1 / 0 if token == 0 else float('nan') if token == 1 else 1.0"
    )
    config = make_config(write_reward(body), data={"eval": {}})
    summary = train(
        config.model_copy(
            update={"reward": config.reward.model_copy(update={"max_failed_fraction": 1.0})}
        )
    )
    steps = [line for line in lines(config.output / "metrics.jsonl") if "reward/failed" in line]
    assert sum(line["reward/failed"] for line in steps) == summary.failed_rewards > 0
    assert all(line["reward/mean"] == 1.0 for line in steps), "a failed reward is no zero"
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_what_graders_met_is_noted_under_its_step(
    make_config: MakeConfig, write_reward: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    body = (
        "token = completion.token_ids[0] % 2; "
        "token or __import__('isobit.rewards.counts').rewards.counts.count('mine: even'); "
        "return float(token)"
    )
    config = make_config(write_reward(body), data={"eval": {}})
    train(config)
    steps = [line for line in lines(config.output / "metrics.jsonl") if "reward/counted" in line]
    graded = config.training.prompts_per_step * config.training.samples_per_prompt
    met = [round(graded * (1 - line["reward/mean"])) for line in steps]
    assert [line["reward/counted"] for line in steps] == met and any(met)
    noted = re.findall("graders met: (.*)", capsys.readouterr().out)
    assert noted == [f"{number} mine: even" for number in met if number]


def test_a_run_that_ends_early_keeps_its_weights_and_figures(
    make_config: MakeConfig,
    write_reward: Callable[[str], str],
    capsys: pytest.CaptureFixture[str],
    tiny_folder: Path,
) -> None:
    config = make_config(write_reward("raise KeyError('answer')"), data={"eval": {}})
    with pytest.raises(RewardError, match="KeyError"):
        train(config)
    assert (config.output / "model" / "model.safetensors").read_bytes() == (
        tiny_folder / "model.safetensors"
    ).read_bytes()
    assert (config.output / "run.json").exists()
    assert f"weights before any update are in {config.output / 'model'}" in capsys.readouterr().out


def flip_after_step_1(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of what the first update has left, once its digest is taken."""
    done = list[int]()

    def digest(run: RlRun) -> StateDigest:
        made = state_digest(run)
        if not done:
            tensor = {
                "weights": run.model.policy.weights("training").plain["norm.weight"],
                "masters": run.model.policy.masters["norm.weight"].detach(),
                "moments": run.trainer.moments()["norm.weight.exp_avg"],
            }[kind]
            tensor.view(torch.uint8)[1] ^= 4
        done.append(1)
        return made

    monkeypatch.setattr(isobit.run.loop, "state_digest", digest)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["weights", "masters", "moments"])
def test_a_bit_that_is_lost_between_two_updates_is_told_of(
    kind: str,
    make_config: MakeConfig,
    write_reward: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reward = write_reward("return float(completion.token_ids[0] % 2)")
    flip_after_step_1(kind, monkeypatch)
    train(make_config(reward, data={"eval": {}}, check={"on_mismatch": "warn"}))
    assert f"{kind} in memory are not what the last update left" in capsys.readouterr().out


def test_a_run_stops_at_a_lost_bit_and_does_not_write_it(
    make_config: MakeConfig,
    write_reward: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    reward = write_reward("return float(completion.token_ids[0] % 2)")
    steps = {"steps": 4}
    whole = make_config(reward, data={"eval": {}}, training=steps, output=tmp_path / "whole")
    train(whole)
    config = make_config(reward, data={"eval": {}}, training=steps)
    with monkeypatch.context() as patch:
        flip_after_step_1("masters", patch)
        with pytest.raises(MismatchError, match="masters in memory are not what"):
            train(config)
    assert not (config.output / "model").exists()
    assert not list((config.output / "checkpoints").glob("*"))
    train(config, resume=True)
    for name in ("model/model.safetensors", "digests.jsonl"):
        assert (config.output / name).read_bytes() == (whole.output / name).read_bytes()


def test_whoever_does_not_want_to_know_is_not_told(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_after_step_1("masters", monkeypatch)
    train(make_config(data={"eval": {}}, check={"state": False}))
    assert "in memory" not in capsys.readouterr().out
