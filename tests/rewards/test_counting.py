"""What graders count of hostile answers reaches the trainer with the rewards."""

from pathlib import Path
from typing import Any

import pytest

from isobit.config.reward import RewardConfig, RewardPart
from isobit.data.tasks import TASK_COLUMN
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.rewards import sandbox
from isobit.rewards.counts import LONGEST_KIND, MOST_KINDS, OTHER_KINDS, count
from isobit.rewards.grading import Graders
from isobit.rewards.reference_check import check_references
from isobit.util.errors import RewardError

TOWER = r"\boxed{9^{9^{9^9}}}"
HOSTILE_REWARD = """
import os
from isobit.rewards import counts

counts.count("while it was loaded")

def many(prompt, completion):
    for n in range(len(completion.text)):
        counts.count(f"{n:03}" + "\\U0001f4a9" * 1000)
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


@pytest.mark.exhaustive
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
    if all(sandbox.trial(kind) for kind in (sandbox.Bubblewrap(), sandbox.Namespaces())):
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


@pytest.mark.few(2)
@pytest.mark.parametrize("counts", ["[1]", '"x"', '{"a": "b"}', '{"a": -1}', '{"a": {}}', "null"])
def test_counts_of_another_form_are_none(counts: str, hostile: str) -> None:
    """As a reward that finds the pipe to the trainer could send them."""
    graded = group(counts, counts)
    with Graders(config(f"{hostile}:false")) as graders:
        stats = graders.collect([graded])
    assert graded.rewards == [9.0, 9.0] and stats.counts == {}


PROSE = "We add all that there is to both of the sides and then see what is left over at the end"


def prompts(*references: Any) -> list[Prompt]:
    return [Prompt(f"train/{n}", "", (1,), {"answer": one}) for n, one in enumerate(references)]


def test_unmarked_answers_and_unfinished_thinking_are_counted() -> None:
    texts = ["The answer is 73.", "#### 73", "**73**", "<think>\\boxed{73}", r"\boxed{73}", "72"]
    graded = group(*texts, answer="73")
    with Graders(config("math_verify", in_process=True)) as graders:
        stats = graders.collect([graded])
    assert graded.rewards == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0] and stats.failed == 0
    assert stats.counts == {
        "math_verify: no marked answer": 3,
        "math_verify: unfinished thinking": 1,
    }
    marked = config("math_verify", in_process=True, options={"answer": "marked"})
    with Graders(marked) as graders:
        graders.collect([graded])
    assert graded.rewards == [1.0, 1.0, 1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("grader", ["math_verify", "exact_match"])
def test_a_row_without_a_reference_fails_by_kind_and_is_never_paid(grader: str) -> None:
    missing, right = group("None", "nan", "", answer=None), group("5", answer=5.0)
    with Graders(config(grader, in_process=True)) as graders:
        stats = graders.collect([missing, right])
    assert missing.rewards == [None, None, None] and right.rewards == [1.0]
    assert stats.failures == {"MissingReferenceError": 3}
    assert "prompt train/0, column 'answer', is missing (None)" in str(stats.first_error)


def test_unusable_references_are_told_with_their_share_and_an_example() -> None:
    made = prompts("5", None, float("nan"), PROSE, "#### 7", [])
    (line,) = check_references(config("math_verify"), {"data.train": made})
    assert line.startswith(
        "references of data.train for math_verify: 3 missing and 1 unreadable of 6 (66.7%); their "
        "completions fail and are left out: the reference of prompt train/1"
    )
    assert "prompt train/3" in line and "We add all" in line
    (line,) = check_references(config("exact_match"), {"data.train": made, "more": prompts("a")})
    assert "3 missing of 6 (50.0%)" in line, "any text can be compared as text"


def test_only_graders_with_references_are_asked_and_each_for_its_own_column() -> None:
    made = [Prompt("train/0", "", (1,), {"answer": None, "solution": "5"})]
    solution = config("math_verify", options={"column": "solution"})
    for reward in (solution, config("regex"), config("mine.py:f"), RewardConfig(model="m"), None):
        assert list(check_references(reward, {"data.train": made})) == []


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            prompts(None, ""),
            r"math_verify can use none of the 2 references of data.train .2 missing",
        ),
        (prompts(PROSE), "1 unreadable.*name the column with the answers in reward.options.column"),
        (
            [Prompt("train/0", "", (1,), {"gold": "5"})],
            "needs the column 'answer'.*columns are gold",
        ),
    ],
)
def test_a_set_without_a_reference_is_refused(made: list[Prompt], message: str) -> None:
    for reward in (
        config("math_verify"),
        RewardConfig.model_validate({"parts": {"a": {"function": "math_verify"}}}),
    ):
        with pytest.raises(RewardError, match=message):
            check_references(reward, {"data.eval.a": prompts("5"), "data.train": made})


def test_the_own_scorer_of_tasks_is_refused_for_prompts_of_none() -> None:
    """At a run's start, dry runs included, and not by the first completion."""
    task = Prompt("train/9", "", (1,), {"answer": "7", TASK_COLUMN: {"task": "chain_sum"}})
    assert check_references(config("reasoning_gym"), {"data.train": [task]}) == []
    with pytest.raises(RewardError, match=r"2 of the 3 prompts of data\.train.*first is train/0"):
        check_references(config("reasoning_gym"), {"data.train": [*prompts("a", "b"), task]})
    parts = {"right": RewardPart(function="reasoning_gym"), "short": RewardPart(function="a:b")}
    with pytest.raises(RewardError, match="name another grader"):
        check_references(RewardConfig(parts=parts), {"data.eval.x": prompts("a")})
