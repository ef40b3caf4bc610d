"""exact_match, regex and format; and the table of all graders."""

import inspect
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Prompt
from isobit.rewards.graders import GRADERS
from isobit.rewards.graders import text as layout
from isobit.rewards.graders import text as text_module
from isobit.util.errors import RewardError

PROMPT = Prompt("train/0", "", (1,), {"answer": "Rom", "other": 5})


def completion(text: str) -> Completion:
    return Completion(TokenSequence.of_answer((1,), (2,)), text, "stop")


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("Rom", {}, 1.0),
        ("so \\boxed{Rom}", {}, 1.0),
        ("so <answer> Rom\n</answer>", {}, 1.0),
        ("so <answer> Rom\n</answer>", {"strip": False}, 0.0),
        ("rom", {}, 0.0),
        ("rom", {"ignore_case": True}, 1.0),
        ("Rоm", {"ignore_case": True}, 0.0),  # noqa: RUF001  (a Cyrillic o)
        ("Ｒom", {}, 0.0),  # noqa: RUF001
        ("Rom\u200b", {}, 0.0),
        ("Rom or Paris", {}, 0.0),
        ("", {}, 0.0),
        ("5", {"column": "other"}, 1.0),
    ],
)
def test_exact_match(text: str, options: dict[str, Any], expected: float) -> None:
    assert text_module.exact_match(PROMPT, completion(text), **options) == expected


THOUGHT = "<think>8+2</think><answer>Rom"


@pytest.mark.parametrize(
    ("grader", "text", "stop", "options", "expected"),
    [
        ("format", THOUGHT, "</answer>", {}, 1.0),
        ("format", THOUGHT, "", {}, 0.0),
        ("format", f"{THOUGHT}</answer>", "Question:", {}, 1.0),
        ("exact_match", THOUGHT, "</answer>", {}, 1.0),
        ("exact_match", THOUGHT, "\nQuestion:", {}, 0.0),
        ("exact_match", "Rom", "Question:", {}, 1.0),
        ("exact_match", r"so \boxed{Rom", "}", {}, 1.0),
        ("exact_match", "<think>Rom", "</think>", {}, 0.0),
        ("regex", "a", "b", {"pattern": "ab", "full": True}, 1.0),
        ("regex", "a", "b", {"pattern": "a", "full": True}, 1.0),
        ("regex", "a", "b", {"pattern": "c"}, 0.0),
        ("math_verify", "<answer>Rom", "</answer>", {}, 1.0),
    ],
)
def test_a_stop_string_closes_a_mark(
    grader: str, text: str, stop: str, options: dict[str, Any], expected: float
) -> None:
    module, _, name = GRADERS[grader].partition(":")
    stopped = replace(completion(text), stop_string=stop)
    assert getattr(import_module(module), name)(PROMPT, stopped, **options) == expected


def test_exact_match_without_its_column() -> None:
    with pytest.raises(RewardError, match="exact_match needs the column 'gold'"):
        text_module.exact_match(PROMPT, completion("Rom"), column="gold")


@pytest.mark.parametrize(
    ("pattern", "full", "expected"),
    [
        ("b+", False, 1.0),
        ("b+", True, 0.0),
        ("a.*c", True, 1.0),
        ("^b", False, 0.0),
        ("x", False, 0.0),
    ],
)
def test_regex(pattern: str, full: bool, expected: float) -> None:
    assert (
        text_module.regex_score(PROMPT, completion("abb\nc"), pattern=pattern, full=full)
        == expected
    )


def test_what_is_no_regular_expression() -> None:
    with pytest.raises(RewardError, match=r"'\(' is no regular expression"):
        text_module.regex_score(PROMPT, completion("a"), pattern="(")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nso\n</think>\n<answer>5</answer>", 1.0),
        (" <think></think><answer></answer>\n", 1.0),
        ("<think>so</think>", 0.0),
        ("<answer>5</answer><think>so</think>", 0.0),
        ("<think>so</think><answer>5</answer> indeed", 0.0),
        ("<think>a</think><think>b</think><answer>5</answer>", 0.0),
        ("<think>a<answer>4</answer></think><answer>5</answer>", 0.0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format(text: str, expected: float) -> None:
    assert layout.format_score(PROMPT, completion(text)) == expected


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("q<think>", "so</think><answer>5</answer>", 1.0),
        ("q<think>\n", "so</think>\n<answer>5</answer>", 1.0),
        ("q<think>\n\n", "</think><answer>5</answer>", 1.0),
        ("q<think>", "<think>so</think><answer>5</answer>", 1.0),
        ("q<think>", "so<answer>5</answer>", 0.0),
        ("q<think>", "<think>a</think></think><answer>5</answer>", 0.0),
        ("q", "so</think><answer>5</answer>", 0.0),
        ("q<think></think>", "so</think><answer>5</answer>", 0.0),
        ("q<think> well", "so</think><answer>5</answer>", 0.0),
        ("q<answer>", "5</answer>", 0.0),
        ("q<" + "a" * 1000 + ">", "<think>so</think><answer>5</answer>", 1.0),
    ],
)
def test_a_tag_that_the_prompt_opened_belongs_to_the_completion(
    prompt: str, text: str, expected: float
) -> None:
    opened = replace(PROMPT, text=prompt)
    assert layout.format_score(opened, completion(text)) == expected


def test_another_layout_may_name_the_opened_tag_or_not() -> None:
    opened = replace(PROMPT, text="q<reasoning>\n")
    answer = completion("so</reasoning> 5")
    for pattern in (
        r"<reasoning>.*</reasoning> \d",
        r"\s*<reasoning>\s*so</.*",
        r"so</reasoning> 5",
    ):
        assert layout.format_score(opened, answer, pattern=pattern) == 1.0
    assert layout.format_score(opened, answer, pattern=r"<think>.*") == 0.0


@pytest.mark.parametrize("part", ["<think>", "</think>", "<think></think>", "<answer>", "<", "a"])
def test_the_layout_reads_a_megabyte_once(part: str) -> None:
    """Not timed; what goes back again and again would end this test by its deadline."""
    assert layout.format_score(PROMPT, completion(part * (1_000_000 // len(part)))) == 0.0


def test_another_layout() -> None:
    assert layout.format_score(PROMPT, completion("Answer: 5"), pattern=r"Answer: \d+") == 1.0
    assert layout.format_score(PROMPT, completion("Answer: five"), pattern=r"Answer: \d+") == 0.0


@pytest.mark.parametrize("name", sorted(GRADERS))
def test_every_grader_is_where_the_table_says(name: str) -> None:
    module, _, function = GRADERS[name].partition(":")
    parameters = inspect.signature(getattr(import_module(module), function)).parameters
    assert list(parameters)[:2] == ["prompt", "completion"]
