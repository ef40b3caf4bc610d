"""``async.lag``: which weights sample which batch, that the bits are checked where they can be, and
that a run with batches in waiting repeats and resumes.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isobit.commands.replay import replay
from isobit.config.recipes import RunConfig
from isobit.models.safetensors import TensorFile
from isobit.records.text import Group
from isobit.run import loop
from isobit.run.log import RlLog
from isobit.run.loop import train
from isobit.run.pending import COMPARED, GradedBatch, Pending
from isobit.run.rl_run import RlRun
from isobit.starter import starter_folder
from isobit.store import resume
from isobit.store.keeper import CheckpointKeeper
from isobit.training.step import StepMetrics
from isobit.util.errors import CheckpointError, ConfigError
from isobit.util.files import file_sha256
from tests.tiny import json_lines as lines

MakeConfig = Callable[..., RunConfig]
STEPS, UPDATES = 5, 2
REWARD = "return float(len(completion.token_ids) % 3 + completion.token_ids[0] % 2)"


class Killed(BaseException):
    """Stands for kill -9: nothing is cleaned up."""


def train_to_a_death(patch: pytest.MonkeyPatch, config: RunConfig, resume: bool = False) -> None:
    """A run that is killed after its next step, whether that has left a checkpoint or not."""
    save = CheckpointKeeper.save_if_due

    def save_and_die(self: CheckpointKeeper, step: int) -> None:
        save(self, step)
        raise Killed

    with patch.context() as patched:
        patched.setattr(CheckpointKeeper, "save_if_due", save_and_die)
        with pytest.raises(Killed):
            train(config, resume=resume)


@pytest.fixture
def lagging(make_config: MakeConfig, write_reward: Callable[[str], str]) -> MakeConfig:
    """Five steps of two updates, with a checkpoint after each."""

    def make(lag: int, **sections: Any) -> RunConfig:
        training = {"steps": STEPS, "updates_per_batch": UPDATES, **sections.pop("training", {})}
        config = make_config(
            write_reward(REWARD),
            training=training,
            evaluation={"every": 2},
            checkpoint={"every": 1, "keep_last": 9, **sections.pop("checkpoint", {})},
            **{"async": {"lag": lag}, "rollout": {"max_new_tokens": 4}, **sections},
        )
        return config

    return make


def sampled_by(root: Path) -> list[int]:
    """The weights' versions, counted from 0 by steps, of the batches in the order of their
    sampling.
    """
    graded = lines(root / "rewards.jsonl")
    versions = [
        line["weights_version"] for line in graded if line["prompts"][0][0].startswith("train")
    ]
    assert all((version - 1) % UPDATES == 0 for version in versions)
    return [(version - 1) // UPDATES for version in versions]


def specified(lag: int) -> list[int]:
    return [max(t - 1 - lag, 0) for t in range(1, STEPS + 1)]


def outcome(root: Path) -> dict[str, Any]:
    """All that a run leaves but for times; of files their SHA-256."""
    timed = ("time/", "tokens_per_s/")
    files = {
        str(path.relative_to(root)): file_sha256(path)
        for path in sorted(root.rglob("*"))
        if path.suffix == ".safetensors"
        or path.name in ("completions.jsonl", "rewards.jsonl", "digests.jsonl")
    }
    metrics = [
        {name: value for name, value in line.items() if not name.startswith(timed)}
        for line in lines(root / "metrics.jsonl")
    ]
    return {**files, "metrics": metrics}


def steps_of(root: Path) -> list[dict[str, Any]]:
    return [line for line in lines(root / "metrics.jsonl") if "staleness/mean" in line]


@pytest.mark.few(1)
@pytest.mark.parametrize("lag", [0, 1, 2, 7])
def test_batches_are_sampled_by_the_weights_that_are_specified(
    lag: int, lagging: MakeConfig
) -> None:
    config = lagging(lag)
    train(config)
    assert sampled_by(config.output) == specified(lag)
    behind = [t - 1 - version for t, version in enumerate(specified(lag), start=1)]
    steps = steps_of(config.output)
    assert [line["staleness/mean"] for line in steps] == [UPDATES * steps for steps in behind]
    assert [line["log_prob_diff/tokens_differing"] for line in steps] == [0] * STEPS
    assert all(line["log_prob_diff/tokens_compared"] > 0 for line in steps)
    assert lag == 0 or any(line["ratio/max"] > 1.01 for line in steps[1:])


def test_a_run_that_samples_with_the_newest_weights_is_found(
    lagging: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Pending, "missing", lambda self, step: range(self._first + len(self._waiting), step + 1)
    )
    config = lagging(1)
    train(config)
    assert sampled_by(config.output) == specified(0) != specified(1)


def test_what_is_compared_after_the_weights_moved_differs(
    lagging: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count of 0 is a check: it is another number where sampler and trainer are apart."""
    compare = Pending.compare

    def late(
        run: RlRun, log: RlLog, batch: GradedBatch, estimated: Sequence[Group], step: int
    ) -> StepMetrics:
        trained = run.learner.update(batch.groups, estimated, step)
        compare(run.pending, run.trainer)
        batch = run.pending.front()
        assert batch.comparison is not None
        return replace(trained, comparison=batch.comparison)

    monkeypatch.setattr(Pending, "compare", lambda *_: None)
    monkeypatch.setattr(loop, "learn", late)
    training = {"steps": 1, "updates_per_batch": 1}
    assert train(lagging(1, training=training)).tokens_differing > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(("lag", "precision"), [(0, "fp8"), (1, "fp8"), (1, "int8"), (2, "fp8")])
def test_killed_between_any_two_steps_and_resumed_it_leaves_the_same_bytes(
    lag: int, precision: str, lagging: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = lagging(lag, output=tmp_path / "whole", precision=precision)
    train(whole)
    expected = outcome(whole.output)
    waiting = sum(name.endswith("pending.safetensors") for name in expected)
    assert waiting == (STEPS - 1 if lag else 0)

    config = lagging(lag, precision=precision)
    for step in range(1, STEPS + 1):
        train_to_a_death(monkeypatch, config, resume=step > 1)
    train(config, resume=True)
    assert outcome(config.output) == expected
    shutil.rmtree(config.output / "checkpoints" / f"step_{STEPS:06}")
    train(config, resume=True)
    assert outcome(config.output) == expected


def test_a_signal_in_the_middle_of_a_step_leaves_the_batches_that_waited(
    lagging: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch sampled in a step that is given up is sampled again by the same weights."""
    whole = lagging(1, output=tmp_path / "whole", checkpoint={"every": 0})
    train(whole)
    config = lagging(1, checkpoint={"every": 0})
    compare = Pending.compare

    def fail_in_step_3(self: Pending, trainer: Any) -> None:
        compare(self, trainer)
        if self.state()["first"] == 3:
            raise KeyError("the third step")

    with monkeypatch.context() as patch:
        patch.setattr(Pending, "compare", fail_in_step_3)
        with pytest.raises(KeyError):
            train(config)
    folder = config.output / "checkpoints" / "step_000002"
    assert list(TensorFile(folder / "pending.safetensors").shapes()) == ["batch_3"]
    train(config, resume=True)
    expected, found = outcome(whole.output), outcome(config.output)
    kept = [name for name in expected if "step_000005" in name or "checkpoints" not in name]
    assert {name: found[name] for name in kept} == {name: expected[name] for name in kept}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"name": "remax"}},
        {"algorithm": {"name": "ppo", "kl_coefficient": 0.05, "kl_in": "reward"}},
        {"algorithm": {"dynamic_sampling": True}, "replay": {"fraction": 0.5, "max_staleness": 8}},
        {"precision": {"preset": "fp8-rollout"}, "corrections": [{"type": "tis"}]},
    ],
    ids=["remax", "ppo", "dynamic, replay", "corrected"],
)
def test_whatever_is_learnt_it_goes_on_where_it_was(
    sections: dict[str, Any], lagging: MakeConfig, tmp_path: Path
) -> None:
    training = {"steps": 4, "updates_per_batch": UPDATES}
    config = lagging(1, training=training, **sections)
    train(config)
    expected = outcome(config.output)
    for step in (3, 4):
        shutil.rmtree(config.output / "checkpoints" / f"step_{step:06}")
    train(config, resume=True)
    assert outcome(config.output) == expected


def test_few_completions_of_a_large_batch_are_compared(lagging: MakeConfig) -> None:
    training = {"steps": 1, "samples_per_prompt": 12, "updates_per_batch": 1}
    config = lagging(1, training=training, rollout={"max_new_tokens": 1})
    assert train(config).tokens_compared == COMPARED


def test_what_was_sampled_ahead_counts_as_learnt(lagging: MakeConfig) -> None:
    summary = train(lagging(1, training={"steps": 3}))
    assert 0 < summary.tokens_learnt <= summary.tokens_generated


def rows_of(tmp_path: Path, rows: Sequence[str]) -> dict[str, Any]:
    """The table of training data with these rows, always in the same file."""
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(rows) + "\n")
    return {"train": {"type": "jsonl", "path": str(path), "limit": 16}}


ROWS = (starter_folder() / "train.jsonl").read_text().splitlines()
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "temperature": ("rollout", {"rollout": {"max_new_tokens": 4, "temperature": 0.5}}),
    "lengths": ("rollout", {"rollout": {"max_new_tokens": 3}}),
    "fewer samples": ("training", {"training": {"samples_per_prompt": 2}}),
    "more groups": ("training", {"training": {"prompts_per_step": 3}}),
    "refills": ("algorithm", {"algorithm": {"dynamic_sampling": True}}),
    "seed": ("seed", {"seed": 3}),
    "other prompts": ("data", {}),
}


def train_two_steps(config: RunConfig, patch: pytest.MonkeyPatch) -> None:
    """As a run that is killed behind its second checkpoint."""
    for step in (1, 2):
        train_to_a_death(patch, config, resume=step > 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("lag", [2, 1])
@pytest.mark.parametrize("change", OTHERS)
def test_what_was_drawn_by_other_settings_is_drawn_again(
    change: str,
    lag: int,
    lagging: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = lagging(lag, data=rows_of(tmp_path, ROWS[:16]))
    train_two_steps(config, monkeypatch)
    before = lines(config.output / "rewards.jsonl")
    allowed, sections = OTHERS[change]
    is_other = change == "other prompts"
    rows = ROWS[100:116] if is_other else ROWS[:16]
    changed = lagging(lag, data=rows_of(tmp_path, rows), **sections)
    capsys.readouterr()
    train(changed, resume=True, allowed=[allowed])
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("dropped")]
    assert len(told) == 1
    assert told[0].startswith(f"dropped: {6 * lag} samples with ")
    assert told[0].endswith(" changed")
    drawn = [line for line in lines(config.output / "rewards.jsonl") if is_of_a_step(line)]
    assert sampled_by(config.output)[2 + lag : 3 + 2 * lag] == [2] * (1 + lag), "by those of now"
    learnt = steps_of(config.output)[2:]
    assert [line["staleness/mean"] for line in learnt[:2]] == [0, UPDATES]
    assert all(line["log_prob_diff/tokens_differing"] == 0 for line in learnt)
    waited = [name for line in before if is_of_a_step(line) for name in line["prompts"]][4:]
    again = [name for line in drawn[2 + lag :] for name in line["prompts"]]
    if is_other:
        assert {visit for _, visit in again} == {1}
    elif change not in ("seed", "refills"):  # in another order, or with more between
        assert again[: len(waited)] == waited, "no prompt is passed over"
    assert replay(config.output, 3, say=lambda _: None).differences == []


def is_of_a_step(line: dict[str, Any]) -> bool:
    return line["prompts"][0][0].startswith("train/")


@pytest.mark.exhaustive
@pytest.mark.parametrize("lag", [2, 1, 3])
def test_another_reward_grades_what_waits_again(
    lag: int,
    lagging: MakeConfig,
    write_reward: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = lagging(lag)
    train_two_steps(config, monkeypatch)
    write_reward("return 7.0")
    train(config, resume=True, allowed=["reward"])
    assert [line["reward/mean"] == 7 for line in steps_of(config.output)] == [False] * 2 + [
        True
    ] * 3
    assert [line["staleness/mean"] / UPDATES for line in steps_of(config.output)] == [
        t - 1 - version for t, version in enumerate(specified(lag), start=1)
    ], "nothing was drawn again"
    for recorded in (False, True):
        found = replay(config.output, 3, say=lambda _: None, recorded_rewards=recorded)
        assert found.differences == []


@pytest.mark.exhaustive
def test_greedy_samples_that_wait_cannot_be_graded_again(
    lagging: MakeConfig,
    write_reward: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = lagging(1, algorithm={"name": "remax"})
    train_two_steps(config, monkeypatch)
    write_reward("return 7.0")
    train(config, resume=True, allowed=["reward"])
    assert "dropped: 6 samples with" in capsys.readouterr().out
    assert [line["reward/mean"] == 7 for line in steps_of(config.output)] == [False] * 2 + [
        True
    ] * 3
    assert [line["staleness/mean"] for line in steps_of(config.output)][2:4] == [0, UPDATES]


def test_a_sample_of_another_prompt_is_refused(
    lagging: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the rule for changes leaves out."""
    config = lagging(1, data=rows_of(tmp_path, ROWS[:16]))
    train_two_steps(config, monkeypatch)
    rows_of(tmp_path, ROWS[100:116])
    monkeypatch.setattr(resume, "draws_others", lambda _: [])
    with pytest.raises(CheckpointError, match=r"pending: .* drawn for another prompt than train/"):
        train(config, resume=True, allowed=["data"])


@pytest.mark.exhaustive
def test_more_steps_than_were_to_be_sampled_ahead_have_to_be_allowed(
    lagging: MakeConfig, tmp_path: Path
) -> None:
    whole = lagging(1, output=tmp_path / "whole")
    train(whole)
    config = lagging(1, training={"steps": 3})
    train(config)
    with pytest.raises(ConfigError, match="the batches of step 4 would have been sampled before"):
        train(lagging(1), resume=True)
    shutil.rmtree(config.output / "checkpoints" / "step_000003")
    train(lagging(1), resume=True)
    assert digests_of(config.output) == digests_of(whole.output)
    shutil.rmtree(config.output)
    train(lagging(1, training={"steps": 3}))
    train(lagging(1), resume=True, allowed=["training.steps"])
    assert digests_of(config.output)[:3] == digests_of(whole.output)[:3]
    assert [line["staleness/mean"] for line in steps_of(config.output)][3:] == [0, UPDATES]


def digests_of(root: Path) -> list[dict[str, Any]]:
    return lines(root / "digests.jsonl")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("lag", "steps"), [(0, 4), (1, 3)])
def test_a_run_that_ends_earlier_leaves_no_record_of_other_steps(
    lag: int, steps: int, lagging: MakeConfig, tmp_path: Path
) -> None:
    whole = lagging(lag, training={"steps": steps}, output=tmp_path / "whole")
    train(whole)
    config = lagging(lag)
    train(config)
    for step in range(3, STEPS + 1):
        shutil.rmtree(config.output / "checkpoints" / f"step_{step:06}")
    train(lagging(lag, training={"steps": steps}), resume=True)
    assert outcome(config.output) == outcome(whole.output)
