"""Some steps of a run, in a process of its own, with what is kept of each while it goes on."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import whole_run
from benchmarks.loading import write_folder
from isobit.models.safetensors import SHARD_BYTES
from tests.tiny import TINY


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "tiny"
    write_folder(TINY, made, SHARD_BYTES)
    whole_run.write_tokenizer(TINY, made)
    return made


def words(folder: Path, directory: Path, steps: int) -> list[str]:
    sizes = {"steps": steps, "prompts": 4, "samples": 4, "prompt-tokens": 4, "new-tokens": 8}
    sizes |= {"microbatch": 512, "max-sequences": 16}
    named = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    places = ["--folder", str(folder), "--keep", str(directory), "--device", "cpu"]
    return [*places, *named, "--kv-memory-gib", "0.01"]


@pytest.mark.exhaustive
def test_a_long_run_keeps_a_line_of_each_step(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, steps_out = tmp_path / "out.jsonl", tmp_path / "steps.jsonl"
    kept = ["--out", str(out), "--steps-out", str(steps_out)]
    whole_run.main([*words(folder, tmp_path / "run", 11), *kept, "--precision", "int8"])
    steps = [json.loads(line) for line in steps_out.read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, 12))
    compared = [step["compared"] for step in steps]
    assert compared == sorted(set(compared)) and steps[-1]["differing"] == 0
    assert all(step["seconds"] > 0 and step["grad_norm"] is not None for step in steps)
    (row,) = (json.loads(line) for line in out.read_text().splitlines())
    assert (row["steps_done"], row["compared"], row["differing"]) == (11, compared[-1], 0)
    assert len(row["by_step"]) == 11 and row["precision"] == "int8"
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert shown == [steps[9], row]
    whole_run.main(["--table", str(out)])
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("| `int8` | 11 | ") and line.endswith(f" | 0 of {compared[-1]:,} |")
    assert line.count("- -> -") == 2, "a CPU has no memory of its own"


@pytest.mark.exhaustive
def test_a_run_that_is_stopped_counts_the_steps_that_it_did(folder: Path, tmp_path: Path) -> None:
    options = whole_run.parse(words(folder, tmp_path, 10_000))
    whole_run.write_prompts(TINY, 4, tmp_path / "prompts.jsonl")
    done: list[dict[str, Any]] = []
    recipe = whole_run.recipe_of(options, folder, tmp_path)
    found = whole_run.run(recipe, [], tmp_path / "log", done.append, lambda: len(done) >= 2)
    assert 2 <= found["steps_done"] == len(done) < 10_000
    assert found["compared"] == done[-1]["compared"] > 0 == found["differing"]


def test_a_run_that_fails_shows_the_end_of_its_log(folder: Path, tmp_path: Path) -> None:
    options = whole_run.parse(words(folder, tmp_path, 1))
    recipe = {**whole_run.recipe_of(options, folder, tmp_path), "precision": "fp7"}
    with pytest.raises(RuntimeError, match=r"(?s)isobit train ended with 2:.*fp7"):
        whole_run.run(recipe, [], tmp_path / "log")
