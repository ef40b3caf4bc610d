"""The completions that a run has written, read while it goes on.

Of ``completions.jsonl`` the place of each line and a few numbers stay in memory, of the Parquet
files of ``completions/`` the numbers alone; a page of results reads its own lines again.
"""

import json
import math
import os
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any

from isobit.observe.growing_file import LONGEST_LINE, LOOK_S, GrowingFile
from isobit.store.journals import parsed_line
from isobit.util.plain_files import open_plain

PAGE = 50
"""Completions of a page of results."""


@dataclass(frozen=True, slots=True)
class Query:
    """Which completions are wanted; what is empty or None does not matter."""

    source: str = ""
    """A set's name, ``train``, or ``eval`` for all sets of evaluations."""
    prompt_id: str = ""
    """The whole of it, or a part."""
    text: str = ""
    """A part of prompt, completion, answer or a turn, in capitals or not."""
    first_step: float = -math.inf
    last_step: float = math.inf
    lowest: float | None = None
    """Reward.  One that failed is in no range."""
    highest: float | None = None


class Index:
    """Step, source, prompt, reward and the mean reward of its group, 32 bytes a completion."""

    def __init__(self) -> None:
        self.steps, self.rewards = array("q"), array("d")
        """A reward that failed is not a number."""
        self.means = array("d")
        """Of the valid rewards of its group where they are written beside it, else its own."""
        self._sources, self._prompts = array("I"), array("I")
        self._names: dict[str, int] = {}
        self._texts: list[str] = []

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, content: Mapping[str, Any]) -> None:
        step, reward = content.get("step"), content.get("reward")
        self.steps.append(step if isinstance(step, int) and abs(step) < 1 << 62 else -1)
        self.rewards.append(reward if isinstance(reward, int | float) else math.nan)
        group = content.get("group_rewards")
        valid = [one for one in group if isinstance(one, int | float)] if group else []
        self.means.append(fmean(valid) if valid else self.rewards[-1])
        self._sources.append(self._number(str(content.get("source", ""))))
        self._prompts.append(self._number(str(content.get("prompt_id", ""))))

    def _number(self, name: str) -> int:
        if name not in self._names:
            self._names[name] = len(self._texts)
            self._texts.append(name)
        return self._names[name]

    def sources(self) -> list[str]:
        """In the order of their first appearance."""
        return [self._texts[number] for number in dict.fromkeys(self._sources)]

    def source(self, place: int) -> str:
        return self._texts[self._sources[place]]

    def prompt_id(self, place: int) -> str:
        return self._texts[self._prompts[place]]

    def fits(self, place: int, query: Query) -> bool:
        """Whether a completion is one of those that are wanted, its text aside."""
        source, reward = self.source(place), self.rewards[place]
        is_eval = source != "train"
        return (
            query.source in ("", source, "eval" if is_eval else source)
            and query.first_step <= self.steps[place] <= query.last_step
            and query.prompt_id in self.prompt_id(place)
            and (query.lowest is None or reward >= query.lowest)
            and (query.highest is None or reward <= query.highest)
        )


class Completions(ABC):
    """Completions of a run by their place in its files."""

    index: Index

    @abstractmethod
    def look(self, seconds: float = LOOK_S) -> None:
        """Read on, for that long at most."""

    @abstractmethod
    def read(self, place: int) -> dict[str, Any]:
        """Everything about one.  Raises OSError where it is there no more."""

    @property
    @abstractmethod
    def progress(self) -> float:
        """The share of the files that is read, 0 to 1."""

    def find(
        self, query: Query, at: int, step: int, seconds: float = LOOK_S
    ) -> tuple[list[tuple[int, dict[str, Any]]], int | None]:
        """A page of what is wanted, from place ``at`` on in steps of 1 or -1, and where the search
        goes on, None at the end.  After ``seconds`` it ends with what it has found.
        """
        until, found, text = monotonic() + seconds, list[tuple[int, dict[str, Any]]](), query.text
        while 0 <= at < len(self.index) and len(found) < PAGE and monotonic() < until:
            if self.index.fits(at, query):
                with suppress(OSError):  # of a file that is gone or was cut
                    content = self.read(at)
                    if not text or text.lower() in _words(content):
                        found.append((at, content))
            at += step
        return found, at if 0 <= at < len(self.index) else None


def _words(content: Mapping[str, Any]) -> str:
    texts = [str(content.get(name, "")) for name in ("prompt", "completion", "answer")]
    turns = content.get("messages")
    if isinstance(turns, list):
        texts += [str(turn.get("content", "")) for turn in turns if isinstance(turn, dict)]
    return "\n".join(texts).lower()


class LineCompletions(GrowingFile, Completions):
    """Those of ``completions.jsonl``."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._clear()

    def _clear(self) -> None:
        self.index, self._offsets = Index(), array("Q")

    def _take(self, at: int, content: dict[str, Any]) -> None:
        self.index.add(content)
        self._offsets.append(at)

    @property
    def progress(self) -> float:
        return self.position / self.size if self.size else 1.0

    def read(self, place: int) -> dict[str, Any]:
        with open_plain(self.path, follow_links=False) as file:
            file.seek(self._offsets[place])
            content = parsed_line(file.readline(LONGEST_LINE))
        if content is None:
            raise FileNotFoundError(f"{self.path} has changed")
        return content


class TableCompletions(Completions):
    """Those of the Parquet files of ``completions/``, in the order of their steps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._clear()

    def _clear(self) -> None:
        self.index = Index()
        self._files: list[tuple[tuple[int, str], Path, int]] = []
        """Order, path, and the first place, of each that is read."""
        self._seen: dict[Path, tuple[int, int]] = {}
        self._left = 0
        self._open: tuple[Path, Any] | None = None
        """The table that was read last."""

    def look(self, seconds: float = LOOK_S) -> None:
        until = monotonic() + seconds
        there = dict(self._list())
        orders = sorted(order for order, _ in there.values())
        last = self._files[-1][0] if self._files else (-1, "")
        paths = {order: path for path, (order, _) in there.items()}
        is_same = all(there.get(path, (0, None))[1] == about for path, about in self._seen.items())
        new = [order for order in orders if paths[order] not in self._seen]
        if not is_same or (new and new[0] < last):
            self._clear()
            new = orders
        self._left = len(new)
        for order in new:
            if monotonic() >= until:
                return
            self._add(order, paths[order], there[paths[order]][1])
            self._left -= 1

    def _list(self) -> Iterator[tuple[Path, tuple[tuple[int, str], tuple[int, int]]]]:
        """Each file with its order, and its size and the time of its last change."""
        with suppress(OSError):
            for entry in os.scandir(self._folder):
                kind, _, step = entry.name.removesuffix(".parquet").partition("_")
                is_one = entry.name.endswith(".parquet") and kind in ("step", "evaluation")
                if is_one and step.isdecimal() and entry.is_file(follow_symlinks=False):
                    about = entry.stat(follow_symlinks=False)
                    order = int(step), "" if kind == "step" else kind  # evaluated after the step
                    yield Path(entry.path), (order, (about.st_size, about.st_mtime_ns))

    def _add(self, order: tuple[int, str], path: Path, about: tuple[int, int]) -> None:
        from pyarrow import ArrowException, parquet

        self._seen[path] = about
        self._files.append((order, path, len(self.index)))
        columns = ["step", "source", "prompt_id", "reward"]
        with suppress(OSError, ArrowException, KeyError):  # a damaged file has no completions
            for row in parquet.read_table(path, columns=columns).to_pylist():
                self.index.add(row)

    @property
    def progress(self) -> float:
        return len(self._files) / (len(self._files) + self._left) if self._left else 1.0

    def read(self, place: int) -> dict[str, Any]:
        from pyarrow import ArrowException, parquet

        number = bisect_right(self._files, place, key=lambda one: one[2]) - 1
        _, path, first = self._files[number]
        if self._open is None or self._open[0] != path:
            try:
                self._open = path, parquet.read_table(path)
            except ArrowException as error:
                raise FileNotFoundError(f"{path} has changed") from error
        (row,) = self._open[1].slice(place - first, 1).to_pylist()
        row |= {"reward_parts": dict(row.get("reward_parts") or {})}
        if row.get("messages"):
            with suppress(ValueError):
                row["messages"] = json.loads(row["messages"])
        return row
