"""Reading what a run left: torn lines, doubled steps, figures that are none."""

from collections.abc import Callable
from pathlib import Path

from isobit.observe.run_record import read_run
from tests.observe.report.run_files import manifest


def test_a_torn_line_is_counted_and_left_out(write_run: Callable[..., Path]) -> None:
    root = write_run([{"step": 1, "loss": 0.5}], [], manifest())
    with (root / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 2, "lo')
    record = read_run(root)
    assert record.figures == {1: {"loss": 0.5}}
    assert record.problems == ("metrics.jsonl: 1 of 2 lines cannot be read and are left out",)


def test_a_step_gathers_its_lines_and_a_later_one_wins(write_run: Callable[..., Path]) -> None:
    lines = [
        {"step": 2, "loss": 1.0},
        {"step": 1, "loss": 2.0},
        {"step": 2, "eval/a/accuracy": 0.5},
        {"step": 2, "loss": 3.0},
    ]
    record = read_run(write_run(lines, [], manifest()))
    assert record.figures == {1: {"loss": 2.0}, 2: {"loss": 3.0, "eval/a/accuracy": 0.5}}
    assert list(record.figures) == [1, 2]
    assert record.names == ["loss", "eval/a/accuracy"]


def test_only_numbers_and_null_are_figures(write_run: Callable[..., Path]) -> None:
    first = {"step": 1, "a": None, "b": True, "c": "1", "d": [1], "e": 2}
    record = read_run(write_run([first, {"a": 1}, {"step": "1"}], [], manifest()))
    assert record.figures == {1: {"a": None, "e": 2}}


def test_a_manifest_that_is_no_object_is_damaged(write_run: Callable[..., Path]) -> None:
    root = write_run([], [], manifest())
    (root / "run.json").write_text("[1]", encoding="utf-8")
    assert read_run(root).problems == ("run.json is damaged: the page lacks what it holds",)
