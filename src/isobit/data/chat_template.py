"""Rendering with a tokenizer's chat template, within limits.

A chat template is an untrusted program. transformers runs it in jinja's sandbox, which does not
limit the time: two nested loops of ``range(99999)`` take an hour, and a power of a power never
ends. So the lines that a template executes are counted here, powers are refused, and what its
operations make is bounded (``isobit.data.template_limits``).
"""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

from jinja2 import Environment, TemplateError
from transformers import PreTrainedTokenizerBase

from isobit.data.template_limits import Allowance, compiled, limited
from isobit.data.tokenizer import LARGEST_TEXT
from isobit.util.errors import did_you_mean
from isobit.util.plain_files import read_plain

MAX_LINES = 1_000_000
"""Executed lines of a template for one conversation; a thousand messages take some 50,000."""
_LINES_AT_ONCE = 1000
LARGEST = 1 << 20
"""Characters of a template, and of a layout of the date ``LONGEST_LAYOUT``."""
LONGEST_LAYOUT = 1000
_FILE = "<template>"
"""The file name of jinja's compiled templates."""
CLOCK = "strftime_now"
"""The function by which chat templates read the clock."""
_NOW: ContextVar[datetime | None] = ContextVar("now", default=None)
"""The time that the clock of a template shows; None for the machine's."""


def rendered(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] = MappingProxyType({}),
    date: datetime | None = None,
    continues: str | None = None,
) -> str:
    """The text of a conversation, as ``apply_chat_template`` of transformers gives it.

    ``continues`` names the field of the last message that the model continues. Raises
    whatever the template raises, ``TemplateError`` for one that is invalid or does not end, and
    UnicodeEncodeError for half of a surrogate pair in the text, which no tokenizer reads.
    """
    for template in _templates(tokenizer):
        _check(template)
    listed: Any = None if tools is None else [dict(tool) for tool in tools]
    template = tokenizer.get_chat_template(None, listed)
    # transformers gives templates a clock that shows the time of the rendering
    compiled(template).globals[CLOCK] = _strftime_now
    before = _NOW.set(date)
    try:
        with limited([messages, tools, variables]) as allowance, _counted_lines(allowance):
            text = tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=listed,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt and continues is None,
                continue_final_message=continues or False,
                **variables,
            )
    finally:
        _NOW.reset(before)
    str(text).encode("utf-8")
    return str(text)


def _strftime_now(layout: str) -> str:
    if len(layout) > LONGEST_LAYOUT:
        raise TemplateError(f"the layout of the date has more than {LONGEST_LAYOUT} characters")
    return (_NOW.get() or datetime.now()).strftime(layout)


def _templates(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The text of the chat template, or of each of several that have names; empty for none."""
    templates: Any = tokenizer.chat_template
    if isinstance(templates, dict):
        return tuple(map(str, templates.values()))
    return (str(templates),) if templates else ()


@lru_cache(16)
def _names(template: str) -> frozenset[str]:
    return frozenset(
        text for _, kind, text in Environment(autoescape=True).lex(template) if kind == "name"
    )


def mentions(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """Whether a chat template reads the variable ``name``."""
    try:
        return any(name in _names(template) for template in _templates(tokenizer))
    except TemplateError:  # of which rendering says more
        return True


def reads_key(tokenizer: PreTrainedTokenizerBase, key: str) -> bool:
    """Whether a chat template may read the key of messages: as an attribute or in quotes."""
    quoted = (f"'{key}'", f'"{key}"')
    written = any(one in template for template in _templates(tokenizer) for one in quoted)
    return written or mentions(tokenizer, key)


def reads_of_messages(tokenizer: PreTrainedTokenizerBase, key: str) -> bool:
    """Whether a chat template reads ``key`` as an attribute or by its quoted name, as it reads the
    keys of messages; a variable of that name does not count.
    """
    read = re.compile(
        rf"\.\s*{key}\b|(?:\[\s*|get\(\s*)(['\"]){key}\1|(['\"]){key}\2\s+(?:not\s+)?in\b"
    )
    return any(read.search(template) for template in _templates(tokenizer))


_TEMPLATES = ("tokenizer_config.json", "*chat_template*", "additional_chat_templates/*")


def reads_clock(folder: Path) -> bool:
    """Whether a chat template of a model folder may write the date. No tokenizer is loaded."""
    files = (path for pattern in _TEMPLATES for path in folder.glob(pattern) if path.is_file())
    return any(CLOCK.encode() in read_plain(path, LARGEST_TEXT) for path in files)


_TAKEN = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {
    "documents"
}


def check_variables(variables: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ``ValueError`` for a variable that no chat template reads, or that is no variable."""
    for name in variables:
        if name in _TAKEN or name == "messages":
            raise ValueError(f"{name!r} is no variable of a template: rendering sets it itself")
        if not mentions(tokenizer, name):
            known = {name for one in _templates(tokenizer) for name in _names(one)}
            hint = did_you_mean(name, sorted(known - _TAKEN))
            other = "; leave it out, or name one that the folder's chat template reads"
            raise ValueError(f"the chat template reads no variable {name!r}{hint or other}")


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
def _counted_lines(allowance: Allowance) -> Iterator[None]:
    """Raise ``TemplateError`` inside a template that executes more than ``MAX_LINES`` lines, or for
    too long.
    """
    left = MAX_LINES

    def of_template(_frame: FrameType, event: str, _value: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if left % _LINES_AT_ONCE == 0:
            allowance.check_time()
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
