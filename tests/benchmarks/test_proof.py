"""``benchmarks.proof``: its problems are right and apart, its runs are ordinary and resumable, its
differences are paired.
"""

import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.arms import cost, figures, flows, look, problems, repeats, rows, runs, suite
from benchmarks.arms.problems import product_worked_out, rows_of
from isobit.starter import starter_folder
from tests.benchmarks.made_up_rows import made_up_row
from tests.forked import called

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


class Job:
    """What is asked of a Popen, of a command that is forked."""

    def __init__(self, card: str, command: Sequence[str], log: Path) -> None:
        python, option, module, *words = map(str, command)
        assert (python, option) == (sys.executable, "-m")
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": card}
        self._process = called("tests.forked:be_module", log, module, *words, environ=environ)

    def poll(self) -> int | None:
        return self._process.exitcode

    returncode = property(poll)

    def wait(self) -> int | None:
        self._process.join()
        return self.returncode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


@pytest.fixture
def forked_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs on a card need not import torch, which takes seconds."""
    for module in (runs, flows):
        monkeypatch.setattr(module, "on_card", Job)


def test_a_job_sees_its_card_alone_and_adds_to_its_log(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    for card in ("0", "1"):
        program = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
        assert runs.on_card(card, [sys.executable, "-c", program], log).wait() == 0
    assert log.read_text() == "0\n1\n"


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
    splits = [
        {row["prompt"] for row in rows_of("multiply", split, 500)} for split in problems.SIZES
    ]
    assert all(len(split) == 500 for split in splits)
    assert not (splits[0] & splits[1] or splits[0] & splits[2] or splits[1] & splits[2])


def test_solutions_earn_the_reward_and_repeat() -> None:
    for task in problems.TASKS:
        rows = rows_of(task, "held_out", 20)
        assert rows == rows_of(task, "held_out", 20)
        assert all(row["completion"].endswith(f"#### {row['answer']}") for row in rows)


@pytest.mark.usefixtures("forked_jobs")
def test_a_run_is_kept_once_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "SIZES", {"solutions": 1, "train": 4, "held_out": 3})
    problems.write_problems(tmp_path / "data")
    (run,) = suite.wanted(["gsm"], ["fp8"], [0])
    assert not runs.run_all([run], tmp_path, [""], 1, 0.0, TINY)  # no time: nothing begins
    assert runs.run_all([run], tmp_path, [""], 1, 120.0, TINY), (
        tmp_path / "runs" / f"{run.name}.log"
    ).read_text()
    (row,) = rows.read_finished(tmp_path / "rows")
    assert len(figures.before(row)) == len(figures.after(row)) == 3
    assert row["jobs"] == 1 and row["steps"]["step"] == [1]
    assert row["final"] == rows.weights_sha256(tmp_path / "runs" / run.name / "model")
    assert row["start"].keys() == {"model.safetensors"}
    assert row["summary"]["tokens_differing"] == 0 < row["summary"]["tokens_compared"]
    (line,) = figures.tables([row])[0].lines
    assert line[:2] == ("fp8", "1") and line[5] == "-"  # nothing to be paired with
    assert row["other_flow"]["precision"]["preset"] == "bf16"
    assert row["other_flow"]["sets"]["held_out"]["problems"] == 3
    (seen,) = look.look(tmp_path)
    assert seen.startswith("gsm-fp8-0: 1 steps; held out 0: ") and "; 0 of " in seen
    before = json.dumps(row)
    assert runs.run_all([run], tmp_path, [""], 1, 0.0, TINY)  # is there
    assert json.dumps(rows.read_finished(tmp_path / "rows")[0]) == before


def test_a_run_made_again_is_a_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = suite.run_named("gsm:fp8:2:again")
    assert run == suite.Run("gsm", "fp8", 2, again=True) and run.name == "gsm-fp8-2-again"
    row = made_up_row("gsm", "fp8", 2, steps=2, problems=4)
    named = {"task", "arm", "seed", "jobs"}
    found = {name: part for name, part in row.items() if name not in named}
    monkeypatch.setattr(rows, "row_of", lambda _: found)
    for one in (run, suite.run_named("gsm:fp8:2")):
        runs.keep(one, tmp_path, 1)
    first, again = rows.read_finished(tmp_path / "rows"), repeats.read(tmp_path / "rows")
    assert first == again.rows and len(first) == 1
    (table,) = figures.tables(first, again)
    assert table.notes[0].startswith("Repeated on another day or card: 1 of 1 the same bytes")
    for wrong in ("gsm:fp8", "gsm:fp9:2", "sum:fp8:2", "gsm:fp8:2:twice", "gsm:fp8:x"):
        with pytest.raises(ValueError, match="no run is named"):
            suite.run_named(wrong)


@pytest.mark.usefixtures("forked_jobs")
def test_no_run_begins_when_the_time_to_begin_is_over(tmp_path: Path) -> None:
    wanted = [suite.run_named("gsm:fp8:0")]
    assert not runs.run_all(wanted, tmp_path, [""], 1, 60.0, TINY, begin_within=-1.0)
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.usefixtures("forked_jobs")
def test_each_arm_is_measured_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "SIZES", {"solutions": 1, "train": 8, "held_out": 3})
    problems.write_problems(tmp_path / "data")
    wanted = suite.wanted(["gsm"], ["bf16", "fp8"], [0])
    several = {**TINY, "training.steps": "100", "evaluation.every": "0"}
    cost.measure_all(wanted, tmp_path, "", 2, several)
    costs = cost.read(tmp_path / "rows")
    found = costs["gsm"]
    for arm in ("bf16", "fp8"):
        assert [len(found[arm][phase]) for phase in ("rollout", "training")] == [2, 2]
        assert found[arm]["device"]["type"] == "cpu"
    assert not (tmp_path / "cost").exists()
    *_, bf16, fp8, _ = cost.markdown(costs)
    assert bf16.startswith("| `bf16` |") and bf16.endswith("| 1.00 |") and fp8.startswith("| `fp8`")


@pytest.mark.usefixtures("forked_jobs")
def test_a_run_that_fails_is_not_measured(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    wanted = suite.wanted(["gsm"], ["bf16"], [0])
    with pytest.raises(RuntimeError, match="gsm-bf16-0 ended before it was measured"):
        cost.measure_all(wanted, tmp_path, "", 2, TINY)


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


@pytest.mark.usefixtures("forked_jobs")
def test_the_start_answers_in_every_flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "SIZES", {"solutions": 1, "train": 1, "held_out": 2})
    monkeypatch.setattr(flows, "FLOWS", {"plain": "bf16", "mixed": flows.FLOWS["down_proj alone"]})
    problems.write_problems(tmp_path / "data")
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "model").symlink_to(starter_folder())
    settings = {key: value for key, value in TINY.items() if key != "model"}
    found = flows.answer_all(tmp_path, [""], 2, settings)
    kept = found["mixed"]["precision"]["modules_bf16"]
    assert kept == ["qkv_proj", "o_proj", "gate_up_proj"]
    assert [one["problems"] for one in found["plain"]["sets"].values()] == [2, 2]
    assert flows.markdown(found)[-1] == "| mixed | 0.0% | 0.0% |"
