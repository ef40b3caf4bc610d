"""The rows of a folder as two tables, passes and steps: ratios to our own BF16 and to the fastest
transformers row, on one card each.
"""

import json
from pathlib import Path

from benchmarks.comparison.rows import Row, read_rows

HEADERS = {
    "pass": (
        "| L x sequences | engine | recompute | tokens/s | model TFLOP/s "
        "| of isobit `bf16` | of transformers | peak GiB |"
    ),
    "step": (
        "| L x sequences | engine | recompute | tokens a step | forward s | backward s "
        "| optimiser s | publish s | tokens/s | of isobit `bf16` | of transformers | peak GiB |"
    ),
}
TITLES = {"pass": "Forward and backward", "step": "Whole steps"}
PHASES = ("forward", "backward", "optimiser", "publish")


def run_table(directory: Path) -> None:
    """Print the tables, and write their lines to ``DIR/training-table.json``."""
    rows = read_rows(directory)
    tables = {
        kind: make_lines([row for row in rows if row.get("kind") == kind]) for kind in HEADERS
    }
    for kind, lines in tables.items():
        rule = "|---|---|---|" + "---:|" * (HEADERS[kind].count("|") - 4)
        for shape, card in dict.fromkeys((line["shape"], line["card"]["uuid"]) for line in lines):
            body = [
                _markdown(line)
                for line in lines
                if (line["shape"], line["card"]["uuid"]) == (shape, card)
            ]
            print(
                "\n".join(
                    [f"{TITLES[kind]}, {shape}, card {card}", "", HEADERS[kind], rule, *body, ""]
                )
            )
    (directory / "training-table.json").write_text(json.dumps(tables, indent=2) + "\n")


def make_lines(rows: list[Row]) -> list[Row]:
    """Each row with its ratios; None where that card has nothing to compare with.  Of repeated
    measurements the last one counts.

    A pass is held against our BF16 pass at the same setting; a step, whose micro-batch is what
    fits, against the fastest BF16 step of the same length.
    """
    latest = {_key(row): row for row in rows}
    lines = []
    for row in latest.values():
        measured = [
            other
            for other in latest.values()
            if "error" not in other and _family(other) == _family(row)
        ]
        ours = [
            o
            for o in measured
            if (o["engine"], o["mode"]) == ("native", "bf16")
            and (row["kind"] == "step" or _same(o, row))
        ]
        theirs = [o for o in measured if o["engine"] == "transformers"]
        lines.append(
            row | {"of_native_bf16": _ratio(row, ours), "of_transformers": _ratio(row, theirs)}
        )
    return sorted(lines, key=_order)


def _ratio(row: Row, others: list[Row]) -> float | None:
    if "error" in row or not others:
        return None
    return row["tokens_per_s"] / max(other["tokens_per_s"] for other in others)


def _family(row: Row) -> tuple[object, ...]:
    return row["kind"], row["shape"], row["length"], row["card"]["uuid"]


def _same(row: Row, other: Row) -> bool:
    return all(row[name] == other[name] for name in ("sequences", "recompute"))


def _key(row: Row) -> tuple[object, ...]:
    return *_family(row), row["engine"], row["mode"], row["sequences"], row["recompute"]


def _order(line: Row) -> tuple[object, ...]:
    return (
        line["shape"],
        line["card"]["uuid"],
        line["length"],
        line["engine"],
        line["mode"],
        line["recompute"],
        line["sequences"],
    )


def _markdown(line: Row) -> str:
    name = f"isobit `{line['mode']}`" if line["engine"] == "native" else "transformers BF16"
    cells = [f"{line['length']:,} x {line['sequences']}", name, line["recompute"]]
    if "error" in line:
        return f"| {' | '.join(cells)} | {line['error']} |"
    ratios = [
        "-" if line[key] is None else f"{line[key]:.2f}"
        for key in ("of_native_bf16", "of_transformers")
    ]
    if line["kind"] == "pass":
        cells += [f"{line['tokens_per_s']:,.0f}", f"{line['model_tflop_per_s']:.0f}", *ratios]
    else:
        phases = [f"{line['phases_s'].get(name, 0.0):.2f}" for name in PHASES]
        cells += [f"{line['step_tokens']:,}", *phases, f"{line['tokens_per_s']:,.0f}", *ratios]
    cells.append(f"{line['peak_gib']:.0f}")
    return f"| {' | '.join(cells)} |"
