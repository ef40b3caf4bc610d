"""Which charts a run gets: those of what it has, each figure once.

What a reader has to know of a run before its charts.
"""

from collections.abc import Callable
from pathlib import Path

from isobit.observe.report.notices import notices
from isobit.observe.report.panels import Section, build_sections
from isobit.observe.run_record import read_run
from isobit.records.metrics import find_metric
from tests.observe.report.run_files import manifest, step_line

WriteRun = Callable[..., Path]
ALL = {
    "reward/level_share": 0.25,
    "reward/correct/mean": 0.5,
    "reward/correct/std": 0.5,
    "reward/short-1/mean": -3.0,
    "reward/short-1/std": 1.0,
    "rollout/refills": 1,
    "rollout/dropped_groups": 3,
    "ratio/min": 0.5,
    "clip_fraction/dual": 0.0,
    "kl/k1": 0.01,
    "kl/k3": 0.02,
    "value/loss": 0.1,
    "value/clip_fraction": 0.0,
    "value/explained_variance": 0.3,
    "log_prob_diff/p99": 0.1,
    "mismatch/k1": 0.0,
    "mismatch/k3": 0.001,
    "mismatch/mult_prob_error": 1.01,
    "mismatch/effective_sample_size": 0.99,
    "correction/mean": 1.0,
    "correction/effective_sample_size": 0.9,
    "correction/rejected": 0.1,
    "staleness/mean": 1.5,
    "replay/samples": 16,
    "replay/size": 64,
}


def sections_of(root: Path) -> dict[str, Section]:
    return {section.title: section for section in build_sections(read_run(root))}


def titles(section: Section) -> set[str]:
    return {chart.panel.title for chart in (*section.charts, *section.constants)}


def test_every_row_with_a_chart_is_drawn_and_the_rest_apart(write_run: WriteRun) -> None:
    found = sections_of(write_run([step_line(1) | ALL, step_line(2) | ALL], run=manifest()))
    assert titles(found["Rewards and responses"]) >= {
        "Reward correct",
        "Reward short-1",
        "Zero-variance groups",
    }
    assert titles(found["Rollout against training"]) >= {"Probability error", "Rejected"}
    apart = titles(found.pop("Other figures"))
    rows = [find_metric(name) for name in ALL]
    assert {row.chart for row in rows if row and row.chart and "NAME" not in row.chart} <= {
        title for section in found.values() for title in titles(section)
    }
    assert apart & ALL.keys() == {
        name for name in ALL if (row := find_metric(name)) and not row.chart
    }
    assert "something/new" in apart


def test_figures_that_never_change_are_said_in_one_place(write_run: WriteRun) -> None:
    found = sections_of(write_run([step_line(1), step_line(2)], run=manifest()))
    section = found["Rollout against training"]
    assert section.charts == ()
    assert [chart.constant for chart in section.constants] == ["0", "0", "0"]


def test_fine_tuning_leads_with_the_loss(write_run: WriteRun) -> None:
    lines = [{"step": step, "loss": 1.0 / step, "eval/a/loss": 2.0 / step} for step in (1, 2)]
    found = sections_of(write_run(lines, run=manifest()))
    assert [chart.panel.title for section in found.values() for chart in section.charts] == [
        "a loss",
        "Loss",
    ]


def test_the_headline_of_several_curves_names_its_curve(write_run: WriteRun) -> None:
    found = sections_of(write_run([step_line(1), step_line(2)], run=manifest()))
    latest = {chart.panel.title: chart.latest for chart in found["Rewards and responses"].charts}
    assert latest["Response length"] == "mean 302"


def test_a_run_without_a_stage_has_no_charts_of_it(write_run: WriteRun) -> None:
    line = step_line(1) | {"staleness/mean": 0.0, "replay/samples": 0}
    found = sections_of(write_run([line], run=manifest()))
    assert titles(found["Replay and staleness"]) == {"Staleness"}
    assert "KL to the reference" not in found and "Value head" not in found


TROUBLE = {
    "reward/failed": 3,
    "reward/level_share": 1.0,
    "updates/skipped": 2,
    "updates/taken": 0,
    "updates/without_signal": 1,
    "response_length/truncated": 0.5,
    "log_prob_diff/tokens_differing": 7,
}


def test_all_that_went_wrong_is_named_with_its_number(write_run: WriteRun) -> None:
    config = {"rollout": {"max_new_tokens": 24}}
    lines = [step_line(step) | TROUBLE for step in (1, 2)]
    said = list(notices(read_run(write_run(lines, [], manifest(config=config)))))
    assert [line.split(" ")[0] for line in said] == ["14", "6", "4", "2", "100%", "50%"]
    assert "in a flow where none should" in said[0]
    assert "no weight changed in 2 of 2 steps" in said[3]
    assert "the length limit of 24 tokens" in said[5]


def test_a_run_without_trouble_has_no_notice(write_run: WriteRun) -> None:
    lines = [
        step_line(step) | dict.fromkeys(TROUBLE, 0.0) | {"updates/taken": 1} for step in (1, 2)
    ]
    assert not list(notices(read_run(write_run(lines, [], manifest()))))
