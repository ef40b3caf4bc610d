"""Recorded rewards are taken from the record, whatever the reward function would say now."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.rewards.grading import Grading, grade
from isobit.rewards.load import RewardFunction
from isobit.rewards.tally import GradeStats
from isobit.store.journals import whole_lines
from isobit.store.reward_record import RewardRecord, SentRecord
from isobit.util.disk_space import LineFile
from isobit.util.errors import RewardError, StorageError


def groups(token: int = 5, version: int = 1) -> list[Group]:
    completions = [
        Completion(TokenSequence.of_answer((1,), (token, n), (0.0, 0.0), (0, version)), "", "stop")
        for n in range(3)
    ]
    return [Group(Prompt(f"train/{index}", "", (1,)), 0, list(completions)) for index in range(2)]


def by(reward: RewardFunction, max_failed_fraction: float = 1.0) -> Grading:
    return partial(grade, reward=reward, max_failed_fraction=max_failed_fraction)


def opened(path: Path, say: Callable[[str], None] = print) -> RewardRecord:
    """A record that goes on with what the file holds."""
    record = RewardRecord(say, whole_lines(path, 0))
    record.open(path)
    return record


def never(groups: Sequence[Group]) -> GradeStats:
    raise AssertionError("the reward was asked for again")


def some_fail(prompt: Prompt, completion: Completion) -> float:
    return 1.5 if completion.token_ids[1] else 1 / 0


def test_what_was_graded_before_opening_and_after_is_recorded_and_replayed(tmp_path: Path) -> None:
    path = tmp_path / "rewards.jsonl"
    record = RewardRecord(print)
    first = record.grade(groups(), by(some_fail))
    record.open(path)
    second = record.grade(groups(6), by(lambda prompt, completion: 0.1 + completion.token_ids[1]))
    size = record.position
    assert len(path.read_text().splitlines()) == 1 and size > path.stat().st_size
    record.write()
    record.write()
    assert (
        len(path.read_text().splitlines()) == 2 and record.position == path.stat().st_size == size
    )
    content = path.read_bytes()

    again = opened(path)
    replayed = groups(), groups(6)
    assert [again.grade(made, never) for made in replayed] == [first, second]
    assert replayed[0][0].rewards == [None, 1.5, 1.5] and replayed[1][1].rewards == [0.1, 1.1, 2.1]
    assert path.read_bytes() == content and again.position == len(content)


def test_other_completions_are_graded_anew_and_that_is_said(tmp_path: Path) -> None:
    path, said = tmp_path / "rewards.jsonl", []
    record = opened(path)
    for token in (5, 6, 7):
        record.grade(groups(token), by(lambda prompt, completion: 1.0))
    record.write()
    again = opened(path, said.append)
    again.grade(groups(5), never)
    again.grade(groups(9), by(lambda prompt, completion: 2.0))
    again.grade(groups(7), by(lambda prompt, completion: 3.0))
    again.write()
    assert len(said) == 1 and "graded anew" in said[0]
    assert [json.loads(line)["rewards"][0][0] for line in path.read_text().splitlines()] == [
        1.0,
        2.0,
        3.0,
    ]


@pytest.mark.parametrize("rest", [b'{"weights_version": 1, "pro', b"\xff\xfe\n", b"[]\n"])
def test_an_unfinished_line_is_cut_off(rest: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rewards.jsonl"
    record = opened(path)
    record.grade(groups(), by(lambda prompt, completion: 1.0))
    record.write()
    whole = path.read_bytes()
    path.write_bytes(whole + rest)
    opened(path)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "damaged",
    [b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", b"[1]", b"\xff", b"null", b"1" * 5000],
    ids=["deep", "list", "no text", "null", "digits"],
)
def test_lines_up_to_one_that_holds_no_object_are_whole(damaged: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rewards.jsonl"
    path.write_bytes(b'{"a": 1}\n' + damaged + b'\n{"b": 2}\n')
    assert whole_lines(path, 0) == [b'{"a": 1}\n']


def test_a_grading_that_failed_is_not_recorded(tmp_path: Path) -> None:
    record = opened(tmp_path / "rewards.jsonl")
    with pytest.raises(RewardError):
        record.grade(groups(), by(some_fail, 0.1))
    record.write()
    assert (tmp_path / "rewards.jsonl").read_bytes() == b""


def test_several_rewards_are_recorded_each(tmp_path: Path) -> None:
    def two(asked: Sequence[Group]) -> GradeStats:
        for group in asked:
            group.rewards = [None, 1.5, 2.5]
            group.reward_parts = {"z": [None, 1.0, 2.0], "a": [None, 0.5, 0.5]}
        return GradeStats(4, 2, {"ValueError": 3, "deadline": 1}, "prompt train/0, sample 0: no")

    path = tmp_path / "rewards.jsonl"
    record = opened(path)
    first = record.grade(groups(), two)
    record.write()
    again, replayed = RewardRecord(print, whole_lines(path, 0)), groups()
    assert again.is_ahead and again.grade(replayed, never) == first and not again.is_ahead
    assert list(replayed[1].reward_parts.items()) == [
        ("z", [None, 1.0, 2.0]),
        ("a", [None, 0.5, 0.5]),
    ]
    assert replayed[1].rewards == [None, 1.5, 2.5]


def test_what_graders_met_is_recorded_where_they_met_something(tmp_path: Path) -> None:
    met = {"math_verify: power": 3, "code: time limit": 1}

    def counting(asked: Sequence[Group]) -> GradeStats:
        for group in asked:
            group.rewards = [0.0, 0.0, 1.0]
        return GradeStats(6, 0, {}, None, met)

    path = tmp_path / "rewards.jsonl"
    record = opened(path)
    first = record.grade(groups(), counting)
    record.grade(groups(6), by(some_fail))
    record.write()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["counts"] == met and "counts" not in lines[1]
    again = RewardRecord(print, whole_lines(path, 0))
    replayed = again.grade(groups(), never)
    assert replayed == first and list(replayed.counts.items()) == list(met.items())
    assert again.grade(groups(6), never).counts == {}


def test_gradings_made_elsewhere_are_those_of_the_record_again_or_new(tmp_path: Path) -> None:
    path = tmp_path / "rewards.jsonl"
    record = opened(path)
    for token in (5, 6):
        record.grade(groups(token), by(some_fail))
    record.write()
    content = path.read_bytes()

    goes_on = opened(path)
    sent = SentRecord(print, goes_on.lines_ahead)
    sent.grade(groups(5), never)
    goes_on.append(sent.gradings)
    assert goes_on.is_ahead and goes_on.position == path.read_bytes().index(b"\n") + 1
    sent = SentRecord(print, goes_on.lines_ahead)
    sent.grade(groups(6), never)
    sent.grade(groups(7), by(some_fail))
    goes_on.append(sent.gradings)
    goes_on.write()
    record.grade(groups(7), by(some_fail))
    record.write()
    new = path.read_bytes().splitlines(keepends=True)
    assert b"".join(new[:2]) == content and new[2] == new[3] and not goes_on.is_ahead


def test_other_gradings_made_elsewhere_take_the_place_of_the_record(tmp_path: Path) -> None:
    path, said = tmp_path / "rewards.jsonl", list[str]()
    record = opened(path)
    for token in (5, 6):
        record.grade(groups(token), by(some_fail))
    record.write()
    goes_on = opened(path, said.append)
    sent = SentRecord(print, goes_on.lines_ahead)
    sent.grade(groups(8), by(some_fail))
    goes_on.append(sent.gradings)
    goes_on.write()
    assert len(said) == 1 and path.read_bytes() == b"".join(sent.gradings)


def test_what_could_not_be_written_is_written_the_next_time_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "rewards.jsonl", LineFile.write
    record = opened(path)
    for token in (5, 6, 7):
        record.grade(groups(token), by(some_fail))
    expected = record.position

    def full_at_the_second(file: LineFile, line: bytes) -> None:
        if path.stat().st_size:
            raise StorageError("no space")
        write(file, line)

    with monkeypatch.context() as patch:
        patch.setattr(LineFile, "write", full_at_the_second)
        with pytest.raises(StorageError):
            record.write()
    assert len(path.read_text().splitlines()) == 1 and record.position == expected
    record.write()
    assert len(path.read_text().splitlines()) == 3 and path.stat().st_size == expected
