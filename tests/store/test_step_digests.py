"""``digests.jsonl`` comes back as it was written, and a line that is damaged keeps its step."""

from pathlib import Path

from isobit.records.text import Group, Prompt
from isobit.store.state_digest import StateDigest
from isobit.store.step_digests import StepDigests, read_digests

LEFT = StateDigest("0" * 16, "1" * 16, "2" * 16)


def lines(count: int) -> list[StepDigests]:
    return [
        StepDigests.of(step, [Group(Prompt(f"train/{step}", "", (1,)), 0, [])], LEFT)
        for step in range(1, count + 1)
    ]


def write(root: Path, written: list[bytes]) -> None:
    (root / "digests.jsonl").write_bytes(b"".join(written))


def test_lines_come_back(tmp_path: Path) -> None:
    made = lines(3)
    write(tmp_path, [one.line() for one in made])
    assert read_digests(tmp_path) == {one.step: one for one in made}
    assert len({one.tokens for one in made}) == 3


def test_a_damaged_line_keeps_its_step(tmp_path: Path) -> None:
    made = [one.line() for one in lines(5)]
    for place, broken in ((0, b"{\n"), (2, made[2].replace(b"tokens", b"t")), (4, made[4][:30])):
        made[place] = broken
    write(tmp_path, made)
    found = read_digests(tmp_path)
    assert sorted(found) == [1, 2, 3, 4, 5]
    assert [step for step, line in sorted(found.items()) if line is None] == [1, 3, 5]
