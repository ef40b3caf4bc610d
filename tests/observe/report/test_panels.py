"""Which charts a run gets: those of what it has, each figure once."""

from collections.abc import Callable
from pathlib import Path

from isobit.observe.report.panels import Section, build_sections
from isobit.observe.report.source import read_run

from .run_files import manifest, step_line

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
    return {chart.panel.title for chart in section.charts}


def test_every_stage_of_a_run_has_its_charts(write_run: WriteRun) -> None:
    found = sections_of(write_run([step_line(1) | ALL, step_line(2) | ALL], run=manifest()))
    assert titles(found["Results"]) >= {"Reward correct", "Reward short-1", "Level groups"}
    assert titles(found["Learning"]) >= {"KL to the reference", "Value loss", "Explained variance"}
    assert titles(found["Rollout against training"]) >= {"Probability error", "Rejected"}
    assert titles(found["Replay"]) == {"Staleness", "Replayed", "Replay buffer"}
    assert not titles(found["Other figures"]) & ALL.keys()


def test_a_run_without_a_stage_has_no_charts_of_it(write_run: WriteRun) -> None:
    line = step_line(1) | {"staleness/mean": 0.0, "replay/samples": 0}
    found = sections_of(write_run([line], run=manifest()))
    assert "Replay" not in found
    assert "KL to the reference" not in titles(found["Learning"])
    assert titles(found["Other figures"]) >= {"staleness/mean", "replay/samples"}
