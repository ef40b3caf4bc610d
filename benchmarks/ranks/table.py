"""Several ranks beside one, as ratios of one sitting: a row is compared with rows of its card."""

from pathlib import Path
from typing import Any

from benchmarks.comparison.rows import Row, read_rows

NAMES = {
    "training": ("tokens_per_s", "round_s"),
    "step": ("rollout_tokens_per_s", "seconds"),
    "digests": ("published", "masters"),
    "proof": ("published", "completions"),
    "split": ("seconds",),
}


def run_table(directory: Path) -> None:
    """Print a line for everything that was measured with one rank and with several, and for a
    split beside the same step of ranks that do both.
    """
    rows = [row for row in read_rows(directory) if "error" not in row]
    bases = {_key(row): row for row in rows if row["ranks"] == 1}
    together = {_key(row): row for row in rows if row["ranks"] > 1 and row["kind"] == "step"}
    print("| what | ranks | base | ours | ratio |")
    print("|---|---:|---:|---:|---:|")
    for row in rows:
        base = together.get(_key(row)) if row["kind"] == "split" else bases.get(_key(row))
        if row["ranks"] == 1 or base is None:
            continue
        for name, ours, theirs in _compared(row, base):
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
    kind, sequences = row["kind"], row.get("sequences")
    if kind in ("step", "split") and sequences is not None:
        sequences //= row["ranks"]
    kind = "step" if kind == "split" else kind
    sitting = row["card"].get("uuid")
    return sitting, kind, row["mode"], row["shape"], row.get("case"), row.get("step"), sequences


def _compared(row: Row, base: Row) -> list[tuple[str, Any, Any]]:
    """Name, ours, base's."""
    kind = row["kind"]
    notes = (row.get("note"), f"recompute {row['recompute']}" if kind == "step" else None)
    note = "".join(f" ({one})" for one in notes if one)
    found = [(f"{kind} {name}{note}", row[name], base[name]) for name in NAMES.get(kind, ())]
    if kind == "step":
        ours = row["sequences"] / row["seconds"]
        theirs = base["sequences"] / base["seconds"]
        found.append((f"step sequences a second{note}", ours, theirs))
        if "phases_s" in row:  # on a GPU
            found.append((f"step training_s a sequence{note}", *map(_training_s, (row, base))))
    return found


def _training_s(row: Row) -> float:
    """Seconds a sample in forwards, backwards, optimiser and publication."""
    names = ("forward", "backward", "optimiser", "publish")
    return sum(row["phases_s"][name] for name in names) / row["sequences"]
