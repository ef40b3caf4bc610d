"""``isobit recipe [NAME]``: the recipes that come with the package.

Without a name it lists them. With one it prints the recipe, whose data and code are read where they
are installed; ``--out FOLDER`` writes it there with copies of them, to be changed.
"""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from isobit.cli.options import Command, option, path_value
from isobit.util.errors import ConfigError
from isobit.util.plain_files import read_plain
from isobit.util.terminal import say

if TYPE_CHECKING:
    from isobit.config.shipped import ShippedRecipe

_COMMAND = Command(
    "recipe",
    "Print a recipe that comes with Isobit, or list all: isobit recipe NAME > my.toml, and then "
    "isobit train my.toml.",
    [
        option("name NAME", "by default all are listed", nargs="?"),
        option(
            "--out FOLDER",
            "write the recipe there instead, with copies of the data and code that it reads",
            path_value,
        ),
    ],
)


def run_recipe(arguments: Sequence[str]) -> int:
    """Raises ConfigError for a name that no recipe has, and for files that exist."""
    from isobit.config.shipped import read_shipped

    options = _COMMAND.read(arguments)
    if options.name is None:
        if options.out is not None:
            raise ConfigError("--out is for one recipe: name it, as `isobit recipe` lists them")
        print("\n".join(_listed()))
        return 0
    recipe = read_shipped(options.name)
    if options.out is not None:
        _write(recipe, options.out)
        return 0
    print(recipe.at(None), end="")
    if recipe.files:
        say(
            f"it reads {', '.join(recipe.files)} from {recipe.folder}; `isobit recipe "
            f"{recipe.name} --out FOLDER` makes copies to change"
        )
    return 0


def _listed() -> list[str]:
    from isobit.config.shipped import FIRST, shipped_recipes

    known = shipped_recipes()
    width = max(map(len, known)) + 2
    room = max(20, shutil.get_terminal_size().columns - width)  # 80 in a file
    return [
        *(
            f"{name:<{width}}{shorten(what, room, placeholder=' ..')}"
            for name, what in known.items()
        ),
        "",
        f"isobit recipe {FIRST} > my.toml writes one; --out FOLDER adds the files that it reads.",
    ]


def _write(recipe: "ShippedRecipe", folder: Path) -> None:
    from isobit.config.shipped import read_shipped

    if not re.fullmatch(r'[^"\\\x00-\x1f]+', str(folder)):
        raise ConfigError(f"{folder} would stand in a recipe: take one without quotes and \\")
    contents = {
        name: read_shipped(name).at(folder).encode()
        if name.endswith(".toml")
        else read_plain(recipe.folder / name)
        for name in [recipe.file, *recipe.files]
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        changed = [
            str(folder / name)
            for name, content in contents.items()
            if (folder / name).exists() and read_plain(folder / name) != content
        ]
        if changed:
            raise ConfigError(
                f"{', '.join(changed)} {'exists' if len(changed) == 1 else 'exist'} already, and "
                "not as shipped; name another folder, or remove what is there"
            )
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        place = error.filename or folder
        raise ConfigError(f"{place} cannot be written: {error.strerror}") from None
    print("\n".join(str(folder / name) for name in contents))
    say(f"run it: {' && '.join(recipe.commands(folder))}")
