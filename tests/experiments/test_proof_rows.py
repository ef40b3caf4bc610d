"""Rows of the proof: whole and the same bytes, their table, their settings, and repeats."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from experiments.proof import figures, rows
from experiments.proof.rows import Repeats
from tests.experiments.made_up_rows import made_up_row


def small(arm: str, seed: int = 0, **changes: Any) -> dict[str, Any]:
    return {**made_up_row("gsm", arm, seed, steps=25, problems=20), **changes}


def test_a_row_comes_back_whole_in_the_same_bytes_and_small(tmp_path: Path) -> None:
    row = made_up_row("gsm", "fp8-rollout", 0)
    path = tmp_path / f"{rows.name_of(row)}{rows.SUFFIX}"
    rows.write_row(path, row)
    first = path.read_bytes()
    rows.write_row(path, row)
    assert path.read_bytes() == first and len(first) < 40_000
    assert [one.name for one in tmp_path.iterdir()] == ["gsm-fp8-rollout-0.json.xz"]
    assert rows.read_finished(tmp_path) == [row] and rows.read_repeats(tmp_path) == Repeats([])


def test_a_file_that_was_cut_is_named(tmp_path: Path) -> None:
    path = tmp_path / f"gsm-fp8-0{rows.SUFFIX}"
    rows.write_row(path, small("fp8"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"gsm-fp8-0\.json\.xz is no row .*copy it again"):
        rows.read_finished(tmp_path)


def test_evaluations_are_read_with_their_steps(tmp_path: Path) -> None:
    """A grading of training prompts lies between; a reward that failed stays None."""
    output = tmp_path / "run"
    (output / "model").mkdir(parents=True)
    (output / "model" / "model.safetensors").write_bytes(b"weights")
    (output / "run.json").write_text(json.dumps({"model": {"folder": str(output / "model")}}))
    (output / "summary.json").write_text("{}")
    step = {"step": 1, "reward/mean": 0.5, "entropy": None, "loss": 3.0}
    evaluation = {
        "eval/held_out/accuracy": 0.0,
        "eval/held_out/response_length": 7.0,
        "time/evaluation_s": 2.0,
    }
    _write(output / "metrics.jsonl", {"step": 0, **evaluation}, step, {"step": 1, **evaluation})
    graded = [
        {"prompts": [["held_out/0", 0], ["held_out/1", 0]], "rewards": [[0.0], [1.0]]},
        {"prompts": [["train/0", 0]], "rewards": [[0.0, 1.0]]},
        {"prompts": [["held_out/0", 0], ["held_out/1", 0]], "rewards": [[1.0], [None]]},
    ]
    _write(output / "rewards.jsonl", *graded)
    row = rows.row_of(output)
    found = [(one["step"], one["rewards"]) for one in row["evaluations"]]
    assert found == [(0, [0.0, 1.0]), (1, [1.0, None])]
    assert row["steps"]["reward/mean"] == [0.5] and row["steps"]["entropy"] == [None]
    assert "loss" not in row["steps"]
    with pytest.raises(ValueError, match="the reward of 1 held-out problems failed"):
        figures.after({**row, "task": "gsm", "arm": "fp8", "seed": 0})
    (output / "model" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors"):
        rows.row_of(output)


def _write(path: Path, *lines: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_the_table_has_what_is_finished() -> None:
    """Arms in their order, an unknown one last; pairs where both have the seed; stress last."""
    found = [
        small("new-arm"),
        small("fp8", 0),
        small("fp8", 1),
        small("bf16", 0),
        {**small("fp8"), "task": "stress-lr"},
    ]
    gsm, stress = figures.tables(found)
    assert [line[0] for line in gsm.lines] == ["bf16", "fp8", "new-arm"]
    cells = dict(zip(("arm", *figures.COLUMNS), gsm.lines[1], strict=True))
    assert cells["seeds"] == "2" and cells["rollout alone, s a step"] == "-"
    assert cells["minus bf16, points (95%)"].endswith("), 1 of 2 seeds")
    assert stress.lines[0][5] == "-", "there is no bf16"
    assert [line[5:7] for line in gsm.lines[:2]] == [("-", "-"), (gsm.lines[1][5], "-")]
    assert gsm.lines[2][6].endswith(")"), "minus fp8, of seed 0"
    text = "\n".join(figures.markdown([gsm, stress]))
    assert text.index("| gsm |") < text.index("| stress-lr |")


def test_differences_of_log_probabilities_are_means_over_tokens() -> None:
    row = small("fp8-rollout")
    row["steps"] = {
        **row["steps"],
        "log_prob_diff/mean": [0.1, None, 0.4, *[None] * 22],
        "log_prob_diff/tokens_compared": [100, None, 300, *[0] * 22],
    }
    assert figures.mean_difference([row], "log_prob_diff/mean") == pytest.approx(0.325)
    assert figures.mean_difference([], "log_prob_diff/mean") is None


def test_times_are_those_of_an_arm_alone() -> None:
    alone = {"gsm": {"fp8": {"rollout": [1000.0, 2.0, 3.0, 3.0], "training": [0.5]}}}
    (table,) = figures.tables([small("fp8"), small("bf16")], costs=alone)
    assert [line[-2:] for line in table.lines] == [("-", "-"), ("3.00", "0.50")]


def test_one_token_is_not_the_probability_error_of_a_run() -> None:
    """A rollout that draws what training holds for impossible: e^24 in one step of 25."""
    row = small("fp8-rollout")
    row["steps"]["mismatch/mult_prob_error"] = [1.05, *[1.01] * 23, 2.6e10]
    assert cells_of([row])["exp(abs(d)), median step"] == "1.0100"


def test_answers_in_another_flow_stand_in_the_table() -> None:
    """Rows of the first sitting have none."""
    other = {"precision": {"preset": "bf16"}, "sets": {"held_out": {"accuracy": 0.625}}}
    again = {"precision": {"preset": "bf16"}, "sets": {"held_out": {"accuracy": 0.375}}}
    name = "after, in another flow"
    assert cells_of([small("fp8")])[name] == "-"
    rows_of_arm = [small("fp8", seed, other_flow=one) for seed, one in enumerate((other, again))]
    assert cells_of([*rows_of_arm, small("fp8", 2)])[name] == "50.0% (bf16)"


@pytest.mark.exhaustive
def test_sites_stand_beside_what_they_are_compared_with() -> None:
    """The runs of ``multiply`` of the same seeds, ``bf16`` and ``fp8`` alone."""
    multiply = [
        {**small(arm, seed), "task": "multiply"}
        for arm in ("bf16", "fp8", "fp8-rollout")
        for seed in range(2)
    ]
    sites = {**small("fp8-wgrad-bf16"), "task": "sites"}
    found = {table.task: table for table in figures.tables([*multiply, sites])}
    assert [line[0] for line in found["sites"].lines] == ["bf16", "fp8", "fp8-wgrad-bf16"]
    assert [line[1] for line in found["sites"].lines] == ["1", "1", "1"]
    assert found["sites"].lines[2][5] != "-"  # paired with bf16
    assert [line[1] for line in found["multiply"].lines] == ["2", "2", "2"]


def cells_of(found: list[dict[str, Any]]) -> dict[str, str]:
    """Of the one arm of the rows."""
    ((line,),) = (table.lines for table in figures.tables(found))
    return dict(zip(("arm", *figures.COLUMNS), line, strict=True))


def test_what_differs_without_an_arms_doing_is_said() -> None:
    other = small("fp8", 1, start={"model.safetensors": "other"})
    other["run"]["config"]["training"]["steps"] = 26
    found = [small("bf16"), small("fp8", 0), other]
    seen = rows.settings_of(found)
    assert seen.by_arm["config.arm.precision"] == {"bf16": "bf16", "fp8": "fp8"}
    assert seen.shared["config.training.learning_rate"] == "3e-06"
    assert set(seen.mixed) == {"config.training.steps", "start.model.safetensors"}
    assert "config.training.steps (25, 26)" in figures.tables(found)[0].notes[-1]
    assert rows.setting_notes([small("bf16"), small("fp8")]) == []


def test_another_start_is_never_an_arms_doing() -> None:
    """Even where every row of an arm has it."""
    found = [small("bf16"), small("fp8", start={"model.safetensors": "other"})]
    assert set(rows.settings_of(found).mixed) == {"start.model.safetensors"}


def test_repeats_are_compared_by_their_bytes(tmp_path: Path) -> None:
    first, slower = small("fp8"), small("fp8")
    slower["steps"] = {**slower["steps"], "time/rollout_s": [9.0] * 25}
    slower["run"]["device"]["model"] = "another card"
    slower["run"]["config"]["rollout"] = {"kv_memory_gib": 6.0}  # less of it
    assert rows.differing_parts(first, slower) == []
    changes: dict[str, dict[str, Any]] = {
        "final weights": {"final": {"model.safetensors": "0"}},
        "completions and rewards": {"completions": "0"},
        "figures of the steps": {"steps": {**first["steps"], "entropy": [0.5] * 25}},
        "held-out rewards": {"evaluations": first["evaluations"][:1]},
        "settings": {"start": {}},
    }
    for name, change in changes.items():
        assert rows.differing_parts(first, {**slower, **change}) == [name]
    again = [slower, {**slower, "final": {}}, small("bf16")]  # the last has no first
    said = list(rows.repeat_notes([first], Repeats(again)))
    assert said[0].startswith("Repeated on another day or card: 1 of 2 the same bytes")
    assert said[1].endswith("again: 2026-11-23, another card) has other: final weights.")
    assert list(rows.repeat_notes([first], Repeats())) == []
    rows.write_row(tmp_path / rows.REPEATS / "second" / f"gsm-fp8-0{rows.SUFFIX}", slower)
    assert rows.read_repeats(tmp_path) == Repeats([slower])


def test_a_run_that_was_lost_is_compared_as_far_as_it_came(tmp_path: Path) -> None:
    first = small("fp8")
    columns = {name: column[:20] for name, column in first["steps"].items()}
    lines = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    for line in lines:
        line["time/rollout_s"] = 9.0
    lines.insert(10, {"step": 10, "eval/held_out/accuracy": 0.5})
    path = tmp_path / rows.REPEATS / "gsm-fp8-0.jsonl.xz"
    path.parent.mkdir()
    path.write_bytes(lzma.compress("".join(f"{json.dumps(line)}\n" for line in lines).encode()))
    (said,) = rows.repeat_notes([first, small("bf16")], rows.read_repeats(tmp_path))
    assert said.endswith("1 of 1 with the same figures in every step (20 steps).")
    lines[15]["entropy"] = 0.75
    path.write_bytes(lzma.compress("".join(f"{json.dumps(line)}\n" for line in lines).encode()))
    none, named = rows.repeat_notes([first], rows.read_repeats(tmp_path))
    assert "0 of 1 with the same figures" in none and named.startswith(
        "gsm-fp8-0 has other figures"
    )
    path.write_bytes(b"no xz")
    with pytest.raises(ValueError, match=r"gsm-fp8-0\.jsonl\.xz is no metrics.jsonl in xz"):
        rows.read_repeats(tmp_path)
