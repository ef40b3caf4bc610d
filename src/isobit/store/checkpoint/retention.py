"""Which checkpoints stay: the newest, every so many steps, and the best.  Decided from what is on
the disk, after each new one.

A checkpoint is renamed to a hidden name before its files go, so that a kill in between leaves
nothing that looks like a damaged one.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from isobit.config.checkpoint import CheckpointConfig
from isobit.errors import CheckpointError
from isobit.store.checkpoint.format import folder_name, folders_by_step, read_manifest


def steps_to_keep(figures: Mapping[int, float | None], config: CheckpointConfig) -> set[int]:
    """Of the steps on disk, those that stay; ``figures`` holds the value to be best by, None where
    there was no evaluation.
    """
    steps = sorted(figures)
    keep = set(steps[-config.keep_last :])
    if config.keep_every:
        keep |= {step for step in steps if step % config.keep_every == 0}
    best = best_step(figures)
    return keep if best is None else keep | {best}


def best_step(figures: Mapping[int, float | None]) -> int | None:
    """The first step with the highest value."""
    known = {step: value for step, value in sorted(figures.items()) if value is not None}
    return max(known, key=known.__getitem__) if known else None


def worth(figures: Mapping[str, float], name: str) -> float | None:
    """The figure to be best by, None where it was not measured; the best has the highest, so that a
    loss is negated.
    """
    value = figures.get(name)
    return -value if value is not None and name.endswith("/loss") else value


def best_on_disk(parent: Path, name: str) -> int | None:
    """The step of the best checkpoint in ``parent`` by an evaluation figure; None where none of
    them has it.
    """
    folders = folders_by_step(parent)
    return best_step({step: _figure(folder, name) for step, folder in folders.items()})


def apply_retention(parent: Path, config: CheckpointConfig) -> None:
    """Remove the checkpoints in ``parent`` that need not stay."""
    figures = {
        step: _figure(folder, config.keep_best) for step, folder in folders_by_step(parent).items()
    }
    for step in sorted(figures.keys() - steps_to_keep(figures, config)):
        hidden = parent / f".{folder_name(step)}.deleted"
        shutil.rmtree(hidden, ignore_errors=True)
        (parent / folder_name(step)).rename(hidden)
        shutil.rmtree(hidden)


def _figure(folder: Path, name: str | None) -> float | None:
    try:
        return worth(read_manifest(folder)["evaluation"], name) if name else None
    except CheckpointError:
        return None
