"""Grading: parts and models, numbers and failures, and rewards that change when repeated."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isobit.config.reward import RewardConfig
from isobit.observe.group_metrics import reward_metrics
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.rewards import grading
from isobit.rewards.grade import Failure, failure_of, outcome_of
from isobit.rewards.grading import KIND, Graders, grade
from isobit.rewards.load import RewardFunction
from isobit.rewards.tally import Tally
from isobit.util.errors import RewardError

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

def solved(completions, solution, level=0, **columns):
    return [0.0 for _ in completions]

def score(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0
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
                    "weight": -1.0,
                    "options": {"scale": 2},
                    "function": f"{rewards}:length",
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
    assert groups[1].rewards == [None, 2.0 - 2.0, 10.0 - 10.0], "vowels does not apply to '?'"
    assert (stats.graded, stats.failed) == (4, 2)
    assert stats.failures == {"ValueError": 1, "not finite": 1}
    assert stats.first_error is not None
    assert stats.first_error.startswith(
        "prompt train/0, sample 2, length: ValueError: no (mine.py:"
    )


def test_a_group_is_done_once_nothing_of_it_is_waited_for(rewards: str) -> None:
    """In the process of the run nothing is graded before it is asked for."""
    waited = Path(rewards).with_name("waited_for")
    Path(rewards).write_text(
        f"import os, time\ndef slow(prompt, completion):\n"
        f"    while not os.path.exists({str(waited)!r}): time.sleep(0.01)\n"
        "    return 1.0\n"
    )
    ours, other = group("a", "b"), group("c", place=1)
    with Graders(RewardConfig(function=f"{rewards}:slow", workers=1)) as graders:
        graders.submit(ours)
        graders.poll()
        assert not graders.is_done(ours)
        assert graders.is_done(other), "it was not submitted"
        waited.touch()
        while not graders.is_done(ours):
            graders.poll()
        graders.collect([ours])
    assert ours.rewards == [1.0, 1.0]
    with Graders(RewardConfig(function=f"{rewards}:slow", in_process=True)) as graders:
        graders.submit(ours)
        assert graders.is_done(ours)


def test_a_failure_names_the_line_of_the_users_code() -> None:
    """Not that of a library which it calls, nor of Isobit."""

    def judge(text: str) -> float:
        return float(json.loads(text))

    with pytest.raises(json.JSONDecodeError) as raised:
        judge("{")
    place = rf" \({Path(__file__).name}:\d+, in judge\)"
    assert re.fullmatch(f"JSONDecodeError: .*{place}", failure_of(raised.value).message)
    assert not re.search(place, failure_of(raised.value, with_place=False).message)
    assert failure_of(ValueError("no")).message == "ValueError: no"
    other = type("Other", (ValueError,), {"__traceback__": 7})
    assert failure_of(other("no")).message == "Other: no"


def outcomes_of(**parts: list[float | Failure]) -> tuple[Group, Tally]:
    """A group of three completions that parts of weight 2 graded so."""
    graded, tally = group("a", "b", "c"), Tally()
    tally.fill(graded, dict.fromkeys(parts, 2.0), parts)
    return graded, tally


def test_a_part_that_does_not_apply_is_left_out_of_the_sum() -> None:
    nothing, broken = outcome_of(None), failure_of(ValueError("no"))
    assert isinstance(nothing, Failure) and outcome_of({"score": None}) == nothing
    graded, tally = outcomes_of(math=[1.0, nothing, nothing], code=[nothing, -3.0, nothing])
    assert graded.rewards == [2.0, -6.0, None]
    assert graded.reward_parts == {"math": [1.0, None, None], "code": [None, -3.0, None]}
    assert (tally.failed, tally.failures) == (1, {"no reward": 1})
    assert "each of the parts math, code returned None" in str(tally.first_error)
    assert reward_metrics([graded])["reward/math/mean"] == 1.0
    assert reward_metrics([graded])["reward/code/graded"] == 1
    graded, tally = outcomes_of(math=[broken, nothing, 1.0], code=[nothing, 0.0, nothing])
    assert graded.rewards == [None, 0.0, 2.0], "a failure is none of what does not apply"
    assert tally.failures == {"ValueError": 1}
    graded, tally = outcomes_of(only=[nothing, 0.0, nothing])
    assert str(tally.first_error).endswith(
        "the reward returned None, which says that it does not apply to the completion; a function "
        "without a return statement returns None, too"
    )
    assert graded.rewards == [None, 0.0, None] and tally.failures == {"no reward": 2}


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
    with pytest.raises(RewardError, match="did you mean right"), Graders(config) as graders:
        graders.describe()


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize(
    ("function", "rows", "message"),
    [
        ("solved", [{"solution": "1"}, {"answer": "2"}], "'solution', which 1 of the 2 .*'answer'"),
        ("solved", [{"level": 1}, {}], "'solution', which 2 of the 2 prompts of data.train do not"),
        ("score", [{"answer": "1"}], "'data_source', which 1 of the 1 .*first is train/0; its col"),
        ("score", [{"data_source": "a"}], "'ground_truth' or 'reward_model.ground_truth' or 'ans"),
        (
            "score",
            [{"answer": "1"}, {"data_source": "a"}],
            "'data_source', which 1 of the 2 pr",
        ),
        ("score", [{"reward_model": {}}], "'data_source', 'ground_truth' or .*are 'reward_model'"),
    ],
)
def test_columns_that_a_reward_takes_are_sought_before_anything_is_graded(
    rewards: str, in_process: bool, function: str, rows: list[dict[str, Any]], message: str
) -> None:
    def prompts(rows: list[dict[str, Any]]) -> dict[str, list[Prompt]]:
        return {"data.train": [Prompt(f"train/{at}", "", (1,), row) for at, row in enumerate(rows)]}

    whole = {"solution": "1", "data_source": "a", "reward_model": {"ground_truth": "1"}}
    name = f"{rewards}:{function}"
    with Graders(RewardConfig(function=name, workers=1, in_process=in_process)) as graders:
        graders.check_columns(prompts([whole]))
        with pytest.raises(RewardError, match=f"{re.escape(name)}' takes {message}"):
            graders.check_columns(prompts(rows))


def test_in_the_process_of_the_run_a_watch_is_asked_between_completions(rewards: str) -> None:
    asked = []
    config = RewardConfig(function=f"{rewards}:length", in_process=True)
    with Graders(config) as graders:
        graders.collect([group("a", "b", "c")], watch=lambda: asked.append(1))
    assert len(asked) == 3


def test_a_signal_ends_a_call_in_the_process_of_the_run_and_nothing_between_two(
    rewards: str,
) -> None:
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


def groups(*texts: list[str]) -> list[Group]:
    return [group(*some, place=index) for index, some in enumerate(texts)]


def returns(value: Any) -> RewardFunction:
    return lambda prompt, completion: value


def length_or_fail(prompt: Prompt, completion: Completion) -> float:
    """1.0 a character, but ``!`` raises, ``?`` is NaN and ``-`` is no number."""
    match completion.text:
        case "!":
            raise KeyError("answer")
        case "?":
            return float("nan")
        case "-":
            return "1.0"  # pyright: ignore[reportReturnType]
        case text:
            return float(len(text))


def test_rewards_keep_the_order_of_groups_and_completions() -> None:
    graded = groups(["a", "bbb"], ["cc", ""])
    stats = grade(graded, length_or_fail)
    assert [group.rewards for group in graded] == [[1.0, 3.0], [2.0, 0.0]]
    assert (stats.graded, stats.failed, stats.failures, stats.first_error) == (4, 0, {}, None)


@pytest.mark.parametrize(
    "value", [1, True, 1.0, np.float32(1), np.float64(1), np.int64(1), np.bool_(True), Fraction(1)]
)
def test_every_kind_of_number_is_a_float(value: Any) -> None:
    (group,) = graded = groups(["a"])
    grade(graded, returns(value))
    assert group.rewards == [1.0]
    assert type(group.rewards[0]) is float


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (float("nan"), "not finite"),
        (float("-inf"), "not finite"),
        (np.float32("inf"), "not finite"),
        (10**400, "not finite"),
        (1e30, "too large"),
        (-1.7e308, "too large"),
        (None, "no reward"),
        ("1.0", "not a number"),
        ([1.0], "not a number"),
        (1j, "not a number"),
        (np.ones(2), "not a number"),
    ],
)
def test_what_is_no_finite_number_is_excluded_and_counted(value: Any, kind: str) -> None:
    graded = groups(["a", "b"])
    values = iter([value, 0.5])
    stats = grade(graded, lambda prompt, completion: next(values))
    assert graded[0].rewards == [None, 0.5]
    assert (stats.graded, stats.failed, stats.failures) == (1, 1, {kind: 1})


class MischiefError(Exception):
    def __str__(self) -> str:
        raise KeyError("text")

    def __repr__(self) -> str:
        raise MischiefError


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (torch.zeros((), device="meta"), "RuntimeError", "RuntimeError: .*meta"),
        (MischiefError(), "MischiefError", "MischiefError, whose text raises KeyError"),
    ],
)
def test_what_raises_when_it_is_asked_is_a_failure(value: Any, kind: str, message: str) -> None:
    graded = groups(["a", "b"])
    stats = grade(graded, lambda prompt, one: value if one.text == "a" else 1.0)
    assert graded[0].rewards == [None, 1.0] and stats.failures == {kind: 1}
    assert stats.first_error is not None and re.search(message, stats.first_error)


def test_a_message_of_a_failure_is_bounded() -> None:
    def fails(prompt: Prompt, completion: Completion) -> float:
        raise type("E" * 1000, (Exception,), {})("x" * 10**6)

    graded = groups(["a"])
    with pytest.raises(RewardError) as told:
        grade(graded, fails)
    assert len(str(told.value)) < 3000


def test_failures_are_counted_by_kind_with_the_first_message() -> None:
    graded = groups(["a", "!"], ["?", "!", "-", "b"])
    stats = grade(graded, length_or_fail)
    assert [group.rewards for group in graded] == [[1.0, None], [None, None, None, 1.0]]
    assert stats.failures == {"KeyError": 2, "not finite": 1, "not a number": 1}
    assert stats.first_error is not None
    assert stats.first_error.startswith("prompt train/0, sample 1: KeyError: 'answer' (")
    assert stats.failed_fraction == pytest.approx(4 / 6)


def test_a_reward_that_exits_is_a_failure_not_an_end() -> None:
    def leaves(prompt: Prompt, completion: Completion) -> float:
        if completion.text == "!":
            raise SystemExit(0)
        return 1.0

    stats = grade(groups(["a", "!"]), leaves)
    assert stats.failures == {"SystemExit": 1}


def test_too_many_failures_stop_the_run_with_the_first_error() -> None:
    assert grade(groups(["a", "!"]), length_or_fail, max_failed_fraction=0.5).failed == 1
    with pytest.raises(RewardError, match=r"2 of 3 rewards failed, .* 0.5 .*sample 1: KeyError"):
        grade(groups(["a", "!", "?"]), length_or_fail, max_failed_fraction=0.5)
    with pytest.raises(RewardError, match="2 of 2 rewards failed"):
        grade(groups(["!", "?"]), length_or_fail)


def test_a_reward_error_of_the_reward_itself_ends_the_run() -> None:
    def refuses(prompt: Prompt, completion: Completion) -> float:
        raise RewardError("no such scorer")

    with pytest.raises(RewardError, match="no such scorer"):
        grade(groups(["a"]), refuses)


def test_grading_again_replaces_the_rewards() -> None:
    graded = groups(["a", "b"])
    grade(graded, returns(1))
    grade(graded, returns(2))
    assert graded[0].rewards == [2.0, 2.0]


REWARDS_REPETITION = """
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
def rewards_repetition(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(REWARDS_REPETITION, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("function", "in_process", "noticed"),
    [("counts_calls", True, 3), ("draws", False, 3), ("reads", True, 0)],
)
def test_a_reward_that_answers_otherwise_when_asked_again_is_counted(
    function: str,
    in_process: bool,
    noticed: int,
    rewards_repetition: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grading, "FIRST", 2)
    config = RewardConfig(
        function=f"{rewards_repetition}:{function}", in_process=in_process, workers=1
    )
    found = []
    with Graders(config) as graders:
        for _ in range(5):
            groups = [group(*"a!b"), group(*"a!b")]
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


def test_a_failure_has_nothing_that_drives_a_terminal() -> None:
    found = failure_of(type("A\x1b[2J", (Exception,), {})("b\x1b[2J\r\x9b\u202e"))
    assert found.kind == "'A\\x1b[2J'"
    assert found.message == "A\\x1b[2J: b\\x1b[2J\\r\\x9b\\u202e"
    assert Failure(found.kind, found.message) == found
