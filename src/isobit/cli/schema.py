"""``isobit schema``: the JSON schema of a recipe, or the keys of all recipes as a Markdown page."""

from collections.abc import Sequence
from itertools import groupby

from pydantic import BaseModel

from isobit.cli.options import Command, option
from isobit.config.keys import Key, all_keys, fields_by_key
from isobit.config.recipes import RECIPES
from isobit.config.schema import json_schema
from isobit.util.strict_json import json_text

_COMMAND = Command(
    "schema",
    "Print the JSON schema of a recipe, from which editors complete it.",
    [
        option(
            "command", "whose recipe; by default train", nargs="?", choices=RECIPES, default="train"
        ),
        option("--markdown", "print the keys of all recipes as a page instead"),
    ],
)


def run_schema(arguments: Sequence[str]) -> int:
    options = _COMMAND.read(arguments)
    if options.markdown:
        print(configuration_page(), end="")
    else:
        print(json_text(json_schema(RECIPES[options.command]), indent=2))
    return 0


_HEAD = """# Configuration

A recipe is a TOML file. `isobit train RECIPE.toml --training.steps 5` overrides any key of it;
`--print-config` prints what comes out, and `--dry-run` what the run would use and take. An unknown
key is an error that suggests the right one. `precision = "int8"` is short for the table with that
preset, and `algorithm = "dapo"` for the one with that name ([algorithms](algorithms.md)). Where not
all kinds of a table have a key or a default, those are named. Relative paths are relative to the
directory in which the command runs. NAME is yours to choose.

An editor with Even Better TOML or taplo completes and checks a recipe whose first line names the
schema:

```toml
#:schema ../docs/run.schema.json
```

The path is relative to the recipe; `isobit schema > run.schema.json` writes the schema anywhere.
"""
_TITLES = {"train": "isobit train (run.schema.json)", "sft": "isobit sft (sft.schema.json)"}


def configuration_page() -> str:
    """The page of all keys in Markdown; a table equal to an earlier one refers to it."""
    titles: dict[str, str] = {}
    page = _HEAD
    for command, model in RECIPES.items():
        page += f"\n## {_TITLES[command]}\n"
        for table, keys in groupby(_in_order(model), key=lambda key: key.path.rpartition(".")[0]):
            title = f"[[{table[:-2]}]]" if table.endswith("[]") else f"[{table}]"
            rows = "\n".join(map(_row, keys))
            first = titles.setdefault(rows, f"`{title}` of `isobit {command}`")
            page += f"\n### {title}\n" if table else ""
            if first == f"`{title}` of `isobit {command}`":
                page += f"\n| key | takes | default | |\n|---|---|---|---|\n{rows}\n"
            else:
                page += f"\nThe keys of {first}, above.\n"
    return page


def _in_order(model: type[BaseModel]) -> list[Key]:
    """The keys in an order that TOML takes: those outside tables first, and a table before those
    inside it."""
    ranks = {name: rank for rank, name in enumerate(fields_by_key(model))}

    def order(key: Key) -> tuple[bool, int, int]:
        parts = key.path.replace("[]", "").split(".")
        return len(parts) > 1, ranks[parts[0]] if len(parts) > 1 else 0, len(parts)

    return sorted(all_keys(model), key=order)


def _row(key: Key) -> str:
    kind, text = (part.replace("|", "or") for part in (key.kind, key.description))
    default = key.default and f"`{key.default}`"
    return f"| `{key.path.rpartition('.')[2]}` | {kind} | {default} | {text} |"
