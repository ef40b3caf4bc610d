"""The quickstart with several seeds in `bf16` and `fp8`: greedy accuracy on the held-out problems before and after.

    python benchmarks/quickstart.py [--seeds 3] [--precisions bf16 fp8] [--out benchmarks/results/quickstart.json]

Each run is the recipe as shipped, in a process of its own, with another seed: other prompts first, other samples.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.toml"


def run(precision: str, seed: int, directory: Path) -> dict[str, float]:
    """-> the run's summary."""
    output = directory / f"{precision}-{seed}"
    overrides = ["--precision", precision, "--seed", str(seed), "--output", str(output)]
    command = [sys.executable, "-m", "isobit.cli.main", "train", str(RECIPE), *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
    return json.loads((output / "summary.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp8"])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = []
    print(f"{'precision':12} {'seed':>4} {'before':>7} {'after':>7} {'differing of compared':>24} {'train s':>8}")
    with tempfile.TemporaryDirectory() as directory:
        for precision in arguments.precisions:
            for seed in range(arguments.seeds):
                summary = run(precision, seed, Path(directory))
                results.append({"precision": precision, "seed": seed} | summary)
                tokens = f"{summary['tokens_differing']} of {summary['tokens_compared']}"
                accuracy = f"{summary['accuracy_before']:7.1%} {summary['accuracy_after']:7.1%}"
                print(f"{precision:12} {seed:4} {accuracy} {tokens:>24} {summary['train_seconds']:8.0f}", flush=True)
            after = [row["accuracy_after"] for row in results if row["precision"] == precision]
            print(f"{precision:12} mean {'':7} {mean(after):7.1%}")
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
