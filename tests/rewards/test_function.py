"""Reward functions by name, and what a user reads when the name is wrong."""

from pathlib import Path

import pytest

from isobit.errors import RewardError
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Prompt
from isobit.rewards.function import load_reward
from isobit.rewards.graders.reasoning_gym import score as score_task

PROMPT = Prompt("train/0", "3+8+2+9=", (1,), {"answer": "22"})
MODULE = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Result:
    value: float

def exact(prompt, completion):
    return float(completion.text == prompt.row["answer"])

def batch(prompts, completions, answers):
    return 0.0

async def later(prompt, completion):
    return 0.0

LIMIT = 3
"""


def completion(text: str) -> Completion:
    return Completion(TokenSequence.of_answer((1,), (2,)), text, "stop")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MODULE)
    return Path("mine.py")


def test_a_function_from_a_file(module: Path) -> None:
    reward = load_reward(f"{module}:exact")
    assert (reward(PROMPT, completion("22")), reward(PROMPT, completion("21"))) == (1.0, 0.0)


def test_a_function_from_a_module() -> None:
    reward = load_reward("isobit.starter.tasks:correct_answer")
    assert (reward(PROMPT, completion("11,13,22")), reward(PROMPT, completion("11,13,21"))) == (
        1.0,
        0.0,
    )


def test_the_task_scorer_by_name() -> None:
    assert load_reward("reasoning_gym") is score_task


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact", "cannot read the reward 'exact'; expected 'module:function'"),
        (":exact", "cannot read the reward ':exact'"),
        ("mine.py:", "cannot read the reward 'mine.py:'"),
        ("none.py:exact", "there is no reward file none.py"),
        (
            "mine.py:exakt",
            "mine.py has no function 'exakt'; its functions are exact, batch, later; did you mean "
            "'exact'",
        ),
        ("mine.py:LIMIT", "mine.py has no function 'LIMIT'"),
        (
            "mine.py:batch",
            r"must take \(prompt, completion\), but is batch\(prompts, completions, answers\)",
        ),
        ("mine.py:later", "is async"),
        ("builtins:max", "is built in"),
        (
            "no_such_package.rewards:exact",
            "cannot be imported: ModuleNotFoundError.*named by its path",
        ),
    ],
)
def test_a_wrong_name_is_explained(name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        load_reward(name)


@pytest.mark.parametrize(
    "source", ["import no_such_package", "def exact(:", "raise ValueError('broken')"]
)
def test_a_file_that_fails_on_import_is_named(module: Path, source: str) -> None:
    module.write_text(source)
    with pytest.raises(RewardError, match=r"the reward file mine\.py fails on import: "):
        load_reward("mine.py:exact")
