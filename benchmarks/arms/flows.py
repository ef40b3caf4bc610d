"""Which site of ``fp8`` costs the start its accuracy: held-out problems of both tasks, answered by
the weights that all arms begin with, in many precision flows.

Nothing is trained here, so a flow takes seconds, and what it loses is the rounding of the forward
pass alone.  FLOWS keeps one thing of ``fp8`` in BF16 at a time, or has one thing alone in FP8.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks.arms import answers
from benchmarks.arms.runs import on_card, places_of, recipe_of, words_of
from benchmarks.arms.suite import Run

_LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def _in_bf16(preset: str, *modules: str) -> str:
    return f'{{preset = "{preset}", modules_bf16 = {json.dumps(modules)}}}'


FLOWS: dict[str, str] = {
    "bf16": "bf16",
    "fp8": "fp8",
    "fp8-linear": "fp8-linear",
    "fp8, scales in FP32": '{preset = "fp8", scales = "fp32"}',
    "fp8 without its first 3 layers": '{preset = "fp8", first_layers_bf16 = 3}',
    "fp8 without its last 3 layers": '{preset = "fp8", last_layers_bf16 = 3}',
    **{f"fp8 without {name}": _in_bf16("fp8", name) for name in _LINEARS},
    "attention and KV cache alone": _in_bf16("fp8", *_LINEARS),
    **{
        f"{name} alone": _in_bf16("fp8-linear", *(one for one in _LINEARS if one != name))
        for name in _LINEARS
    },
}
"""Name -> ``precision``."""
_SETS = {"gsm": "gsm", "multiply": "held_out"}
"""Task -> the name of its evaluation set here; the recipe's own is that of ``multiply``."""
Answered = Mapping[str, Mapping[str, Any]]
"""Name of a flow -> what ``benchmarks.arms.answers`` wrote."""


def answer_all(
    directory: Path, cards: Sequence[str], jobs: int, changes: Mapping[str, str]
) -> Answered:
    """Both tasks in every flow that has no answers yet, ``jobs`` at a time on each card; raises
    RuntimeError where one failed, when all have ended.
    """
    (directory / "flows").mkdir(exist_ok=True)
    free = SimpleQueue[str]()
    for card in list(cards) * jobs:
        free.put(card)

    def answer(place: int, precision: str) -> Path:
        out = directory / "flows" / f"{place}.json"
        if not out.exists():
            card = free.get()
            try:
                _run(directory, out, {**changes, "precision": precision}, card)
            finally:
                free.put(card)
        return out

    with ThreadPoolExecutor(len(cards) * jobs) as pool:
        outs = list(pool.map(answer, range(len(FLOWS)), FLOWS.values()))
    if missing := [name for name, out in zip(FLOWS, outs, strict=True) if not out.exists()]:
        raise RuntimeError(f"no answers in {', '.join(missing)}: see {directory / 'flows'}/*.log")
    found = [json.loads(out.read_text(encoding="utf-8")) for out in outs]
    return dict(zip(FLOWS, found, strict=True))


def _run(directory: Path, out: Path, changes: Mapping[str, str], card: str) -> None:
    given = {
        **places_of(Run("multiply", "bf16", 0), directory),
        "output": str(out.with_suffix("")),
        "data.eval.gsm.type": "jsonl",
        "data.eval.gsm.path": str(directory / "data" / "gsm.held_out.jsonl"),
    }
    words = words_of({**given, **changes})
    command = answers.command(Path(given["model"]), recipe_of("multiply"), out, words)
    on_card(card, command, out.with_suffix(".log")).wait()


def markdown(found: Answered) -> list[str]:
    """A line a flow."""
    lines = [f"| the start answers in | {' | '.join(f'`{task}`' for task in _SETS)} |"]
    lines.append(f"|---|{'---:|' * len(_SETS)}")
    for flow, one in found.items():
        accuracies = " | ".join(f"{one['sets'][name]['accuracy']:.1%}" for name in _SETS.values())
        lines.append(f"| {flow} | {accuracies} |")
    return lines
