"""Pages that stand for themselves: HTML without scripts, from templates, written as a whole.

Text from prompts, completions, configurations and file names is escaped by the template engine,
never by hand; characters that are invisible or could change the direction of the text are replaced
by visible ones before that.
"""

from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from isobit.errors import ConfigError

_FOLDERS = ("isobit.observe.report", "isobit.observe.inspection")
"""Where templates are; their names differ."""


def render_template(template: str | Path, /, **values: Any) -> str:
    """A template with everything that it needs: by its file's name, or a file elsewhere that may
    include these.
    """
    environment = Environment(
        loader=FunctionLoader(_source),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    if isinstance(template, Path):
        made = environment.from_string(template.read_text(encoding="utf-8"))
    else:
        made = environment.get_template(template)
    return made.render(**values)


def write_page(page: str, path: Path, marker: str) -> Path:
    """Write a page as a whole; -> where it is.  An older one, which begins with ``marker``, is
    replaced.

    Raises ConfigError where another file is, or where it cannot be written.
    """
    try:
        if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(
            marker
        ):
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


def _source(name: str) -> str | None:
    for folder in _FOLDERS:
        path = files(folder).joinpath(name)
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None


def visible(text: str) -> str:
    """``text`` with pictures in the place of control characters, and code points in the place of
    other invisible ones.
    """
    return "".join(
        character if character in "\t\n" or character.isprintable() else _picture(ord(character))
        for character in text
    )


def _picture(code: int) -> str:
    return (
        chr(0x2400 + code)
        if code < 0x20
        else "\N{SYMBOL FOR DELETE}"
        if code == 0x7F
        else f"[U+{code:04X}]"
    )


def _finalize(value: Any) -> Any:
    """What the template puts out for a value; markup that it made itself passes as it is."""
    return visible(value) if type(value) is str else value
