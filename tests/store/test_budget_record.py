"""Changes of the budget come back as they were written, up to one that is damaged."""

import json
from pathlib import Path

import pytest

from isobit.store.budget_record import keep_changes, read_changes, write_change
from isobit.training.budget import BudgetChange


def never(line: str) -> None:
    raise AssertionError(line)


CHANGES = [BudgetChange(4, 4096, 2048), BudgetChange(9, 2048, 1024)]


def test_what_is_written_is_read_from_a_position_on(tmp_path: Path) -> None:
    path = tmp_path / "budget.jsonl"
    assert read_changes(path, 0, never) == []
    write_change(path, 3, CHANGES[0])
    size = path.stat().st_size
    write_change(path, 5, CHANGES[1])
    assert read_changes(path, 0, never) == CHANGES
    assert read_changes(path, size, never) == CHANGES[1:]


def test_an_unfinished_line_is_no_change_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "budget.jsonl"
    keep_changes(path, 0, [], 1)
    assert not path.exists()
    write_change(path, 3, CHANGES[0])
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:15])
    assert read_changes(path, 0, never) == CHANGES[:1]
    keep_changes(path, 0, CHANGES[:1], 1)
    write_change(path, 5, CHANGES[1])
    assert read_changes(path, 0, never) == CHANGES


def test_changes_that_stay_keep_their_lines_and_others_are_written(tmp_path: Path) -> None:
    path = tmp_path / "budget.jsonl"
    write_change(path, 3, CHANGES[0])
    size = path.stat().st_size
    for change in (CHANGES[1], BudgetChange(11, 1024, 512)):
        write_change(path, 5, change)
    before = path.read_bytes()
    allowed = BudgetChange(10, 1024, 9000, allowed=True)
    keep_changes(path, size, [CHANGES[1], allowed], 6)
    assert read_changes(path, 0, never) == [*CHANGES, allowed]
    lines = path.read_bytes().splitlines(keepends=True)
    assert before.startswith(b"".join(lines[:2])) and json.loads(lines[2])["step"] == 6
    keep_changes(path, size, [CHANGES[1], allowed], 9)
    assert path.read_bytes() == b"".join(lines)
    keep_changes(path, size, [], 9)
    assert path.read_bytes() == lines[0]


@pytest.mark.parametrize(
    "damaged",
    [
        "{}",
        '{"step": 2, "upd',
        '{"step": 2, "upd\rate": 5}',
        "\0\0\0",
        "[1]",
        "5",
        '{"step": 2, "update": "x", "old": 1, "new": 2}',
        '{"step": 2, "update": 5, "old": 64}',
        '{"step": 2, "update": 5, "old": 64, "new": 32.0}',
        '{"step": 2, "update": 5, "old": null, "new": 32}',
        '{"step": 2, "update": [5], "old": 64, "new": 32}',
        '{"step": 2, "update": true, "old": 64, "new": 32}',
        '{"step": 2, "update": 5, "old": 64, "new": -32}',
        '{"lost_bytes": 70}',
    ],
)
def test_changes_end_before_a_line_that_is_none_which_is_said(damaged: str, tmp_path: Path) -> None:
    path, said = tmp_path / "budget.jsonl", list[str]()
    write_change(path, 3, CHANGES[0])
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + damaged.encode() + b"\n")
    write_change(path, 5, CHANGES[1])
    assert read_changes(path, 0, said.append) == CHANGES[:1]
    assert read_changes(path, size, said.append) == []
    assert [f"{path} has a damaged line" in line for line in said] == [True, True]
    keep_changes(path, 0, CHANGES[:1], 1)
    assert path.stat().st_size == size
