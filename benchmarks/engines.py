"""vLLM as the engine of a run: mismatch, and what its weights take, by way of making the KV cache's
scales and of correcting.

    isobit train RECIPE --rollout.engine vllm --precision.preset fp8-rollout
        --precision.kv_scales per_tensor --precision.kv_calibration engine|never
        [--corrections '[{type="mis"}]'] --output RUN
    python -m benchmarks.engines ROWS               # RUN/metrics.jsonl of each, as ROWS/NAME.jsonl

The rows of benchmarks/results/engines, on one H200 with vLLM 0.25.1: SmolLM2-135M-Instruct on
``gsm_symbolic`` as it comes, 32 problems with 8 answers of at most 288 tokens a step
(``fp8-rollout`` ran alone, with CUDA graphs, the others side by side and without, so that their
speed says nothing); ``gsm-*``, the task ``engines`` of experiments.proof; ``8b-*``, random weights
(benchmarks/README.md has such commands).
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

COLUMNS = {
    "mean abs(d)": ("log_prob_diff/mean", "{:.4f}"),
    "k3": ("mismatch/k3", "{:.4f}"),
    "effective sample size": ("mismatch/effective_sample_size", "{:.3f}"),
    "largest ratio": ("mismatch/ratio_max", "{:.1f}"),
    "weight of corrections": ("correction/mean", "{:.3f}"),
    "rejected": ("correction/rejected", "{:.2%}"),
    "update, s": ("time/update_s", "{:.3f}"),
}


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The metrics of a run's steps, without those of its evaluations."""
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if "mismatch/k3" in line]


def cells(steps: Sequence[dict[str, Any]]) -> list[str]:
    """Means over the steps; of updates without the first step's, which an evaluation had sent."""
    found: list[str] = []
    for name, form in COLUMNS.values():
        values = [step[name] for step in steps if name in step]
        if name == "time/update_s":
            values = values[1:]
        found.append(form.format(fmean(values)) if values else "-")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("rows", type=Path)
    print("| run | steps | " + " | ".join(COLUMNS) + " |")
    print("|---|" + "---:|" * (1 + len(COLUMNS)))
    for path in sorted(parser.parse_args().rows.glob("*.jsonl")):
        steps = read_steps(path)
        print(f"| `{path.stem}` | {len(steps)} | " + " | ".join(cells(steps)) + " |")


if __name__ == "__main__":
    main()
