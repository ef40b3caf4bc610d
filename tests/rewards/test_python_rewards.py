"""Reward functions by name and given from Python: names, copies, digests and errors."""

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isobit.config.reward import RewardConfig
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Prompt
from isobit.rewards.behaviour_digest import digest_of
from isobit.rewards.grading import Graders
from isobit.rewards.load import load_reward
from isobit.rewards.python_rewards import PREFIX, give_reward, packed_reward
from isobit.starter.tasks import correct_answer
from isobit.util.errors import RewardError
from tests.rewards.test_grading import group as make_group

BONUS = 0.25


def test_a_function_that_can_be_imported_has_a_name_as_in_a_recipe() -> None:
    assert give_reward(correct_answer).name == "isobit.starter.tasks:correct_answer"


def closing(weight: float) -> Callable[..., float]:
    def score(prompt: Any, completion: Any) -> float:
        return weight * len(completion.text) + BONUS

    return score


def batch(weight: float) -> Callable[..., list[float]]:
    return lambda completions, answer: [weight + len(one) for one in completions]


class Judge:
    def __init__(self, least: int) -> None:
        self.least = least

    def __call__(self, solution_str: str, ground_truth: str) -> float:
        return float(len(solution_str) >= self.least)


@pytest.mark.exhaustive
def test_other_functions_are_handed_to_the_processes_as_copies() -> None:
    held = [give_reward(one) for one in (closing(2.0), batch(1.0), Judge(2), lambda **_: 0.0)]
    assert [one.name.partition("@")[0] for one in held] == [
        f"{PREFIX}score", f"{PREFIX}lambda", f"{PREFIX}Judge", f"{PREFIX}lambda",
    ]  # fmt: skip
    parts = {name: {"function": one.name} for name, one in zip("abc", held, strict=False)}
    group = make_group("1", "22")
    with Graders(RewardConfig.model_validate({"parts": parts, "workers": 1})) as graders:
        first = graders.describe()[0]
        stats = graders.collect([group])
    assert first.startswith(f"reward a: {PREFIX}score@") and "Isobit's form" in first
    assert stats.failed == 0, stats.first_error
    assert group.reward_parts == {"a": [2.25, 4.25], "b": [2.0, 3.0], "c": [0.0, 1.0]}


def test_names_tell_functions_apart_and_are_forgotten() -> None:
    first, same, other = (give_reward(closing(weight)) for weight in (1.0, 1.0, 2.0))
    assert first is same and first.name != other.name
    name = first.name
    assert load_reward(name).name == name
    del first, same
    with pytest.raises(RewardError, match=r"given from Python.*reward=f"):
        load_reward(name)


def test_what_cannot_be_handed_over_is_said_before_a_process_is_started() -> None:
    bonuses = (1.0 for _ in range(9))

    def drawn(prompt: Any, completion: Any) -> float:
        return next(bonuses)

    given = give_reward(drawn)
    with pytest.raises(RewardError, match=r"drawn.* cannot be handed .*inside the function"):
        packed_reward(given.name)
    config = RewardConfig(function=given.name, in_process=True)
    group = make_group("1")
    with Graders(config) as graders:
        graders.collect([group])
    assert group.rewards == [1.0]


SCRIPT = '''
import functools, json, re, threading
WORDS = {"b", "a", "c"}
PATTERN = re.compile("[0-9]+")
LOCK = threading.Lock()
class Judge:
    """A judge."""
    scale = 2.0
    @staticmethod
    def half(x): return x / 2
    @property
    def twice(self): return 2 * self.scale
    def __init__(self, words): self.words = words
    def __call__(self, prompt, completion): return self.half(helper(completion.text))
def helper(text):
    return float(text in WORDS or text in {"x", "y", "z"}) + len(PATTERN.findall(text))
@functools.cache
def kept(text): return helper(text)
def closing(factor):
    def score(prompt, completion):
        with LOCK:
            return factor * kept(json.dumps(completion.text))
    return score
score = closing(3)
'''
ALL = ("score", "helper", "kept", "closing", "Judge(WORDS)", "lambda p, c: Judge.half(1)")


def digests(script: str, *names: str) -> list[str]:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(script, space)  # as `python script.py` would
    return [digest_of(eval(name, space)) for name in names]


def test_another_process_with_another_seed_of_hashes_has_the_same_digests(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    lines = "from isobit.rewards.behaviour_digest import digest_of\n" + "".join(
        f"print(digest_of({name}))\n" for name in ALL
    )
    path.write_text("# a comment\n\n" + SCRIPT + lines)
    found = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, check=True, env={**ENV}
    ).stdout.split()
    assert found == digests(SCRIPT, *ALL), "and comments and places in a file do not count"
    assert len(set(found)) == len(ALL)


ENV = {"PYTHONHASHSEED": "123", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}


EVERY, CLASS = set(ALL), {"Judge(WORDS)", "lambda p, c: Judge.half(1)"}


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ('"b", "a"', '"b", "d"', EVERY),
        ('{"x", "y"', '{"x", "v"', EVERY),
        ("[0-9]+", "[0-8]+", EVERY),
        ("float(text", "bool(text", EVERY),
        ("closing(3)", "closing(4)", {"score"}),
        ("x / 2", "x / 3", CLASS),
        ("2 * self", "3 * self", CLASS),
        ("scale = 2.0", "scale = 1.0", CLASS),
        ('"""A judge."""', '"""A jury."""', set()),
        ("def helper(text):", "def helper(text):  # why", set()),
    ],
)
def test_what_a_function_reads_changes_its_digest(old: str, new: str, changed: set[str]) -> None:
    assert old in SCRIPT
    before, after = digests(SCRIPT, *ALL), digests(SCRIPT.replace(old, new), *ALL)
    names = zip(ALL, before, after, strict=True)
    assert {name for name, one, other in names if one != other} == changed


def scaled(factor: float, text: str, pattern: re.Pattern[str] = re.compile("a")) -> float:
    return factor * len(pattern.findall(text))


@pytest.mark.parametrize(
    "make",
    [
        lambda value: functools.partial(scaled, value),
        lambda value: lambda text, factor=value: factor,
        lambda value: lambda text: value,
        lambda value: lambda text, *, factor=value: factor,
    ],
)
def test_defaults_closures_and_given_arguments_count(make: Callable[[Any], Any]) -> None:
    assert digest_of(make(2)) == digest_of(make(2))
    assert len({digest_of(make(value)) for value in (2, 3, 2.0, "2", [2], (2,), {2: 2}, {2})}) == 8


PROMPT = Prompt("train/0", "3+8+2+9=", (1,), {"answer": "22"})
MODULE = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Result:
    value: float

def exact(prompt, completion):
    return float(completion.text == prompt.row["answer"])

def batch(prompts, completion, answers):
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
    assert [reward(PROMPT, completion(text)) for text in ("11,13,22", "11,13,21")] == [1.0, 0.0]


def test_the_task_scorer_by_name() -> None:
    described = load_reward("reasoning_gym").describe()
    assert described == "reasoning_gym (Isobit's form: prompt, completion)"


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact", "cannot read the reward 'exact'; expected .* or one of .*'reasoning_gym'"),
        (":exact", "cannot read the reward ':exact'"),
        ("math_verfy", "did you mean math_verify"),
        ("exactmatch", "did you mean exact_match"),
        ("reasoning-gym", "did you mean reasoning_gym"),
        ("llm-judge", "did you mean llm_judge"),
        ("mine.py", "names no function of the file; expected mine.py:function, and its functions"),
        ("nowhere.py", "there is no reward file nowhere.py"),
        ("mine.py:", "cannot read the reward 'mine.py:'"),
        ("none.py:exact", "there is no reward file none.py"),
        ("mine.py:exakt", "mine.py has no function 'exakt'; .*; did you mean exact"),
        ("mine.py:LIMIT", "mine.py has no function 'LIMIT'"),
        ("mine.py:batch", r"takes \(prompts, completion, answers\), .*; the forms are"),
        ("builtins:max", "is built in"),
        ("no_such_package.rewards:exact", "ModuleNotFoundError.*named by its path"),
    ],
)
def test_a_wrong_name_is_explained(name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        load_reward(name)


@pytest.mark.parametrize(
    "source",
    [
        "import no_such_package",
        "def exact(:",
        "raise ValueError('broken\\nin two')",
        "import sys; sys.exit(3)",
    ],
)
def test_a_file_that_fails_on_import_is_named(module: Path, source: str) -> None:
    module.write_text(source)
    with pytest.raises(RewardError, match=r"the reward file mine\.py fails on import: ") as told:
        load_reward("mine.py:exact")
    assert "\n" not in str(told.value)
