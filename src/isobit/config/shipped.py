"""The recipes that come with the package, by name, with the data and code that they read.

In a wheel they lie in ``isobit/recipes``, in a checkout in ``recipes`` beside ``src``. A recipe
names its files as ``recipes/FILE``, from the root of a checkout; whoever reads it elsewhere gets
other paths.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from isobit.util.errors import ConfigError, did_you_mean

_PACKAGE = Path(__file__).parents[1]
_NAMED = re.compile(r"\brecipes/([\w.]+\w)")
_SCHEMA = "#:schema "
"""Begins the line that says which schema an editor takes, by a path of the checkout."""
_NEEDS_CHECKOUT = ("starter",)
"""Recipes of the project's own, whose data its tools make."""
_COMMAND = re.compile(r"^# {5}(\S.*?) *$", re.MULTILINE)
FIRST = "quickstart"
"""The recipe to begin with."""


@dataclass(frozen=True, slots=True)
class ShippedRecipe:
    name: str
    """``quickstart``, or a program with its suffix, ``rl_loop.py``."""
    text: str
    """The recipe without the line that names its schema."""
    folder: Path
    """The folder of the recipe and its files."""

    @property
    def file(self) -> str:
        return self.name if "." in self.name else f"{self.name}.toml"

    @property
    def files(self) -> list[str]:
        """The names of the files that the recipe names, and that those name."""
        names: list[str] = []
        texts = [self.text]
        while texts:
            for name in _NAMED.findall(texts.pop()):
                path = self.folder / name
                if name != self.file and name not in names and path.is_file():
                    names.append(name)
                    texts += [path.read_text(encoding="utf-8")] if path.suffix == ".toml" else []
        return names

    @property
    def command(self) -> str:
        if "." in self.name:
            return "python" if self.name.endswith(".py") else "jupyter lab"
        own = re.search(rf"isobit (train|sft) recipes/{self.file}\b", self.text)
        return f"isobit {own[1] if own else 'train'}"

    def commands(self, folder: Path) -> list[str]:
        """The lines that its head says to run, up to its own, with files that lie in ``folder``."""
        own = f"{self.command} {folder / self.file}"
        lines = [line.split("  #")[0].rstrip() for line in _COMMAND.findall(self.at(folder))]
        place = next((i for i, line in enumerate(lines) if line.startswith(own)), None)
        return [own] if place is None else lines[: place + 1]

    def at(self, folder: Path | None) -> str:
        """Its text with files that lie in ``folder``; for None those where they are."""
        where = f"{self.folder if folder is None else folder}/"
        paths = {name: f"{where}{name}" for name in self.files}
        paths[self.file] = self.file if folder is None else f"{where}{self.file}"
        return _NAMED.sub(lambda match: paths.get(match[1], match[0]), self.text)


def shipped_folder() -> Path:
    inside = _PACKAGE / "recipes"
    return inside if inside.is_dir() else _PACKAGE.parents[1] / "recipes"


@cache
def shipped_recipes() -> dict[str, str]:
    """What each is for, by its name: its first sentence."""
    folder = shipped_folder()
    recipes = {
        path.stem: _sentence(_comment(_text(path)))
        for path in sorted(folder.glob("*.toml"))
        if path.stem not in _NEEDS_CHECKOUT
    }
    programs = {
        "rl_loop.py": "GRPO in 150 lines on the public API",
        "tens.ipynb": "a task of your own, in a notebook",
    }
    return recipes | {name: what for name, what in programs.items() if (folder / name).is_file()}


def _text(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(_SCHEMA))


def _comment(text: str) -> str:
    lines = (line for line in text.splitlines())
    above = []
    for line in lines:
        if not line.startswith("# "):
            break
        above.append(line.removeprefix("# "))
    return " ".join(above)


def _sentence(text: str) -> str:
    return re.split(r"(?<=[a-z\d)])[.:](?:\s|$)", text, maxsplit=1)[0]


def read_shipped(name: str) -> ShippedRecipe:
    """Raises ConfigError for a name that none has."""
    known = shipped_recipes()
    name = name.removesuffix(".toml")
    if name in _NEEDS_CHECKOUT:
        raise ConfigError(
            f"the recipe {name!r} is that of the shipped model, which is made by tools of a "
            f"checkout; the shipped recipes are {', '.join(known)}"
        )
    if name not in known:
        raise ConfigError(
            f"there is no recipe {name!r}; the shipped recipes are "
            f"{', '.join(known)}{did_you_mean(name, known)}"
        )
    folder = shipped_folder()
    path = folder / (name if "." in name else f"{name}.toml")
    return ShippedRecipe(name, _text(path), folder)


def in_place_of(folder: Path) -> str:
    """What to do where a directory was to be a recipe."""
    if (folder / "run.json").is_file():
        return "it is that of a run, with which --resume goes on (resume=True in Python)"
    if any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        return f"it is a model's: name a recipe, and --model {folder}"
    recipes = sorted(path.name for path in folder.glob("*.toml"))
    if recipes:
        return f"name a recipe in it: {', '.join(recipes[:20])}"
    return how_to_get(folder)


def how_to_get(path: Path) -> str:
    """What to do where ``path`` was to be a recipe, and is no file."""
    known = shipped_recipes()
    name = path.name.removesuffix(".toml")
    if name in known and name != FIRST:
        return f"`isobit recipe {name} --out {path.parent}` writes the shipped recipe of this name"
    return (
        f"name a recipe, which is a TOML file: `isobit recipe {FIRST} > my.toml` writes one to "
        "begin with, and `isobit recipe` lists all; --model NAME trains another model"
    )
