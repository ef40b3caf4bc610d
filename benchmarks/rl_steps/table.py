"""The rows of a folder as a table of whole steps; the outside baseline is vLLM's rollout and
transformers' training on one card.
"""

import json
from pathlib import Path

from benchmarks.comparison.rows import Row, read_rows
from benchmarks.rl_steps.cases import CASES

PHASES = ("rollout", "old_log_probs", "forward", "backward", "optimiser", "publish")
HEADER = (
    "| case | engine | micro-batch | rollout s | old log-probs s | forward s | backward s | "
    "optimiser s | publish s | other s | "
    "training phase s | step s | training x outside | training x `bf16` | step x outside | "
    "differing | bytes changed | peak GiB |"
)
OUTSIDE = "vLLM BF16 + transformers BF16"
NOTE = (
    "A micro-batch is what its backward computes again, and its tokens at most. The training phase "
    "is all that is not rollout; `x` is how "
    "many times as fast. The outside line is the sum of two commands on one card: its weights' way "
    "to vLLM, and vLLM's sleeping and "
    "waking, are not counted."
)


def run_table(directory: Path) -> None:
    """Print the table, and write its lines to ``DIR/end-to-end-table.json``."""
    lines = make_lines([row for row in read_rows(directory) if row.get("kind") == "rl"])
    for shape, card in dict.fromkeys((line["shape"], line["card"]["uuid"]) for line in lines):
        body = [
            _markdown(line)
            for line in lines
            if (line["shape"], line["card"]["uuid"]) == (shape, card)
        ]
        print(
            "\n".join(
                [f"{shape}, card {card}", "", HEADER, "|---|---|---|" + "---:|" * 15, *body, ""]
            )
        )
    print(NOTE)
    (directory / "end-to-end-table.json").write_text(json.dumps(lines, indent=2) + "\n")


def make_lines(rows: list[Row]) -> list[Row]:
    """A line for each of our rows, for each baseline, and for each half of one that has no other on
    its card.

    Of repeated measurements the last one counts; a ratio is None where a card has nothing to
    compare with.
    """
    latest = {
        (row["shape"], row["case"], row["card"]["uuid"], row["engine"], row["mode"]): row
        for row in rows
    }
    lines = _joined([row | {"name": _name(row)} for row in latest.values()])
    return sorted((line | _ratios(line, lines) for line in lines), key=_order)


def _joined(rows: list[Row]) -> list[Row]:
    """vLLM's and transformers' rows of one card and case become one line."""
    halves = {
        (row["part"], *_place(row)): row
        for row in rows
        if row["part"] != "whole" and "error" not in row
    }
    joined, used = [], set()
    for (part, *_), rollout in halves.items():
        training = halves.get(("training", *_place(rollout)))
        if part == "rollout" and training is not None:
            used |= {id(rollout), id(training)}
            seconds, phases = (
                rollout["seconds"] + training["seconds"],
                rollout["phases_s"] | training["phases_s"],
            )
            whole = {
                "name": OUTSIDE + _scaled(training),
                "engine": "outside",
                "part": "whole",
                "seconds": seconds,
                "phases_s": phases,
            }
            joined.append(training | whole)
    return [row for row in rows if id(row) not in used] + joined


def _ratios(line: Row, lines: list[Row]) -> Row:
    whole = [
        other
        for other in lines
        if other["part"] == "whole" and "error" not in other and _place(other) == _place(line)
    ]
    outside = next((other for other in whole if other["engine"] == "outside"), None)
    bf16 = next(
        (other for other in whole if (other["engine"], other["mode"]) == ("native", "bf16")), None
    )
    if line not in whole:
        outside = bf16 = None
    return {
        "training_x_outside": training_seconds(outside) / training_seconds(line)
        if outside
        else None,
        "training_x_bf16": training_seconds(bf16) / training_seconds(line) if bf16 else None,
        "step_x_outside": outside["seconds"] / line["seconds"] if outside else None,
    }


def training_seconds(line: Row) -> float:
    """All that is not rollout."""
    return line["seconds"] - line["phases_s"].get("rollout", 0.0)


def _name(row: Row) -> str:
    return (
        f"isobit `{row['mode']}`"
        if row["engine"] == "native"
        else f"{row['engine']} BF16, {row['part']} alone{_scaled(row)}"
    )


def _scaled(row: Row) -> str:
    """A remark where a part of the batch was measured for the whole."""
    measured, all_of_them = row.get("sequences_measured"), CASES[row["case"]].sequences
    return (
        ""
        if measured in (None, all_of_them)
        else f" (training scaled from {measured} of {all_of_them} sequences)"
    )


def _place(row: Row) -> tuple[str, str, str]:
    return row["shape"], row["case"], row["card"]["uuid"]


def _order(line: Row) -> tuple[object, ...]:
    return (
        line["shape"],
        line["card"]["uuid"],
        list(CASES).index(line["case"]),
        line["engine"] == "native",
        line["name"],
    )


def _markdown(line: Row) -> str:
    if "error" in line:
        return f"| {line['case']} | {line['name']} | {line['error']} |"
    phases = line["phases_s"]
    other = sum(seconds for name, seconds in phases.items() if name not in PHASES)
    times = [
        *(phases.get(name) for name in PHASES),
        other,
        training_seconds(line) or None,
        line["seconds"],
    ]
    ratios = [line[key] for key in ("training_x_outside", "training_x_bf16", "step_x_outside")]
    differing = (
        f"{line['tokens_differing']:,} of {line['tokens_compared']:,}"
        if "tokens_compared" in line
        else "-"
    )
    changed = f"{line['weight_bytes_changed']:.1%}" if "weight_bytes_changed" in line else "-"
    peak = max((memory["peak_gib"] for memory in line.get("memory", {}).values()), default=None)
    microbatch = (
        f"{line['recompute']} {line['tokens_per_microbatch']:,}" if "recompute" in line else "-"
    )
    cells = [
        line["case"],
        line["name"],
        microbatch,
        *(_figure(x, 1) for x in times),
        *(_figure(x, 2) for x in ratios),
        differing,
        changed,
    ]
    return f"| {' | '.join([*cells, _figure(peak, 0)])} |"


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
