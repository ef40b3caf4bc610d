"""Files that are read while they are being written, cut and removed."""

import json
import math
import os
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from isobit.observe import completion_files, growing_file
from isobit.observe.completion_files import LineCompletions, Query, TableCompletions
from isobit.observe.figures import GrowingFigures
from isobit.observe.run_list import find_runs
from isobit.observe.training_log import write_completions
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt


def lines_of(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def sample(step: int, reward: float | None = 1.0, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "source": "train",
        "prompt_id": f"train/{step}",
        "prompt": "6 x 7",
        "completion": f"it is {step}",
        "reward": reward,
        **changes,
    }


def test_a_line_counts_once_it_is_whole_and_a_file_that_was_cut_is_read_anew(
    tmp_path: Path,
) -> None:
    path = lines_of(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    found = GrowingFigures(path)
    found.look()
    with path.open("a") as file:
        file.write('not json\n{"step": 2, "loss"')
    found.look()
    assert found.figures == {1: {"loss": 1.0}} and (found.damaged, found.is_read) == (1, True)
    version = found.version
    with path.open("a") as file:
        file.write(": 2.0}\n")
    found.look()
    assert found.figures[2] == {"loss": 2.0} and found.version > version
    lines_of(path, [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 5.0}, {"step": 3, "loss": 6.0}])
    found.look()  # a resumed run has written as much again, and other numbers
    assert [row["loss"] for row in found.figures.values()] == [1.0, 5.0, 6.0] and not found.damaged
    path.unlink()
    found.look()
    assert (len(found.figures), found.is_read) == (0, True)


def test_a_look_ends_in_time_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lines_of(tmp_path / "completions.jsonl", [sample(step) for step in range(100)])
    clock = iter(range(10_000))
    for module in (growing_file, completion_files):
        monkeypatch.setattr(module, "monotonic", lambda: next(clock))
    found = LineCompletions(path)
    shares = list[float]()
    while not shares or shares[-1] < 1.0:
        found.look(seconds=30)  # of a clock that ticks once a line
        shares.append(found.progress)
    assert len(shares) == 4 and shares[0] == pytest.approx(0.29, abs=0.03)
    rows, after = found.find(Query(), seconds=10)
    assert after == rows[-1][0] == 100 - len(rows) and 0 < len(rows) < 20


def test_pages_go_through_all_that_fits_once(tmp_path: Path) -> None:
    rewards = [None if step % 7 == 0 else step % 3 / 2 for step in range(300)]
    lines = [
        sample(step, reward, source="train" if step % 2 else "held_out", tokens=step % 10)
        for step, reward in enumerate(rewards)
    ]
    lines[150]["messages"] = [{"role": "tool", "content": "The NEEDLE"}]
    found = LineCompletions(lines_of(tmp_path / "completions.jsonl", lines))
    found.look(60)

    def steps(query: Query, backwards: bool = False) -> list[int]:
        places = list[int]()
        after = None
        while not places or after is not None:
            rows, after = found.find(query, after, backwards, seconds=60)
            assert len(rows) <= completion_files.PAGE
            places += [content["step"] for _, content in rows]
        return places

    assert steps(Query()) == list(reversed(range(300)))
    assert steps(Query(order="oldest")) == steps(Query(), backwards=True) == list(range(300))
    assert steps(Query(source="eval", lowest=0.5, highest=0.5, order="oldest")) == [
        step for step in range(0, 300, 2) if rewards[step] == 0.5
    ]
    assert steps(Query(first_step=40, last_step=42)) == [42, 41, 40]
    assert steps(Query(prompt_id="train/29", order="oldest")) == [29, *range(290, 300)]
    assert steps(Query(text="needle")) == [150] and steps(Query(text="is 77")) == [77]

    valid = {step: reward for step, reward in enumerate(rewards) if reward is not None}
    failed = [step for step in range(300) if step not in valid]
    assert steps(Query(order="worst")) == sorted(valid, key=valid.__getitem__) + failed
    assert steps(Query(order="best")) == sorted(valid, key=lambda step: -valid[step]) + failed
    assert steps(Query(order="longest"))[:3] == [9, 19, 29]
    assert steps(Query(order="shortest"))[:3] == [0, 10, 20]
    assert found.find(Query(first_step=40, last_step=42), after=7)[0] == []


def test_rewards_of_a_step_are_those_of_whole_groups(tmp_path: Path) -> None:
    lines = [
        sample(3, 1.0, prompt_id=name, group_rewards=[0.0, None, 1.0]) for name in ("a", "a", "b")
    ]
    lines += [sample(3, 9.0, source="held_out", group_rewards=[9.0]), sample(4, 0.5)]
    found = LineCompletions(lines_of(tmp_path / "completions.jsonl", lines))
    found.look(60)
    rewards = found.step_rewards(3, "train")
    assert [one for one in rewards if not math.isnan(one)] == [0.0, 1.0, 0.0, 1.0]
    assert len(rewards) == 6 and found.step_rewards(4, "train") == []
    assert found.index.steps_of("train").tolist() == [3, 4]


def test_links_pipes_and_lines_without_end_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = lines_of(tmp_path / "secret", [sample(1)])
    (tmp_path / "link").symlink_to(secret)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "absent"):
        for found in (LineCompletions(tmp_path / name), TableCompletions(tmp_path / name)):
            found.look()
            assert (len(found.index), found.progress) == (0, 1.0)
    monkeypatch.setattr(growing_file, "LONGEST_LINE", 400)
    path = lines_of(tmp_path / "long", [sample(1), sample(2, completion="x" * 999), sample(3)])
    found = LineCompletions(path)
    found.look()
    assert (list(found.index.steps), found.damaged) == ([1, 3], 1)
    assert found.read(1)["step"] == 3


def group(row: int, rewards: list[float | None]) -> Group:
    prompt = Prompt(f"train/{row}", "6 x 7", (1, 2))
    made = [
        Completion(TokenSequence.of_answer((1, 2), (3, 4)), f"answer {place}", "stop")
        for place in range(len(rewards))
    ]
    return Group(prompt, 0, made, rewards, {"right": rewards})


def test_tables_are_read_in_the_order_of_steps_and_again_where_one_has_changed(
    tmp_path: Path,
) -> None:
    for step in (2, 1):
        write_completions(
            tmp_path / f"step_{step:06}.parquet", step, {"train": [group(step, [1.0, None])]}, "all"
        )
    write_completions(
        tmp_path / "evaluation_000001.parquet", 1, {"held_out": [group(7, [0.5])]}, "all"
    )
    (tmp_path / "step_000003.parquet").write_bytes(b"PAR1 torn")
    (tmp_path / "step_000004.parquet").symlink_to(tmp_path / "step_000001.parquet")
    found = TableCompletions(tmp_path)
    found.look(60)
    assert list(found.index.steps) == [1, 1, 1, 2, 2]
    assert [found.index.key(place)[1] for place in range(3)] == ["train", "train", "held_out"]
    assert math.isnan(found.index.reward(1)) and found.progress == 1.0
    row = found.read(4)
    assert (row["completion"], row["reward_parts"]) == ("answer 1", {"right": None})
    assert row["token_ids"] == [3, 4]
    write_completions(
        tmp_path / "step_000002.parquet", 2, {"train": [group(2, [0.0, 0.0, 1.0])]}, "all"
    )
    found.look(60)
    assert list(found.index.rewards)[3:] == [0.0, 0.0, 1.0] and found.read(5)["reward"] == 1.0


def test_runs_are_found_below_a_folder_and_have_names_of_their_own(tmp_path: Path) -> None:
    for name in ("a/one", "a/deep/er/two", "b/one", "b/1/2/3/4/too_deep", "b/.hidden/run"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").touch()
    (tmp_path / "a" / "again").symlink_to(tmp_path / "a")
    one, other = tmp_path / "a", tmp_path / "b"
    assert list(find_runs([one])) == ["deep/er/two", "one"]
    assert list(find_runs([one, other, one / "one"])) == ["a/deep/er/two", "a/one", "b/one", "one"]
    assert list(find_runs([one / "one", other / "one"])) == ["one", "one (2)"]
    assert find_runs([tmp_path / "absent"]) == {}
    numbered = [tmp_path / name / "x (2)" for name in ("c", "d")]
    plain = [tmp_path / name / "x" for name in "efg"]
    for run in (*numbered, *plain):
        run.mkdir(parents=True)
        (run / "metrics.jsonl").touch()
    for runs in permutations([*numbered, *plain]):
        assert sorted(find_runs(runs).values()) == sorted(runs)
