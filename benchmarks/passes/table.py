"""The rows of a folder as a table: ratios to our own BF16 at the same setting, and to the fastest transformers row, on one card each."""

import json
from pathlib import Path

from comparison.rows import Row, read_rows

HEADER = "| L x sequences | engine | recompute | tokens/s | model TFLOP/s | of isobit `bf16` | of transformers | peak GiB |"


def run_table(directory: Path) -> None:
    """Print the table, and write its lines to ``DIR/table.json``."""
    lines = make_lines(read_rows(directory))
    print("\n".join([HEADER, "|---|---|---|" + "---:|" * 5, *map(_markdown, lines)]))
    (directory / "table.json").write_text(json.dumps(lines, indent=2) + "\n")


def make_lines(rows: list[Row]) -> list[Row]:
    """Each row with its ratios; None where that card has nothing to compare with.  Of repeated measurements the last one counts."""
    latest = {_key(row): row for row in rows}
    lines = []
    for row in latest.values():
        same = [other for other in latest.values() if (other["card"]["uuid"], other["shape"]) == (row["card"]["uuid"], row["shape"])]
        ours = [o for o in same if _key(o) == (row["shape"], "native", "bf16", *_key(row)[3:])]
        theirs = [o for o in same if o["engine"] == "transformers" and o["length"] == row["length"]]
        lines.append(row | {"of_native_bf16": _ratio(row, ours), "of_transformers": _ratio(row, theirs)})
    return sorted(lines, key=lambda line: (line["shape"], line["length"], line["recompute"], line["engine"], line["mode"]))


def _ratio(row: Row, others: list[Row]) -> float | None:
    return row["tokens_per_s"] / max(other["tokens_per_s"] for other in others) if others else None


def _key(row: Row) -> tuple[object, ...]:
    case = row["length"], row["sequences"], row["recompute"], row["card"]["uuid"]
    return row["shape"], row["engine"], row["mode"], *case


def _markdown(line: Row) -> str:
    name = f"isobit `{line['mode']}`" if line["engine"] == "native" else "transformers BF16"
    ratios = ["-" if line[key] is None else f"{line[key]:.2f}" for key in ("of_native_bf16", "of_transformers")]
    figures = [f"{line['tokens_per_s']:,.0f}", f"{line['model_tflop_per_s']:.0f}", *ratios, f"{line['peak_gib']:.0f}"]
    cells = [f"{line['length']:,} x {line['sequences']}", name, "full" if line["recompute"] else "no", *figures]
    return f"| {' | '.join(cells)} |"
