"""What is run: tasks, arms, and the settings that each changes.

A run has a task, an arm and a seed, and the name TASK-ARM-SEED; one that is made again, on another
day or card, ends in ``-again``.  Besides the two tasks of the proof
there are settings under stress, and two that look for where ``fp8`` loses: they are trained on the
problems of one of the two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.arms.problems import TASKS, Task

Changes = Mapping[str, str]
_TIS = '[{type = "tis", level = "token", max = 2.0}]'
_TRAINERS: Changes = {"precision": "fp8-rollout", "training.old_log_probs": "recomputed"}
ARMS: dict[str, Changes] = {
    "bf16": {"precision": "bf16"},
    "fp8": {"precision": "fp8"},
    "fp8-linear": {"precision": "fp8-linear"},
    "fp8-rollout": _TRAINERS,
    "fp8-rollout-tis": {**_TRAINERS, "corrections": _TIS},
    "fp8-fp32-scales": {"precision": '{preset = "fp8", scales = "fp32"}'},
}
_FEW = {name: ARMS[name] for name in ("bf16", "fp8", "fp8-rollout", "fp8-rollout-tis")}
"""Of ``multiply``, whose runs take longer, and of the settings under stress."""
_SITE_ARMS: dict[str, Changes] = {
    "fp8-linear": ARMS["fp8-linear"],
    "fp8-fp32-scales": ARMS["fp8-fp32-scales"],
    "fp8-ends-bf16": {"precision": '{preset = "fp8", first_layers_bf16 = 3, last_layers_bf16 = 3}'},
    "fp8-wgrad-bf16": {"precision": '{preset = "fp8", wgrad = "bf16"}'},
    "fp8-stream-bf16": {
        "precision": '{preset = "fp8", modules_bf16 = ["qkv_proj", "gate_up_proj"]}'
    },
}
SITES = "sites"
"""``multiply`` where something of ``fp8`` is kept in BF16: attention and KV cache (``fp8-linear``),
the first and last three layers, the weight gradients' operands, or the linears that read the
residual stream, whose rounding costs most; or its scales in FP32.
"""
FROM_FP8 = "from-fp8"
"""``multiply`` from a start that was fine-tuned in ``fp8``."""
OUTLIERS = "stress-outliers"
"""Begins with the start in which outliers are planted (``benchmarks.arms.outliers``)."""
STRESSES: dict[str, Changes] = {
    "stress-rate": {"training.learning_rate": "6e-5"},
    "stress-collapse": {"training.learning_rate": "1e-4"},
    "stress-updates": {"training.updates_per_batch": "4"},
    "stress-hot": {"rollout.temperature": "1.3"},
    OUTLIERS: {},
}
"""``gsm`` in settings that are said to make a mismatch of rollout and training worse."""
_ARMS_OF: dict[str, dict[str, Changes]] = {
    "gsm": ARMS,
    SITES: _SITE_ARMS,
    FROM_FP8: {name: ARMS[name] for name in ("bf16", "fp8")},
}
"""Of the tasks that have not just the few."""
NAMES = (*TASKS, SITES, FROM_FP8, *STRESSES)
"""Of all tasks, for a run."""


@dataclass(frozen=True)
class Run:
    """One training."""

    task: str
    """One of ``NAMES``."""
    arm: str
    seed: int
    again: bool = False
    """Whether it repeats one whose row is kept."""

    @property
    def problems(self) -> Task:
        """What it is trained and measured on."""
        return "gsm" if self.task == "gsm" or self.task in STRESSES else "multiply"

    @property
    def start(self) -> str:
        """Of the directories that have a ``model``, the one that it begins with."""
        return {OUTLIERS: "outliers", FROM_FP8: "start-fp8"}.get(self.task, "start")

    @property
    def name(self) -> str:
        """Also of its files."""
        return self.row_name + ("-again" if self.again else "")

    @property
    def row_name(self) -> str:
        """Of what is kept of it, among the rows or among the repeats."""
        return f"{self.task}-{self.arm}-{self.seed}"

    @property
    def settings(self) -> dict[str, str]:
        """What it changes in the recipe of its problems."""
        return {**STRESSES.get(self.task, {}), **arms_of(self.task)[self.arm]}


def arms_of(task: str) -> dict[str, Changes]:
    """The arms of a task, by name."""
    return _ARMS_OF.get(task, _FEW)


ALL_ARMS = tuple(dict.fromkeys(arm for task in NAMES for arm in arms_of(task)))


def run_named(words: str) -> Run:
    """``TASK:ARM:SEED`` or ``TASK:ARM:SEED:again``.  Raises ValueError for any other."""
    match words.split(":"):
        case [task, arm, seed, *again] if task in NAMES and again in ([], ["again"]):
            if arm in arms_of(task) and seed.isdecimal():
                return Run(task, arm, int(seed), bool(again))
    raise ValueError(f"no run is named {words}: TASK:ARM:SEED, and :again for one made before")


def wanted(tasks: Sequence[str], arms: Sequence[str], seeds: Sequence[int]) -> list[Run]:
    """All arms of a seed before the next seed, so that pairs are whole wherever a suite ends."""
    return [
        Run(task, arm, seed)
        for seed in seeds
        for task in tasks
        for arm in arms_of(task)
        if arm in arms
    ]
