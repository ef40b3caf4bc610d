"""Changes of the budget come back as they were written, as far as they were."""

from pathlib import Path

from isobit.store.budget_record import drop_torn_line, read_changes, write_change
from isobit.training.budget import BudgetChange

CHANGES = [BudgetChange(4, 4096, 2048), BudgetChange(9, 2048, 1024)]


def test_what_is_written_is_read_from_a_position_on(tmp_path: Path) -> None:
    path = tmp_path / "budget.jsonl"
    assert read_changes(path, 0) == []
    write_change(path, 3, CHANGES[0])
    size = path.stat().st_size
    write_change(path, 5, CHANGES[1])
    assert read_changes(path, 0) == CHANGES
    assert read_changes(path, size) == CHANGES[1:]


def test_an_unfinished_line_is_no_change_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "budget.jsonl"
    drop_torn_line(path)
    assert not path.exists()
    write_change(path, 3, CHANGES[0])
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:15])
    assert read_changes(path, 0) == CHANGES[:1]
    drop_torn_line(path)
    write_change(path, 5, CHANGES[1])
    assert read_changes(path, 0) == CHANGES
