"""The quickstart under every algorithm, under the corrections of an off-policy rollout, on stale
samples, with a part of ``fp8`` in another format, with a KL penalty, with replay or a teacher, or
from a hybrid's weights: does each learn, and what do its figures say?

    python -m experiments.family run algorithms corrections stages --out DIR [--seeds 3] [--jobs 1]
    python -m experiments.family run sites --out DIR --seeds 10
    python -m experiments.family run teachers --out DIR      # DIR/teacher: what the recipe makes
    python -m experiments.family run hybrids --out DIR       # DIR/hybrid: the start, ten minutes
    python -m experiments.family table DIR

Each run is ``recipes/quickstart.toml`` with the changes of ``RUNS``, in a process of its own, two
threads each (``--threads``), ``--jobs`` side by side; 20 steps of 256 completions.  A row is a file
of its own, so that a suite which was cut off goes on where it was: what is there is not run again.
``before`` and ``after`` are the greedy accuracy on 500 held-out problems; ``figures`` are means
over all steps of what ``metrics.jsonl`` holds, ``last`` over the last five.  The table has the mean
difference to ``BASES`` of the same seeds, with its standard error, where a suite has them; rewards
of the last five steps; means over all steps of the gradient norm and of the effective sample size
of sequences, where rows have it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from isobit.util.machine import processor_name

Changes = Mapping[str, str]
BySeed = Mapping[int, Mapping[str, Any]]

RECIPES = Path(__file__).parent.parent / "recipes"
THREADS = 2
"""Of each run where ``--threads`` says nothing; gradients repeat at one number alone."""
LAST = 5
TEACHER = "TEACHER"
"""In place of the folder of the model that the recipe makes with the seed ``TEACHERS_SEED``."""
TEACHERS_SEED = 100
HYBRID = "HYBRID"
"""In place of the folder of a hybrid of the starter's width, which learns half of the starter's
text from random weights, in BF16 (``recipes/starter.toml``).
"""
_HYBRID: Changes = {
    "from_scratch.family": "qwen3_5_text",
    "from_scratch.linear_num_key_heads": "2",
    "from_scratch.linear_num_value_heads": "4",
    "from_scratch.linear_key_head_dim": "32",
    "from_scratch.linear_value_head_dim": "32",
    "training.steps": "500",
}
BASES = "bf16", "fp8", "lag 0"
"""What runs of a suite that has them are compared with, seed by seed."""
_MORE = "reward, last | gradient norm | sequences' ESS | differing | seconds |"

_ALGORITHMS: dict[str, Changes] = {
    "grpo": {},
    "dr_grpo": {},
    "dapo": {},
    "rloo": {},
    "reinforce_pp": {},
    "reinforce_pp_baseline": {},
    "gspo": {"training.updates_per_batch": "2"},
    "cispo": {"training.updates_per_batch": "2"},
    "remax": {},
    "ppo": {"training.updates_per_batch": "4"},
}
_TIS = '{type = "tis", level = "token", max = 2.0}'
_MIS = '{type = "mis", level = "geometric", min = 0.99, max = 1.001}'
_ICEPOP = '{type = "icepop", min = 0.5, max = 5.0}'
_RATIOS: dict[str, Changes] = {
    "exact": {"algorithm.clip": "none"},
    "clipped": {},
    "TIS": {"training.old_log_probs": "recomputed", "corrections": f"[{_TIS}]"},
    "exact, rate by ESS": {"algorithm.clip": "none", "training.rate_by_ess": "true"},
}
_LONGER: Changes = {"training.steps": "40"}
"""With a lag of 8 the initial weights sample nine batches."""
_ROLLOUT: Changes = {"precision": "fp8-rollout"}
_WITH_TIS: Changes = {**_ROLLOUT, "corrections": f"[{_TIS}]"}
_FOUR: dict[str, Changes] = {
    "bf16": {"precision": "bf16"},
    "fp8": {"precision": "fp8"},
    "fp8-rollout": _ROLLOUT,
    "fp8-rollout, TIS": _WITH_TIS,
}
"""One function in BF16, one in FP8, and two functions with and without a correction."""
_LAYERS = {
    "ends": (1, 1),
    "first layer": (1, 0),
    "last layer": (0, 1),
    "first two layers": (2, 0),
    "last two layers": (0, 2),
}
"""Of the starter's four: how many of the first and of the last."""
_STRESSES: dict[str, Changes] = {
    "rate-2": {"training.learning_rate": "2e-4"},
    "updates": {"training.updates_per_batch": "4"},
    "hot": {"rollout.temperature": "1.3"},
    "steps": {"training.steps": "100"},
}
"""Settings that are said to make a mismatch of rollout and training worse."""

RUNS: dict[str, dict[str, Changes]] = {
    "algorithms": {
        name: {"algorithm.name": name, **changes} for name, changes in _ALGORITHMS.items()
    },
    "corrections": {
        "bf16": {"precision": "bf16"},
        "fp8": {"precision": "fp8"},
        "fp8-rollout, trainer's": _ROLLOUT,
        "fp8-rollout, recorded": {**_ROLLOUT, "training.old_log_probs": "recorded"},
        "fp8-rollout, TIS": _WITH_TIS,
        "fp8-rollout, MIS": {**_ROLLOUT, "corrections": f"[{_MIS}]"},
        "fp8-rollout, IcePop": {**_ROLLOUT, "corrections": f"[{_ICEPOP}]"},
    },
    "sites": {
        "bf16": {"precision": "bf16"},
        "fp8": {"precision": "fp8"},
        "fp8, scales in FP32": {"precision": '{preset = "fp8", scales = "fp32"}'},
        "fp8, WGrad in BF16": {"precision": '{preset = "fp8", wgrad = "bf16"}'},
        **{
            f"fp8, {name} in BF16": {
                "precision": f'{{preset = "fp8", first_layers_bf16 = {first}, '
                f"last_layers_bf16 = {last}}}"
            }
            for name, (first, last) in _LAYERS.items()
        },
        "fp8, stream in BF16": {
            "precision": '{preset = "fp8", modules_bf16 = ["qkv_proj", "gate_up_proj"]}'
        },
        "fp8-linear": {"precision": "fp8-linear"},
        "fp8-rollout": _ROLLOUT,
        "fp8-rollout, TIS": _WITH_TIS,
    },
    **{
        f"stress-{stress}": {name: {**changes, **arm} for name, arm in _FOUR.items()}
        for stress, changes in _STRESSES.items()
    },
    **{
        f"lags-{rate}": {
            "lag 0": {"training.learning_rate": rate, **_LONGER},
            **{
                f"lag {lag}, {name}": {
                    "training.learning_rate": rate,
                    "async.lag": str(lag),
                    **_LONGER,
                    **ratio,
                }
                for lag in (2, 8)
                for name, ratio in _RATIOS.items()
            },
        }
        for rate in ("1e-4", "2e-4", "5e-4")
    },
    "teachers": {
        "rewards": {},
        **{
            f"teacher alone, {kl}": {
                "teacher.model": TEACHER,
                "teacher.kl": kl,
                "teacher.only": "true",
            }
            for kl in ("sampled", "reverse", "forward")
        },
        "rewards and teacher, sampled": {"teacher.model": TEACHER},
    },
    "hybrids": {flow: {"model": HYBRID, "precision": flow} for flow in ("bf16", "int8")},
    "stages": {
        "kl 1": {"algorithm.kl_coefficient": "1"},
        "kl measured": {"algorithm.kl_coefficient": "1e-12"},
        "entropy bonus": {"algorithm.entropy_coefficient": "0.01"},
        "replay 0.5": {"replay.fraction": "0.5", "replay.max_staleness": "4"},
        "replay 0.5, by advantage": {
            "replay.fraction": "0.5",
            "replay.max_staleness": "4",
            "replay.sampling": "advantage",
        },
    },
}


def run(suite: str, name: str, seed: int, threads: int, out: Path) -> dict[str, Any]:
    """Train once; returns the row."""
    made = {TEACHER: _teacher, HYBRID: _hybrid}
    changes = {
        key: str(made[value](out)) if value in made else value
        for key, value in RUNS[suite][name].items()
    }
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "run"
        _isobit(
            "train",
            "quickstart",
            output,
            {"seed": str(seed), "threads": str(threads), "checkpoint.keep_last": "0", **changes},
        )
        summary = json.loads((output / "summary.json").read_text())
        lines = [json.loads(line) for line in (output / "metrics.jsonl").open(encoding="utf-8")]
    steps = [line for line in lines if "loss" in line]
    return {
        "suite": suite,
        "name": name,
        "seed": seed,
        "changes": dict(RUNS[suite][name]),
        "device": processor_name(),
        "threads": threads,
        "before": summary["accuracy_before"],
        "after": summary["accuracy_after"],
        "tokens_compared": summary["tokens_compared"],
        "tokens_differing": summary["tokens_differing"],
        "train_seconds": summary["train_seconds"],
        "figures": _means(steps),
        "last": _means(steps[-LAST:]),
        "first": _means(steps[:1]),
    }


def _teacher(out: Path) -> Path:
    if not (out / "teacher" / "summary.json").exists():
        _isobit("train", "quickstart", out / "teacher", {"seed": str(TEACHERS_SEED)})
    return out / "teacher" / "model"


def _hybrid(out: Path) -> Path:
    text = out / "hybrid-text"
    if not text.exists():
        _python("tools.starter.build", "text", str(text))
    if not (out / "hybrid" / "summary.json").exists():
        rows = {
            "data.train.path": str(text / "text.jsonl"),
            "data.eval.held_out.path": str(text / "held_out_text.jsonl"),
        }
        _isobit("sft", "starter", out / "hybrid", {"model": str(text), **rows, **_HYBRID})
    return out / "hybrid" / "model"


def _isobit(command: str, recipe: str, output: Path, changes: Changes) -> None:
    settings = {"output": str(output), "device": "cpu", "threads": str(THREADS), **changes}
    overrides = [word for key, value in settings.items() for word in (f"--{key}", value)]
    file = str(RECIPES / f"{recipe}.toml")
    _python("isobit.cli.main", command, file, "--resume", *overrides)


def _python(module: str, *words: str) -> None:
    command = [sys.executable, "-m", module, *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603


def _means(steps: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """The mean of every figure over the steps that have it."""
    names = dict.fromkeys(name for step in steps for name in step if name != "step")
    columns = {name: [v for step in steps if (v := step.get(name)) is not None] for name in names}
    return {name: fmean(column) for name, column in columns.items() if column}


def run_all(suites: Sequence[str], seeds: int, jobs: int, threads: int, out: Path) -> None:
    """Every row of the suites that is not there yet."""
    out.mkdir(parents=True, exist_ok=True)

    def make(suite: str, name: str, seed: int) -> None:
        file = out / f"{suite}-{name.replace(' ', '_').replace(',', '')}-{seed}.json"
        if not file.exists():
            row = run(suite, name, seed, threads, out)
            file.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
            print(json.dumps({key: row[key] for key in ("suite", "name", "seed", "after")}))
            sys.stdout.flush()

    wanted = [(s, name, seed) for s in suites for seed in range(seeds) for name in RUNS[s]]
    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(make, *one) for one in wanted]:
            done.result()


def table(out: Path) -> Iterator[str]:
    """A line of Markdown for each kind of run, its seeds side by side."""
    rows = [json.loads(file.read_text()) for file in sorted(out.glob("*.json"))]
    for suite, runs in RUNS.items():
        ours = {
            name: {row["seed"]: row for row in rows if (row["suite"], row["name"]) == (suite, name)}
            for name in runs
        }
        bases = [ours[base] for base in BASES if base in runs]
        minus = "".join(f" minus {base}, points |" for base in BASES if base in runs)
        yield f"| {suite} | before | after, by seed | mean |{minus} {_MORE}"
        yield "|---|---|---|---|" + "---|" * (len(bases) + _MORE.count("|"))
        for name in runs:
            if ours[name]:
                yield _line(name, ours[name], bases)
        yield ""


def _line(name: str, by_seed: BySeed, bases: Sequence[BySeed]) -> str:
    rows = [by_seed[seed] for seed in sorted(by_seed)]
    after = [row["after"] for row in rows]
    differing = sum(row["tokens_differing"] for row in rows)
    cells = [
        name,
        f"{fmean(row['before'] for row in rows):.1%}",
        ", ".join(f"{value:.1%}" for value in after),
        f"{fmean(after):.1%}",
        *(_minus(by_seed, base) for base in bases),
        f"{fmean(row['last']['reward/mean'] for row in rows):.3f}",
        f"{fmean(row['figures']['grad_norm'] for row in rows):.2f}",
        f"{fmean(ess):.2f}" if (ess := _known(rows, "ratio/effective_sequences")) else "-",
        f"{differing:,} of {sum(row['tokens_compared'] for row in rows):,}",
        f"{fmean(row['train_seconds'] for row in rows):.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def _known(rows: Sequence[Mapping[str, Any]], figure: str) -> list[float]:
    """A figure of the rows that have it."""
    return [row["figures"][figure] for row in rows if figure in row["figures"]]


def _minus(by_seed: BySeed, base: BySeed) -> str:
    """The mean difference of the seeds that both have, points, and its standard error."""
    both = sorted(by_seed.keys() & base.keys())
    if by_seed is base or len(both) < 2:
        return "-"
    found = [100 * (by_seed[seed]["after"] - base[seed]["after"]) for seed in both]
    return f"{fmean(found):+.1f} ± {stdev(found) / len(found) ** 0.5:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("suites", nargs="+", choices=list(RUNS))
    runs.add_argument("--seeds", type=int, default=3)
    runs.add_argument("--jobs", type=int, default=1)
    runs.add_argument("--threads", type=int, default=THREADS)
    runs.add_argument("--out", type=Path, required=True)
    commands.add_parser("table").add_argument("out", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "table":
        print("\n".join(table(arguments.out)))
    else:
        sizes = arguments.seeds, arguments.jobs, arguments.threads
        run_all(arguments.suites, *sizes, arguments.out)


if __name__ == "__main__":
    main()
