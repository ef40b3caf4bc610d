"""What the curves of a folder show, and whether it is what they have to show."""

import json
from pathlib import Path
from statistics import fmean

from benchmarks.common import Row, read_rows

LAST = 10
"""Steps whose mean loss is a run's final one."""
HALVED, NEAR, CHANGED = 0.5, 0.005, 0.01
"""The bars: final loss of the first one, fp8's final loss from bf16's, and weight bytes that each
step changes.
"""


def run_table(directory: Path) -> None:
    """Print both tables, and write their lines to ``DIR/table.json``."""
    runs = last_runs(read_rows(directory))
    supervised = [supervised_line(rows) for rows in runs if rows[0]["engine"] == "sft"]
    reinforced = [reinforced_line(rows) for rows in runs if rows[0]["engine"] == "rl"]
    add_ratios(supervised)
    print(markdown(supervised), "", markdown(reinforced), sep="\n")
    (directory / "table.json").write_text(
        json.dumps({"supervised": supervised, "reinforced": reinforced}, indent=2) + "\n"
    )


def last_runs(rows: list[Row]) -> list[list[Row]]:
    """The rows of each run; of repeated ones (the same kind, shape, flow, seed and learning rate)
    the last.
    """
    runs: list[list[Row]] = []
    for row in rows:
        if row["step"] == 1 and "loss" in row:
            runs.append([])
        runs[-1].append(row)
    return list({(run[0]["engine"], *_key(run), run[0]["mode"]): run for run in runs}.values())


def supervised_line(rows: list[Row]) -> Row:
    losses = [row["loss"] for row in rows if "loss" in row]
    first, last = losses[0], fmean(losses[-LAST:])
    return {
        **_who(rows),
        "steps": len(losses),
        "first_loss": first,
        "last_loss": last,
        "held_out_loss": next(
            (row["held_out_loss"] for row in rows if "held_out_loss" in row), None
        ),
        "seconds": sum(row["seconds"] for row in rows if "loss" in row),
        "skipped": sum(row["skipped"] is not None for row in rows if "loss" in row),
        "halved": last <= HALVED * first,
    }


def add_ratios(lines: list[Row]) -> None:
    """Each line's distance from ``bf16`` of the same shape, seed and learning rate: the share by
    which its final loss is higher.
    """
    for line in lines:
        same = [
            other
            for other in lines
            if all(other[name] == line[name] for name in ("shape", "seed", "learning_rate"))
        ]
        others = [other["last_loss"] for other in same if other["mode"] == "bf16"]
        above = line["last_loss"] / others[0] - 1 if others else None
        line |= {"above_bf16": above, "near_bf16": None if above is None else abs(above) <= NEAR}


def reinforced_line(rows: list[Row]) -> Row:
    return {
        **_who(rows),
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
    if not lines:
        return "(no such run)"
    head = [name for name in lines[0] if name != "card"]
    body = [[_cell(line[name]) for name in head] for line in lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body))


def _who(rows: list[Row]) -> Row:
    shape, seed, learning_rate = _key(rows)
    return {
        "shape": shape,
        "mode": rows[0]["mode"],
        "seed": seed,
        "learning_rate": learning_rate,
        "card": rows[0]["card"]["uuid"],
    }


def _key(rows: list[Row]) -> tuple[str, int, float | None]:
    """Shape, seed (the first rows, which do not name it, have 0) and the schedule's highest
    learning rate, where it is known.
    """
    rates = [row["learning_rate"] for row in rows if "learning_rate" in row]
    return rows[0]["shape"], rows[0].get("seed", 0), max(rates, default=None)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if value is None:
        return "-"
    return (
        f"{value:.4f}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )
