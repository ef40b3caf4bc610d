"""The table, the picture and the advice over model sizes, from rows of runs that never were."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.proof import figures, ladder, rows, sizes, suite
from experiments.proof.ladder import PARAMETERS, PRETRAINED
from experiments.proof.sizes import measured
from isobit.config.precision import PrecisionConfig
from tests.experiments.made_up_rows import made_up_row

PROBLEMS = 40


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "DRAWS", 400)


def row(task: str, arm: str, seed: int, before: float, after: float, **more: Any) -> dict[str, Any]:
    """Of which so many of the first problems are solved."""
    made = made_up_row(task, arm, seed, steps=25, problems=PROBLEMS)
    shares = (before, after)
    for one, share in zip(made["evaluations"], shares, strict=True):
        one["rewards"] = [float(place < round(share * PROBLEMS)) for place in range(PROBLEMS)]
    return {**made, **more}


def pair(task: str, seeds: int = 1, before: float = 0.1, after: float = 0.2) -> list[rows.Row]:
    """``bf16``, and ``fp8`` so far below it."""
    return [
        one
        for seed in range(seeds)
        for one in (
            row(task, "bf16", seed, 0.5, 0.8),
            row(task, "fp8", seed, 0.5 - before, 0.8 - after),
        )
    ]


def found(given: list[rows.Row], size: str, arm: str = "fp8", **more: Any) -> sizes.Measured:
    (one,) = (
        one
        for one in measured(given, more.get("costs", {}), more.get("starts", {}))
        if (one.size, one.arm) == (size, arm)
    )
    return one


def test_the_seeds_of_one_start_prove_no_more_before_training() -> None:
    one, three = (found(pair("ladder-27m", seeds), "27m") for seeds in (1, 3))
    assert one.differences["before"] == three.differences["before"]
    assert one.differences["before"].mean == pytest.approx(-0.1)
    after = one.differences["after"], three.differences["after"]
    assert after[0].mean == after[1].mean == pytest.approx(-0.2)
    assert after[0].low is not None and after[1].low is not None and after[0].low < after[1].low
    assert three.accuracies["before"] == pytest.approx(0.4)
    assert found(pair("ladder-27m"), "27m", "bf16").differences == {}


def test_weights_answer_back_paired_where_problems_are_known() -> None:
    other = {"sets": {"held_out": {"accuracy": 0.75}}}
    rewards = [float(place < 0.75 * PROBLEMS) for place in range(PROBLEMS)]
    bf16, fp8 = pair("ladder-27m")
    old = found([bf16, {**fp8, "other_flow": other}], "27m")
    new = {**other, "rewards": {"held_out": rewards}}
    paired = found([bf16, {**fp8, "other_flow": new}], "27m").differences["back"]
    assert old.accuracies["back"] == 0.75
    assert old.differences["back"].mean == pytest.approx(-0.05)
    assert old.differences["back"].low is None
    difference = torch.tensor([rewards]) - torch.tensor([figures.after(bf16)])
    assert (paired.low, paired.high) == figures.interval(difference)
    assert "back" not in found([bf16, fp8], "27m").differences


def test_the_law_goes_through_the_pretrained_model() -> None:
    """A size with 4 times its parameters loses 4^-0.4 of what it loses, in the same arm."""
    known = measured(pair("multiply"), {}, {})
    base = PARAMETERS[PRETRAINED]
    assert sizes.law(known, "fp8", "after", base) == pytest.approx(-0.2)
    assert sizes.law(known, "fp8", "before", 4 * base) == pytest.approx(-0.1 * 4**-0.4)
    assert sizes.law(known, "int8", "after", base) is None
    assert sizes.law(measured(pair("ladder-108m"), {}, {}), "fp8", "after", base) is None
    lines = list(sizes.markdown(measured([*pair("multiply"), *pair("ladder-1.1b")], {}, {}), {}))
    (large,) = (line.split(" | ") for line in lines if line.startswith("| 1.1b, `fp8`"))
    assert large[8:10] == ["-3.9", "-7.8"], "(1107.3 / 106.2)^-0.4 = 0.391"


def test_linear_layers_alone_are_among_the_sites_of_the_pretrained_model() -> None:
    given = [*pair("multiply", 2), row("sites", "fp8-linear", 0, 0.5, 0.7)]
    one = found(given, PRETRAINED, "fp8-linear")
    assert one.seeds == 1 and one.differences["after"].mean == pytest.approx(-0.1)
    assert found([row("sites", "fp8-ends-bf16", 0, 0.5, 0.7), *given], PRETRAINED).seeds == 2


def test_times_compare_where_as_many_runs_shared_the_card() -> None:
    bf16, fp8 = pair("ladder-27m")
    columns = {name: [2.0] * 25 for name in ("time/rollout_s", "time/training_s")}
    slow = {**fp8, "steps": {**fp8["steps"], **columns}}
    fast = {**bf16, "steps": {**bf16["steps"], **{name: [1.0] * 25 for name in columns}}}

    def cells(given: list[rows.Row], costs: Any = None) -> tuple[str, ...]:
        table = sizes.table(measured(given, costs or {}, {}))
        return next(cells[9:11] for one, cells in table if one.arm == "fp8")

    assert cells([fast, slow]) == ("2.00 + 2.00 (4 at once)", "2.00x")
    assert cells([fast, {**slow, "jobs": 1}]) == ("2.00 + 2.00", "-")
    once = {name: [0.5] * 25 for name in columns}
    other = {**slow, "seed": 1, "jobs": 1, "steps": {**fp8["steps"], **once}}
    assert cells([fast, slow, other]) == ("0.50 + 0.50", "-"), "those with the fewest beside them"
    alone = {"rollout": [3.0], "training": [3.0]}
    costs = {"ladder-27m": {"bf16": {**alone, "rollout": [1.0]}, "fp8": alone}}
    assert cells([fast, slow], costs) == ("3.00 + 3.00", "1.50x")
    costs = {"ladder-27m": {"bf16": alone}}
    assert cells([fast, {**slow, "jobs": 1}], costs) == ("2.00 + 2.00", "-"), "measured otherwise"


def test_a_start_that_was_answered_without_training_stands_in() -> None:
    scores = {"bf16": [1.0, 1.0, 0.0, 0.0], "int8": [1.0, 0.0]}
    close = {"closeness": {"perplexity": 1.25, "rms": 0.5}, "perplexity_of_base": 1.0}
    flows = {name: {"scores": one, **close} for name, one in scores.items()}
    starts = {"443m": {"flows": flows}}
    one = found([], "443m", "int8", starts=starts)
    assert (one.seeds, one.differences["before"].mean) == (0, -0.5), "of what both were asked"
    assert set(one.differences) == {"before"} and one.seconds is None
    given = pair("ladder-443m")
    runs = found(given, "443m", "fp8", starts=starts)
    assert runs.differences["before"].mean == pytest.approx(-0.1), "not answered untrained"
    more = found([*given, row("ladder-443m", "int8", 0, 0.5, 0.7)], "443m", "int8", starts=starts)
    assert (more.asked, more.differences["before"].mean) == (2, -0.5)
    lines = "\n".join(sizes.markdown(measured([], {}, starts), starts))
    assert "| 443m: perplexity, rms (nats) | +25.000%, 0.5000 |" in lines
    assert "| 443m, `int8` | 0 | 50.0% of 2 | - |" in lines


@pytest.mark.parametrize(
    ("after", "said"), [(0.0, "within one point"), (0.5, "not"), (0.025, "undecided")]
)
def test_it_is_said_whether_an_arm_is_within_a_point(after: float, said: str) -> None:
    before, line = sizes.verdicts(measured(pair("ladder-27m", after=after), {}, {}))
    assert line == f"- `fp8`, after training: {said} at 27m (1 seed)."
    assert before == "- `fp8`, before training: not at 27m."


def test_the_advice_is_of_the_ladder_and_names_where_it_was_measured() -> None:
    known = pair("multiply")
    with pytest.raises(ValueError, match="no two arms of the ladder are finished"):
        sizes.advice(measured(known, {}, {}), known)
    lone = [*known, row("ladder-27m", "fp8", 0, 0.5, 0.5)]
    with pytest.raises(ValueError, match="no two arms of the ladder are finished"):
        sizes.advice(measured(lone, {}, {}), lone)
    given = [*known, *pair("ladder-27m", 2), row("ladder-27m", "fp8-rollout-tis", 0, 0.5, 0.5)]
    said = sizes.advice(measured(given, {}, {}), given)
    assert (said["cards"], said["steps"], said["days"]) == (["made-up"], [25], ["2026-11-23"] * 2)
    assert [(one["name"], list(one["flows"])) for one in said["sizes"]] == [
        (PRETRAINED, ["fp8"]),
        ("27m", ["fp8"]),
    ]
    fp8 = said["sizes"][1]["flows"]["fp8"]
    assert fp8["seeds"] == 2 and set(fp8) == {"seeds", "before", "after"}
    assert said["sizes"][1]["layer_parameters"] == 25_165_824


def test_the_advice_has_int8_as_it_is_by_default_beside_its_earlier_backward() -> None:
    given = pair("ladder-27m")
    given += [row("ladder-27m", arm, 0, 0.5, 0.5) for arm in ("int8", "int8-backward")]
    (size,) = sizes.advice(measured(given, {}, {}), given)["sizes"]
    earlier = '{preset = "int8", dgrad = "fp8", wgrad = "bf16"}'
    assert list(size["flows"]) == ["fp8", earlier, "int8"]


def test_repeats_and_other_starts_are_told() -> None:
    given = [*pair("ladder-27m", 2), *pair("multiply")]
    again = rows.Repeats([given[1], {**given[0], "final": {}}])
    differing, same, other = sizes.notes(given, again)
    assert differing.endswith("in `bf16`, `fp8`: 0 of 7,962,174.")
    assert same.startswith("- Repeated on another day or card: 1 of 2 the same bytes")
    assert "ladder-27m-bf16-0" in other and other.endswith("has other: final weights.")
    given[3] = {**given[3], "start": {"model.safetensors": "other"}}
    _, note = sizes.notes(given, rows.Repeats())
    assert note.startswith("- `ladder-27m`: Not the same in all rows: start.model.safetensors")


def test_the_table_goes_between_the_marks_of_a_page(tmp_path: Path) -> None:
    text = f"before\n{sizes.BEGIN}\nold\n{sizes.END}\nafter\n"
    table = f"| {'a' * 120} |"
    said = ["- " + "word " * 30, table]
    block = sizes.page_lines(said, tmp_path / "pictures" / "one.svg", tmp_path / "page.md")
    new = sizes.with_block(text, block)
    assert "(pictures/one.svg)\n\n- word" in new and "old" not in new
    assert [line for line in new.splitlines() if len(line) > 100] == [table]
    assert new.startswith("before\n") and new.endswith("after\n")
    assert sizes.with_block(new, block) == new
    with pytest.raises(ValueError, match="has no block"):
        sizes.with_block("no marks", block)


def test_parameters_are_those_of_the_layers_matrices() -> None:
    """Of Qwen3-1.7B's layers, of which ``1.1b`` has 22."""
    attention = 2 * 2048 * 16 * 128 + 2 * 2048 * 8 * 128
    assert PARAMETERS["1.1b"] == 22 * (attention + 3 * 2048 * 6144)
    assert set(PARAMETERS) == {
        PRETRAINED,
        *(one.removeprefix(suite.LADDER) for one in suite.LADDERS),
    }


def test_rewards_while_training_are_compared_where_both_runs_have_steps() -> None:
    given = pair("ladder-443m", 2)
    for row, reward in zip(given, (0.7, 0.6, 0.5, 0.5), strict=True):
        row["steps"]["reward/mean"] = [0.0] * 30 + [reward] * 30  # pyright: ignore[reportIndexIssue]
    (both,) = (line for line in sizes.rewards(given, rows.Repeats()) if line.startswith("| 443m"))
    assert "| -5.0 [-10.0, +0.0], 2 seeds, to step 60 | - |" in both
    lost = rows.Repeats(lost={"ladder-443m-fp8-0": {"reward/mean": [0.0] * 30 + [0.1] * 5}})
    (cut,) = (line for line in sizes.rewards(given[:1], lost) if line.startswith("| 443m"))
    assert "| -12.0 [" in cut and ", 1 seed, to step 35 |" in cut  # 5 of 25 steps: -0.6


def answers(asked: list[tuple[list[str], int]], told: dict[str, float]) -> Any:
    """In place of ``compare_flows``: notes which flows and how many problems it is asked for.  All
    flows solve the first problem alone; ``told`` has what some score on the last.
    """

    def answer(folder: Path, config: Any, others: list[PrecisionConfig], answers: str) -> Any:
        (held_out,) = config.data.eval.values()
        count = held_out.limit or 3
        asked.append(([one.name for one in others], count))
        made = [
            Namespace(
                name=one.name,
                result=None,
                scores=[1.0, *[0.0] * (count - 2), told.get(one.name, 0.0)],
                closeness=None,
                generated_per_s=1.0,
                problem=None,
            )
            for one in (PrecisionConfig(preset="bf16"), *others)
        ]
        return Namespace(tokens=9 * count, flows=made)

    return answer


ADDED = "fp8-int8-attention"


@pytest.fixture
def of_start(tmp_path: Path) -> Path:
    """The row of a start that answered three problems in all flows but one."""
    model = tmp_path / "start-27m" / "model"
    model.mkdir(parents=True)
    (tmp_path / "data").mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    known = {one: {"scores": [1.0, 0.0, 0.0]} for one in ladder.FLOWS if one != ADDED}
    path = tmp_path / "rows" / "starts" / "27m.json.xz"
    rows.write_row(path, {"start": rows.weights_sha256(model), "flows": known})
    return path


def test_a_row_of_a_start_takes_in_the_flows_that_it_lacks(
    tmp_path: Path, of_start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[list[str], int]]()
    monkeypatch.setattr(ladder, "compare_flows", answers(asked, {}))
    assert ladder.answer_start(tmp_path, "27m", {}) == of_start
    assert asked == [(['{preset = "fp8", attention = "int8"}'], 3)]
    flows = rows.read_row(of_start)["flows"]
    assert list(flows) == list(ladder.FLOWS)
    assert (flows[ADDED]["scores"], flows[ADDED]["tokens"]) == ([1.0, 0.0, 0.0], 27)
    ladder.answer_start(tmp_path, "27m", {})
    assert len(asked) == 1, "nothing is lacking"
    (tmp_path / "start-27m" / "model" / "model.safetensors").write_bytes(b"others")
    with pytest.raises(ValueError, match="the row is of a start whose SHA-256"):
        ladder.answer_start(tmp_path, "27m", {})
    assert len(asked) == 1


def test_a_start_answers_more_problems_than_the_runs(
    tmp_path: Path, of_start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of them are those of the runs, and are answered alike."""
    asked = list[tuple[list[str], int]]()
    monkeypatch.setattr(ladder, "compare_flows", answers(asked, {}))
    ladder.answer_start(tmp_path, "27m", {}, ["int8", "bf16"], 5)
    assert asked == [([suite.ARMS["int8"]["precision"]], 5)]
    held_out = (tmp_path / "data" / "multiply.held_out-5.jsonl").read_text(encoding="utf-8")
    assert list(map(json.loads, held_out.splitlines())) == suite.rows_of("multiply", "held_out", 5)
    flows = rows.read_row(of_start)["flows"]
    lengths = {one: len(flow["scores"]) for one, flow in flows.items()}
    assert lengths == {"bf16": 5, "fp8": 3, "fp8-linear": 3, "int8": 5}
    ladder.answer_start(tmp_path, "27m", {}, ["int8"], 4)
    assert len(asked) == 1, "more are known"
    monkeypatch.setattr(ladder, "compare_flows", answers(asked, {"bf16": 1.0}))
    with pytest.raises(ValueError, match="bf16 answers otherwise than in the row"):
        ladder.answer_start(tmp_path, "27m", {}, ["fp8"], 4)
