"""The part of a completion that is its answer, and the graders that compare text: ``exact_match``,
``regex`` and ``format``.

The functions that find the answer read the text once, in linear time. A regular expression with
nested repetitions, as in ``(a+)+b``, can take time exponential in the length of the text, which
only the grading pool's deadline bounds.
"""

import re
from functools import lru_cache
from typing import Any

from isobit.records.text import Completion, Prompt
from isobit.util.errors import RewardError

OPENING, CLOSING = "<answer>", "</answer>"
BOX = re.compile(r"\\(?:boxed|fbox)\s{0,10}\{")
BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
"""Braces, and escaped characters, which are no braces of LaTeX's."""
FENCE = "```"
PYTHON = frozenset({"python", "python3", "py"})


def cell(prompt: Prompt, name: str, grader: str) -> Any:
    if name in prompt.row:
        return prompt.row[name]
    raise RewardError(
        f"the grader {grader} needs the column {name!r}, which prompt {prompt.id} does not have; "
        f"its columns are {', '.join(map(str, prompt.row)) or 'none'}"
    )


def last_tagged(text: str) -> str | None:
    """The text of the last complete ``<answer>..</answer>``."""
    end = text.rfind(CLOSING)
    start = text.rfind(OPENING, 0, end) if end >= 0 else -1
    if start < 0:
        return None
    inside = text[start + len(OPENING) : end]
    return inside.partition(CLOSING)[0]


def last_boxed(text: str) -> str | None:
    r"""The text of the last complete ``\boxed{..}``, whose braces may nest."""
    found = None
    position = 0
    while (box := BOX.search(text, position)) is not None:
        end = _closing(text, box.end() - 1)
        if end < 0:
            break
        found = text[box.end() : end]
        position = end
    return found


def final_answer(text: str) -> str:
    r"""The last ``\boxed{..}``, else the last ``<answer>``, else the whole text."""
    boxed = last_boxed(text)
    tagged = last_tagged(text) if boxed is None else boxed
    return text if tagged is None else tagged


def _closing(text: str, brace: int) -> int:
    """Where the brace that opens at ``brace`` closes; -1 if it does not."""
    depth = 0
    for token in BRACES.finditer(text, brace):
        depth += (token[0] == "{") - (token[0] == "}")
        if depth == 0 and token[0] == "}":
            return token.start()
    return -1


def last_code(text: str) -> str | None:
    """The last complete fenced block of Python, or else of no language."""
    marked = unmarked = None
    language: str | None = None
    lines: list[str] = []
    for line in text.splitlines():
        word = line.strip()
        if language is None:
            if word.startswith(FENCE):
                language, lines = word[len(FENCE) :].strip().lower(), []
        elif word == FENCE:
            code = "\n".join(lines) + "\n"
            if language in PYTHON:
                marked = code
            elif not language:
                unmarked = code
            language = None
        else:
            lines.append(line)
    return unmarked if marked is None else marked


def exact_match(
    prompt: Prompt,
    completion: Completion,
    column: str = "answer",
    ignore_case: bool = False,
    strip: bool = True,
) -> float:
    """1.0 if the completion's final answer (``final_answer``) is the text of ``column``.

    ``strip`` ignores white space around both, ``ignore_case`` their case. Look-alikes of other
    alphabets are other characters. Raises ``RewardError`` for a missing column.
    """
    expected = str(cell(prompt, column, "exact_match"))
    given = final_answer(completion.text)
    if strip:
        given, expected = given.strip(), expected.strip()
    if ignore_case:
        given, expected = given.casefold(), expected.casefold()
    return float(given == expected)


def regex_score(prompt: Prompt, completion: Completion, pattern: str, full: bool = False) -> float:
    """1.0 if ``pattern`` is found in the completion, with ``full`` if it matches all of it. Raises
    ``RewardError`` for an invalid regular expression.
    """
    del prompt  # every grader gets one
    expression = compiled(pattern)
    found = (expression.fullmatch if full else expression.search)(completion.text)
    return float(found is not None)


@lru_cache(maxsize=64)
def compiled(pattern: str) -> re.Pattern[str]:
    """``pattern``, in which a dot matches any character. Raises ``RewardError``."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise RewardError(f"{pattern!r} is no regular expression: {error}") from error


_LONGEST_TAG = 64
_OPENED = re.compile(r"<[A-Za-z][\w.-]*>\s*\Z")
"""An open tag at the end of a prompt."""
THINK_AND_ANSWER = (
    r"\s*<think>(?:(?!</?think>|</?answer>).)*</think>"
    r"\s*<answer>(?:(?!</?think>|</?answer>).)*</answer>\s*"
)
"""``<think>..</think><answer>..</answer>``, each once, with nothing around them."""


def format_score(prompt: Prompt, completion: Completion, pattern: str = THINK_AND_ANSWER) -> float:
    """1.0 if all of the completion matches ``pattern``, in which a dot matches any character. A tag
    that the prompt ends with, such as the ``<think>`` of a chat template's generation prompt, is
    its beginning: the completion may match with it or by itself. Raises ``RewardError`` for an
    invalid regular expression.
    """
    expression, text = compiled(pattern), completion.text
    opened = _OPENED.search(prompt.text[-_LONGEST_TAG:])
    texts = (text,) if opened is None else (opened[0] + text, text)
    return float(any(expression.fullmatch(one) is not None for one in texts))
