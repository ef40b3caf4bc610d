"""What was measured on a checkpoint, as Markdown."""

import json
from pathlib import Path


def print_table(directory: Path) -> None:
    """A table of each kind that there are results of."""
    for file in sorted(directory.glob("answers-*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        print(
            f"{found['equal']} of {found['questions']} greedy answers ({found['tokens']} tokens) "
            "equal transformers' in FP32\n"
        )
    for file in sorted(directory.glob("perplexity-*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        base = found["perplexity"]["transformers bf16"]
        print(f"| {found['device']} | perplexity | of transformers BF16 | linears |")
        print("|---|---|---|---|")
        for name, value in found["perplexity"].items():
            linears = ", ".join(f"{n} {f}" for f, n in found["linears"].get(name, {}).items())
            print(f"| {name} | {value:.4f} | {value / base:.4f} | {linears} |")
        print()
