"""What the curves of a folder show, and whether it is what they have to show."""

import json
from itertools import groupby
from pathlib import Path
from statistics import fmean

from comparison.rows import Row, read_rows

LAST = 10
"""Steps whose mean loss is a run's final one."""
HALVED, NEAR, CHANGED = 0.5, 0.005, 0.01
"""The bars: final loss of the first one, fp8's final loss from bf16's, and weight bytes that each step changes."""


def run_table(directory: Path) -> None:
    """Print both tables, and write their lines to ``DIR/table.json``."""
    runs = last_runs(read_rows(directory))
    supervised = [supervised_line(rows) for (kind, *_), rows in runs.items() if kind == "sft"]
    reinforced = [reinforced_line(rows) for (kind, *_), rows in runs.items() if kind == "rl"]
    add_ratios(supervised)
    print(markdown(supervised), "", markdown(reinforced), sep="\n")
    (directory / "table.json").write_text(json.dumps({"supervised": supervised, "reinforced": reinforced}, indent=2) + "\n")


def last_runs(rows: list[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """The rows of each kind, shape and flow, from the last first step on."""
    runs: dict[tuple[str, str, str], list[Row]] = {}
    for key, group in groupby(rows, key=lambda row: (row["engine"], row["shape"], row["mode"])):
        kept = list(group)
        starts = [i for i, row in enumerate(kept) if row["step"] == 1 and "loss" in row]
        runs[key] = kept[starts[-1] :]
    return runs


def supervised_line(rows: list[Row]) -> Row:
    """Of one run."""
    losses = [row["loss"] for row in rows if "loss" in row]
    first, last = losses[0], fmean(losses[-LAST:])
    return {
        **_who(rows[0]),
        "steps": len(losses),
        "first_loss": first,
        "last_loss": last,
        "held_out_loss": next((row["held_out_loss"] for row in rows if "held_out_loss" in row), None),
        "seconds": sum(row["seconds"] for row in rows if "loss" in row),
        "skipped": sum(row["skipped"] is not None for row in rows if "loss" in row),
        "halved": last <= HALVED * first,
    }


def add_ratios(lines: list[Row]) -> None:
    """Each line's distance from ``bf16`` of the same shape: the share by which its final loss is higher."""
    for line in lines:
        others = [other["last_loss"] for other in lines if (other["shape"], other["mode"]) == (line["shape"], "bf16")]
        above = line["last_loss"] / others[0] - 1 if others else None
        line |= {"above_bf16": above, "near_bf16": None if above is None else abs(above) <= NEAR}


def reinforced_line(rows: list[Row]) -> Row:
    """Of one run."""
    return {
        **_who(rows[0]),
        "steps": len(rows),
        "first_reward": rows[0]["reward_mean"],
        "last_reward": rows[-1]["reward_mean"],
        "least_std": min(row["reward_std"] for row in rows),
        "tokens_compared": sum(row["tokens_compared"] for row in rows),
        "tokens_differing": sum(row["tokens_differing"] for row in rows),
        "least_changed": min(row["weight_bytes_changed"] for row in rows),
        "skipped": sum(row["skipped"] is not None for row in rows),
        "seconds": sum(row["rollout_seconds"] + row["training_seconds"] for row in rows),
        "peak_gib": rows[-1]["peak_gib"],
        "exact": all(row["tokens_compared"] > 0 and row["tokens_differing"] == 0 for row in rows),
        "changed_enough": all(row["weight_bytes_changed"] >= CHANGED for row in rows),
    }


def markdown(lines: list[Row]) -> str:
    """A column a figure."""
    if not lines:
        return "(no such run)"
    head = [name for name in lines[0] if name != "card"]
    body = [[_cell(line[name]) for name in head] for line in lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body))


def _who(row: Row) -> Row:
    return {"shape": row["shape"], "mode": row["mode"], "card": row["card"]["uuid"]}


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
