"""Rows that a program makes: reasoning-gym's procedural tasks, and the datasets of verifiers'
environments.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from isobit.util.errors import DataError
from isobit.util.option_secrets import from_environment

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset


TASK_COLUMN = "reasoning_gym"
"""Column with the task's name, size, seed and options, to build the task again."""


def create_task(name: str, size: int, seed: int, options: Mapping[str, Any]) -> "ProceduralDataset":
    """The task ``name`` with ``size`` entries drawn from ``seed``.

    ``composite`` mixes tasks: its option ``datasets`` lists tables with ``name``, ``weight`` and
    ``config``, the task's own options. Raises ``DataError`` for an unknown task (with the nearest
    name), an unknown option (with those that exist) and a value that the task refuses.
    """
    import reasoning_gym  # takes about two seconds

    _check(name, options, drawn=True)
    try:
        arguments = (
            {**options, "datasets": _specs(options["datasets"])}
            if name == "composite" and "datasets" in options
            else options
        )
        return reasoning_gym.create_dataset(name, **arguments, size=size, seed=seed)
    except DataError:
        raise
    except Exception as error:  # tasks raise AssertionError, ValueError, TypeError and more
        raise DataError(
            f"reasoning-gym task {name!r} refuses the options {dict(options)}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _check(name: str, options: Mapping[str, Any], drawn: bool) -> None:
    """Refuse an unknown name or option; size and seed are none of a task that is ``drawn``."""
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = get_close_matches(name, DATASETS, n=3)
        hint = (
            f"did you mean {' or '.join(map(repr, near))}?"
            if near
            else f"it has {len(DATASETS)}, from {min(DATASETS)!r} to {max(DATASETS)!r}"
        )
        raise DataError(f"reasoning-gym has no task {name!r}; {hint}")
    known = {field.name for field in fields(DATASETS[name][1])} - (
        {"size", "seed"} if drawn else set()
    )
    unknown = sorted(set(options) - known)
    if unknown:
        raise DataError(
            f"reasoning-gym task {name!r} has no option {unknown[0]!r}; its options are "
            f"{', '.join(sorted(known)) or 'none'}"
        )


def _specs(parts: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The parts of a mix as the library's own records."""
    from reasoning_gym.composite import DatasetSpec

    for part in parts:
        if set(part) - {"name", "weight", "config"} or not isinstance(part.get("name"), str):
            raise DataError(
                f"a part of reasoning-gym's composite is {dict(part)}; expected a table with name, "
                "weight and config"
            )
        _check(part["name"], part.get("config", {}), drawn=False)
    return [
        DatasetSpec(part["name"], part.get("weight", 1.0), dict(part.get("config", {})))
        for part in parts
    ]


_PRINTS = """
import json, sys
from isobit.environments.tasksets import print_rows
print_rows(*json.load(sys.stdin))
"""


def read_verifiers(
    place: str, options: Mapping[str, Any], split: str
) -> Iterator[Mapping[str, Any]]:
    """The dataset of an environment of verifiers, which another process loads.  Raises
    ``DataError``.
    """
    request = json.dumps([place, from_environment(options, "environment"), split])
    command = [sys.executable, "-c", _PRINTS]
    process = subprocess.run(command, input=request, capture_output=True, text=True, check=False)  # noqa: S603
    if process.returncode:
        said = process.stderr.strip().rpartition("\n")[2]
        raise DataError(f"the dataset of the environment {place!r} cannot be read: {said}")
    for line in process.stdout.splitlines():
        yield json.loads(line)
