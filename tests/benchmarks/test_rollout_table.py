"""``benchmarks.rollout table``: its arithmetic, its refusal of rows from several cards, and its
check of vLLM's own figures.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.rollout"]
REFERENCE = {"bf16": 7818, "fp8": 10976}  # vLLM, long, h200-measurements.md; at 4.27 TB/s


def row(
    engine: str,
    mode: str,
    rate: float,
    uuid: str = "A",
    case: str = "long",
    copy: float = 4.27,
    log_probs: bool = False,
) -> dict:
    card = {"name": "NVIDIA H200", "uuid": uuid, "copy_tb_per_s": copy}
    measured = (
        {}
        if engine == "floor"
        else {"log_probs": log_probs, "startup_s": 12.3, "memory_gib": 130.0}
    )
    return {
        "engine": engine,
        "mode": mode,
        "shape": "qwen3-8b",
        "card": card,
        "case": case,
        "tokens_per_s": rate,
    } | measured


def four_rows(uuid: str = "A") -> list[dict]:
    native = [
        row("native", mode, rate, uuid, log_probs=True)
        for mode, rate in (("bf16", 8000.0), ("fp8", 14000.0))
    ]
    return native + [row("vllm", mode, float(rate), uuid) for mode, rate in REFERENCE.items()]


def table(directory: Path, *files: list[dict]) -> subprocess.CompletedProcess[str]:
    for i, rows in enumerate(files):
        (directory / f"{i}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return subprocess.run(
        [*COMMAND, "table", directory],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def lines(directory: Path) -> dict[tuple[str, str, bool], dict]:
    found = json.loads((directory / "table.json").read_text())["lines"]
    return {
        (line["engine"], line["mode"], line["log_probs"] and line["engine"] == "vllm"): line
        for line in found
    }


def test_ratios_and_share_of_the_floor(tmp_path: Path) -> None:
    done = table(
        tmp_path,
        four_rows(),
        [row("floor", "fp8", 17500.0), row("vllm", "bf16", 6000.0, log_probs=True)],
    )
    assert done.returncode == 0, done.stderr
    assert "| long | isobit `fp8` | 14,000 | 1.79 | 1.28 | 80% | 12.3 | 130 |" in done.stdout
    assert (
        "| long | vLLM BF16, log-probabilities | 6,000 | 0.77 | 0.55 | - | 12.3 | 130 |"
        in done.stdout
    )
    found = lines(tmp_path)
    assert found["native", "fp8", False]["of_vllm_bf16"] == 14000 / 7818
    assert found["native", "fp8", False]["of_vllm_fp8"] == 14000 / 10976
    assert found["native", "fp8", False]["of_floor"] == 0.8
    assert found["native", "bf16", False]["of_floor"] is None
    assert found["vllm", "bf16", True]["of_reference"] is None, (
        "the reference was measured without log-probabilities"
    )
    assert "void" not in done.stdout


def test_the_last_of_several_measurements_counts(tmp_path: Path) -> None:
    assert (
        table(tmp_path, four_rows(), [row("native", "fp8", 15000.0, log_probs=True)]).returncode
        == 0
    )
    assert lines(tmp_path)["native", "fp8", False]["tokens_per_s"] == 15000.0


def test_a_row_of_a_card_without_a_baseline_is_refused(tmp_path: Path) -> None:
    done = table(
        tmp_path, four_rows("A"), [row("native", "fp8-linear", 9000.0, "B", log_probs=True)]
    )
    assert done.returncode == 2
    assert "native fp8-linear, qwen3-8b, long was measured on card B, vLLM BF16 on A" in done.stderr
    assert not (tmp_path / "table.json").exists()


def test_a_row_that_brings_its_baseline_may_come_from_another_card(tmp_path: Path) -> None:
    others = [
        row("native", "fp8-linear", 9000.0, "B", log_probs=True),
        row("vllm", "bf16", 7500.0, "B"),
    ]
    done = table(tmp_path, four_rows("A"), others)
    assert done.returncode == 0, done.stderr
    assert lines(tmp_path)["native", "fp8-linear", False]["of_vllm_bf16"] == 9000 / 7500


def test_the_four_rows_with_bars_must_share_a_card(tmp_path: Path) -> None:
    on_a = [r for r in four_rows("A") if r["mode"] == "bf16"]
    on_b = [r for r in four_rows("B") if r["mode"] == "fp8"] + [row("vllm", "bf16", 7818.0, "B")]
    done = table(tmp_path, on_a, on_b)
    assert done.returncode == 2
    assert "no single card has all rows" in done.stderr


def test_shapes_without_vllm_need_no_baseline(tmp_path: Path) -> None:
    small = row("native", "fp8", 40000.0, log_probs=True) | {"shape": "qwen3-0.6b"}
    done = table(tmp_path, [small])
    assert done.returncode == 0, done.stderr
    assert "| long | isobit `fp8` | 40,000 | - | - | - | 12.3 | 130 |" in done.stdout


@pytest.mark.parametrize(
    ("copy", "rate", "void"),
    [(4.27, 7037.0, False), (4.27, 7035.0, True), (3.8, 7035.0, False), (4.5, 7380.0, True)],
)
def test_a_slow_vllm_voids_the_table(tmp_path: Path, copy: float, rate: float, void: bool) -> None:
    """0.9 of 7,818 is 7,036.2 at 4.27 TB/s, and in proportion to the card's copy bandwidth
    elsewhere.
    """
    done = table(tmp_path, [row("vllm", "bf16", rate, copy=copy)])
    assert done.returncode == 0, done.stderr
    assert ("**void**" in done.stdout) == void
    assert json.loads((tmp_path / "table.json").read_text())["void"] == void
