"""A model folder's chat template, rendered within bounds.

A template is a stranger's program.  transformers runs it in jinja's sandbox, where it reads no file
and calls nothing of Python's; what the sandbox does not bound is how long it runs.  Two nested
loops of ``range(99999)`` take an hour, and one power of a power for ever, so the lines that a
template executes are counted here, and powers are refused before it is compiled.
"""

import sys
from collections.abc import Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateError
from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_LINES = 1_000_000
"""Of a template's compiled code, for one conversation.  A thousand messages take some 50,000."""
LARGEST = 1 << 20
"""Characters of a template."""
_FILE = "<template>"
"""What jinja calls the file that it compiles a template to."""


def rendered(
    messages: Sequence[dict[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    add_generation_prompt: bool,
) -> str:
    """The text of a conversation.  Raises whatever the template raises, and ``TemplateError`` for
    one that does not end or is none.
    """
    for template in _sources(tokenizer.chat_template):
        _check(template)
    with _counted_lines():
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    return str(text)


def _sources(template: Any) -> tuple[str, ...]:
    """A tokenizer has one template, or several by name."""
    return tuple(map(str, template.values())) if isinstance(template, dict) else (str(template),)


@lru_cache(16)
def _check(template: str) -> None:
    if len(template) > LARGEST:
        raise TemplateError(
            f"the template has {len(template):,} characters; expected at most {LARGEST:,}"
        )
    before = ""
    for _, kind, text in Environment(autoescape=True).lex(template):
        if kind == "operator" and text == "**" and before not in ("(", ","):
            raise TemplateError("the template computes a power, which no conversation needs")
        before = before if kind == "whitespace" else text


@contextmanager
def _counted_lines() -> "Iterator[None]":
    """Raise ``TemplateError`` inside a template that executes more than ``MAX_LINES`` lines."""
    left = MAX_LINES

    def of_template(_frame: FrameType, event: str, _value: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if left < 0:
            raise TemplateError(
                f"it has not ended after {MAX_LINES:,} lines: its loops are too long"
            )
        return of_template

    def enter(frame: FrameType, _event: str, _value: Any) -> Any:
        return of_template if frame.f_code.co_filename == _FILE else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)
