r"""Which part of a completion is its answer.

Every function reads the text once, from left to right, so that no text takes longer than its
length.
"""

import re
from typing import Any

from isobit.errors import RewardError
from isobit.records.text import Prompt

OPENING, CLOSING = "<answer>", "</answer>"
BOX = re.compile(r"\\(?:boxed|fbox)\s{0,10}\{")
BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
"""Braces, and what is escaped: no brace of LaTeX's own."""
FENCE = "```"
PYTHON = frozenset({"python", "python3", "py"})


def cell(prompt: Prompt, name: str, grader: str) -> Any:
    """The prompt's column ``name``.  Raises RewardError that names those it has."""
    if name in prompt.row:
        return prompt.row[name]
    raise RewardError(
        f"the grader {grader} needs the column {name!r}, which prompt {prompt.id} does not have; "
        f"its columns are {', '.join(map(str, prompt.row)) or 'none'}"
    )


def last_tagged(text: str) -> str | None:
    """What stands in the last complete ``<answer>..</answer>``."""
    end = text.rfind(CLOSING)
    start = text.rfind(OPENING, 0, end) if end >= 0 else -1
    if start < 0:
        return None
    inside = text[start + len(OPENING) : end]
    return inside.partition(CLOSING)[0]


def last_boxed(text: str) -> str | None:
    r"""What stands in the last complete ``\boxed{..}``, whose braces may nest."""
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
    r"""The last ``\boxed{..}``, else the last ``<answer>``, else all of it."""
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
    """The last complete block of Python between fences; of those without a language if none is
    marked as Python.
    """
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
