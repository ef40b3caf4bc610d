"""A sandbox that bounds the memory and time of a chat template, beside what it may read.

transformers renders templates in jinja's sandbox, which keeps them from the machine but not from
its memory and time: ``'x' * 10 ** 9``, ``'%1000000000d' % 1``, a join, an indent, or twenty times
``[x, x]`` take gigabytes in one operation, which nothing outside can end.  So the sandbox
here is transformers' own with these limits, for each rendering:

    a value       of at most ``VALUE`` characters and ``PER_CHARACTER`` more for each of the input;
                  what a container holds counts, each time that it holds it
    all values    that operations make, ``ALL`` and ``ALL_PER_CHARACTER`` in the same way
    time          ``SECONDS`` of the thread's own, looked at between operations and lines

An operation whose result can be larger than its arguments computes the size beforehand; every
other is linear in its arguments, which are within the limit.  Methods of texts and numbers
are those of a list, and filters that search in ways that are not linear are left out.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, update_wrapper, wraps
from typing import Any, NamedTuple, cast

from jinja2 import Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
)
from jinja2.utils import Namespace
from markupsafe import Markup
from transformers.utils import chat_template_utils

VALUE, PER_CHARACTER = 1 << 23, 8
ALL, ALL_PER_CHARACTER = 1 << 26, 128
SECONDS = 10.0
_NODE = 64
"""Characters that a value counts as, whatever it is."""
_DEEPEST = 500
"""Containers within containers."""
_MOST = 100_000
"""The most items, columns or digits that a number in a template may ask for, as in jinja's own
``range``.
"""

_OF_TEXT = """
capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha
isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join
ljust lower lstrip partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit
rstrip split splitlines startswith strip swapcase title upper zfill
"""
_METHODS = {
    str: frozenset(_OF_TEXT.split()),
    int: frozenset({"bit_length", "bit_count", "conjugate", "is_integer"}),
    float: frozenset({"conjugate", "is_integer", "hex"}),
    bytes: frozenset[str](),
}
"""The methods that a template may call, by the type of their owner."""
_LEFT_OUT = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
_ITERATED = ("list", "join", "sort", "unique", "sum", "first", "last", "min", "max", "length")
"""Filters that exhaust a generator."""
_CONTAINERS = (
    list, tuple, set, frozenset, dict, type({}.items()), type({}.keys()), type({}.values())
)  # fmt: skip
_NUMBER = re.compile(r"\d+")
_WIDE = re.compile(r"[%)][#0\- +]*(\d*\.)?(\d{6,}|\*)")
"""A width or precision of ``%`` that is no small number."""


class _Size(NamedTuple):
    characters: int
    """Characters of its text, roughly, and ``_NODE`` for each value in it."""
    depth: int


class Allowance:
    """The budget of one rendering, or of the compilation of a template."""

    def __init__(self, source: object = None) -> None:
        self._known: dict[int, tuple[object, _Size]] = {}  # holds them, so that ids stay theirs
        self._largest = 1 << 62
        size = self._size(source).characters
        self._largest = VALUE + PER_CHARACTER * size
        self._left = ALL + ALL_PER_CHARACTER * size
        self._until = time.thread_time() + SECONDS

    def check_time(self) -> None:
        if time.thread_time() > self._until:
            raise TemplateError(f"it has not ended after {SECONDS:g} s of computing")

    def expect(self, characters: int) -> None:
        """Raise ``TemplateError`` before a value of so many characters is made."""
        if characters > self._largest:
            raise TemplateError(
                f"it makes a value of {characters:,} characters; expected at most "
                f"{self._largest:,}, far more than the conversation has"
            )

    def look(self, value: object) -> object:
        """A value that is read or made. Raises ``TemplateError`` for one that is too large."""
        size = self._size(value)
        self.expect(size.characters)
        if size.depth > _DEEPEST:
            raise TemplateError(f"it makes more than {_DEEPEST} lists within lists")
        return value

    def made(self, value: Any) -> Any:
        """A value that an operation has made, which takes a part of what is left."""
        self.check_time()
        self.look(value)
        if isinstance(value, str):
            self._left -= len(value)
        elif isinstance(value, list | tuple | Mapping):
            self._left -= _NODE * (len(value) + 4)
            self._left -= sum(len(one) for one in value if isinstance(one, str))
        if self._left < 0:
            raise TemplateError(
                "all that it makes is too much; expected some copies of what the conversation has"
            )
        return value

    def size(self, value: object) -> int:
        return self._size(value).characters

    def depth(self, value: object) -> int:
        return self._size(value).depth

    def _size(self, value: object) -> _Size:
        if isinstance(value, str | bytes):
            return _Size(len(value) + _NODE, 0)
        if isinstance(value, int):
            return _Size(value.bit_length() // 3 + _NODE, 0)
        if isinstance(value, range):
            return _Size(_NODE * (len(value) + 1), 1)
        if isinstance(value, Namespace):  # may change: its size is not kept
            attributes = cast(dict[str, object], getattr(value, "_Namespace__attrs"))  # noqa: B009
            return self._sum(attributes.values())
        if not isinstance(value, _CONTAINERS):
            return _Size(_NODE, 0)
        if id(value) not in self._known:
            pairs = value.items() if isinstance(value, dict) else ()
            parts = (one for pair in pairs for one in pair) if pairs else value
            self._known[id(value)] = (value, self._sum(cast(Iterable[object], parts)))
        return self._known[id(value)][1]

    def _sum(self, parts: Iterable[object]) -> _Size:
        characters, depth = _NODE, 0
        for one in parts:
            if isinstance(one, Namespace):
                raise TemplateError("it puts a namespace into another value")
            part = self._size(one)
            characters, depth = characters + part.characters, max(depth, part.depth)
            if characters > self._largest:
                break
        return _Size(characters, depth + 1)


_ALLOWANCE: ContextVar[Allowance | None] = ContextVar("allowance", default=None)


def allowance() -> Allowance:
    """The allowance of the rendering that is under way, or else a new one for one operation."""
    return _ALLOWANCE.get() or Allowance()


@contextmanager
def limited(source: object) -> Iterator[Allowance]:
    """A block in which transformers renders templates within the limits for this input."""
    before = _ALLOWANCE.set(limits := Allowance(source))
    try:
        yield limits
    finally:
        _ALLOWANCE.reset(before)


class _Generator(CodeGenerator):
    """Generates code that makes ~, slices and literals through the environment, not in place."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.joined((")
        for one in node.nodes:
            self.visit(one, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.made(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx != "load":  # names that are assigned to
            super().visit_Tuple(node, frame)
            return
        self.write("environment.made(")
        super().visit_Tuple(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self.write("environment.made(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self.write("environment.made(")
        super().visit_Dict(node, frame)
        self.write(")")


class _Formatter(SandboxedFormatter):
    """``str.format`` in which each field counts towards the limits."""

    def __init__(self, environment: "Bounded", **options: Any) -> None:
        super().__init__(environment, **options)
        self._written = 0

    def format_field(self, value: Any, format_spec: str) -> str:
        numbers = _NUMBER.findall(format_spec)
        if any(len(number) > 5 for number in numbers):
            raise TemplateError(f"the layout {format_spec[:40]!r} has more than {_MOST:,} columns")
        limits = allowance()
        limits.look(value)
        self._written += limits.size(value) + sum(map(int, numbers))
        limits.expect(self._written)
        return super().format_field(value, format_spec)


class _EscapeFormatter(_Formatter, SandboxedEscapeFormatter):
    """``_Formatter`` for markup: inserted values are escaped."""


class Bounded(ImmutableSandboxedEnvironment):
    """The sandbox with limits."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the text that a template, a macro or a block has written."""
        limits = allowance()
        pieces = list[str]()
        size = 0
        for part in parts:
            size += len(part)
            limits.expect(size)
            pieces.append(part)
        return limits.made("".join(pieces))

    def made(self, value: Any) -> Any:
        return allowance().made(value)

    def joined(self, values: tuple[Any, ...]) -> str:
        limits = allowance()
        limits.expect(sum(map(limits.size, values)))
        return limits.made("".join(map(str, values)))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        limits = allowance()
        limits.look((left, right))
        if operator == "**":
            raise TemplateError("the template computes a power, which no conversation needs")
        if operator == "*":
            _check_product(limits, left, right)
        if operator == "%" and isinstance(left, str):
            _check_percent(limits, left, right)
        if operator == "+" and isinstance(left, str | list | tuple):
            limits.expect(limits.size(left) + limits.size(right))
        return limits.made(super().call_binop(context, operator, left, right))

    def call(  # pyright: ignore[reportIncompatibleMethodOverride]
        __self,  # noqa: N805
        __context: Any,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        limits = allowance()
        for one in (*args, *kwargs.values()):
            limits.look(one)
        owner = getattr(__obj, "__self__", None)
        for kind, names in _METHODS.items():
            if isinstance(owner, kind):
                name = getattr(__obj, "__name__", "")
                if name not in names:
                    raise TemplateError(f"no template may call {kind.__name__}.{name}")
                if isinstance(owner, str):
                    args = _check_method(limits, owner, name, args, kwargs)
        return limits.made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text = value.__self__

        def format(*args: Any, **kwargs: Any) -> str:
            if value.__name__ == "format_map":
                args, kwargs = (), *args
            formatter = _Formatter(self)
            if isinstance(text, Markup):
                formatter = _EscapeFormatter(self, escape=text.escape)
            return allowance().made(type(text)(formatter.vformat(text, args, kwargs)))

        return update_wrapper(format, value)


def _finalize(value: Any) -> Any:
    return value if isinstance(value, str) else allowance().look(value)


def _check_product(limits: Allowance, left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(value, str | list | tuple):
            size = len(value) if isinstance(value, str) else limits.size(value)
            limits.expect(size * max(0, times))
    if isinstance(left, int) and isinstance(right, int):
        limits.expect(_NODE * (left.bit_length() + right.bit_length()))


def _check_percent(limits: Allowance, layout: str, values: Any) -> None:
    """Each place may be as wide as its numbers say, or hold all values."""
    if _WIDE.search(layout):
        raise TemplateError(f"the layout {layout[:40]!r} has more than {_MOST:,} columns")
    columns = sum(int(one) for one in _NUMBER.findall(layout) if len(one) < 6)
    times = layout.count("%") if isinstance(values, Mapping) else 1
    limits.expect(len(layout) + columns + limits.size(values) * times)


def _check_method(
    limits: Allowance, text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The arguments of a text's method. Raises ``TemplateError`` where it would make too much."""
    first = args[0] if args else None
    if name in ("center", "ljust", "rjust", "zfill") and isinstance(first, int):
        limits.expect(len(text) + max(0, first))
    elif name == "expandtabs":
        width = kwargs.get("tabsize", 8 if first is None else first)
        limits.expect(len(text) + text.count("\t") * max(0, int(width)))
    elif name == "replace" and len(args) > 1:
        _check_replaced(limits, text, first, args[1])
    elif name in ("split", "rsplit"):
        between = kwargs.get("sep", first)
        parts = len(text.split()) if between is None else text.count(str(between)) + 1
        limits.expect(_NODE * parts)
    elif name == "splitlines":
        limits.expect(_NODE * sum(text.count(one) for one in "\n\r\v\f"))
    elif name == "join" and args:
        items = first if hasattr(first, "__len__") else _sized(limits, first)
        limits.expect(len(text) * len(cast(list[Any], items)) + limits.size(items))
        return (items, *args[1:])
    return args


def _check_replaced(limits: Allowance, text: str, old: Any, new: Any) -> None:
    limits.expect(len(text) + (text.count(str(old)) + 1) * len(str(new)))


def _sized(limits: Allowance, values: Any) -> list[Any]:
    """The items of what may be a generator."""
    items, size = list[Any](), 0
    for one in values:
        size += limits.size(one)
        limits.expect(size)
        items.append(one)
    return items


class _FilterCall(NamedTuple):
    """The value that a filter is applied to, and its arguments."""

    value: Any
    others: tuple[Any, ...]
    named: Mapping[str, Any]

    def option(self, position: int, key: str, default: Any) -> Any:
        return self.named.get(
            key, self.others[position] if len(self.others) > position else default
        )


def _check_center(limits: Allowance, call: _FilterCall) -> None:
    limits.expect(limits.size(call.value) + int(call.option(0, "width", 80)))


def _check_indent(limits: Allowance, call: _FilterCall) -> None:
    width = call.option(0, "width", 4)
    columns = len(width) if isinstance(width, str) else int(width)
    lines = str(call.value).count("\n") + 2
    limits.expect(limits.size(call.value) + lines * max(0, columns))


def _check_join(limits: Allowance, call: _FilterCall) -> None:
    between = len(str(call.option(0, "d", "")))
    limits.expect(limits.size(call.value) + between * len(call.value))


def _check_replace(limits: Allowance, call: _FilterCall) -> None:
    old, new = call.option(0, "old", ""), call.option(1, "new", "")
    _check_replaced(limits, str(call.value), old, new)


def _check_format(limits: Allowance, call: _FilterCall) -> None:
    _check_percent(limits, str(call.value), call.named or call.others)


def _check_json(limits: Allowance, call: _FilterCall) -> None:
    indent, separators = call.option(1, "indent", None), call.option(2, "separators", None)
    columns = len(indent) if isinstance(indent, str) else int(indent or 0)
    longest = max((len(str(one)) for one in separators or ()), default=0)
    if columns > _NODE or longest > _NODE:
        raise TemplateError(f"the filter tojson is given more than {_NODE} columns")
    values, depth = limits.size(call.value) // _NODE + 1, limits.depth(call.value) + 1
    limits.expect(limits.size(call.value) + values * depth * columns)


def _check_parts(limits: Allowance, call: _FilterCall) -> None:
    _check_number(call.option(0, "linecount", call.named.get("slices", 0)), _MOST)


def _check_round(limits: Allowance, call: _FilterCall) -> None:
    _check_number(call.option(0, "precision", 0), _DEEPEST)


def _check_number(number: Any, most: int) -> None:
    if isinstance(number, int) and abs(number) > most:
        raise TemplateError(f"a filter is asked for {number:,}; expected at most {most:,}")


def _check_sum(limits: Allowance, call: _FilterCall) -> None:
    if not isinstance(call.option(1, "start", 0), int | float):
        raise TemplateError("the filter sum adds numbers, and its start is none")


def _check_letters(limits: Allowance, call: _FilterCall) -> None:
    if isinstance(call.value, str):
        limits.expect(_NODE * len(call.value))


_CHECKS: Mapping[str, Callable[[Allowance, _FilterCall], None]] = {
    "batch": _check_parts,
    "center": _check_center,
    "format": _check_format,
    "indent": _check_indent,
    "join": _check_join,
    "list": _check_letters,
    "replace": _check_replace,
    "round": _check_round,
    "slice": _check_parts,
    "sort": _check_letters,
    "sum": _check_sum,
    "tojson": _check_json,
    "unique": _check_letters,
}
"""Raise ``TemplateError`` where a filter would make too much of its value."""


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter within the limits."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def bounded(*args: Any, **named: Any) -> Any:
        limits = allowance()
        before, (value, *others) = args[:skipped], args[skipped:]
        if name in _LEFT_OUT:
            raise TemplateError(f"the filter {name} is not there for chat templates")
        for one in (value, *others, *named.values()):
            limits.look(one)
        if name in _ITERATED and not hasattr(value, "__len__"):
            value = _sized(limits, value)
        if name in _CHECKS:
            _CHECKS[name](limits, _FilterCall(value, tuple(others), named))
        return limits.made(function(*before, value, *others, **named))

    return bounded


_compile_without_limits = chat_template_utils._compile_jinja_template


@lru_cache(16)
def compiled(template: str) -> Template:
    """A template in transformers' own environment, with limits. Raises ``TemplateError``."""
    environment = chat_template_utils._cached_compile_jinja_template("").environment
    environment.__class__ = Bounded
    environment.finalize = _finalize
    environment.globals.pop("lipsum")
    environment.filters = {
        name: _bounded_filter(name, function) for name, function in environment.filters.items()
    }
    with limited(None):
        return environment.from_string(template)


def _compile(template: str) -> Template:
    return compiled(template) if _ALLOWANCE.get() else _compile_without_limits(template)


chat_template_utils._compile_jinja_template = _compile
