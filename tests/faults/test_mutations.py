"""Mutations of what a run reads beside the model: a checkpoint's manifest, a recipe, a dataset.

Those of a model folder's files are in ``tests/models``.
"""

import json
import random
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.config.data import JsonlData
from isobit.config.load import dump_config, load_config
from isobit.config.rules import check_run
from isobit.data.sources import load_rows
from isobit.models.safetensors import Slice
from isobit.store.checkpoint import (
    MANIFEST,
    STATE,
    Checkpoint,
    Snapshot,
    read_checkpoint,
    write_checkpoint,
)
from isobit.util.errors import CheckpointError, ConfigError, DataError
from tests.mutations import COUNT, Outcomes, mutated_bytes, mutated_json_text

pytestmark = pytest.mark.timeout(300)
RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"


@pytest.mark.few(1)
@pytest.mark.parametrize("file", [MANIFEST, STATE, "masters.safetensors"])
def test_checkpoint(tmp_path: Path, file: str) -> None:
    tensor = {"a": Slice.whole(torch.arange(64.0))}
    description = {"config": {"steps": [1, {"a": True}]}, "environment": {}, "evaluation": {}}
    state = {"step": 7, "cursor": [1, 2, 3]}
    folder = write_checkpoint(tmp_path, Snapshot(7, tensor, tensor, state, description))
    path, draw, outcomes = folder / file, random.Random(4), Outcomes(f"a checkpoint's {file}")
    content, whole = path.read_bytes(), read_checkpoint(folder)

    def said(found: Checkpoint) -> object:
        return found.step, found.state, found.manifest

    for _ in range(COUNT):
        mutate = mutated_bytes if file.endswith(".safetensors") else mutated_json_text
        path.write_bytes(mutate(content, draw))
        if not outcomes.refuses(lambda: read_checkpoint(folder), CheckpointError):
            assert said(read_checkpoint(folder)) == said(whole)
    outcomes.check(2 / 3)


def mutated_toml(text: str, draw: random.Random) -> bytes:
    """Bytes changed, a value another, or a line gone, twice, or elsewhere."""
    if draw.random() < 0.3:
        return mutated_bytes(text.encode(), draw)
    lines = text.splitlines()
    at = draw.randrange(len(lines))
    kind = draw.randrange(4)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(draw.randrange(len(lines)), lines[at])
    else:
        settings = [place for place, line in enumerate(lines) if " = " in line]
        at = draw.choice(settings)
        values = [
            "-1", "0", "1", "1e400", "nan", "inf", "true", '"20"', "20.0", "0.5", "[]", "[1]",
            "{}", '""', "9" * 30, "9" * 5000, "[" * 3000 + "]" * 3000, "1979-05-27",
            '"\\u001b[31m"', "{a.b.c.d = 1}", "-inf", "0x10", "1_0", "1e10", "'../x'", '"fp8"',
        ]  # fmt: skip
        lines[at] = f"{lines[at].partition(' = ')[0]} = {draw.choice(values)}"
    return "\n".join(lines).encode()


def leaves(table: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(table, dict) or not table:
        return {path: table}
    return {
        key: value
        for name, one in table.items()
        for key, value in leaves(one, f"{path}.{name}").items()
    }


def test_recipe(tmp_path: Path) -> None:
    path, draw, outcomes = tmp_path / "r.toml", random.Random(5), Outcomes("a recipe")
    text = RECIPE.read_text(encoding="utf-8")

    def read() -> Any:
        config = load_config(path)
        check_run(config)
        return config

    for _ in range(COUNT):
        path.write_bytes(mutated_toml(text, draw))
        if outcomes.refuses(read, ConfigError):
            continue
        said = leaves(tomllib.loads(path.read_text(encoding="utf-8")))
        found = leaves(tomllib.loads(dump_config(read())))
        for key, value in said.items():
            if key == ".precision":
                key += ".preset"
            if value == {}:
                continue
            is_path = key.endswith((".output", ".path"))
            assert found[key] == (str(Path(value)) if is_path else value), key
            for kind in (bool, str):  # 20.0 is 20, but true is not 1
                assert isinstance(found[key], kind) == isinstance(value, kind), key
    outcomes.check(1 / 4)


def test_dataset(tmp_path: Path) -> None:
    path, draw, outcomes = tmp_path / "r.jsonl", random.Random(6), Outcomes("JSONL")
    rows = [
        {"prompt": "1+1=", "answer": "2", "n": 1},
        {"prompt": [{"role": "user", "content": "2+2="}], "answer": 4, "n": [1, {"a": None}]},
    ]
    source = JsonlData(path=path)
    for _ in range(COUNT):
        at = draw.randrange(2)
        made = [json.dumps(row).encode() for row in rows]
        made[at] = mutated_json_text(made[at], draw)
        path.write_bytes(b"\n".join(made))
        if outcomes.refuses(lambda: load_rows(source), DataError):
            continue
        said = [json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip()]
        found = load_rows(source)
        assert len(found) == len(said)
        for one, row in zip(said, found, strict=True):
            prompt = one.pop("prompt")
            assert repr(row.columns) == repr(one)  # as text: NaN is not equal to itself
            assert row.prompt == prompt or list(row.prompt) == prompt
    outcomes.check(1 / 3)
