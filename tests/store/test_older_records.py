"""Records of runs that earlier versions wrote: a key that they lack counts as its default.

``older`` holds manifests of checkpoints as commit 5e770631 wrote them, of recipes/quickstart.toml
and recipes/fine_tune.toml.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isobit.config.recipes import RunConfig, SftConfig, recorded_recipe
from isobit.store.compatible import changed_keys, check_compatible
from isobit.util.errors import ConfigError

OLDER = Path(__file__).with_name("older")
KINDS: dict[str, type[RunConfig] | type[SftConfig]] = {"train": RunConfig, "sft": SftConfig}
WIDE: dict[str, Any] = {
    "output": "run",
    "data": {
        "train": {"type": "jsonl", "path": "x.jsonl"},
        "eval": {"a": {"type": "jsonl", "path": "y.jsonl"}},
    },
    "lora": {"rank": 4},
    "reward": {"parts": {"one": {"function": "math"}, "two": {"function": "none"}}},
    "environment": {"class": "calculator"},
    "corrections": [{"type": "tis"}],
    "algorithm": {"name": "grpo", "clip": "none"},
    "async": {"lag": 1},
}


def record(command: str) -> dict[str, Any]:
    return json.loads((OLDER / f"{command}_5e770631.json").read_text(encoding="utf-8"))["config"]


def now(command: str) -> dict[str, Any]:
    values = recorded_recipe(record(command))
    return KINDS[command].model_validate(values).model_dump(mode="json")


def keys_of(table: dict[str, Any], *above: str) -> Iterator[tuple[str, ...]]:
    """The path of every key and table."""
    for key, value in table.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from keys_of(value, *above, key)


def without(table: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    key, *below = path
    if not below:
        return {name: value for name, value in table.items() if name != key}
    return {**table, key: without(table[key], tuple(below))}


@pytest.mark.parametrize("command", KINDS)
def test_a_record_of_an_older_version_is_that_of_its_recipe_now(command: str) -> None:
    saved = record(command)
    assert "back_end" not in saved and "rate_by_ess" not in saved["training"]
    assert changed_keys(saved, now(command)) == {}
    assert check_compatible(saved, now(command), step=1) == {}


@pytest.mark.parametrize(
    ("table", "key", "value", "line"),
    [
        ("algorithm", "clip", "none", "algorithm.clip: not set in the run, 'none' now"),
        ("training", "rate_by_ess", True, "training.rate_by_ess: not set in the run, True now"),
        ("async", "max_staleness", 2, "async.max_staleness: not set in the run, 2 now"),
        ("rollout", "stop_tokens", [7], r"rollout.stop_tokens: not set in the run, [7] now"),
        ("training", "seed_of_tomorrow", 1, "training.seed_of_tomorrow: not set in the run, 1 now"),
    ],
)
def test_a_key_that_is_not_as_by_default_is_refused_in_words(
    table: str, key: str, value: Any, line: str
) -> None:
    saved, config = record("train"), now("train")
    saved[table].pop(key, None)
    config[table][key] = value
    with pytest.raises(ConfigError) as refused:
        check_compatible(saved, config, step=1)
    assert "1 key differs" in str(refused.value) and f"  {line}\n" in str(refused.value)


def test_a_table_that_is_not_set_is_not_one_with_the_defaults() -> None:
    saved, config = record("train"), now("train")
    assert saved["lora"] is None
    config["lora"] = RunConfig.model_validate(WIDE).model_dump(mode="json")["lora"]
    assert changed_keys(saved, config)["lora.rank"] == ("not set", 4)
    with pytest.raises(ConfigError, match=r"lora\.rslora: not set in the run, False now"):
        check_compatible(saved, config, step=1)


@pytest.mark.parametrize("side", ["saved", "now"])
def test_every_key_that_a_record_lacks_counts_as_its_default(side: str) -> None:
    """Whatever key is added later: the record of a version without it is one that lacks it."""
    whole = RunConfig.model_validate(WIDE).model_dump(mode="json")
    set_otherwise = {(key, *path) for key in WIDE for path in [(), *below(WIDE[key])]}
    found = 0
    for path in keys_of(whole):
        if path[0] == "precision" or path in set_otherwise:
            continue  # its defaults are those of the preset, and were others
        pruned = without(whole, path)
        pair = (pruned, whole) if side == "saved" else (whole, pruned)
        assert changed_keys(*pair) == {}, path
        found += 1
    assert found > 100


def below(value: Any) -> Iterator[tuple[str, ...]]:
    return keys_of(value) if isinstance(value, dict) else iter(())
