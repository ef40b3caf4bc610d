"""Which part of a completion is its answer."""

import pytest

from isobit.records.text import Prompt
from isobit.rewards.graders.text import cell, final_answer, last_boxed, last_code, last_tagged
from isobit.util.errors import RewardError


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so <answer> 22 </answer> it is", " 22 "),
        ("<answer>21</answer> no, <answer>22</answer>", "22"),
        ("<answer>2\n2</answer>", "2\n2"),
        ("<answer>22", None),
        ("22</answer>", None),
        ("<answer><answer>22</answer>", "22"),
        ("<answer>22</answer></answer>", "22"),
        ("<answer></answer>", ""),
        ("", None),
    ],
)
def test_last_tagged(text: str, answer: str | None) -> None:
    assert last_tagged(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{22}.", "22"),
        (r"\boxed{21} no, \boxed{22}", "22"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{3}}", r"\boxed{3}"),
        (r"\boxed {4}", "4"),
        (r"\fbox{5}", "5"),
        (r"\boxed{21} and \boxed{22", "21"),
        (r"\boxed22", None),
        (r"\boxed22 of {1, 2}", None),
        (r"\boxed{}", ""),
        ("", None),
    ],
)
def test_last_boxed(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"<answer>1</answer> \boxed{2} <answer>3</answer>", "2"),
        ("<answer> 1 </answer>", " 1 "),
        ("\\boxed{ 1 }", " 1 "),
        (" 1\n", " 1\n"),
    ],
)
def test_final_answer(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nor\n```python\nx = 2\n```", "x = 2\n"),
        ("```py\nx = 1\n```\n```bash\nls\n```\n```\n1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("  ```Python\n  x = 1\n  ```", "  x = 1\n"),
        ("```python\nx = 1\n```\n```python\nx = 2", "x = 1\n"),
        ("```bash\nls\n```", None),
        ("x = 1", None),
    ],
)
def test_last_code(text: str, code: str | None) -> None:
    assert last_code(text) == code


@pytest.mark.parametrize("part", [r"\boxed{", "<answer>", "```python\n", "```\n", "{", r"\boxed "])
def test_a_megabyte_of_beginnings_is_read_once(part: str) -> None:
    """Not timed; a text that is read again for each part would end this test by its deadline."""
    text = part * (1_000_000 // len(part))
    assert last_boxed(text) is None
    assert last_tagged(text) is None
    last_code(text)


def test_a_cell() -> None:
    assert cell(Prompt("train/0", "", (1,), {"answer": 0}), "answer", "format") == 0
    with pytest.raises(RewardError, match="its columns are a, b"):
        cell(Prompt("train/0", "", (1,), {"a": 1, "b": 2}), "answer", "format")
    with pytest.raises(RewardError, match="its columns are none"):
        cell(Prompt("train/0", "", (1,)), "answer", "format")
