"""Every algorithm, and every stage around it, through the command's own function: runs of two
steps.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from isobit.algorithms.registry import ALGORITHMS, build_algorithm
from isobit.config.recipes import RunConfig
from isobit.run.loop import train
from isobit.run.resolved import resolve
from isobit.run.rl_run import read_rl
from isobit.util.errors import ConfigError

MakeConfig = Callable[..., RunConfig]
WriteReward = Callable[[str], str]
PARITY = "return float(completion.token_ids[0] % 2)"


def steps(output: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").open(encoding="utf-8")]
    return [line for line in lines if "reward/mean" in line]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ALGORITHMS)
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
    assert ("value/loss" in last) == build_algorithm(config.algorithm).needs_values
    before, after = (
        load_file(folder / "model.safetensors") for folder in (tiny_folder, summary.model)
    )
    assert before.keys() == after.keys(), "a value head stays with the run"
    assert any(not before[key].equal(after[key]) for key in before)


@pytest.mark.few(1)
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


CUT_ARE_PAID = "return float(completion.finish_reason == 'length' and completion.token_ids[0] % 2)"


def test_dynamic_sampling_does_not_count_what_is_excluded(
    make_config: MakeConfig, write_reward: WriteReward
) -> None:
    """Seen before: groups whose one other reward was of an excluded completion counted as telling,
    and the step had no signal while refills were left.
    """
    algorithm = {"name": "dapo", "truncated": "exclude", "max_refills": 2}
    config = make_config(write_reward(CUT_ARE_PAID), algorithm=algorithm)
    train(config)
    for line in steps(config.output):
        assert line["rollout/refills"] == 2 and line["reward/level_share"] == 1.0


def test_dynamic_sampling_of_remax_keeps_groups_that_differ_from_their_greedy_answer(
    make_config: MakeConfig, write_reward: WriteReward
) -> None:
    """Seen before: dropped, since their samples agree with each other."""
    greedy = "return float(prompt.id.endswith(('0', '2', '4', '6', '8')))"
    algorithm = {"name": "remax", "dynamic_sampling": True, "max_refills": 1}
    sampled = {"samples_per_prompt": 1}
    config = make_config(write_reward(PARITY), algorithm=algorithm, training=sampled)
    summary = train(config)
    lines = steps(config.output)
    assert summary.steps_without_signal < len(lines)
    level = make_config(
        write_reward(greedy), algorithm=algorithm, output=config.output.with_name("level")
    )
    assert train(level).steps_without_signal == 2, "every sample has its greedy answer's reward"


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["reinforce_pp", "remax", "ppo"])
def test_one_sample_a_prompt_is_enough_where_samples_are_not_compared(
    name: str, make_config: MakeConfig, write_reward: WriteReward
) -> None:
    sizes = {"samples_per_prompt": 1, "prompts_per_step": 6, "without_signal": "skip"}
    summary = train(make_config(write_reward(PARITY), algorithm={"name": name}, training=sizes))
    assert summary.steps_without_signal == 0 == summary.tokens_differing
    assert summary.tokens_compared > 0


def test_the_share_that_is_compared_is_said(
    make_config: MakeConfig, write_reward: WriteReward, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen before: "differing 0 of 23" of a step with four updates."""
    config = make_config(write_reward(PARITY), training={"updates_per_batch": 2, "steps": 1})
    summary = train(config)
    (line,) = steps(config.output)
    assert line["log_prob_diff/share"] == summary.tokens_compared / summary.tokens_learnt < 1
    said = capsys.readouterr().out
    assert "those of the first of 2 updates a batch (training.updates_per_batch)" in said
    assert f"compared {line['log_prob_diff/share']:.0%}" in said


def test_steps_without_signal_are_no_part_of_what_could_be_compared(
    make_config: MakeConfig, write_reward: WriteReward, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen before: "compared were 71%, those of the first of 1 updates a batch"."""
    body = "reward.calls = getattr(reward, 'calls', 0) + 1; return float(reward.calls % 2)"
    level_at_first = body.replace("float(", "float(reward.calls > 17 and ")
    training = {"prompts_per_step": 2, "samples_per_prompt": 6, "without_signal": "skip"}
    config = make_config(write_reward(level_at_first), training=training)
    config = config.model_copy(
        update={"reward": config.reward.model_copy(update={"in_process": True})}
    )
    summary = train(config)
    first, last = steps(config.output)
    assert summary.steps_without_signal == 1 and first["log_prob_diff/tokens_compared"] == 0
    assert "log_prob_diff/share" not in first and "log_prob_diff/share" not in last
    assert summary.tokens_compared == summary.tokens_learnt > 0
    assert "compared were" not in capsys.readouterr().out


def test_evaluation_has_a_top_p_of_its_own(make_config: MakeConfig) -> None:
    """verl's ``val_kwargs.top_p``: an evaluation that truncates what training does not."""
    for given, expected in ((None, 0.9), (0.5, 0.5), (1.0, 1.0)):
        config = make_config(evaluation={"top_p": given}, rollout={"top_p": 0.9})
        plan = read_rl(resolve(config))
        assert plan.sampling.top_p == 0.9
        ((request, *_),) = plan.evaluation.values()
        assert request.sampling.top_p == expected
