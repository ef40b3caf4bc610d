"""Pages from templates: HTML without anything to load.

Text from prompts, completions, configurations and file names is escaped by the template engine,
never by hand, and invisible characters, some of which change the direction of text, are replaced by
visible ones.
"""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

import isobit
from isobit.util.errors import ConfigError
from isobit.util.plain_files import open_plain

MARKER = "<!doctype html>\n<!-- isobit report -->"
"""The first lines of every page: a file that does not begin with them is never overwritten."""


def render_page(template: str | Path, marker: str, /, **values: Any) -> str:
    """``marker`` and a template with its values.  A template is named, or a file elsewhere, which
    may include those that have names.
    """
    return f"{marker}\n{fill(template, **values)}\n"


def fill(template: str | Path, /, **values: Any) -> str:
    """A template with its values, every text of which is escaped."""
    if isinstance(template, Path):
        filled = _environment().from_string(template.read_text(encoding="utf-8"))
    else:
        filled = _environment().get_template(template)
    return filled.render(version=isobit.__version__, **values)


@cache
def _environment() -> Environment:
    def source(name: str) -> str | None:
        path = files("isobit.observe.report").joinpath(name)
        return path.read_text(encoding="utf-8") if path.is_file() else None

    environment = Environment(
        loader=FunctionLoader(source),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    environment.globals["cells"] = _cells
    return environment


def _cells(rows: Sequence[Sequence[str]]) -> Markup:
    """Rows of a table, whose cells are escaped, at once: a loop of the template is slow."""
    text = "\x1e".join("\x1f".join(map(visible, row)) for row in rows)  # no cell has these
    html = str(escape(text)).replace("\x1f", "</td><td>").replace("\x1e", "</td></tr>\n<tr><td>")
    return Markup(f"<tr><td>{html}</td></tr>")  # noqa: S704


def write_page(page: str, path: Path, marker: str) -> Path:
    """Write a page; -> ``path``.  An older page, which begins with ``marker``, is replaced.

    Raises ConfigError where another file is, or where the page cannot be written.
    """
    try:
        if path.exists():
            with open_plain(path) as file:
                is_page = file.read(len(marker.encode())) == marker.encode()
            if not is_page:
                raise ConfigError(
                    f"{str(path)!r} is there already and no report; name another file (--out FILE)"
                )
        partial = path.with_name(f".{path.name}.partial")
        try:
            partial.write_text(page, encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{str(path)!r} cannot be written ({error.strerror}); name another file (--out FILE)"
        ) from error
    return path


def visible(text: str) -> str:
    """``text`` with symbols instead of control characters, and code points instead of other
    invisible characters.
    """

    if text.isprintable():
        return text

    def shown(character: str) -> str:
        code = ord(character)
        if character in "\t\n" or character.isprintable():
            return character
        if code == 0x7F:
            return "\N{SYMBOL FOR DELETE}"
        return chr(0x2400 + code) if code < 0x20 else f"[U+{code:04X}]"

    return "".join(map(shown, text))
