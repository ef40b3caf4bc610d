"""Where every GiB of a GPU goes when it trains a real model's shape: planned anywhere, and measured
beside the plan on the card.

    python -m benchmarks.memory plan [--shape qwen3-8b] [--gib 139.2]
    python -m benchmarks.memory speed
    python -m benchmarks.memory measure --precision fp8 --recompute full --tokens 16384
        --length 16384 [--moments fp8] [--offload-moments] [--kv-memory-gib 50] [--lora-rank 32]
        [--limit-gib 22.5] --out DIR

plan     the tables of docs/memory.md: BF16 moments where they do not say others, micro-batches of
         4,096 and 16,384 tokens in sequences of as many.
speed    writes the rows that an estimate of a run's time rests on (isobit.memory.speed).
measure  a rollout with the planned KV cache and an update over two full micro-batches, by turns, as
         a run makes them; a plan that does not fit is refused.  With a limit the plan is of so
         much, and torch's allocator gets no more, as on a smaller card.

Of the two measured steps the second counts, which has moments from its beginning.  The rollout has
prompts of the case's length, and more short ones than fit a batch.  Where moments are on the host
for the rollout, the trainer's turn includes their way to the GPU and back, and each way is also
counted by itself.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import cycle
from pathlib import Path
from typing import get_args

import torch

from benchmarks.cases import (
    MODES,
    ROLLOUT_CASES,
    STEP_CASES,
    PassCase,
    make_requests,
    precision_of,
)
from benchmarks.common import (
    CARD,
    Commands,
    Row,
    RowWriter,
    allocate_in_pages,
    card_planner,
    markdown,
    measure_card,
    run_command,
    versions,
)
from isobit.config.lora import LORA_TARGETS
from isobit.config.rollout import RolloutConfig
from isobit.config.training import Moments, Recompute, TrainingConfig
from isobit.memory.cache_size import RESERVE, forward_bytes
from isobit.memory.device import DevicePlanner
from isobit.memory.sharing import DeviceSharing
from isobit.memory.speed import ROWS as SPEED_ROWS
from isobit.memory.speed import SpeedShape, StepWork, estimate_step
from isobit.models.config import Lora
from isobit.models.policy import random_policy
from isobit.models.shapes import model_shape
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.training.supervised import SupervisedObjective
from isobit.training.trainer import Trainer
from isobit.util.clock import Clock
from isobit.util.strict_json import json_text

RESULTS = Path(__file__).with_name("results")
GIB = 1 << 30
H200_GIB = 139.2
"""Of the card's 139.8 GiB a process has less, once CUDA is there: 138.7 to 139.3 where it was
measured.
"""
PRECISIONS = ("fp8", "bf16")
TOKENS = (4096, 16384)
LEVELS: tuple[Recompute, ...] = get_args(Recompute)
MOMENTS: tuple[Moments, ...] = get_args(Moments)
STATE = ("masters", "optimiser moments", "gradients")
PROCESSES = (1, 2, 4, 8)


def make_commands() -> Commands:
    commands = Commands(__doc__)
    plan = commands.add("plan", print_plan, out=False)
    plan.add_argument(
        "--gib", type=float, default=H200_GIB, help="what the process has of the card's memory"
    )
    commands.add("speed", lambda _: write_speed(), shape=False, out=False)
    command = commands.add("measure", measure)
    command.add_argument("--precision", choices=MODES, required=True)
    command.add_argument("--recompute", choices=LEVELS, required=True)
    command.add_argument("--tokens", type=int, required=True, help="of a micro-batch")
    command.add_argument("--length", type=int, required=True, help="of a sequence")
    command.add_argument("--moments", choices=MOMENTS, default="bf16")
    command.add_argument("--offload-moments", action="store_true")
    command.add_argument(
        "--kv-memory-gib", type=float, help="of the KV cache; by default all that is left"
    )
    command.add_argument("--lora-rank", type=int, help="train adapters of all linears alone")
    command.add_argument("--limit-gib", type=float, help="what a process has of a smaller card")
    return commands


def print_plan(arguments: argparse.Namespace) -> None:
    tables = (training_table, rollout_table, tokens_table, processes_table)
    print("\n\n".join(table(arguments.shape, arguments.gib) for table in tables))


def training_table(shape: str, gib: float) -> str:
    """The training phase, GiB.  State is masters, moments and gradients."""
    config = model_shape(shape)
    lines = []
    for precision in PRECISIONS:
        planner = card_planner(config, precision, int(gib * GIB))
        for tokens in TOKENS:
            for recompute in LEVELS:
                parts = planner.training_bytes(_training(recompute, tokens), tokens, tokens)
                published, saved = parts["published weights"], parts["saved activations"]
                state, total = sum(parts[name] for name in STATE), sum(parts.values())
                cells = [state, published, saved, total - state - published - saved]
                fits = "yes" if total + RESERVE <= gib * GIB else "no"
                setting = [f"`{precision}`", f"{tokens:,}", f"`{recompute}`"]
                lines.append([*setting, *map(_gib, cells), f"**{_gib(total)}**", fits])
    head = ["precision", "tokens", "recompute", "state", "published", "activations", "temporary"]
    return _table([*head, "total", "fits"], lines, figures=set(range(3, 8)))


def rollout_table(shape: str, gib: float) -> str:
    """The rollout phase, GiB: the KV cache gets what is left."""
    config, rollout = model_shape(shape), RolloutConfig()
    lines = []
    for precision in PRECISIONS:
        planner = card_planner(config, precision, int(gib * GIB))
        weights = planner.weight_bytes(TrainingConfig(moments="bf16"))
        for place in ("GPU", "host"):
            parts = [weights["masters"], weights["published weights"]]
            parts.append(weights["optimiser moments"] if place == "GPU" else 0)
            parts += [forward_bytes(config, planner.flow, rollout, planner.sizes), RESERVE]
            left = f"**{_gib(int(gib * GIB) - sum(parts))}**"
            lines.append([f"`{precision}`", place, *map(_gib, parts), left])
    head = ["precision", "moments on", "masters", "published", "moments", "forward", "reserve"]
    return _table([*head, "KV cache"], lines, figures=set(range(2, 8)))


def tokens_table(shape: str, gib: float) -> str:
    """The largest micro-batches, tokens."""
    config = model_shape(shape)
    lines = []
    for precision in PRECISIONS:
        planner = card_planner(config, precision, int(gib * GIB))
        for moments in MOMENTS:
            size = planner.weight_bytes(TrainingConfig(moments=moments))["optimiser moments"]
            setting = [f"`{precision}`", f"`{moments}`", _gib(size)]
            lines.append([*setting, *_largest(planner, moments)])
    head = ["precision", "moments", "GiB", *(f"`{recompute}`" for recompute in LEVELS)]
    return _table(head, lines, figures=set(range(2, 6)))


def _largest(planner: DevicePlanner, moments: Moments = "bf16") -> list[str]:
    """Tokens of the largest micro-batch of each level."""
    tokens = (planner.largest_microbatch(_training(level, 1, moments), 1) for level in LEVELS)
    return [f"{most:,}" for most in tokens]


def processes_table(shape: str, gib: float) -> str:
    """What each of several processes has on its GPU in ``fp8``, GiB, and the largest micro-batches,
    tokens.
    """
    config, lines = model_shape(shape), []
    moving = ("gradients as they are made", "arriving gradients")
    for processes in PROCESSES:
        planner = replace(card_planner(config, "fp8", int(gib * GIB)), processes=processes)
        parts = planner.training_bytes(_training("mlp", 8192), 8192, 8192)
        sizes = [sum(parts[name] for name in STATE)]
        sizes += [parts.get(name, 0) for name in ("published weights", *moving)]
        lines.append([str(processes), *map(_gib, sizes), *_largest(planner)])
    head = ["processes", "state", "published", "being made", "arriving"]
    head += [f"`{recompute}`" for recompute in LEVELS]
    return _table(head, lines, figures=set(range(len(head))))


def measure(arguments: argparse.Namespace) -> None:
    sequences = max(1, arguments.tokens // arguments.length)
    case = PassCase(
        arguments.precision, arguments.length, sequences, arguments.recompute, arguments.shape
    )
    writer = RowWriter(arguments.out, "native", case.mode, case.shape, measure_card(), versions())
    settings = arguments.moments, arguments.offload_moments, arguments.kv_memory_gib
    more = {"limit_gib": arguments.limit_gib, "lora_rank": arguments.lora_rank}
    writer.write(kind="memory", **case.fields, **more, **two_steps(case, *settings, **more))


def write_speed() -> None:
    """Write the rows of ``isobit.memory.speed``."""
    rows = speed_rows()
    for more in ([], whole_steps()):  # the second are estimated from the first
        rows += more
        lines = ",\n".join(json_text(row) for row in rows)
        SPEED_ROWS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def speed_rows() -> list[Row]:
    """Of native rollouts, passes, scoring and ranks, with the file and line that each is taken
    from. Rollouts in which sequences were preempted are left out, as are passes behind a forward in
    INT8 with DGrad in FP8 and WGrad in BF16, the flow of earlier versions.
    """
    rows: list[Row] = []
    for folder in ("training", "experts", "int8/backward"):
        modes = "int8-qwen" if folder.startswith("int8") else ""
        for path in sorted((RESULTS / folder).glob(f"native-{modes}*.jsonl")):
            for source, row in _lines(path):
                rows += _speeds(source, row)
    for pattern in (
        "rollout/native-*",
        "int8/rollout/native-int8-qwen*",
        "reward_model/reward-model-*",
        "parallel/ranks-*",
    ):
        for path in sorted(RESULTS.glob(f"{pattern}.jsonl")):
            for source, row in _lines(path):
                rows += _speeds(source, row)
    return rows


def whole_steps() -> Iterator[Row]:
    """Steps of reinforcement learning, with what is estimated of them from the other rows."""
    for path in [
        *sorted((RESULTS / "end_to_end").glob("native-[!i]*.jsonl")),
        *sorted((RESULTS / "end_to_end/int8").glob("native-int8-*.jsonl")),  # as it is now
        *sorted((RESULTS / "parallel").glob("ranks-*.jsonl")),
    ]:
        for source, row in _lines(path):
            if row["kind"] == "rl" or (row["kind"] == "step" and "rollout" in row["phases_s"]):
                about = {key: row[key] for key in ("mode", "shape", "seconds")}
                about |= {"source": source, "card": row["card"]["name"]}
                yield {"phase": "whole", **about, "estimated_s": round(_whole_step(row), 1)}


def _whole_step(row: Row) -> float:
    """Seconds, estimated of a measured step."""
    if row["kind"] == "rl":
        case, ranks = STEP_CASES[row["case"]], 1
    else:
        of_case = STEP_CASES["2k"]
        prompts, ranks = row["sequences"] // of_case.samples, row["ranks"]
        case = replace(of_case, prompts=prompts, new_tokens=row["new_tokens"])
    shape = SpeedShape.named(row["shape"], row["mode"])
    planner = replace(card_planner(shape.config, row["mode"], int(H200_GIB * GIB)), processes=ranks)
    training = _training(row["recompute"], row["tokens_per_microbatch"])
    plan = planner.plan(RolloutConfig(max_new_tokens=case.new_tokens), training, case.length)
    step = StepWork(
        shape=shape,
        sequences=case.sequences,
        length=case.length,
        recompute=row["recompute"],
        trainers=ranks,
        prompts=case.prompts,
        prompt_tokens=case.prompt_tokens,
        samples=case.samples,
        new_tokens=case.new_tokens,
        cached_tokens=plan.pages * plan.page_tokens,
        samplers=ranks,
    )
    return estimate_step(step).total


def _lines(path: Path) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        yield f"{path.relative_to(RESULTS).as_posix()}:{number}", json.loads(line)


def _speeds(source: str, row: Row) -> Iterator[Row]:
    """The rows that a measured row gives, by phase."""
    about = {"source": source, "card": row["card"]["name"], "mode": row["mode"]}
    about["shape"] = row["shape"]
    kind = row.get("kind")
    if kind in ("pass", "step") and "length" in row:
        tokens = row.get("step_tokens", row["length"] * row["sequences"])
        size = {"tokens": tokens, "length": row["length"]}
        phases = row.get("phases_s", {})
        passes = phases["forward"] + phases["backward"] if phases else row["seconds"]
        recompute = row["recompute"]
        yield {"phase": "training", **about, **size, "recompute": recompute, "seconds": passes}
        if phases:
            size["head_tokens"] = tokens
            yield {"phase": "forward", **about, **size, "seconds": phases["forward"]}
    elif row["engine"] == "reward-model":
        size = {"tokens": row["sequences"] * row["length"], "length": row["length"]}
        yield {"phase": "forward", **about, **size, "head_tokens": 0, "seconds": row["seconds"]}
    elif row["engine"] == "native" and not row["stats"]["preemptions"]:
        case = ROLLOUT_CASES[row["case"]]
        if case.spread:  # which the estimate does not know
            return
        if case.new_tokens == 1:
            size = {"tokens": case.counted_tokens, "length": case.prompt_tokens}
            size["head_tokens"] = case.requests
            yield {"phase": "forward", **about, **size, "seconds": row["seconds"]}
        else:
            sizes = {key: n for key, n in asdict(case).items() if key != "spread"}
            yield {"phase": "rollout", **about, **sizes, "seconds": row["seconds"]}
    elif kind == "training" and row["note"] == "copy engines":
        yield {"phase": "round", **about, "ranks": row["ranks"], "seconds": row["round_s"]}
    elif kind == "step" and row["ranks"] == 1:
        tokens = row["sequences"] * row["new_tokens"]
        other = row["phases_s"]["other"]
        yield {"phase": "other", **about, "tokens": tokens, "seconds": other}


def _training(recompute: Recompute, tokens: int, moments: Moments = "bf16") -> TrainingConfig:
    return TrainingConfig(moments=moments, recompute=recompute, tokens_per_microbatch=tokens)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def _table(head: list[str], lines: list[list[str]], figures: set[int]) -> str:
    rule = ["---:" if column in figures else "---" for column in range(len(head))]
    return "\n".join(map(markdown, (head, rule, *lines)))


NEW_TOKENS = 8
SHORT, LONG, SAMPLES = (80, 64), 2, 4  # prompts and their tokens, long prompts, samples of each


class BothWays(Clock):
    """Counts the two ways of the moments apart: a turn of the trainer begins with the one and ends
    with the other.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ways = cycle(("moments to the GPU", "moments to the host"))

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """As a clock, and each ``offload`` under the way that it is."""
        with super().__call__(name):
            if name != "offload":
                yield
                return
            with super().__call__(next(self._ways)):
                yield


def two_steps(
    case: PassCase,
    moments: Moments,
    offload_moments: bool,
    kv_memory_gib: float | None = None,
    limit_gib: float | None = None,
    lora_rank: int | None = None,
) -> Row:
    """GiB by phase and part, planned and measured, and the seconds of the second step.  Raises
    ConfigError for a plan that does not fit.
    """
    rollout = RolloutConfig(max_new_tokens=NEW_TOKENS, kv_memory_gib=kv_memory_gib)
    training = TrainingConfig(
        moments=moments,
        recompute=case.recompute,
        tokens_per_microbatch=case.tokens,
        offload_moments=offload_moments,
    )
    config, total = case.config, None
    if lora_rank is not None:
        config = replace(config, lora=Lora(lora_rank, 2.0 * lora_rank, LORA_TARGETS))
    if limit_gib is not None:
        total = int(limit_gib * GIB)
        torch.cuda.set_per_process_memory_fraction(total / torch.cuda.mem_get_info()[1])
    plan = card_planner(config, case.mode, total).plan(rollout, training, case.length)
    print("\n".join(plan.describe()), file=sys.stderr, flush=True)
    allocate_in_pages()
    policy = random_policy(config, precision_of(case.mode), seed=0, device=CARD)
    engine = NativeEngine(policy, rollout.model_copy(update={"kv_pages": plan.pages}), None, seed=0)
    trainer, batches = Trainer(policy, training, total_updates=1000), case.batches(2)
    turns, clock = DeviceSharing(plan, engine, trainer), BothWays()
    seconds: dict[str, float] = {}
    reserved: dict[str, int] = {}
    for step in range(2):
        with clock("rollout"):
            generate(engine, _requests(case, step))
        reserved["rollout"] = torch.cuda.max_memory_reserved()
        with clock("training"), turns.training(clock):
            metrics = trainer.update(batches, SupervisedObjective())
            reserved["training"] = torch.cuda.max_memory_reserved()
        assert metrics.skipped is None, metrics.skipped
        seconds = clock.take()
    return {
        "moments": moments,
        "offload_moments": offload_moments,
        "total_gib": plan.total / GIB,
        "planned_gib": _in_gib(plan.peaks),
        "peak_gib": {phase: turns.figures()[f"memory/{phase}_peak_gib"] for phase in plan.peaks},
        "reserved_gib": _in_gib(reserved),
        "rollout_parts_gib": _in_gib(plan.rollout),
        "training_parts_gib": _in_gib(plan.training),
        "kv_pages": plan.pages,
        "kv_tokens": plan.pages * plan.page_tokens,
        "seconds": seconds,
    }


def _requests(case: PassCase, step: int) -> list[Request]:
    generator = torch.Generator().manual_seed(step)
    longest = case.length - NEW_TOKENS
    lengths = [longest] * LONG + [min(SHORT[1], longest)] * SHORT[0]
    vocabulary = case.config.vocab_size
    prompts = [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths]
    return make_requests(prompts, NEW_TOKENS, SAMPLES, step)


def _in_gib(sizes: Mapping[str, int]) -> dict[str, float]:
    return {name: size / GIB for name, size in sizes.items()}


if __name__ == "__main__":
    sys.exit(run_command(make_commands().parser))
