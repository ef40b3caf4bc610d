"""How a finished model answers in another precision flow than its own: what of an arm's accuracy is
in the weights, and what in the arithmetic of the answers.

    python -m benchmarks.arms.answers FOLDER RECIPE OUT [--KEY VALUE ...]

OUT is written as a whole: the figures of each evaluation set, with the flow that answered.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isobit import load_config
from isobit.run.evaluate import evaluate_folder
from isobit.store.directory import write_json


def command(folder: Path, recipe: Path, out: Path, words: Sequence[str]) -> list[str]:
    """What answers with the model in ``folder``, by the recipe with these keys changed."""
    return [sys.executable, "-m", __name__, *map(str, (folder, recipe, out)), *words]


def other_flow(arm: str) -> str:
    """Whether what was learnt in BF16 stands in FP8, and the other way round."""
    return "fp8" if arm == "bf16" else "bf16"


def answer(folder: Path, recipe: Path, words: Sequence[str]) -> dict[str, Any]:
    """``precision`` as resolved, and ``sets``: name -> figures."""
    config = load_config(recipe, words)
    results = evaluate_folder(folder, config)
    return {
        "precision": config.precision.model_dump(mode="json"),
        "sets": {name: result.figures() for name, result in results.items()},
    }


def main() -> None:
    folder, recipe, out = map(Path, sys.argv[1:4])
    write_json(out, answer(folder, recipe, sys.argv[4:]))


if __name__ == "__main__":
    main()
