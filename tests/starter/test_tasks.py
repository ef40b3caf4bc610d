"""The starter's problems: right answers, a stable split, and the reward."""

from collections import Counter
from random import Random

import pytest

from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Prompt
from isobit.starter.tasks import (
    GUESS_RANGE,
    correct_answer,
    final_answer,
    guess,
    is_held_out,
    is_worked_out,
    pretraining_answer,
    problems,
    question,
    worked_out,
)


def test_question_and_worked_out_answer() -> None:
    assert question((3, 8, 2, 9)) == "3+8+2+9="
    assert worked_out((3, 8, 2, 9)) == "11,13,22"


def test_worked_out_answers_are_right_and_told_from_guesses() -> None:
    random = Random(0)
    for problem in problems(held_out=True):
        assert final_answer(worked_out(problem)) == str(sum(problem))
        assert is_worked_out(worked_out(problem))
        assert not is_worked_out(guess(problem, random))


def test_guesses_are_near_and_seldom_right() -> None:
    random = Random(0)
    errors = Counter(int(guess((5, 5, 5, 5), random)) - 20 for _ in range(9000))
    assert set(errors) == set(range(-GUESS_RANGE, GUESS_RANGE + 1))
    assert all(800 < count < 1200 for count in errors.values())
    assert min(int(guess((0, 0, 0, 1), random)) for _ in range(100)) == 0


def test_a_third_of_the_pretraining_answers_is_worked_out() -> None:
    random = Random(0)
    count = sum(is_worked_out(pretraining_answer((1, 2, 3, 4), random)) for _ in range(3000))
    assert 900 < count < 1100


def test_the_split_is_disjoint_complete_and_fixed() -> None:
    train, held_out = set(problems(held_out=False)), set(problems(held_out=True))
    assert not train & held_out
    assert len(train | held_out) == 10_000
    assert (len(train), len(held_out)) == (9011, 989)
    assert problems(held_out=True)[:3] == ((2, 3, 2, 1), (7, 0, 8, 5), (6, 8, 6, 7))
    assert all(is_held_out(problem) for problem in held_out)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("22", 1.0),
        ("11,13,22", 1.0),
        ("1,2,22", 1.0),
        ("21", 0.0),
        ("22,", 0.0),
        ("22 ", 0.0),
        ("022", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_reads_the_final_answer_only(text: str, reward: float) -> None:
    prompt = Prompt("train/0", "3+8+2+9=", (1,), {"answer": "22"})
    assert (
        correct_answer(prompt, Completion(TokenSequence.of_answer((1,), (2,)), text, "stop"))
        == reward
    )


def test_the_first_problems_are_a_fair_sample() -> None:
    first = problems(held_out=True)[:200]
    assert 17 < sum(map(sum, first)) / len(first) < 19
