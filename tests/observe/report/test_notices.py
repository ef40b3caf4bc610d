"""What a reader has to know of a run before its charts."""

from collections.abc import Callable
from pathlib import Path

from isobit.observe.report.notices import notices
from isobit.observe.report.source import read_run

from .run_files import manifest, step_line

WriteRun = Callable[..., Path]
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
    said = notices(read_run(write_run(lines, [], manifest(config=config))))
    assert [line.split(" ")[0] for line in said] == ["14", "6", "4", "2", "100%", "50%"]
    assert "in a flow where none should" in said[0]
    assert "no weight changed in 2 of 2 steps" in said[3]
    assert "the length limit of 24 tokens" in said[5]


def test_a_run_without_trouble_has_no_notice(write_run: WriteRun) -> None:
    lines = [
        step_line(step) | dict.fromkeys(TROUBLE, 0.0) | {"updates/taken": 1} for step in (1, 2)
    ]
    assert notices(read_run(write_run(lines, [], manifest()))) == []
