"""Rollout on one Hopper GPU: this engine, vLLM, and the floor under both, with the shape of a real
model and random weights.

    python -m benchmarks.rollout native --precision fp8 [--shape qwen3-8b] [--cases CASES] --out DIR
                                        [--tensor-parallel 2]     one engine on so many GPUs
    python -m benchmarks.rollout vllm --mode fp8 [--log-probs short,long] ... --out DIR
    python -m benchmarks.rollout floor --precision fp8 ... --out DIR
    python -m benchmarks.rollout steps --precisions fp8,int8 --counts 1,8,32,128 --out DIR
    python -m benchmarks.rollout steps-vllm --mode bf16 --counts 1,8,32,128 --out DIR
    python -m benchmarks.rollout table DIR          # markdown, and DIR/table.json

CASES are some of prefill,short,long,context, which are the default, and ragged, whose lengths are
log-normal (no floor).  ``vllm`` runs where vLLM can be imported, and takes ``context`` alone, in a
call of its own.

Each command appends its rows to a file of DIR as they come, with the card's UUID, copy bandwidth
and versions; ``table`` compares rows of one card.  All requests of a case come at once, prompts are
random tokens, sampling is at temperature 1 over the full vocabulary, and every request gets exactly
its number of tokens.  Tokens a second are generated tokens over the time of the whole call, prompts
included; in ``prefill`` they are the prompts' tokens.  Startup is the time from the start of the
process to the first token.

The rows of a folder as a table: tokens a second, ratios to vLLM on the same card, and the share
of the floor.

A ratio is taken within one card only.  A row from a card without a vLLM BF16 row of its own is
refused as soon as any card has one for that case, and so are the rows that carry the bars where no
card has all of them.  vLLM's own rows are held against the figures that it reached on the reference
card: one that is more than a tenth lower, the cards' bandwidths allowed for, voids the table.
"""

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

_STARTED_AT = perf_counter()  # startup counts from here: what follows imports torch

from benchmarks.cases import MODES, ROLLOUT_CASES  # noqa: E402
from benchmarks.common import (  # noqa: E402
    Commands,
    Row,
    names_of,
    read_rows,
    run_command,
    write_json,
)
from benchmarks.common import markdown as cells_of  # noqa: E402
from isobit.util.errors import ConfigError  # noqa: E402


def make_commands() -> Commands:
    commands = Commands(__doc__)
    cases = names_of(ROLLOUT_CASES, "cases")
    ours = commands.add("native", native)
    ours.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="GPUs that share one engine"
    )
    ours.add_argument("--speculation", type=int, help="guesses behind a sequence")
    theirs = commands.add("vllm", peer)
    theirs.add_argument(
        "--log-probs",
        type=cases,
        default=[],
        metavar="CASES",
        help="these a second time, with log-probabilities",
    )
    for command in (ours, theirs, commands.add("floor", floor)):
        flag = "--mode" if command is theirs else "--precision"
        choices = tuple(PEER) if command is theirs else MODES
        command.add_argument(flag, dest="mode", choices=choices, required=True)
        chosen = ["prefill", "short", "long", *([] if command is theirs else ["context"])]
        command.add_argument("--cases", type=cases, default=chosen)
    each = commands.add("steps", steps)
    each.add_argument("--precisions", type=names_of(MODES, "precisions"), required=True)
    theirs = commands.add("steps-vllm", peer_steps)
    theirs.add_argument("--mode", choices=tuple(PEER), required=True)
    for command in (each, theirs):
        command.add_argument("--counts", type=_counts, default=[1, 8, 32, 64, 128])
    commands.add_table(run_table)
    return commands


def _counts(text: str) -> list[int]:
    return [int(count) for count in text.split(",")]


# Engines are imported when a command runs them: vLLM is not everywhere.


def native(arguments: argparse.Namespace) -> None:
    from benchmarks.rollout_engines import run_native, run_shared

    case = arguments.mode, arguments.shape, arguments.cases, arguments.out, _STARTED_AT
    if arguments.tensor_parallel > 1:
        run_shared(*case, arguments.tensor_parallel)
    else:
        run_native(*case, arguments.speculation)


def steps(arguments: argparse.Namespace) -> None:
    from benchmarks.rollout_engines import run_steps

    run_steps(arguments.precisions, arguments.shape, arguments.counts, arguments.out)


def peer_steps(arguments: argparse.Namespace) -> None:
    from benchmarks.rollout_engines import run_peer_steps

    run_peer_steps(arguments.mode, arguments.shape, arguments.counts, arguments.out)


def peer(arguments: argparse.Namespace) -> None:
    from benchmarks.rollout_engines import run_peer

    case = arguments.mode, arguments.shape, arguments.cases, arguments.log_probs
    run_peer(*case, arguments.out, _STARTED_AT)


def floor(arguments: argparse.Namespace) -> None:
    from benchmarks.rollout_floor import run_floor

    run_floor(arguments.mode, arguments.shape, arguments.cases, arguments.out)


REFERENCE_COPY_TB_PER_S = 4.27
REFERENCE = {
    ("prefill", "bf16"): 43128,
    ("prefill", "fp8-linear"): 67314,
    ("prefill", "fp8"): 65676,
    ("short", "bf16"): 12155,
    ("short", "fp8-linear"): 14150,
    ("short", "fp8"): 15288,
    ("long", "bf16"): 7818,
    ("long", "fp8-linear"): 8716,
    ("long", "fp8"): 10976,
}
"""vLLM 0.25.1 with the shape of Qwen3-8B on one H200, without log-probabilities, tokens a
second.
"""
REFERENCE_SHAPE = "qwen3-8b"
TOLERATED = 0.9
PEER = {"bf16": "BF16", "fp8-linear": "FP8 linears", "fp8": "FP8+KV"}  # what vLLM has of the modes
BASELINE = ("vllm", "bf16")
BARS = (BASELINE, ("native", "bf16"), ("native", "fp8"))
BARS_BESIDE_FP8 = {"long"}
"""Cases with a bar beside vLLM's FP8+KV too."""
NAMES = {
    "native": "isobit",
    **{f"native-tp{ranks}": f"isobit on {ranks} GPUs" for ranks in (2, 4, 8)},
    "vllm": "vLLM",
}
HEADER = (
    "| case | engine | tokens/s | of vLLM BF16 | of vLLM FP8+KV "
    "| of the floor | startup s | memory GiB |"
)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table; None where there is nothing to compare with."""

    shape: str
    case: str
    engine: str
    mode: str
    log_probs: bool
    uuid: str
    tokens_per_s: float
    of_vllm_bf16: float | None
    of_vllm_fp8: float | None
    of_floor: float | None
    startup_s: float
    memory_gib: float
    of_reference: float | None
    """vLLM's rate over its reference figure, scaled by copy bandwidth; below ``TOLERATED`` the
    table is void.
    """


Key = tuple[str, str, str, str, bool, str]


def run_table(directory: Path) -> None:
    """Print the table, and write it to ``DIR/table.json``; then that of single steps."""
    rows = read_rows(directory)
    lines = make_lines([row for row in rows if row["engine"] != "steps"])
    print(markdown(lines))
    print(steps_markdown([row for row in rows if row["engine"] == "steps"]))
    is_void = any(_is_void(line) for line in lines)
    write_json(directory / "table.json", {"void": is_void, "lines": list(map(asdict, lines))})


def make_lines(rows: list[Row]) -> list[Line]:
    """Of several measurements of one thing on one card the last one counts.  Raises ConfigError if
    cards are mixed.
    """
    by_key = {_key(row): row for row in rows}
    _check_cards(set(by_key))

    def rate(row: Row, engine: str, mode: str) -> float | None:
        other = by_key.get((row["shape"], row["case"], engine, mode, False, row["card"]["uuid"]))
        return row["tokens_per_s"] / other["tokens_per_s"] if other else None

    copied = ("shape", "case", "engine", "mode", "log_probs")
    copied += ("tokens_per_s", "startup_s", "memory_gib")
    return [
        Line(
            **{name: row[name] for name in copied},
            uuid=row["card"]["uuid"],
            of_vllm_bf16=rate(row, "vllm", "bf16"),
            of_vllm_fp8=rate(row, "vllm", "fp8"),
            of_floor=None if "-tp" in row["engine"] else rate(row, "floor", row["mode"]),
            of_reference=_of_reference(row),
        )
        for row in sorted((row for row in by_key.values() if row["engine"] != "floor"), key=_order)
    ]


def markdown(lines: list[Line]) -> str:
    """A table for each shape and card."""
    parts = []
    if any(_is_void(line) for line in lines):
        parts.append(
            f"**void**: vLLM is more than {1 - TOLERATED:.0%} below its reference figure in the "
            "lines marked so"
        )
    for shape, uuid in dict.fromkeys((line.shape, line.uuid) for line in lines):
        body = [_markdown_line(line) for line in lines if (line.shape, line.uuid) == (shape, uuid)]
        parts.append(
            "\n".join([f"{shape}, card {uuid}", "", HEADER, "|---|---|" + "---:|" * 6, *body])
        )
    return "\n\n".join(parts)


def steps_markdown(rows: list[Row]) -> str:
    """Milliseconds of decode steps, a table for each shape and card: how many times as fast as
    ``fp8``, and the share of the floor.
    """
    by_key = {(row["shape"], row["card"]["uuid"], row["case"], row["mode"]): row for row in rows}
    parts = list[str]()
    for shape, uuid in dict.fromkeys(key[:2] for key in by_key):
        here = {key[2:]: row for key, row in by_key.items() if key[:2] == (shape, uuid)}
        modes = sorted({mode for _, mode in here}, key=MODES.index)
        lines = [f"{shape}, steps on card {uuid}", "", cells_of(["sequences", *modes])]
        lines.append("|---:|" + "---:|" * len(modes))
        for case in dict.fromkeys(case for case, _ in here):
            fp8 = here.get((case, "fp8"))
            cells = [case.removeprefix("step-")]
            for mode in modes:
                row = here.get((case, mode))
                if row is None:  # not measured
                    cells.append("-")
                    continue
                times = f"{fp8['step_ms'] / row['step_ms']:.2f} x; " if fp8 else ""
                cells.append(
                    f"{row['step_ms']:.2f} ({times}{row['floor_ms'] / row['step_ms']:.0%})"
                )
            lines.append(cells_of(cells))
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _markdown_line(line: Line) -> str:
    kind = PEER[line.mode] if line.engine == "vllm" else f"`{line.mode}`"
    name = f"{NAMES[line.engine]} {kind}" + (
        ", log-probabilities" if line.log_probs and line.engine == "vllm" else ""
    )
    void = f" (void: {line.of_reference:.0%} of the reference)" if _is_void(line) else ""
    ratios = [f"{x:.2f}" if x is not None else "-" for x in (line.of_vllm_bf16, line.of_vllm_fp8)]
    floor = f"{line.of_floor:.0%}" if line.of_floor is not None else "-"
    rest = f"{line.startup_s:.1f}", f"{line.memory_gib:.0f}"
    return cells_of([line.case, name + void, f"{line.tokens_per_s:,.0f}", *ratios, floor, *rest])


def _key(row: Row) -> Key:
    log_probs = row["engine"] == "vllm" and row["log_probs"]  # ours always records them
    return row["shape"], row["case"], row["engine"], row["mode"], log_probs, row["card"]["uuid"]


def _order(row: Row) -> tuple[object, ...]:
    place = list(ROLLOUT_CASES).index(row["case"]), row["engine"] == "native"
    return row["shape"], row["card"]["uuid"], *place, MODES.index(row["mode"]), row["log_probs"]


def _check_cards(keys: set[Key]) -> None:
    baselines = {
        (shape, case, uuid)
        for shape, case, *kind, log_probs, uuid in keys
        if (*kind, log_probs) == (*BASELINE, False)
    }
    for shape, case, engine, mode, _, uuid in sorted(keys):
        others = {other for s, c, other in baselines if (s, c) == (shape, case)}
        if engine != "floor" and others and uuid not in others:
            raise ConfigError(
                f"{engine} {mode}, {shape}, {case} was measured on card {uuid}, vLLM BF16 on "
                f"{', '.join(sorted(others))}: no ratio can be "
                "taken between cards; measure vLLM BF16 on that card too"
            )
    for shape, case in {key[:2] for key in keys}:
        bars = [*BARS, ("vllm", "fp8")] if case in BARS_BESIDE_FP8 else BARS
        cards = [
            {
                uuid
                for s, c, *kind, log_probs, uuid in keys
                if (s, c, *kind, log_probs) == (shape, case, *bar, False)
            }
            for bar in bars
        ]
        if all(cards) and not set.intersection(*cards):
            raise ConfigError(
                f"{shape}, {case}: no single card has all rows that carry the bars: "
                f"{', '.join(map(' '.join, bars))}"
            )


def _of_reference(row: Row) -> float | None:
    reference = REFERENCE.get((row["case"], row["mode"]))
    measured = row["engine"], row["shape"], row["log_probs"]
    if reference is None or measured != ("vllm", REFERENCE_SHAPE, False):
        return None
    scale = row["card"]["copy_tb_per_s"] / REFERENCE_COPY_TB_PER_S
    return row["tokens_per_s"] / (reference * scale)


def _is_void(line: Line) -> bool:
    return line.of_reference is not None and line.of_reference < TOLERATED


if __name__ == "__main__":
    sys.exit(run_command(make_commands().parser))
