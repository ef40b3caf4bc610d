"""What a run prints, with and without a terminal."""

from io import StringIO
from pathlib import Path

from rich.console import Console

from isobit.observe.console import Report, describe_result, describe_summary, printable
from isobit.observe.eval_result import EvalResult
from isobit.observe.summary import SetSummary, Summary
from isobit.rollout.progress import Progress

METRICS = {
    "reward/mean": 0.5,
    "response_length/mean": 12.25,
    "entropy": 0.125,
    "log_prob_diff/tokens_differing": 0,
    "log_prob_diff/tokens_compared": 3136,
    "tokens_per_s/rollout": 11000.4,
    "tokens_per_s/training": 7400.0,
    "time/rollout_s": 1.0,
    "time/grading_s": 0.25,
    "time/training_s": 2.0,
}


def test_a_step_is_one_plain_line_without_a_terminal() -> None:
    out = StringIO()
    report = Report(Console(file=out, width=40))
    with report.generating("rollout") as progress:
        assert progress is None
    report.step(3, 20, METRICS)
    assert out.getvalue() == (
        "step  3/20  reward 0.500  length 12.2  entropy 0.125  differing 0 of 3136  rollout 11,000 "
        "tok/s  training 7,400 tok/s  3.2 s\n"
    )


def test_a_step_without_an_update_says_so() -> None:
    out = StringIO()
    Report(Console(file=out)).step(
        1, 1, {name: value for name, value in METRICS.items() if name != "entropy"}
    )
    assert "no update" in out.getvalue()


def test_a_terminal_shows_tokens_per_second_while_generating() -> None:
    out = StringIO()
    report = Report(Console(file=out, force_terminal=True, width=120))
    with report.generating("rollout") as progress:
        assert progress is not None
        progress(Progress(finished=3, running=5, total=8, generated_tokens=2500, seconds=2.0))
    assert "1,250 tokens/s" in out.getvalue()
    assert "3/8" in out.getvalue()


def test_a_terminal_shows_what_takes_its_time_and_elsewhere_nothing_is_printed() -> None:
    terminal, pipe = StringIO(), StringIO()
    for console in (Console(file=terminal, force_terminal=True, width=80), Console(file=pipe)):
        with Report(console).busy("training"):
            pass
    assert "training" in terminal.getvalue() and "0:00:0" in terminal.getvalue()
    assert pipe.getvalue() == ""


def test_control_characters_and_markup_do_not_reach_the_terminal() -> None:
    out = StringIO()
    Report(Console(file=out, force_terminal=True)).line("a\x1b[31mb\x07 [bold]c[/bold]")
    assert out.getvalue() == "a[31mb [bold]c[/bold]\n"
    assert printable("\u202egnihton\t\n") == "gnihton\t\n"


def test_an_evaluation_set_in_one_line() -> None:
    result = EvalResult(0.5, (0.4, 0.6), 200, 4, 3, {1: 0.5, 2: 0.75, 4: 0.9}, 17.5, 0.0)
    assert describe_result("sums", result) == (
        "sums accuracy 50.0% (95% interval 40.0 to 60.0) on 200 problems, 4 samples each, pass@2 "
        "75.0%, pass@4 90.0%, length 17.5, "
        "3 rewards failed"
    )


def test_the_last_lines_hold_the_figures_and_the_places() -> None:
    sets = {"held_out": SetSummary(200, 0.55, 0.9, None, None)}
    summary = Summary(
        Path("runs/x"),
        "fp8",
        20,
        0.55,
        0.9,
        200,
        90123,
        0,
        0.0,
        90123,
        0,
        0,
        112.4,
        60.0,
        9.5,
        sets,
    )
    assert describe_summary(summary) == [
        "held_out: accuracy 55.0% -> 90.0% (+35.0 points) on 200 problems",
        "fp8: 0 of 90,123 log-probabilities differ in rollout and training",
        "time: 112.4 s for 20 steps, 9.5 s for evaluation",
        "model: runs/x/model",
        "files: runs/x (summary.json, metrics.jsonl, completions.jsonl, tensorboard/, run.json)",
        "figures as a page: isobit report runs/x",
    ]
