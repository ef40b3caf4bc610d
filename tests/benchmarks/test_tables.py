"""The tables of the README and of docs/performance.md, from rows with known answers: ratios are
taken on one card and at one setting, and rows that cannot be compared are refused.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import end_to_end, rollout, training
from benchmarks.cases import PassCase, flops
from isobit.util.errors import ConfigError
from tests.forked import ran

Row = dict[str, Any]
ROOT = Path(__file__).parents[2]
REFERENCE = {"bf16": 7818.0, "fp8": 10976.0}  # vLLM, long, h200-measurements.md; at 4.27 TB/s


@pytest.fixture
def shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command's table prints of rows; it writes beside them."""

    def show(run_table: Callable[[Path], None], *rows: Row) -> str:
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        run_table(tmp_path)
        return capsys.readouterr().out

    return show


def lines_of(folder: Path) -> dict[tuple[str, str, bool], Row]:
    found = json.loads((folder / "table.json").read_text())["lines"]
    return {
        (line["engine"], line["mode"], line["log_probs"] and line["engine"] == "vllm"): line
        for line in found
    }


def rollout_row(
    engine: str, mode: str, rate: float, uuid: str = "A", copy: float = 4.27, **other: Any
) -> Row:
    card = {"name": "NVIDIA H200", "uuid": uuid, "copy_tb_per_s": copy}
    row = {"engine": engine, "mode": mode, "shape": "qwen3-8b", "card": card, "case": "long"}
    if engine != "floor":
        row |= {"log_probs": engine == "native", "startup_s": 12.3, "memory_gib": 130.0}
    return row | {"tokens_per_s": rate} | other


def test_steps_are_compared_on_one_card(shown: Callable[..., str]) -> None:
    def row(mode: str, uuid: str, step_ms: float) -> Row:
        card = {"name": "NVIDIA H200", "uuid": uuid, "copy_tb_per_s": 4.27}
        step = {"case": "step-8", "step_ms": step_ms, "floor_ms": 2.0}
        return {"engine": "steps", "mode": mode, "shape": "qwen3-8b", "card": card} | step

    rows = row("fp8", "A", 9.0), row("fp8", "A", 4.0), row("int8", "A", 3.2), row("int8", "B", 2.5)
    text = shown(rollout.run_table, *rows)
    assert "| 8 | 4.00 (1.00 x; 50%) | 3.20 (1.25 x; 62%) |" in text  # the later row of fp8
    assert "| 8 | 2.50 (80%) |" in text


def four_rows(uuid: str = "A") -> list[Row]:
    native = {"bf16": 8000.0, "fp8": 14000.0}
    return [
        rollout_row(engine, mode, rate, uuid)
        for engine, rates in (("native", native), ("vllm", REFERENCE))
        for mode, rate in rates.items()
    ]


def test_rollout_has_ratios_to_vllm_and_the_share_of_the_floor(
    shown: Callable[..., str], tmp_path: Path
) -> None:
    floor = rollout_row("floor", "fp8", 17500.0)
    with_log_probs = rollout_row("vllm", "bf16", 6000.0, log_probs=True)
    text = shown(rollout.run_table, *four_rows(), floor, with_log_probs)
    assert "| long | isobit `fp8` | 14,000 | 1.79 | 1.28 | 80% | 12.3 | 130 |" in text
    assert "| long | vLLM BF16, log-probabilities | 6,000 | 0.77 | 0.55 | - | 12.3 | 130 |" in text
    assert "void" not in text
    found = lines_of(tmp_path)
    ours = found["native", "fp8", False]
    assert (ours["of_vllm_bf16"], ours["of_vllm_fp8"], ours["of_floor"]) == (
        *(14000 / REFERENCE[mode] for mode in ("bf16", "fp8")),
        0.8,
    )
    assert found["native", "bf16", False]["of_floor"] is None
    # the reference was measured without log-probabilities
    assert found["vllm", "bf16", True]["of_reference"] is None


def test_the_last_of_several_measurements_counts(shown: Callable[..., str], tmp_path: Path) -> None:
    shown(rollout.run_table, *four_rows(), rollout_row("native", "fp8", 15000.0))
    assert lines_of(tmp_path)["native", "fp8", False]["tokens_per_s"] == 15000.0


def test_rollout_rows_of_two_cards_are_refused(shown: Callable[..., str], tmp_path: Path) -> None:
    other = rollout_row("native", "fp8-linear", 9000.0, "B")
    message = "native fp8-linear, qwen3-8b, long was measured on card B, vLLM BF16 on A"
    with pytest.raises(ConfigError, match=message):
        shown(rollout.run_table, *four_rows("A"), other)
    halves = [
        *(row for row in four_rows("A") if row["mode"] == "bf16"),
        *(row for row in four_rows("B") if row["mode"] == "fp8"),
        rollout_row("vllm", "bf16", 7818.0, "B"),
    ]
    with pytest.raises(ConfigError, match="no single card has all rows"):
        shown(rollout.run_table, *halves)
    assert not (tmp_path / "table.json").exists()
    shown(rollout.run_table, *four_rows("A"), other, rollout_row("vllm", "bf16", 7500.0, "B"))
    assert lines_of(tmp_path)["native", "fp8-linear", False]["of_vllm_bf16"] == 9000 / 7500


def test_shapes_without_vllm_need_no_baseline(shown: Callable[..., str]) -> None:
    text = shown(rollout.run_table, rollout_row("native", "fp8", 4e4, shape="qwen3-0.6b"))
    assert "| long | isobit `fp8` | 40,000 | - | - | - | 12.3 | 130 |" in text


@pytest.mark.parametrize(
    ("copy", "rate", "void"),
    [(4.27, 7037.0, False), (4.27, 7035.0, True), (3.8, 7035.0, False), (4.5, 7380.0, True)],
)
def test_a_slow_vllm_voids_the_table(
    shown: Callable[..., str], tmp_path: Path, copy: float, rate: float, void: bool
) -> None:
    """0.9 of 7,818 is 7,036.2 at 4.27 TB/s, and in proportion to the card's copy bandwidth."""
    text = shown(rollout.run_table, rollout_row("vllm", "bf16", rate, copy=copy))
    assert ("**void**" in text) == void
    assert json.loads((tmp_path / "table.json").read_text())["void"] == void


def pass_row(engine: str, mode: str, rate: float, uuid: str = "A", **other: Any) -> Row:
    row = {"kind": "pass", "engine": engine, "mode": mode, "shape": "qwen3-8b"}
    case = {"length": 4096, "sequences": 2, "recompute": "none", "peak_gib": 90.0}
    rates = {"tokens_per_s": rate, "model_tflop_per_s": rate / 20}
    return row | {"card": {"uuid": uuid}} | case | rates | other


def step_row(engine: str, mode: str, rate: float, **other: Any) -> Row:
    phases = {"forward": 2.0, "backward": 4.0, "optimiser": 0.25, "publish": 0.05}
    step: Row = {"kind": "step", "step_tokens": 65536, "phases_s": phases}
    return pass_row(engine, mode, rate, **step | other)


def test_flops_of_the_8b_shape() -> None:
    a_token = flops(PassCase("fp8", 4096, 2, "none")) / 8192
    assert a_token == pytest.approx(6 * 7.57e9 + 3 * 4 * (4096 / 2) * 4096 * 36, rel=1e-3)


def test_ratios_of_passes_are_taken_on_one_card_and_at_one_setting(
    shown: Callable[..., str],
) -> None:
    failed = pass_row("native", "bf16", 0.0, sequences=4, error="out of memory")
    failed.pop("tokens_per_s")
    text = shown(
        training.run_table,
        pass_row("native", "fp8", 14000.0),
        pass_row("native", "bf16", 10000.0),
        pass_row("transformers", "bf16", 9000.0),
        pass_row("transformers", "bf16", 7000.0, recompute="full"),
        pass_row("native", "fp8", 15000.0, uuid="B"),
        failed,
        {"kind": "rl", "engine": "native"},
    )
    assert "| 4,096 x 2 | isobit `fp8` | none | 14,000 | 700 | 1.40 | 1.56 | 90 |" in text
    assert "| 4,096 x 2 | isobit `fp8` | none | 15,000 | 750 | - | - | 90 |" in text
    assert "| 4,096 x 4 | isobit `bf16` | none | out of memory |" in text


def test_a_step_is_held_against_the_fastest_bf16_step_of_its_length(
    shown: Callable[..., str],
) -> None:
    text = shown(
        training.run_table,
        step_row("native", "fp8", 12000.0, recompute="mlp"),
        step_row("native", "bf16", 8000.0),
        pass_row("native", "bf16", 10000.0),
        step_row("native", "bf16", 7500.0, recompute="full"),
        step_row("transformers", "bf16", 6000.0, recompute="full"),
    )
    fp8 = "| 4,096 x 2 | isobit `fp8` | mlp | 65,536 | 2.00 | 4.00 | 0.25 | 0.05 | 12,000 |"
    assert f"{fp8} 1.50 | 2.00 | 90 |" in text
    assert "| 4,096 x 2 | isobit `bf16` | none | 10,000 | 500 | 1.00 | - | 90 |" in text


PEER_SETTING: Row = {"recompute": "none", "tokens_per_microbatch": 4608}


def rl_row(
    engine: str, mode: str, part: str, phases: dict[str, float], uuid: str = "A", **other: Any
) -> Row:
    row = {"kind": "rl", "engine": engine, "mode": mode, "part": part, "shape": "qwen3-8b"}
    row |= {"case": "2k", "card": {"uuid": uuid}, "phases_s": phases}
    return row | {"seconds": sum(phases.values())} | other


def ours(mode: str, rollout: float, backward: float, **other: Any) -> Row:
    phases = {"rollout": rollout, "forward": 10.0, "backward": backward}
    phases |= {"optimiser": 0.5, "publish": 0.1, "other": 0.4}
    counts = {"tokens_compared": 524288, "tokens_differing": 0, "weight_bytes_changed": 0.031}
    counts |= {"memory": {"training": {"peak_gib": 120.0}}}
    setting = {"recompute": "none", "tokens_per_microbatch": 6912}
    return rl_row("native", mode, "whole", phases, **setting | counts | other)


VLLM = rl_row("vllm", "bf16", "rollout", {"rollout": 64.0})


def test_the_outside_line_is_the_sum_of_two_commands_on_one_card(
    shown: Callable[..., str], tmp_path: Path
) -> None:
    phases = {"old_log_probs": 20.0, "forward": 20.0, "backward": 55.0}
    phases |= {"optimiser": 0.8, "publish": 0.2}
    peer = rl_row("transformers", "bf16", "training", phases, **PEER_SETTING)
    rows = ours("fp8", 35.0, 29.0), ours("bf16", 45.0, 39.0), VLLM, peer
    text = shown(end_to_end.run_table, *rows)
    both = "| 2k | vLLM BF16 + transformers BF16 | none 4,608 | 64.0 | 20.0 | 20.0 | 55.0 | 0.8 |"
    assert f"{both} 0.2 | 0.0 | 96.0 | 160.0 | 1.00 |" in text
    fp8 = "| 2k | isobit `fp8` | none 6,912 | 35.0 | - | 10.0 | 29.0 | 0.5 | 0.1 | 0.4 | 40.0 |"
    assert f"{fp8} 75.0 | 2.40 | 1.25 | 2.13 | 0 of 524,288 | 3.1% | 120 |" in text
    assert len(json.loads((tmp_path / "end-to-end-table.json").read_text())) == 3


def test_the_outside_line_says_what_part_of_the_batch_was_measured(
    shown: Callable[..., str],
) -> None:
    measured: Row = PEER_SETTING | {"sequences_measured": 32}
    part = rl_row("transformers", "bf16", "training", {"forward": 9.0}, **measured)
    scaled = "(training scaled from 32 of 256 sequences) | none 4,608 |"
    both = "| 2k | vLLM BF16 + transformers BF16"
    assert f"{both} {scaled} 64.0 |" in shown(end_to_end.run_table, VLLM, part)
    whole = shown(end_to_end.run_table, VLLM, part | {"sequences_measured": 256})
    assert f"{both} | none 4,608 | 64.0 |" in whole
    alone = f"| 2k | transformers BF16, training alone {scaled} - |"
    assert alone in shown(end_to_end.run_table, part)


def test_halves_of_two_cards_are_not_added_up(shown: Callable[..., str], tmp_path: Path) -> None:
    text = shown(
        end_to_end.run_table,
        ours("fp8", 35.0, 29.0),
        VLLM | {"card": {"uuid": "B"}},
        rl_row("transformers", "bf16", "training", {"old_log_probs": 20.0, "forward": 76.0}),
        ours("bf16", 0.0, 0.0, uuid="C") | {"error": "refused"},
    )
    lines = json.loads((tmp_path / "end-to-end-table.json").read_text())
    assert all(line["training_x_outside"] is None for line in lines)
    alone = "| 2k | vllm BF16, rollout alone | - | 64.0 | - | - | - | - | - | 0.0 | - | 64.0 |"
    assert f"{alone} - | - | - | - | - | - |" in text
    assert "| 2k | isobit `bf16` | refused |" in text


@pytest.mark.exhaustive
def test_the_page_on_memory_holds_the_planned_tables(tmp_path: Path) -> None:
    done = ran("tests.forked:be_module", tmp_path, "benchmarks.memory", "plan")
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    for table in done.stdout.strip().split("\n\n"):
        assert table in page, f"docs/memory.md has another table than benchmarks.memory:\n{table}"
