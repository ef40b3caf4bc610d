"""The figures of the quickstart in README.md and docs/after_training.md, from a run of it.

    python -m tools.quickstart_figures RUN      # take them from a finished run's directory
    python -m tools.quickstart_figures          # write the pages again from the stored figures

``RUN`` is the directory of ``isobit train recipes/quickstart.toml`` as it stands.  Its figures and
the machine that they are of are kept in ``experiments/results/quickstart.json``; in a page they
stand between ``<!-- quickstart: NAME -->`` and ``<!-- end -->``.
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

ROOT = Path(__file__).parents[1]
STORED = ROOT / "experiments" / "results" / "quickstart.json"
PAGES = ROOT / "README.md", ROOT / "docs" / "after_training.md"
_MARKED = re.compile(r"(<!-- quickstart: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_EVALUATION = ("accuracy", "low", "high", "problems", "response_length")
_STEP = ("reward/mean", "response_length/mean", "entropy")


def figures_of(run: Path) -> dict[str, Any]:
    """What the pages say of a run's directory.  Raises ValueError for a run that is not finished
    or not the quickstart.
    """
    manifest = json.loads((run / "run.json").read_text(encoding="utf-8"))
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    if summary["steps"] != 20 or summary["preset"] != "int8":
        raise ValueError(f"{run} is no run of 20 steps in int8, which the quickstart is")
    trained = next(row for row in rows if row["step"] == 20 and "reward/mean" in row)
    evaluations = [row for row in rows if "eval/held_out/accuracy" in row]
    before, after = (
        {name: row[f"eval/held_out/{name}"] for name in _EVALUATION}
        for row in (evaluations[0], evaluations[-1])
    )
    return {
        "date": manifest["started"][:10],
        "processor": manifest["machine"]["processor"],
        "instructions": manifest["device"]["instructions"],
        "threads": manifest["device"]["threads"],
        "torch": manifest["versions"]["torch"],
        "before": before,
        "after": after,
        "step_20": {name: trained[name] for name in _STEP}
        | {
            "differing": trained["log_prob_diff/tokens_differing"],
            "compared": trained["log_prob_diff/tokens_compared"],
        },
        "differing": summary["tokens_differing"],
        "compared": summary["tokens_compared"],
    }


def blocks(figures: Mapping[str, Any]) -> dict[str, str]:
    """The text of each marked place, by its name."""
    return {"output": _output(figures), "accuracy": _accuracy(figures)}


def _output(figures: Mapping[str, Any]) -> str:
    step = figures["step_20"]
    counts = f"differing {step['differing']} of {step['compared']}  ..."
    return "\n".join(
        [
            *wrap(f"On {_machine(figures)} it prints, shortened:", 100),
            "",
            "```",
            f"before: {_evaluation(figures['before'])}",
            f"step 20/20  reward {step['reward/mean']:.3f}"
            f"  length {step['response_length/mean']:.1f}  entropy {step['entropy']:.3f}  {counts}",
            f"after step 20: {_evaluation(figures['after'])}",
            f"int8: {figures['differing']:,} of {figures['compared']:,} log-probabilities differ "
            "in rollout and training",
            "```",
            "",
        ]
    )


def _accuracy(figures: Mapping[str, Any]) -> str:
    text = (
        f"The quickstart's own evaluation of these problems, in `int8`, is "
        f"{figures['after']['accuracy']:.1%} on {_machine(figures)}."
    )
    return "\n".join([*wrap(text, 100), ""])


def _machine(figures: Mapping[str, Any]) -> str:
    processor = re.sub(r"\((R|TM)\)| Processor| CPU", "", figures["processor"])
    return (
        f"{figures['threads']} threads of `{processor}` ({figures['instructions']}, "
        f"torch {figures['torch']}, {figures['date']})"
    )


def _evaluation(row: Mapping[str, float]) -> str:
    return (
        f"held_out accuracy {row['accuracy']:.1%} (95% interval {100 * row['low']:.1f} to "
        f"{100 * row['high']:.1f}) on {row['problems']} problems, "
        f"length {row['response_length']:.1f}"
    )


def with_figures(page: str, figures: Mapping[str, Any]) -> str:
    """The page with its marked places as the figures have them.  Raises KeyError for a name that
    there is no text for.
    """
    texts = blocks(figures)
    return _MARKED.sub(lambda place: place[1] + texts[place[2]] + place[3], page)


def main(arguments: list[str]) -> None:
    """Store the figures of a run, if one is named, and write the pages."""
    if arguments:
        figures = figures_of(Path(arguments[0]))
        STORED.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    figures = json.loads(STORED.read_text(encoding="utf-8"))
    for page in PAGES:
        page.write_text(with_figures(page.read_text(encoding="utf-8"), figures), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
