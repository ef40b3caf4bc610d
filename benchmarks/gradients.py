"""How near the FP8 backward is to the exact one, and what it costs that it repeats its bits.

    python -m benchmarks.gradients cosines [--device cuda] [--layers 24] [--steps 300] [--out FILE]
    python -m benchmarks.gradients determinism [--out FILE]

cosines       a model of 24 layers is trained a little in the ``fp8`` flow; then its gradients over
              8,192 fresh tokens are held, matrix by matrix, against the exact backward of the same
              forward bits (``backward.exact``), at their own size and at 1e-12, and against
              plain FP32; each linear is held against the exact one alone, too.  Bars: 0.995 every
              matrix, 0.998 their mean, 0.9985 a linear alone.  Also on a CPU, where only small
              sizes end soon (``--device cpu --layers 3 --steps 4 --length 128``)
determinism   the gradients of an 8B shape twice, and the time of a pass against one with PyTorch's
              fastest attention and embedding backward
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.comparison.command import run_command


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("cosines")
    command.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    command.add_argument("--layers", type=int, default=24)
    command.add_argument("--sequences", type=int, default=8)
    command.add_argument("--length", type=int, default=1024)
    command.add_argument("--steps", type=int, default=300, help="of the training before")
    command.add_argument("--out", type=Path)
    command.set_defaults(run=cosines)
    command = commands.add_parser("determinism")
    command.add_argument("--out", type=Path)
    command.set_defaults(run=determinism)
    return parser


def cosines(arguments: argparse.Namespace) -> None:
    from benchmarks.backward.cosines import compare
    from benchmarks.backward.deep_model import Size

    card = _describe_card() if arguments.device == "cuda" else {}
    size = Size(arguments.layers, arguments.sequences, arguments.length, arguments.steps)
    _show(card | compare(size, arguments.device), arguments.out)


def determinism(arguments: argparse.Namespace) -> None:
    from benchmarks.backward.determinism import measure_determinism

    _show(_describe_card() | measure_determinism(), arguments.out)


def _describe_card() -> dict[str, Any]:
    from benchmarks.comparison.native import describe_card

    return describe_card()


def _show(found: dict[str, Any], out: Path | None) -> None:
    text = json.dumps(found, indent=2)
    print(text)
    if out:
        out.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(run_command(make_parser()))
