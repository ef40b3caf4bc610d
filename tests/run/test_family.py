"""Every algorithm, and every stage around it, through the command's own function: runs of two
steps.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from isobit.config.recipes import RunConfig
from isobit.run.loop import train
from isobit.util.errors import ConfigError

MakeConfig = Callable[..., RunConfig]
WriteReward = Callable[[str], str]
PARITY = "return float(completion.token_ids[0] % 2)"
NAMES = ("grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
NAMES += ("gspo", "cispo", "remax", "ppo")


def steps(output: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").open(encoding="utf-8")]
    return [line for line in lines if "reward/mean" in line]


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_trains_on_its_own_samples_bit_for_bit(
    name: str, make_config: MakeConfig, write_reward: WriteReward, tiny_folder: Path
) -> None:
    config = make_config(
        write_reward(PARITY), algorithm={"name": name}, training={"samples_per_prompt": 6}
    )
    summary = train(config)
    assert summary.tokens_differing == 0 < summary.tokens_compared
    first, last = steps(config.output)
    assert first["ratio/mean"] == first["ratio/min"] == first["ratio/max"] == 1.0
    assert ("value/loss" in last) == (name == "ppo")
    before, after = (
        load_file(folder / "model.safetensors") for folder in (tiny_folder, summary.model)
    )
    assert before.keys() == after.keys(), "a value head stays with the run"
    assert any(not before[key].equal(after[key]) for key in before)


@pytest.mark.parametrize("refresh_every", [0, 1])
def test_a_reference_is_the_policy_until_it_has_moved_and_once_refreshed(
    refresh_every: int, make_config: MakeConfig, write_reward: WriteReward
) -> None:
    reference = {"refresh_every": refresh_every}
    config = make_config(
        write_reward(PARITY), algorithm={"kl_coefficient": 0.1}, reference=reference
    )
    train(config)
    first, second = steps(config.output)
    assert first["kl/k1"] == first["kl/k3"] == 0.0
    assert (second["kl/k3"] == 0.0) == (refresh_every == 1)


def test_replay_mixes_in_what_was_learnt_from_before(
    make_config: MakeConfig, write_reward: WriteReward
) -> None:
    config = make_config(
        write_reward(PARITY), replay={"fraction": 0.5}, training={"steps": 3, "epochs": 1}
    )
    summary = train(config)
    lines = steps(config.output)
    assert [line["replay/samples"] for line in lines] == [0, 6, 6]
    assert [line["replay/size"] for line in lines] == [6, 12, 18]
    assert lines[0]["staleness/mean"] == 0.0 < lines[1]["staleness/mean"]
    assert lines[1]["ratio/max"] != 1.0, "what is replayed was drawn from other weights"
    assert summary.tokens_differing == 0, "and is not compared with them"
    assert summary.tokens_compared == summary.tokens_generated


def test_no_replay_is_no_bit_of_difference(
    make_config: MakeConfig, write_reward: WriteReward, tmp_path: Path
) -> None:
    reward = write_reward(PARITY)
    made = [
        train(make_config(reward, output=tmp_path / name, **changes))
        for name, changes in (
            ("plain", {}),
            ("off", {"replay": {"fraction": 0.0, "max_staleness": 9}}),
            ("corrected", {"corrections": [{"type": "tis"}, {"type": "k3"}]}),
        )
    ]
    files = [(one.model / "model.safetensors").read_bytes() for one in made]
    assert files[0] == files[1]
    assert files[0] == files[2], "on-policy and exact, every correction is the identity"


def test_dynamic_sampling_replaces_level_groups_and_says_how_often(
    make_config: MakeConfig, write_reward: WriteReward
) -> None:
    reward = write_reward("return float(prompt.id[-1] in '02468' and completion.token_ids[0] % 2)")
    config = make_config(reward, algorithm={"name": "dapo"}, training={"samples_per_prompt": 6})
    train(config)
    lines = steps(config.output)
    assert sum(line["rollout/refills"] for line in lines) > 0
    assert sum(line["rollout/dropped_groups"] for line in lines) > 0
    assert all(line["reward/level_groups"] == 0 for line in lines)


def test_refills_end(make_config: MakeConfig, write_reward: WriteReward) -> None:
    config = make_config(write_reward("return 1.0"), algorithm={"name": "dapo", "max_refills": 2})
    train(config)
    for line in steps(config.output):
        assert line["rollout/refills"] == 2
        assert line["reward/level_groups"] == line["rollout/dropped_groups"] / 2 == 2


def test_off_policy_log_probs_are_corrected(
    make_config: MakeConfig, write_reward: WriteReward
) -> None:
    config = make_config(
        write_reward(PARITY),
        precision={"preset": "fp8-rollout"},
        corrections=[{"type": "tis", "max": 2.0}],
    )
    train(config)
    line = steps(config.output)[0]
    assert line["mismatch/k3"] > 0
    assert 0 < line["correction/effective_sample_size"] < 1
    assert line["correction/rejected"] == 0.0
    assert line["log_prob_diff/mean"] <= line["log_prob_diff/p99"] <= line["log_prob_diff/max"]


def test_corrections_without_two_policies_are_refused(make_config: MakeConfig) -> None:
    config = make_config(training={"old_log_probs": "recorded"}, corrections=[{"type": "tis"}])
    with pytest.raises(ConfigError, match="old_log_probs"):
        train(config)
