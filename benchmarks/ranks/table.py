"""Several ranks beside one, as ratios of one sitting."""

from pathlib import Path
from typing import Any

from benchmarks.comparison.rows import Row, read_rows


def run_table(directory: Path) -> None:
    """Print a line for everything that was measured with one rank and with several."""
    rows = read_rows(directory)
    alone = {_key(row): row for row in rows if row["ranks"] == 1 and "error" not in row}
    print("| what | ranks | one | several | ratio |")
    print("|---|---:|---:|---:|---:|")
    for row in rows:
        one = alone.get(_key(row))
        if row["ranks"] == 1 or "error" in row or one is None:
            continue
        for name, ours, theirs in _compared(row, one):
            if isinstance(ours, str):
                same = "equal" if ours == theirs else "DIFFERENT"
                print(f"| {name} | {row['ranks']} | {theirs[:12]} | {ours[:12]} | {same} |")
            else:
                print(
                    f"| {name} | {row['ranks']} | {theirs:,.3f} | {ours:,.3f} | "
                    f"{ours / theirs:.3f} |"
                )


def _key(row: Row) -> tuple[object, ...]:
    """What must agree for a comparison; a weak-scaled step has more sequences a rank."""
    sequences = row.get("sequences")
    if row["kind"] == "step" and sequences is not None:
        sequences //= row["ranks"]
    return row["kind"], row["mode"], row["shape"], row.get("case"), row.get("step"), sequences


def _compared(row: Row, one: Row) -> list[tuple[str, Any, Any]]:
    """Name, several, one."""
    names = {
        "training": ("tokens_per_s", "round_s"),
        "step": ("rollout_tokens_per_s", "seconds"),
        "digests": ("published", "masters"),
        "proof": ("published", "completions"),
    }.get(row["kind"], ())
    note = f" ({row['note']})" if row.get("note") else ""
    found = [(f"{row['kind']} {name}{note}", row[name], one[name]) for name in names]
    if row["kind"] == "step":
        ours = row["sequences"] / row["seconds"]
        found.append(("step sequences a second", ours, one["sequences"] / one["seconds"]))
    return found
