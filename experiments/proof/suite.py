"""What the proof runs: tasks, arms, the settings that each changes, problems, and planted outliers.

    gsm         word problems of reasoning-gym's ``gsm_symbolic``: a hundred templates with other
                names and numbers each time; a solution has some hundred tokens
    multiply    products of two large numbers, digit by digit as on paper: about a thousand tokens

A solution ends with ``#### ANSWER``; the reward is 1 for that, and 0 otherwise.  No problem is in
two splits: seeds of reasoning-gym are further apart than their sizes, and products come from
disjoint residues of the first factor.  Other tasks are settings under stress (on ``gsm``), and two
that look for where ``fp8`` loses and one that takes 300 steps (on ``multiply``), and one with other
engines (on ``gsm``).  A run is named TASK-ARM-SEED, with ``-again``
when it repeats one on another day or card.

Outliers are planted in a model that computes the same function:

    w_norm[c] 2^k,   W[:, c] 2^-k    for every matrix W that reads that norm's output

for one channel c of each 128, so that each group of activations with one scale has one.  Powers of
two change no mantissa, in BF16 neither.  E4M3 has 18 binary orders of magnitude for all numbers of
a group, and what lies at the lower end loses bits: on SmolLM2, log-probabilities of ``fp8-rollout``
are as far from the trainer's with 2^14 as without (1.6 and 1.75 nats at most over 1,512 tokens of
``isobit verify`` on a CPU), and four times as far (7.0) with 2^17.
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from safetensors.torch import load_file, save_file

Task = Literal["gsm", "multiply"]
Split = Literal["solutions", "train", "held_out"]
TASKS: tuple[Task, ...] = get_args(Task)
SIZES: dict[Split, int] = {"solutions": 20_000, "train": 20_000, "held_out": 2_000}
"""Rows of what is fine-tuned on, of the prompts of reinforcement learning, and of evaluation."""
DIGITS = 6, 5
_SPLITS: tuple[Split, ...] = get_args(Split)
SEED_STEP = 10_000_000

Row = dict[str, str]


def write_problems(directory: Path) -> None:
    """``TASK.SPLIT.jsonl`` of every task and split, the same bytes each time."""
    directory.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        for split in _SPLITS:
            problems = rows_of(task, split, SIZES[split])
            write_lines(directory / f"{task}.{split}.jsonl", problems)


def write_lines(path: Path, problems: Iterable[Row]) -> None:
    write_whole(path, "".join(json.dumps(row) + "\n" for row in problems).encode())


def write_whole(path: Path, content: bytes) -> None:
    """All of a file or nothing, also where several processes write it at once."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_bytes(content)
    partial.rename(path)


def rows_of(task: Task, split: Split, count: int) -> list[Row]:
    """So many problems: ``prompt``, ``answer``, and ``completion``, a solution."""
    makers: dict[Task, Callable[[Split, int], Iterator[Row]]] = {"gsm": _gsm, "multiply": _multiply}
    return list(makers[task](split, count))


def _gsm(split: Split, count: int) -> Iterator[Row]:
    import reasoning_gym

    seed = SEED_STEP * (1 + _SPLITS.index(split))
    for entry in reasoning_gym.create_dataset("gsm_symbolic", size=count, seed=seed):
        answer = str(entry["answer"])
        text = entry["metadata"]["answer_cot"].rpartition("####")[0].rstrip()
        prompt = f"{entry['question']}\nThink step by step, and end with #### and the answer."
        yield {"prompt": prompt, "completion": f"{text}\n#### {answer}", "answer": answer}


def _multiply(split: Split, count: int) -> Iterator[Row]:
    place = _SPLITS.index(split)
    random_numbers = random.Random(SEED_STEP + place)  # noqa: S311 (no secret)
    seen: set[tuple[int, int]] = set()
    while len(seen) < count:
        first, second = (
            random_numbers.randrange(10 ** (digits - 1), 10**digits) for digits in DIGITS
        )
        first -= first % len(_SPLITS) - place  # a residue for each split
        if (first, second) not in seen and len(str(first)) == DIGITS[0]:
            seen.add((first, second))
            yield {
                "prompt": f"Multiply {first} by {second}, digit by digit as on paper. "
                "End with #### and the product.",
                "completion": product_worked_out(first, second),
                "answer": str(first * second),
            }


def product_worked_out(first: int, second: int) -> str:
    """Partial products from the last digit of the second factor, with carries; then their sum by
    columns, from the last.
    """
    lines: list[str] = []
    for place, digit in enumerate(reversed(str(second))):
        lines.append(f"{first} * {digit}, shifted by {place}:")
        carry = 0
        for own in map(int, reversed(str(first))):
            total = own * int(digit) + carry
            lines.append(f"{own}*{digit}+{carry}={total}: write {total % 10}, carry {total // 10}")
            carry = total // 10
        lines.append(f"= {first * int(digit)}{'0' * place}")
    partial = [first * int(digit) * 10**place for place, digit in enumerate(reversed(str(second)))]
    lines.append("Sum by columns:")
    carry = 0
    for column in range(len(str(first * second))):
        digits = [number // 10**column % 10 for number in partial]
        total = sum(digits) + carry
        terms = "+".join(map(str, [*digits, carry]))
        lines.append(f"{terms}={total}: write {total % 10}, carry {total // 10}")
        carry = total // 10
    return "\n".join([*lines, f"#### {first * second}"])


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
    "int8": {"precision": '{preset = "int8", dgrad = "fp8", wgrad = "bf16"}'},
}
_FEW = {name: ARMS[name] for name in ("bf16", "fp8", "fp8-rollout", "fp8-rollout-tis", "int8")}
"""Of ``multiply``, whose runs take longer, and of the settings under stress."""
_LATER: dict[str, Changes] = {
    "fp8-int8-attention": {"precision": '{preset = "fp8", attention = "int8"}'},
    "int8-backward": {"precision": "int8"},
}
"""Arms whose runs came later: ``int8`` as it is by default, with DGrad and WGrad in INT8 too, is
``int8-backward``.
"""
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
ENGINES = "engines"
"""``gsm`` over a hundred steps: the native engine in one exact function, then two that differ from
the trainer and are corrected, the native one with scales of Q, K and V a tensor, and vLLM.
"""
_TENSORS = '{preset = "fp8-rollout", kv_scales = "per_tensor", kv_calibration = "engine"}'
_ENGINE_ARMS: dict[str, Changes] = {
    "fp8": ARMS["fp8"],
    "per-tensor-tis": {**ARMS["fp8-rollout-tis"], "precision": _TENSORS},
    "vllm-tis": {
        **ARMS["fp8-rollout-tis"],
        "precision": _TENSORS,
        "rollout.engine": "vllm",
    },
}
LORA = "lora"
"""``gsm`` with adapters of rank 32 in place of all weights, at five and ten times their learning
rate; beside the task ``gsm``.
"""
_LORA_ARMS: dict[str, Changes] = {
    f"{name}-{times}x": {**ARMS[name], "lora.rank": "32", "training.learning_rate": rate}
    for name in ("fp8",)
    for times, rate in ((5, "1.5e-4"), (10, "3e-4"))
}
LAGS: dict[str, Changes] = {
    "lag-3e-5": {"training.learning_rate": "3e-5"},
    "lag-6e-5": {"training.learning_rate": "6e-5"},
}
"""``gsm`` on samples of weights that are steps old, at two learning rates: does a ratio to exact
log-probabilities need a clip, or a correction?
"""
_RATIOS: dict[str, Changes] = {
    "exact": {"algorithm.clip": "none"},
    "clipped": {},
    "tis": {"training.old_log_probs": "recomputed", "corrections": _TIS},
}
_LAG_ARMS: dict[str, Changes] = {
    "int8-backward": _LATER["int8-backward"],
    **{
        f"{name}-{lag}": {**_LATER["int8-backward"], **ratio, "async.lag": str(lag)}
        for lag in (2, 8)
        for name, ratio in _RATIOS.items()
    },
}
"""Without a lag the ratio is 1, and all three are the flow itself, which the others are compared
with.
"""
LONG = "long"
"""``multiply`` over twice as many steps."""
LADDER = "ladder-"
"""``multiply`` from a start of another size (``experiments.proof.ladder``), behind its name."""
_LADDER_RATES = {"27m": "1.5e-5", "108m": "9e-6", "443m": "6e-6", "1.1b": "4.5e-6"}
"""Learning rates, 0.015 of the highest of a size's fine-tuning: by pilots of ``27m`` (README)."""
LADDERS = tuple(LADDER + size for size in _LADDER_RATES)
_LADDER_ARMS: dict[str, Changes] = {
    **{name: ARMS[name] for name in ("bf16", "fp8", "fp8-linear", "int8", "fp8-rollout-tis")},
    **_LATER,
}
_LADDER_SETTINGS: Changes = {"evaluation.every": "0", "checkpoint.every": "0"}
"""Answers before and after training alone, and a checkpoint where a run ends or is interrupted: one
of ``1.1b`` has 12 GiB.
"""
_LARGE: Changes = {
    "data.eval.held_out.limit": "1000",
    "rollout.kv_memory_gib": "12",
    "training.tokens_per_microbatch": "8192",
}
"""Of sizes whose K and V take 90 to 115 KB a token in BF16, so that four runs share a card."""
HYBRID = "hybrid"
"""``multiply`` from a start like ``27m`` with gated delta nets in three of four layers."""
OUTLIERS = "stress-outliers"
"""Begins with the start in which outliers are planted (``experiments.proof.suite``)."""
STRESSES: dict[str, Changes] = {
    "stress-rate": {"training.learning_rate": "6e-5"},
    "stress-collapse": {"training.learning_rate": "1e-4"},
    "stress-updates": {"training.updates_per_batch": "4"},
    "stress-hot": {"rollout.temperature": "1.3"},
    OUTLIERS: {},
}
"""``gsm`` in settings that are said to make a mismatch of rollout and training worse."""
_CHANGED: dict[str, Changes] = {
    **STRESSES,
    **LAGS,
    **{
        LADDER + size: {
            **_LADDER_SETTINGS,
            "training.learning_rate": rate,
            **(_LARGE if size in ("443m", "1.1b") else {}),
        }
        for size, rate in _LADDER_RATES.items()
    },
    HYBRID: {**_LADDER_SETTINGS, "training.learning_rate": _LADDER_RATES["27m"]},
}
_ARMS_OF: dict[str, dict[str, Changes]] = {
    "gsm": {**ARMS, **_LATER},
    "multiply": {**_FEW, **_LATER},
    SITES: _SITE_ARMS,
    FROM_FP8: {name: ARMS[name] for name in ("bf16", "fp8")},
    ENGINES: {name: {**arm, "training.steps": "100"} for name, arm in _ENGINE_ARMS.items()},
    LORA: _LORA_ARMS,
    **dict.fromkeys(LAGS, _LAG_ARMS),
    LONG: {name: {**ARMS[name], "training.steps": "300"} for name in ("bf16", "fp8", "int8")},
    **dict.fromkeys(LADDERS, _LADDER_ARMS),
    HYBRID: {"bf16": ARMS["bf16"], "int8-backward": _LATER["int8-backward"]},
}
"""Arms of the tasks that have others than ``_FEW``."""
NAMES = (*TASKS, SITES, FROM_FP8, ENGINES, LORA, LONG, *LADDERS, HYBRID, *STRESSES, *LAGS)
"""All tasks that a run may have."""


@dataclass(frozen=True)
class Run:
    task: str
    """One of ``NAMES``."""
    arm: str
    seed: int
    again: bool = False
    """Whether it repeats a run whose row is kept."""

    @property
    def problems(self) -> Task:
        """What it is trained and measured on."""
        return "gsm" if self.task in ("gsm", ENGINES, LORA, *STRESSES, *LAGS) else "multiply"

    @property
    def start(self) -> str:
        """Of the directories that have a ``model``, the one that it begins with."""
        if self.task in (*LADDERS, HYBRID):
            return f"start-{self.task.removeprefix(LADDER)}"
        return {OUTLIERS: "outliers", FROM_FP8: "start-fp8"}.get(self.task, "start")

    @property
    def name(self) -> str:
        return self.row_name + ("-again" if self.again else "")

    @property
    def row_name(self) -> str:
        """The name of its row, among the rows or the repeats."""
        return f"{self.task}-{self.arm}-{self.seed}"

    @property
    def shared(self) -> Changes:
        """What all arms of its task change in the recipe of its problems."""
        return _CHANGED.get(self.task, {})

    @property
    def settings(self) -> dict[str, str]:
        """What it changes in the recipe of its problems."""
        return {**self.shared, **arms_of(self.task)[self.arm]}


def arms_of(task: str) -> dict[str, Changes]:
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


EXPONENT = 17
EVERY, FIRST = 128, 5
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
"""The matrices that read each norm of a layer."""


def plant(model: Path, to: Path, exponent: int = EXPONENT) -> None:
    """Copy a model folder of the Llama family, whose weights are one file, with outliers of
    2^``exponent``.
    """
    shutil.copytree(model, to, dirs_exist_ok=True)
    tensors = load_file(to / "model.safetensors")
    factor = 2.0**exponent
    for name, weight in tensors.items():
        layer, _, norm = name.removesuffix(".weight").rpartition(".")
        for reader in READERS.get(norm, ()):
            tensors[f"{layer}.{reader}.weight"][:, FIRST::EVERY] /= factor
        if norm in READERS:
            weight[FIRST::EVERY] *= factor
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
