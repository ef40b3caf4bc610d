"""Several rewards, models among them, and grading in the process of the run."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from isobit.config.reward import RewardConfig
from isobit.errors import RewardError
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.rewards.grading import Graders

REWARDS = """
import math

def length(prompt, completion, scale=1.0):
    if completion.text == "!":
        raise ValueError("no")
    return scale * len(completion.text)

def right(solution_str, ground_truth):
    return {"score": solution_str == ground_truth}

def vowels(completions, **columns):
    return [None if text == "?" else sum(map(text.count, "aeiou")) for text in completions]

def huge(prompt, completion):
    return 0.9e18
"""


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(REWARDS, encoding="utf-8")
    return str(path)


def group(*texts: str, place: int = 0) -> Group:
    completions = [Completion(TokenSequence.of_answer((1,), (2,)), t, "stop") for t in texts]
    return Group(Prompt(f"train/{place}", "", (1,), {"answer": "aa"}), 0, completions)


def several(rewards: str, **config: Any) -> RewardConfig:
    return RewardConfig.model_validate(
        {
            "parts": {
                "right": {"function": f"{rewards}:right", "weight": 10.0},
                "judge": {"model": "my-model", "weight": 0.5},
                "length": {
                    "function": f"{rewards}:length",
                    "weight": -1.0,
                    "options": {"scale": 2},
                },
                "vowels": {"function": f"{rewards}:vowels", "weight": 0.0},
            },
            "workers": 2,
            "max_failed_fraction": 0.9,
            **config,
        }
    )


def judge(pairs: Sequence[tuple[Prompt, Completion]]) -> list[float]:
    return [float("nan") if one.text == "b" else 4.0 * len(one.text) for _, one in pairs]


@pytest.mark.parametrize("in_process", [False, True])
def test_several_rewards_are_added_up_by_weight(rewards: str, in_process: bool) -> None:
    groups = [group("aa", "c", "!"), group("b", "?", "aeiou", place=1)]
    with Graders(several(rewards, in_process=in_process)) as graders:
        stats = graders.collect(groups, models={"judge": judge})
    assert list(groups[0].reward_parts.items()) == [
        ("right", [1.0, 0.0, 0.0]),
        ("judge", [8.0, 4.0, 4.0]),
        ("length", [4.0, 2.0, None]),
        ("vowels", [2.0, 0.0, 0.0]),
    ]
    assert groups[0].rewards == [10.0 + 4.0 - 4.0, 2.0 - 2.0, None]
    assert groups[1].reward_parts["judge"] == [None, 4.0, 20.0]
    assert groups[1].reward_parts["vowels"] == [0.0, None, 5.0]
    assert groups[1].rewards == [None, None, 10.0 - 10.0]
    assert (stats.graded, stats.failed) == (3, 3)
    assert stats.failures == {"ValueError": 1, "not finite": 1, "no reward": 1}
    assert stats.first_error == "prompt train/0, sample 2, length: ValueError: no"


def test_the_lines_say_what_was_recognised_and_who_calls_it(rewards: str) -> None:
    with Graders(several(rewards)) as graders:
        assert graders.describe() == [
            f"reward right: 10 x {rewards}:right (verl's form: solution_str, ground_truth)",
            "reward judge: 0.5 x model my-model",
            f"reward length: -1 x {rewards}:length (Isobit's form: prompt, completion, scale=2)",
            f"reward vowels: 0 x {rewards}:vowels (TRL's form: completions, **columns); "
            "2 processes, 10 s and 2,048 MiB each",
        ]
    with Graders(RewardConfig(function=f"{rewards}:right", in_process=True)) as graders:
        assert graders.describe()[0].endswith("; in the process of the run")


def test_one_reward_has_a_weight_and_no_parts(rewards: str) -> None:
    graded = group("aa", "b")
    config = RewardConfig(function=f"{rewards}:length", weight=0.5, workers=1)
    with Graders(config) as graders:
        graders.submit(graded)
        graders.collect([graded])
        assert graded.rewards == [1.0, 0.5] and graded.reward_parts == {}
        graders.collect([graded])  # and again, which asks again
    assert graded.rewards == [1.0, 0.5]


def test_a_model_alone_needs_no_process_and_somebody_who_scores() -> None:
    graded = group("aa", "b")
    with Graders(RewardConfig(model="my-model", weight=2.0)) as graders:
        assert graders.describe() == ["reward: 2 x model my-model"]
        graders.collect([graded], models={"reward": judge})
        assert graded.rewards == [16.0, None]
        with pytest.raises(RewardError, match="reward is the model my-model, which nothing scores"):
            graders.collect([graded])


def test_a_sum_that_is_too_large_is_a_failure(rewards: str) -> None:
    huge = {"function": f"{rewards}:huge"}
    graded = group("a")
    config = RewardConfig.model_validate({"parts": {"a": huge, "b": huge}, "in_process": True})
    with Graders(config) as graders, pytest.raises(RewardError, match="1 of 1 rewards failed"):
        graders.collect([graded])
    assert graded.rewards == [None] and graded.reward_parts["a"] == [0.9e18]


@pytest.mark.parametrize("in_process", [False, True])
def test_a_reward_that_cannot_be_loaded_is_refused(rewards: str, in_process: bool) -> None:
    config = RewardConfig(function=f"{rewards}:rihgt", in_process=in_process)
    with pytest.raises(RewardError, match="did you mean 'right'"), Graders(config) as graders:
        graders.describe()


def test_in_the_process_of_the_run_a_watch_is_asked_between_completions(rewards: str) -> None:
    asked = []
    config = RewardConfig(function=f"{rewards}:length", in_process=True)
    with Graders(config) as graders:
        graders.collect([group("a", "b", "c")], watch=lambda: asked.append(1))
    assert len(asked) == 3


def test_a_signal_ends_a_call_in_the_process_of_the_run_and_nothing_between_two(
    rewards: str,
) -> None:
    """What the block around a call lets through comes out of the middle of it, and no reward is
    filled.
    """
    Path(rewards).write_text(
        "import os, signal, time\ndef reward(prompt, completion):\n"
        "    if completion.text == '!': os.kill(os.getpid(), signal.SIGUSR2); time.sleep(3600)\n"
        "    return 1.0\n"
    )

    class StoppedError(KeyboardInterrupt):
        pass

    within: list[bool] = []

    def stop(*_: Any) -> None:
        assert within == [True]
        raise StoppedError

    @contextmanager
    def inside() -> Iterator[None]:
        within.append(True)
        try:
            yield
        finally:
            within.pop()

    def watch() -> None:
        assert within == []

    before = signal.signal(signal.SIGUSR2, stop)
    graded = group("a", "!", "b")
    try:
        config = RewardConfig(function=f"{rewards}:reward", in_process=True)
        with Graders(config) as graders, pytest.raises(StoppedError):
            graders.collect([graded], watch=watch, inside=inside)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert graded.rewards == []


def test_a_fork_in_the_process_of_the_run_is_no_second_run(tmp_path: Path) -> None:
    """Whether it comes back from the reward or raises; what it printed would stand there twice."""
    (tmp_path / "forks.py").write_text(
        "import os\ndef reward(prompt, completion):\n"
        "    child = os.fork()\n"
        "    if child: return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "    if completion.text == '!': raise KeyboardInterrupt\n    return 5.0\n"
    )
    (tmp_path / "run.py").write_text(
        "import sys\nfrom isobit.config.reward import RewardConfig\n"
        "from isobit.records.sequence import TokenSequence\n"
        "from isobit.records.text import Completion, Group, Prompt\n"
        "from isobit.rewards.grading import Graders\n"
        "made = [Completion(TokenSequence.of_answer((1,), (2,)), t, 'stop') for t in 'a!']\n"
        "group = Group(Prompt('train/0', '', (1,)), 0, made)\n"
        "with Graders(RewardConfig(function=sys.argv[1], in_process=True)) as graders:\n"
        "    graders.collect([group])\nprint(group.rewards)\n"
    )
    command = [sys.executable, "run.py", "forks.py:reward"]
    run = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert run.stdout == "[1.0, 1.0]\n" and run.stderr == ""
