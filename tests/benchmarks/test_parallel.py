"""``benchmarks.parallel`` on two processes of a CPU: every case runs, and its digests are those of
one process.
"""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from isobit.models import config
from isobit.models.config import ModelConfig
from isobit.parallel.world import ALONE, World
from tests.worlds import in_world

TINY = ModelConfig("qwen3", 256, 128, 256, 2, 2, 1, 64, 512, 1e-6, 1e6, tied_embeddings=False)
SETTINGS = {"recompute": "mlp", "tokens_per_microbatch": 96}


def measure(world: World, folder: str) -> None:
    """All cases but the table, with the smallest of sizes."""
    config.SHAPES["tiny"] = TINY
    links, training, steps, split, passes, cases, writing = (
        import_module(f"benchmarks.{name}")
        for name in (
            "ranks.links",
            "ranks.training",
            "ranks.steps",
            "ranks.split",
            "passes.cases",
            "rl_steps.cases",
            "ranks.writing",
        )
    )
    vars(writing)["native_versions"] = dict  # DeepGEMM's is not there
    out = Path(folder) / str(world.size)
    case = passes.Case("fp8", 20, 2, "none", "tiny")
    sitting = writing.Sitting(world, "fp8", "tiny", out, "cpu")
    links.run_links(sitting)
    training.run_training(world, case, 3, out, "gloo", "cpu")
    training.run_digests(world, case, 3, out, "cpu")
    small = cases.Case(2, 2, 5, 20)
    steps.run_proof(sitting, small, SETTINGS)
    steps.run_timed(sitting, small, SETTINGS)
    if world.size == 2:
        split.run_split(replace(sitting, out=out / "split"), small, SETTINGS)


def test_two_ranks_have_the_digests_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.ranks.writing.native_versions", dict)
    monkeypatch.setitem(config.SHAPES, "tiny", TINY)
    measure(ALONE, str(tmp_path))
    in_world(2, "tests.benchmarks.test_parallel:measure", str(tmp_path))

    def read(size: int) -> list[dict[str, Any]]:
        path = tmp_path / str(size) / "ranks-fp8-tiny.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    one, two = read(1), read(2)
    assert [row["kind"] for row in one] == [row["kind"] for row in two]
    keys = ("published", "masters", "completions", "loss", "grad_norm", "tokens_differing")
    compared = 0
    for ours, theirs in zip(two, one, strict=True):
        for key in keys:
            if key in theirs:
                assert ours[key] == theirs[key], (theirs["kind"], key)
                compared += 1
    assert compared > 12
    row = json.loads((tmp_path / "2" / "split" / "ranks-fp8-tiny.jsonl").read_text())
    for step in row["steps"]:
        parts = [step[name] for name in ("training_s", "waiting_s", "weights_s")]
        assert step["seconds"] == pytest.approx(sum(parts)) and step["rollout_s"] > 0
    capsys.readouterr()
    import_module("benchmarks.ranks.table").run_table(_joined(tmp_path))
    printed = capsys.readouterr().out
    assert "DIFFERENT" not in printed
    assert printed.count("equal") == 8
    assert "training round_s (gloo)" in printed


def _joined(folder: Path) -> Path:
    """Both files in one folder, as a sitting leaves them."""
    rows = [(folder / size / "ranks-fp8-tiny.jsonl").read_text() for size in ("1", "2")]
    joined = folder / "joined"
    joined.mkdir()
    (joined / "ranks-fp8-tiny.jsonl").write_text("".join(rows))
    return joined
