"""All keys of the recipes as one page of Markdown: ``docs/configuration.md``."""

from collections.abc import Iterator
from itertools import groupby

from pydantic import BaseModel

from isobit.config.json_schema import RECIPES
from isobit.config.keys import Key, all_keys, fields_by_key

_HEAD = """# Configuration

<!-- Written by `make schema` from src/isobit/config; change the models there. -->

A recipe is a TOML file. `isobit train RECIPE.toml --training.steps 5` overrides any key of it;
`--print-config` prints what comes out, and `--dry-run` what the run would use and take. An unknown
key is an error that suggests the right one. `precision = "fp8"` is short for the table with that
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
    """The page: a table of keys for each table of each kind of recipe."""
    return _HEAD + "".join(
        f"\n## {_TITLES[command]}\n{_tables(model)}" for command, model in RECIPES.items()
    )


def _tables(model: type[BaseModel]) -> str:
    places = {name: place for place, name in enumerate(fields_by_key(model))}

    def order(
        key: Key,
    ) -> tuple[
        bool, int, int
    ]:  # keys of no table come first, and a table before those inside it, as in TOML
        parts = key.path.replace("[]", "").split(".")
        return len(parts) > 1, places[parts[0]] if len(parts) > 1 else 0, len(parts)

    sections = []
    for table, members in groupby(
        sorted(all_keys(model), key=order), key=lambda key: key.path.rpartition(".")[0]
    ):
        title = f"[[{table[:-2]}]]" if table.endswith("[]") else f"[{table}]"
        head = f"\n### {title}\n" if table else ""
        sections.append(
            "\n".join([head, "| key | takes | default | |", "|---|---|---|---|", *_rows(members)])
            + "\n"
        )
    return "".join(sections)


def _rows(keys: Iterator[Key]) -> Iterator[str]:
    for key in keys:
        name, kind, default = (
            key.path.rpartition(".")[2],
            key.kind.replace("|", "or"),
            f"`{key.default}`" if key.default else "",
        )
        yield f"| `{name}` | {kind} | {default} | {key.description.replace('|', 'or')} |"
