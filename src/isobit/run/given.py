"""What a call from Python gives that no file can hold: rewards as functions, data as rows.

    reward=f                        reward.function = the name of f (``isobit.rewards.given``)
    reward=[f, g]                   reward.parts, each by its function's name, added up
    reward={"function": f, ..}      that key alone
    data=rows                       data.train = the digest of the rows (``isobit.data.sources``)
    data={"train": rows,
          "eval": {"held_out": rows}}
    data={"train": {"rows": rows, "prompt": "question"}}

What is left are settings as a recipe has them, that can be written down, compared and resumed.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from isobit.config.load import Override, nested_overrides
from isobit.config.reward import DEFAULT_FUNCTION
from isobit.data.sources import give_rows
from isobit.rewards.given import give_reward
from isobit.util.errors import ConfigError

Held: TypeAlias = list[Any]
"""What is found by its name for as long as this is held."""


class _Whole:
    """A table that replaces what a recipe has in its place, key by key or not."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.table = table


def plain_overrides(changes: Mapping[str, Any], held: Held) -> list[Override]:
    """Changes of a recipe as overrides, without functions and rows.

    Raises ConfigError for several rewards of one name, DataError for what are no rows.
    """
    nested = nested_overrides(_plain(changes, (), held))
    return [(parts, _opened(value)) for parts, value in nested]


def plain_tables(recipe: Mapping[str, Any], held: Held) -> dict[str, Any]:
    """A recipe's tables, likewise."""
    return _opened(_plain(recipe, (), held))


def _plain(table: Mapping[str, Any], path: tuple[str, ...], held: Held) -> dict[str, Any]:
    return {
        key: _plain_value(value, (*path, *str(key).split(".")), held)
        for key, value in table.items()
    }


def _plain_value(value: Any, path: tuple[str, ...], held: Held) -> Any:
    match path:
        case ("reward",) if callable(value) or isinstance(value, str | list | tuple):
            return _reward_table(value, held)
        case ("reward", "parts", _) if callable(value):
            return {"function": _named(value, held)}
        case ("reward", "function") | ("reward", "parts", _, "function") if callable(value):
            return _named(value, held)
        case ("data",) if _are_rows(value):
            return {"train": _rows_table({"rows": value}, "data", held)}
        case (
            ("data", "train")
            | ("data", "eval", _)
            | ("data", "train", "sources", _)
            | ("data", "eval", _, "sources", _)
        ):
            if _are_rows(value):
                return _rows_table({"rows": value}, ".".join(path), held)
            if isinstance(value, Mapping) and "rows" in value:
                return _rows_table(value, ".".join(path), held)
    return _plain(value, path, held) if isinstance(value, Mapping) else value


def _reward_table(value: Any, held: Held) -> dict[str, Any]:
    """Who grades, in the place of whoever did; the other keys of the table stay."""
    alone = not isinstance(value, list | tuple)
    return {
        "function": _named(value, held) if alone else DEFAULT_FUNCTION,
        "parts": _Whole({} if alone else _parts(value, held)),
        "options": _Whole({}),
        "model": None,
        "model_precision": "fp8",
        "weight": 1.0,
    }


def _parts(functions: Iterable[Any], held: Held) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    for one in functions:
        name = one.rpartition(":")[2] if isinstance(one, str) else getattr(one, "__name__", "")
        label = "".join(sign for sign in name if sign.isalnum() or sign in "_-") or "reward"
        if label in parts:
            raise ConfigError(
                f"two rewards are called {label!r}; name them: reward={{'parts': {{'one': "
                "{'function': f}, 'two': {'function': g}}}"
            )
        parts[label] = {"function": _named(one, held)}
    return parts


def _named(function: Any, held: Held) -> str:
    if isinstance(function, str):
        return function
    if not callable(function):
        raise ConfigError(
            f"reward is {type(function).__name__} {function!r:.60}; expected a function, the name "
            "of one, or a list of them"
        )
    held.append(give_reward(function))
    return held[-1].name


def _are_rows(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Path | Mapping)


def _rows_table(table: Mapping[str, Any], key: str, held: Held) -> _Whole:
    given = give_rows(table["rows"], key)
    held.append(given)
    others = {name: value for name, value in table.items() if name not in ("rows", "type")}
    return _Whole({"type": "rows", "count": len(given.rows), "sha256": given.sha256, **others})


def _opened(value: Any) -> Any:
    if isinstance(value, _Whole):
        return _opened(value.table)
    if isinstance(value, Mapping):
        return {key: _opened(one) for key, one in value.items()}
    return value
