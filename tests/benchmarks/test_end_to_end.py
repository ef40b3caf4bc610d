"""``benchmarks.end_to_end``: a small step of ours and of transformers on a CPU, vLLM's calls to
a double, and the table's arithmetic.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SETTINGS = {"recompute": "mlp", "tokens_per_microbatch": 64}

ROOT = Path(__file__).parents[2]


FP8_SETTING = {"recompute": "none", "tokens_per_microbatch": 6912}
PEER_SETTING = {"recompute": "none", "tokens_per_microbatch": 4608}


def row(
    engine: str,
    mode: str,
    part: str,
    phases: dict[str, float],
    uuid: str = "A",
    case: str = "2k",
    **other: Any,
) -> dict[str, Any]:
    place = {"shape": "qwen3-8b", "case": case, "card": {"uuid": uuid}, "kind": "rl", "part": part}
    return (
        {"engine": engine, "mode": mode, "phases_s": phases, "seconds": sum(phases.values())}
        | place
        | other
    )


def ours(mode: str, rollout: float, backward: float, **other: Any) -> dict[str, Any]:
    counts = {
        "tokens_compared": 524288,
        "tokens_differing": 0,
        "weight_bytes_changed": 0.031,
        "memory": {"training": {"peak_gib": 120.0}},
    }
    phases = {
        "rollout": rollout,
        "forward": 10.0,
        "backward": backward,
        "optimiser": 0.5,
        "publish": 0.1,
        "other": 0.4,
    }
    return row("native", mode, "whole", phases, **FP8_SETTING | counts | other)


def table(folder: Path, rows: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    command = [sys.executable, "-m", "benchmarks.end_to_end", "table", folder]
    done = subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "end-to-end-table.json").read_text())


def test_the_outside_line_is_the_sum_of_two_commands_on_one_card(tmp_path: Path) -> None:
    training = {
        "old_log_probs": 20.0,
        "forward": 20.0,
        "backward": 55.0,
        "optimiser": 0.8,
        "publish": 0.2,
    }
    rows = [ours("fp8", 35.0, 29.0), ours("bf16", 45.0, 39.0)]
    rows += [
        row("vllm", "bf16", "rollout", {"rollout": 64.0}),
        row("transformers", "bf16", "training", training, **PEER_SETTING),
    ]
    shown, lines = table(tmp_path, rows)
    assert (
        "| 2k | vLLM BF16 + transformers BF16 | none 4,608 | 64.0 | 20.0 | 20.0 | 55.0 | 0.8 | 0.2 "
        "| 0.0 | 96.0 | 160.0 | 1.00 |" in shown
    )
    fp8 = (
        "| 2k | isobit `fp8` | none 6,912 | 35.0 | - | 10.0 | 29.0 | 0.5 | 0.1 | 0.4 | 40.0 | "
        "75.0 | 2.40 | 1.25 | 2.13 |"
    )
    assert f"{fp8} 0 of 524,288 | 3.1% | 120 |" in shown
    assert len(lines) == 3


def test_the_outside_line_says_what_part_of_the_batch_was_measured(tmp_path: Path) -> None:
    training = row(
        "transformers", "bf16", "training", {"forward": 9.0}, sequences_measured=32, **PEER_SETTING
    )
    rollout = row("vllm", "bf16", "rollout", {"rollout": 64.0})
    shown, _ = table(tmp_path, [rollout, training])
    assert (
        "| 2k | vLLM BF16 + transformers BF16 (training scaled from 32 of 256 sequences) | none "
        "4,608 | 64.0 |" in shown
    )
    shown, _ = table(tmp_path, [rollout, training | {"sequences_measured": 256}])
    assert "| 2k | vLLM BF16 + transformers BF16 | none 4,608 | 64.0 |" in shown
    shown, _ = table(tmp_path, [training])
    assert (
        "| 2k | transformers BF16, training alone (training scaled from 32 of 256 sequences) | "
        "none 4,608 | - |" in shown
    )


def test_halves_of_two_cards_are_not_added_up(tmp_path: Path) -> None:
    rows = [ours("fp8", 35.0, 29.0), row("vllm", "bf16", "rollout", {"rollout": 64.0}, uuid="B")]
    rows += [
        row("transformers", "bf16", "training", {"old_log_probs": 20.0, "forward": 76.0}),
        ours("bf16", 0.0, 0.0, uuid="C") | {"error": "refused"},
    ]
    shown, lines = table(tmp_path, rows)
    assert all(line["training_x_outside"] is None for line in lines)
    assert (
        "| 2k | vllm BF16, rollout alone | - | 64.0 | - | - | - | - | - | 0.0 | - | 64.0 | - | - | "
        "- | - | - | - |" in shown
    )
    assert "| 2k | isobit `bf16` | refused |" in shown
