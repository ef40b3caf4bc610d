"""Recorded rewards are taken from the record, whatever the reward function would say now."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from isobit.environments.pool import TurnAnswer
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.rewards.grading import Grading, grade
from isobit.rewards.load import RewardFunction
from isobit.rewards.tally import GradeStats
from isobit.store.journals import whole_lines
from isobit.store.reward_record import (
    AnswerRecord,
    KnownAnswers,
    KnownRewards,
    RewardRecord,
    SentRecord,
)
from isobit.util.disk_space import LineFile
from isobit.util.errors import RewardError, StorageError
from isobit.util.strict_json import json_line


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


DAMAGED_GRADINGS = (
    {"rewards": None},
    {"rewards": [[1.0, 1.0, 1.0]]},
    {"rewards": [[1.0, 1.0], [1.0, 1.0, 1.0]]},
    {"rewards": [["1", 1.0, 1.0], [1.0, 1.0, 1.0]]},
    {"parts": [["a", [[1.0, 1.0, 1.0]] * 2]]},
    {"parts": {"a": [1.0, 1.0]}},
    {"failures": {"crash": "many"}},
    {"counts": []},
    {"first_error": 3},
)


@pytest.mark.parametrize("missing", ["rewards", "failures", "first_error"])
def test_a_grading_without_all_of_its_parts_is_made_anew_and_that_is_said(
    missing: str, tmp_path: Path
) -> None:
    check_graded_anew(tmp_path, lambda line: line.pop(missing))


@pytest.mark.parametrize("damage", DAMAGED_GRADINGS)
def test_so_is_one_of_other_types(damage: dict[str, Any], tmp_path: Path) -> None:
    check_graded_anew(tmp_path, lambda line: line.update(damage))


def check_graded_anew(folder: Path, damage: Callable[[dict[str, Any]], object]) -> None:
    path, said = folder / "rewards.jsonl", list[str]()
    record = opened(path)
    for token in (5, 6):
        record.grade(groups(token), by(some_fail))
    record.write()
    whole = path.read_bytes()
    lines = [json.loads(line) for line in whole.splitlines()]
    damage(lines[0])
    path.write_bytes(b"".join(map(json_line, lines)))
    for again in (opened(path, said.append), KnownRewards(said.append, lines)):
        made = groups()
        again.grade(made, by(some_fail))
        assert made[0].rewards == [None, 1.5, 1.5]
    assert len(said) == 2 and all("line of this step is damaged" in one for one in said)
    goes_on = opened(path, said.append)
    sent = SentRecord(print, goes_on.lines_ahead)
    sent.grade(groups(), by(some_fail))
    assert sent.gradings == whole.splitlines(keepends=True)[:1]


KEY = ["train/1", 0, 2, 1, "ab"]
ANSWER = {"results": [["ok", "12"]], "reward": 0.5, "turn_reward": 1, "failure": None}


def answered(path: Path, answers: Any, say: Callable[[str], None]) -> AnswerRecord:
    """A record that begins a rollout, for which the file has these answers and more lines."""
    line = {"weights_version": 3, "prompts": [["train/1", 0]], "answers": answers}
    path.write_bytes(json_line(line) * 2)
    record = AnswerRecord(say, whole_lines(path, 0))
    record.open(path)
    record.begin(3, [("train/1", 0)])
    return record


@pytest.mark.parametrize(
    "answers",
    [
        None,
        5,
        [KEY],
        [[KEY]],
        [[KEY, None]],
        [[KEY, {}]],
        [[KEY, ANSWER], [KEY, {"results": [], "reward": None}]],
        *([[KEY, ANSWER | {"results": one}]] for one in (None, 3, [["ok"]], [["ok", 12]])),
        *([[KEY, ANSWER | {"failure": one}]] for one in (3, ["crash"], ["crash", None])),
        *([[KEY, ANSWER | one]] for one in ({"reward": "1"}, {"turn_reward": [1]}, {"opening": 1})),
        [[KEY, ANSWER | {"opening": ["hello"]}]],
    ],
)
def test_answers_of_a_damaged_line_are_asked_for_anew_and_that_is_said(
    answers: Any, tmp_path: Path
) -> None:
    path, said = tmp_path / "environment.jsonl", list[str]()
    record = answered(path, answers, said.append)
    assert record.find(KEY) is None and not record.is_ahead and path.read_bytes() == b""
    record.end([(KEY, ANSWER)])
    record.write()
    assert json.loads(path.read_text())["answers"] == [[KEY, ANSWER]]
    line = {"weights_version": 3, "prompts": [["train/1", 0]], "answers": answers}
    known = KnownAnswers(said.append, [line])
    known.begin(3, [("train/1", 0)])
    assert known.find(KEY) is None
    assert len(said) == 2 and all("line of this step is damaged" in one for one in said)


@pytest.mark.parametrize("line", ["{}", '{"lost_bytes": 70}', '{"weights_version": 3}'])
def test_a_line_that_names_no_rollout_is_not_taken_for_one(line: str, tmp_path: Path) -> None:
    record = AnswerRecord(list[str]().append, [line.encode()])
    record.begin(3, [("train/1", 0)])
    assert record.find(KEY) is None


def test_whole_answers_come_again(tmp_path: Path) -> None:
    opening = {"opening": [{"role": "user", "content": "?"}], "over": True}
    other = [["train/1", 0, 0, 0, "ab"], {"results": [], "reward": None, "failure": ["crash", "x"]}]
    record = answered(tmp_path / "a", [[KEY, ANSWER | opening], other], pytest.fail)
    assert record.find(KEY) == ANSWER | opening and record.is_ahead
    assert TurnAnswer.of(ANSWER | opening).recorded() == opening | ANSWER
