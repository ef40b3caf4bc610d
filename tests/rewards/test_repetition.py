"""A reward that gives another number to the same completion is noticed, and nothing else is."""

from pathlib import Path

import pytest

from isobit.config.reward import RewardConfig
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.rewards import repetition
from isobit.rewards.grading import Graders
from isobit.rewards.repetition import KIND

REWARDS = """
import random

calls = []

def counts_calls(prompt, completion):
    calls.append(0)
    return float(len(calls))

def draws(completions, **columns):
    return [random.random() for _ in completions]

def reads(prompt, completion):
    calls.append(0)
    if completion.text == "!":
        raise ValueError(f"call {len(calls)}")
    return float(len(completion.text))
"""


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(REWARDS, encoding="utf-8")
    return path


def group() -> Group:
    completions = [Completion(TokenSequence.of_answer((1,), (2,)), t, "stop") for t in "a!b"]
    return Group(Prompt("train/0", "", (1,)), 0, completions)


@pytest.mark.parametrize(
    ("function", "in_process", "noticed"),
    [("counts_calls", True, 3), ("draws", False, 3), ("reads", True, 0)],
)
def test_a_reward_that_answers_otherwise_when_asked_again_is_counted(
    function: str,
    in_process: bool,
    noticed: int,
    rewards: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repetition, "FIRST", 2)
    config = RewardConfig(function=f"{rewards}:{function}", in_process=in_process, workers=1)
    found = []
    with Graders(config) as graders:
        for _ in range(5):
            groups = [group(), group()]
            found.append(graders.collect(groups).counts)
            if function == "counts_calls":  # the repetition changes no reward of its own grading
                first = groups[0].rewards[0]
                assert first is not None
                assert [one.rewards for one in groups] == [
                    [first, first + 1, first + 2],
                    [first + 3, first + 4, first + 5],
                ]
    expected = {KIND: noticed} if noticed else {}
    assert found == [{}, expected, {}, expected, {}]
