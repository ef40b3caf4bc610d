"""``experiments.proof``: its problems are right and apart, its runs are ordinary and resumable, its
differences are paired.
"""

import random
from pathlib import Path

import pytest
import torch

from experiments.proof import figures, rows, runs, suite
from experiments.proof.suite import product_worked_out, rows_of

TINY = {
    "model": "starter",
    "device": "cpu",
    "training.steps": "1",
    "training.prompts_per_step": "2",
    "training.samples_per_prompt": "2",
    "training.without_signal": "take",  # the starter earns nothing here
    "algorithm.overlong_buffer": "2",
    "algorithm.max_refills": "0",
    "rollout.max_new_tokens": "8",
    "rollout.kv_memory_gib": "0.01",
    "evaluation.max_new_tokens": "4",
    "checkpoint.keep_last": "0",
}


def test_a_product_is_worked_out_rightly() -> None:
    draw = random.Random(0)
    for first, second in [
        (999999, 99999),
        (100000, 10000),
        *((draw.randrange(10**5, 10**6), draw.randrange(10**4, 10**5)) for _ in range(20)),
    ]:
        partial, sums = product_worked_out(first, second).split("Sum by columns:\n")
        parts = [int(line[2:]) for line in partial.splitlines() if line.startswith("= ")]
        assert sum(parts) == first * second
        for line in (*partial.splitlines(), *sums.splitlines()):
            if ": write " in line:
                terms, total = line.partition(":")[0].split("=")
                assert sum(_product(term) for term in terms.split("+")) == int(total)
                assert line.endswith(f"write {int(total) % 10}, carry {int(total) // 10}")
        written = [line.split("write ")[1][0] for line in sums.splitlines()[:-1]]
        assert int("".join(reversed(written))) == first * second
        assert sums.splitlines()[-1] == f"#### {first * second}"


def _product(term: str) -> int:
    first, _, second = term.partition("*")
    return int(first) * int(second or 1)


def test_products_of_one_split_are_in_no_other() -> None:
    splits = [{row["prompt"] for row in rows_of("multiply", split, 500)} for split in suite.SIZES]
    assert all(len(split) == 500 for split in splits)
    assert not (splits[0] & splits[1] or splits[0] & splits[2] or splits[1] & splits[2])


def test_solutions_earn_the_reward_and_repeat() -> None:
    for task in suite.TASKS:
        rows = rows_of(task, "held_out", 20)
        assert rows == rows_of(task, "held_out", 20)
        assert all(row["completion"].endswith(f"#### {row['answer']}") for row in rows)


def test_a_run_is_kept_before_it_answers_in_another_flow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run,) = suite.wanted(["gsm"], ["fp8"], [0])
    monkeypatch.setattr(rows, "row_of", lambda output: {"summary": output.name})
    (tmp_path / "runs" / run.name).mkdir(parents=True)
    runs.keep(run, tmp_path, 1)
    (row,) = rows.read_finished(tmp_path / "rows")
    assert row["summary"] == run.name and "other_flow" not in row
    assert not runs.is_made(run, tmp_path)
    runs.answers_path(run, tmp_path).write_text('{"precision": "bf16"}')
    runs.keep_answers(run, tmp_path)
    (row,) = rows.read_finished(tmp_path / "rows")
    assert row["other_flow"] == {"precision": "bf16"} and runs.is_made(run, tmp_path)
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    assert runs.is_made(run, tmp_path), "made in another sitting"


def test_differences_are_paired_by_seed_and_problem() -> None:
    def row(arm: str, seed: int, after: list[float]) -> rows.Row:
        evaluations = [{"rewards": [0.0] * len(after)}, {"rewards": after}]
        return {"task": "gsm", "arm": arm, "seed": seed, "evaluations": evaluations}

    base = [row("bf16", 0, [1, 0, 1, 0]), row("bf16", 1, [1, 1, 0, 0])]
    ours = [row("fp8", 1, [1, 1, 0, 1]), row("fp8", 0, [1, 0, 1, 1]), row("fp8", 2, [1, 1, 1, 1])]
    difference = figures.paired(ours, base)
    assert difference is not None
    assert difference.tolist() == [[0, 0, 0, 1], [0, 0, 0, 1]]  # seed 2 has no pair
    low, high = figures.interval(difference.repeat(1, 50))
    assert 0.19 < low < 0.25 < high < 0.31
    assert figures.interval(torch.zeros(3, 10)) == (0.0, 0.0)


def test_each_task_has_its_arms_and_problems() -> None:
    found = suite.wanted(suite.NAMES, suite.ALL_ARMS, [0])
    arms = {task: [run.arm for run in found if run.task == task] for task in suite.NAMES}
    assert arms["gsm"] == list(suite.ARMS) and len(arms["multiply"]) == 4
    assert "bf16" not in arms["sites"] and "fp8-wgrad-bf16" in arms["sites"]
    problems_of = {run.task: run.problems for run in found}
    assert (
        problems_of["sites"] == problems_of["from-fp8"] == "multiply"
        and problems_of["stress-hot"] == "gsm"
    )
    starts = {run.task: run.start for run in found if run.start != "start"}
    assert starts == {"from-fp8": "start-fp8", "stress-outliers": "outliers"}
    hot = suite.Run("stress-hot", "fp8-rollout-tis", 0).settings
    assert hot.keys() == {
        "rollout.temperature",
        "precision",
        "training.old_log_probs",
        "corrections",
    }
