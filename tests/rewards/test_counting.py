"""What graders count of hostile answers reaches the trainer with the rewards."""

from pathlib import Path
from typing import Any

import pytest

from isobit.config.reward import RewardConfig
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.rewards import sandbox
from isobit.rewards.grading import Graders
from isobit.rewards.outcome import LONGEST_KIND, MOST_KINDS, OTHER_KINDS, count

TOWER = r"\boxed{9^{9^{9^9}}}"
HOSTILE_REWARD = """
import os
from isobit.rewards import outcome

outcome.count("while it was loaded")

def many(prompt, completion):
    for n in range(len(completion.text)):
        outcome.count(f"{n:03}" + "\\U0001f4a9" * 1000)
    if not completion.text:
        return 1.0
    raise type("\\U0001f4a9" * 1000, (Exception,), {})("\\U0001f4a9" * 10**5)

def false(prompt, completion):
    counts = completion.text.encode()
    reply = b"".join(b'{"item": %d, "value": 9.0, "counts": %s}\\n' % (n, counts) for n in (0, 1))
    for descriptor in range(3, 10):
        try:
            os.write(descriptor, reply)
        except OSError:
            pass
    return 1.0
"""


def group(*texts: str, **row: Any) -> Group:
    completions = [Completion(TokenSequence.of_answer((1,), (2,)), t, "stop") for t in texts]
    return Group(Prompt("train/0", "", (1,), row), 0, completions)


@pytest.fixture
def hostile(tmp_path: Path) -> str:
    path = tmp_path / "hostile.py"
    path.write_text(HOSTILE_REWARD, encoding="utf-8")
    return str(path)


def config(function: str, **options: Any) -> RewardConfig:
    return RewardConfig(function=function, workers=2, max_failed_fraction=1.0, **options)


@pytest.mark.parametrize("in_process", [False, True])
def test_towers_of_powers_are_counted(in_process: bool) -> None:
    """Each group has its own counts, though both were begun before either was collected, and what
    was counted by others is none of theirs.
    """
    count("of somebody else")
    first = group(TOWER, r"\boxed{4}", r"\boxed{" + "1+" * 999 + "1}", TOWER, answer="x^2")
    second = group(r"\boxed{x^2}", TOWER, answer="x^2")
    with Graders(config("math_verify", in_process=in_process)) as graders:
        graders.submit(first)
        graders.submit(second)
        stats = [graders.collect([second]), graders.collect([first])]
    assert first.rewards == [0.0, 0.0, 0.0, 0.0] and second.rewards == [1.0, 0.0]
    assert [one.counts for one in stats] == [
        {"math_verify: power": 1},
        {"math_verify: power": 2, "math_verify: length": 1},
    ]
    both = stats[0] + stats[1]
    assert both.counts == {"math_verify: power": 3, "math_verify: length": 1}
    assert list(both.counts) == ["math_verify: power", "math_verify: length"]


def test_hostile_code_is_counted() -> None:
    if all(sandbox.trial(kind) for kind in (sandbox.Bubblewrap(), sandbox.Unshare())):
        pytest.skip("no sandbox works here")
    codes = ["def f():\n    return 1", "while True: pass", "def f():\n    import os; os._exit(0)"]
    graded = group("no code", *(f"```python\n{code}\n```" for code in codes), tests="assert f()")
    with Graders(config("code", options={"seconds": 1.5}, deadline_s=60)) as graders:
        stats = graders.collect([graded])
    assert graded.rewards == [0.0, 1.0, 0.0, 0.0]
    assert stats.counts == {"code: no block": 1, "code: time limit": 1, "code: process ended": 1}


def test_a_reward_that_counts_what_it_likes_is_bounded(hostile: str) -> None:
    """Its failures are told all the same."""
    graded = group("x" * 200, "", "x" * 100)
    with Graders(config(f"{hostile}:many")) as graders:
        stats = graders.collect([graded])
    assert graded.rewards == [None, 1.0, None] and sum(stats.failures.values()) == 2
    assert len(stats.counts) == MOST_KINDS and sum(stats.counts.values()) == 300
    assert OTHER_KINDS in stats.counts and all(len(kind) <= LONGEST_KIND for kind in stats.counts)


@pytest.mark.parametrize("counts", ["[1]", '"x"', '{"a": "b"}', '{"a": -1}', '{"a": {}}', "null"])
def test_counts_of_another_form_are_none(counts: str, hostile: str) -> None:
    """As a reward that finds the pipe to the trainer could send them."""
    graded = group(counts, counts)
    with Graders(config(f"{hostile}:false")) as graders:
        stats = graders.collect([graded])
    assert graded.rewards == [9.0, 9.0] and stats.counts == {}
