"""``benchmarks.family``: a suite goes on where it was cut off, and the table's arithmetic."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from benchmarks import family
from isobit.config.load import apply_overrides, build, parse_overrides, read_toml
from isobit.config.recipes import RunConfig


def row(suite: str, name: str, seed: int) -> dict[str, Any]:
    return {
        "suite": suite,
        "name": name,
        "seed": seed,
        "before": 0.5,
        "after": 0.9 + 0.01 * seed,
        "tokens_compared": 100,
        "tokens_differing": seed,
        "train_seconds": 10.0,
        "figures": {"grad_norm": 1.25 + seed},
        "last": {"reward/mean": 0.5 + 0.125 * seed},
    }


@pytest.mark.parametrize(
    ("suite", "name"), [(s, n) for s, runs in family.RUNS.items() for n in runs]
)
def test_every_run_is_a_recipe(suite: str, name: str) -> None:
    words = [
        word for key, value in family.RUNS[suite][name].items() for word in (f"--{key}", value)
    ]
    tables = apply_overrides(read_toml(family.RECIPE), parse_overrides(words))
    build(RunConfig, tables, "the run")


def test_every_built_in_algorithm_is_run() -> None:
    union = get_args(RunConfig.model_fields["algorithm"].annotation)
    names = {get_args(one.model_fields["name"].annotation)[0] for one in union}
    assert names - {"custom"} == family.RUNS["algorithms"].keys()


def test_what_is_there_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, int]] = []

    def run(suite: str, name: str, seed: int) -> dict[str, Any]:
        asked.append((suite, name, seed))
        return row(suite, name, seed)

    monkeypatch.setattr(family, "run", run)
    family.run_all(["stages"], 1, 1, tmp_path)
    assert [name for _, name, _ in asked] == list(family.RUNS["stages"])
    asked.clear()
    family.run_all(["stages"], 2, 1, tmp_path)
    assert {seed for _, _, seed in asked} == {1}
    (line,) = [line for line in family.table(tmp_path) if line.startswith("| kl 1 ")]
    assert line == "| kl 1 | 50.0% | 90.0%, 91.0% | 90.5% | 0.562 | 1.75 | 1 of 200 | 10 |"


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    gains = {"bf16": {0: 0.0, 1: 0.1, 2: 0.2}, "fp8": {0: -0.02, 1: 0.1, 3: 0.4}}
    for name, by_seed in gains.items():
        for seed, gain in by_seed.items():
            file = tmp_path / f"{name}-{seed}.json"
            file.write_text(json.dumps(row("sites", name, seed) | {"after": 0.5 + gain}))
    lines = [line for line in family.table(tmp_path) if line.startswith(("| sites ", "| fp8 "))]
    minus = "minus bf16, points | minus fp8, points"
    more = "reward, last | gradient norm | differing | seconds"
    accuracy = "50.0% | 48.0%, 60.0%, 90.0% | 66.0% | -1.0 ± 1.0 | -"
    assert lines == [
        f"| sites | before | after, by seed | mean | {minus} | {more} |",
        f"| fp8 | {accuracy} | 0.667 | 2.58 | 4 of 300 | 10 |",
    ]


def test_means_are_over_the_steps_that_have_a_figure() -> None:
    steps = [{"step": 1, "loss": 1.0, "kl/k3": None}, {"step": 2, "loss": 3.0, "kl/k3": 0.5}]
    assert family._means(steps) == {"loss": 2.0, "kl/k3": 0.5}
    assert json.loads(json.dumps(family._means([]))) == {}
