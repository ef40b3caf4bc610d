"""Rows of results, written by rank 0."""

from pathlib import Path
from typing import Any

from benchmarks.comparison.card import measure_card
from benchmarks.comparison.native import native_versions
from benchmarks.comparison.rows import RowWriter
from isobit.parallel.world import World


class RankRows:
    """Appends to ``DIR/ranks-<mode>-<shape>.jsonl``; every rank measures, the first one writes."""

    def __init__(self, world: World, directory: Path, mode: str, shape: str) -> None:
        self._world, self._writer = world, None
        if world.rank == 0:
            versions = native_versions()
            self._writer = RowWriter(directory, "ranks", mode, shape, measure_card(), versions)

    def write(self, **row: Any) -> None:
        """One measurement."""
        if self._writer is not None:
            self._writer.write(ranks=self._world.size, **row)
