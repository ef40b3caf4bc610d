"""What a reference says, and which part of a completion is its answer."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Prompt
from isobit.rewards import counts
from isobit.rewards.graders.text import (
    answer_of,
    cell,
    last_boxed,
    last_code,
    last_tagged,
    read_reference,
    references,
    worded_answer,
)
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
        (r"I end with \boxed{ and a number: \boxed{18}.", "18"),
        (r"\boxed{\boxed{ \boxed{3}", "3"),
        (r"\boxed{(2,2)} \quad \text{and} \quad \boxed{(6,2)}", "(2,2), (6,2)"),
        (r"$\boxed{1}$, $\boxed{2}$ or $\boxed{3}$.", "1, 2, 3"),
        (r"\boxed{5}, \boxed{5}", "5"),
        ("\\boxed{4}\n\n\\boxed{5}", "5"),
        (r"\boxed{4} and so we find that \boxed{5}", "5"),
        (r"\boxed22", None),
        (r"\boxed22 of {1, 2}", None),
        (r"\boxed{}", ""),
        ("", None),
    ],
)
def test_last_boxed(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


ANALYSIS = "<|channel|>analysis<|message|>"
COMMENTARY = "<|channel|>commentary<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"


def found(text: str, prompt: str = "", answer: str = "boxed", read_thinking: bool = False) -> str:
    completion = Completion(TokenSequence.of_answer((1,), (2,)), text, "stop")
    return answer_of(Prompt("train/0", prompt, (1,)), completion, "g", answer, read_thinking)[0]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"<answer>1</answer> \boxed{2} <answer>3</answer>", "2"),
        ("<answer> 1 </answer>", " 1 "),
        ("\\boxed{ 1 }", " 1 "),
        (" 1\n", " 1\n"),
        (r"<think>\boxed{1}</think>\boxed{2}", "2"),
        (r"<think>\boxed{1}</think>nothing", "nothing"),
        (r"\boxed{1}</think>\boxed{2}", "2"),
        (r"[THINK]\boxed{1}[/THINK]\boxed{2}", "2"),
        (f"{ANALYSIS}\\boxed{{1}}<|end|>{ANALYSIS}\\boxed{{3}}<|end|>{FINAL}\\boxed{{2}}", "2"),
        (f"{COMMENTARY}I add \\boxed{{1}}<|end|>{FINAL}\\boxed{{2}}", "2"),
        (f"{FINAL}\\boxed{{2}}<|end|><|start|>assistant{COMMENTARY}\\boxed{{1}}", "2"),
        (f"{FINAL}no<|end|><|start|>assistant \\boxed{{1}}", "no"),
        (r"<think>\boxed{1}</think>\boxed{2}<think>\boxed{3}</think>\boxed{4}", "4"),
        (r"\boxed{2}<think>\boxed{3}", "2"),
        (f'{ANALYSIS}a<|end|><|channel|>final <|constrain|>json<|message|>{{"a":4}}', '{"a":4}'),
        (f"{FINAL}1<|end|>{FINAL}2", "2"),
        (f"{FINAL}2<|end|><|start|>assistant{ANALYSIS}hm", "2"),
        (f"<think>a</think>\\boxed{{2}}{COMMENTARY}", "2"),
        (f"4 {ANALYSIS}", f"4 {ANALYSIS}"),
    ],
)
def test_the_answer_stands_after_the_thinking(text: str, answer: str) -> None:
    counts.take()
    assert found(text) == answer
    assert counts.take() == {}


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("", r"<think>\boxed{1}"),
        ("", r"<think>a</think><thinking>\boxed{1}"),
        ("", f"{ANALYSIS}\\boxed{{1}}<|end|><|start|>assistant"),
        (f"<|start|>assistant{ANALYSIS}", r"\boxed{1}"),
        ("", f"{COMMENTARY}\\boxed{{1}}"),
        ("", r"<|channel|>commentary to=f <|constrain|>json<|message|>\boxed{1}"),
        ("<assistant><think>", r"\boxed{1}"),
        ("<assistant><think>\n", r"\boxed{1}"),
        ("<assistant><think>\n", f"\\boxed{{1}}{COMMENTARY}"),
        ("<assistant><think>\n", f"{COMMENTARY}\\boxed{{1}}{FINAL}"),
        ("<assistant><think>\n", f"{FINAL}\\boxed{{1}}"),
        ("", f"{COMMENTARY}\\boxed{{1}}<|end|><|start|>assistant{ANALYSIS}hm"),
        ("", r"<|channel|>analysis to=python code<|message|>\boxed{1}"),
        ("", r"<|channel|>foo<|message|>\boxed{1}"),
        ("", r" to=functions.add<|channel|>commentary json<|message|>\boxed{1}"),
        ("", r"<|channel|>final to=functions.add<|message|>\boxed{1}"),
        ("", r"<|channel|>analysis <b>\boxed{1}"),
        (f"<|start|>assistant{ANALYSIS}", f"a<|end|>{COMMENTARY}\\boxed{{1}}"),
    ],
)
def test_unfinished_thinking_is_no_answer_and_counted(prompt: str, text: str) -> None:
    counts.take()
    assert found(text, prompt) == ""
    assert counts.take() == {"g: unfinished thinking": 1}
    assert found(text, prompt, read_thinking=True) == "1"
    assert counts.take() == {}


def test_thinking_that_the_prompt_began_may_end() -> None:
    assert found(r"so \boxed{1}</think>\boxed{2}", "<assistant><think>") == "2"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so 489.\n\nFinal Answer: **73**", "73"),
        ("✅ Final Answer: **73**", "73"),
        ("The answer is 73.", "73"),
        ("The answer is 72. No, the answer is 73.", "73"),
        ("the final answer to this question is: $73$. I hope it is correct.", "73"),
        (r"**Answer:** \( 10 - 2\sqrt{5} \)", r"10 - 2\sqrt{5}"),
        ("**Final Answer**\n73", "73"),
        ("Answer:\n73", "73"),
        ("2+40=42\n#### 42\n" + "It is consistent. " * 60, "42"),
        ("there are **73**", "73"),
        ("**73** there are, said he", None),
        ("I answer that it is so", None),
        ("73", None),
        ("", None),
    ],
)
def test_answers_that_words_mark(text: str, answer: str | None) -> None:
    assert worded_answer(text) == answer
    assert found(text) == text, "the default takes only what is boxed or tagged"
    assert found(text, answer="marked") == (text if answer is None else answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("I get 1,234.50 dollars", "1,234.50"),
        ("from 5-3 it is 2", "2"),
        ("-7", "-7"),
        ("3/4 of x2", "3/4"),
        ("1,2", "2"),
        ("none", "none"),
    ],
)
def test_the_last_number(text: str, answer: str) -> None:
    assert found(text, answer="last_number") == answer


def test_another_rule_is_refused() -> None:
    with pytest.raises(RewardError, match="g got answer = 'first'; expected one of 'boxed'"):
        found("1", answer="first")


@pytest.mark.parametrize(
    ("value", "accepted"),
    [
        ("22", ("22",)),
        (22, ("22",)),
        (22.0, ("22",)),
        (np.float32(22), ("22",)),
        (0.5, ("0.5",)),
        (1e-7, ("0.0000001",)),
        (1.5e-7, ("0.00000015",)),
        (6.02e23, (r"6.02 \times 10^{23}",)),
        (True, ("True",)),
        (["22", "23"], ("22", "23")),
        (np.array(["22"]), ("22",)),
        (["22", None, float("nan"), ""], ("22",)),
        ('["22", "23"]', ("22", "23")),
        ("[22, 23]", ("[22, 23]",)),
        ({"ground_truth": ["22"]}, ("22",)),
        ("9+11 = <<9+11=20>>20.\n#### 20", ("20",)),
        ("#### 20\nand more of it", ("#### 20\nand more of it",)),
        (r"so $\boxed{5}$.", ("5",)),
        ("<answer>B</answer>", ("B",)),
        (r"\[5\]", ("5", r"\[5\]")),
    ],
)
def test_references(value: object, accepted: tuple[str, ...]) -> None:
    assert references(Prompt("train/0", "", (1,), {"answer": value}), "answer", "g") == accepted


@given(st.one_of(st.integers(-(10**6), 10**6), st.decimals(-999, 999, places=3)))
@example(0)
def test_a_marked_number_is_read_from_any_solution(number: object) -> None:
    for text in (f"so\n#### {number}", rf"\[ \boxed{{{number}}} \]", f"<answer>{number}</answer>"):
        for mathematics in (False, True):
            assert read_reference(text, mathematics) == (str(number),)
    assert read_reference(f"{number} apples", True)[0] == str(number)
    assert read_reference(f"The sum is ${number}$ in the end.", True) == (str(number),)


@given(st.text(alphabet="\\boxed{}fa <answer>/#*think$()[]1,.\n", max_size=60))
def test_no_text_breaks_the_reading(text: str) -> None:
    for rule in ("boxed", "marked", "last_number"):
        found(text, answer=rule)
    read_reference(text, True)
    boxed = last_boxed(text)
    assert boxed is None or boxed.count("{") >= 0


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


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "part",
    [
        r"\boxed{",
        "<answer>",
        "```python\n",
        "```\n",
        "{",
        r"\boxed ",
        "####",
        "answer is ",
        "Answer: ",
        "**a",
        "$a ",
        r"\(a",
        "<think>",
        "1,",
        "1 ",
        "a ",
        "a",
    ],
)
def test_a_megabyte_of_beginnings_is_read_once(part: str) -> None:
    """Not timed; a text that is read again for each part would end this test by its deadline."""
    text = part * (1_000_000 // len(part))
    assert last_boxed(text) is None
    assert last_tagged(text) is None
    last_code(text)
    for rule in ("marked", "last_number"):
        found(text, answer=rule)
    read_reference(text, True)


def test_a_cell() -> None:
    assert cell(Prompt("train/0", "", (1,), {"answer": 0}), "answer", "format") == 0
    with pytest.raises(RewardError, match="its columns are a, b"):
        cell(Prompt("train/0", "", (1,), {"a": 1, "b": 2}), "answer", "format")
    with pytest.raises(RewardError, match="its columns are none"):
        cell(Prompt("train/0", "", (1,)), "answer", "format")
