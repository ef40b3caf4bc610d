"""Rows of results, written by rank 0."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.comparison.card import measure_card
from benchmarks.comparison.native import native_versions
from benchmarks.comparison.rows import Row, RowWriter
from isobit.parallel.world import World

_cards: list[Row] = []


def measure_first_card() -> None:
    """On rank 0, before it has anything on a card: a fork measures."""
    if os.environ.get("RANK", "0") == "0":
        _cards.append(measure_card())


@dataclass(frozen=True, slots=True)
class Sitting:
    """What the measurements of one command have in common."""

    world: World
    mode: str
    shape: str
    out: Path
    device: str = "cuda"

    def rows(self) -> "RankRows":
        """Where they are written."""
        return RankRows(self.world, self.out, self.mode, self.shape)


class RankRows:
    """Appends to ``DIR/ranks-<mode>-<shape>.jsonl``; every rank measures, the first one writes."""

    def __init__(self, world: World, directory: Path, mode: str, shape: str) -> None:
        self._world, self._writer = world, None
        if world.rank == 0:
            versions = native_versions()
            card = _cards[0] if _cards else {}
            self._writer = RowWriter(directory, "ranks", mode, shape, card, versions)

    def write(self, **row: Any) -> None:
        """One measurement."""
        if self._writer is not None:
            self._writer.write(ranks=self._world.size, **row)
