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
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any, Literal

import numpy as np

from isobit.observe.figures import Column
from isobit.observe.growing_file import LONGEST_LINE, LOOK_S, GrowingFile
from isobit.util.plain_files import open_plain
from isobit.util.strict_json import parsed_line

PAGE = 50
"""Completions of a page of results."""
Order = Literal["newest", "oldest", "best", "worst", "longest", "shortest"]


@dataclass(frozen=True, slots=True)
class Query:
    """Filters and order of completions; an empty field or None filters nothing."""

    source: str = ""
    """A set's name, ``train``, or ``eval`` for all sets of evaluations."""
    prompt_id: str = ""
    """The whole of it, or a part."""
    text: str = ""
    """A part of prompt, completion, answer or a turn, in capitals or not."""
    first_step: float = -math.inf
    last_step: float = math.inf
    lowest: float | None = None
    """The lowest reward.  A failed reward is in no range."""
    highest: float | None = None
    order: Order = "newest"


class Index:
    """Step, source, prompt, reward, length and the mean reward of its group, 40 bytes a completion,
    by its place in the run's files.
    """

    def __init__(self) -> None:
        self._steps, self._lengths = array("q"), array("q")
        self._rewards, self._means = array("d"), array("d")
        self._sources, self._prompts = array("I"), array("I")
        self._numbers: dict[str, int] = {}
        self._texts: list[str] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, content: Mapping[str, Any]) -> None:
        """Add the next completion, a line or a row."""
        group = content.get("group_rewards")
        rewards = map(_finite, group) if isinstance(group, list) else ()
        valid = [reward for reward in rewards if not math.isnan(reward)]
        reward = _finite(content.get("reward"))
        self._steps.append(_whole(content.get("step")))
        self._lengths.append(_whole(content.get("tokens")))
        self._rewards.append(reward)
        self._means.append(fmean(valid) if valid else reward)
        self._sources.append(self._number(str(content.get("source", ""))))
        self._prompts.append(self._number(str(content.get("prompt_id", ""))))

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self._texts)
            self._texts.append(name)
        return self._numbers[name]

    @property
    def steps(self) -> Column:
        """[completions] the step of each."""
        return np.array(self._steps)

    @property
    def rewards(self) -> Column:
        """[completions] NaN where it failed."""
        return np.array(self._rewards)

    @property
    def means(self) -> Column:
        """[completions] the mean of the valid rewards of its group where they are written beside
        it, else its own reward.
        """
        return np.array(self._means)

    @property
    def sources(self) -> list[str]:
        """The sources, in the order of their first appearance."""
        return [self._texts[number] for number in dict.fromkeys(self._sources)]

    def key(self, place: int) -> tuple[int, str, str]:
        """Step, source and prompt of a completion; those of one group share them."""
        source, prompt = self._sources[place], self._prompts[place]
        return self._steps[place], self._texts[source], self._texts[prompt]

    def reward(self, place: int) -> float:
        """The reward of one completion; NaN where it failed."""
        return self._rewards[place]

    def steps_of(self, source: str) -> Column:
        """The steps with completions of a source, ascending."""
        number = self._numbers.get(source, -1)
        return np.unique(self.steps[np.array(self._sources) == number])

    def select(self, query: Query) -> Column:
        """The places of the completions that are wanted, their text aside, in their order."""
        steps, rewards = self.steps, self.rewards
        wanted = (steps >= query.first_step) & (steps <= query.last_step)
        if query.source:
            wanted &= self._named(self._sources, lambda name: _is_of(name, query.source))
        if query.prompt_id:
            wanted &= self._named(self._prompts, lambda name: query.prompt_id in name)
        if query.lowest is not None:
            wanted &= rewards >= query.lowest
        if query.highest is not None:
            wanted &= rewards <= query.highest
        places = np.flatnonzero(wanted)
        if query.order in ("newest", "oldest"):
            return places if query.order == "oldest" else places[::-1]
        by_reward = query.order in ("best", "worst")
        values = (rewards if by_reward else np.array(self._lengths))[places]
        sign = -1 if query.order in ("best", "longest") else 1
        return places[np.argsort(sign * values, kind="stable")]  # failed rewards are last

    def _named(self, numbers: "array[int]", fits: Callable[[str], bool]) -> Column:
        wanted = [number for number, name in enumerate(self._texts) if fits(name)]
        return np.isin(np.array(numbers), wanted)


def _is_of(source: str, wanted: str) -> bool:
    return source == wanted or (wanted == "eval" and source != "train")


def _finite(value: Any) -> float:
    is_number = isinstance(value, int | float) and abs(value) < 1e308
    return float(value) if is_number else math.nan


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and abs(value) < 1 << 62 else -1


Match = tuple[int, dict[str, Any]]
"""A completion's place and everything about it."""


class Completions(ABC):
    """Completions of a run by their place in its files."""

    index: Index

    @abstractmethod
    def look(self, seconds: float = LOOK_S) -> None:
        """Read on, for that long at most."""

    @abstractmethod
    def read(self, place: int) -> dict[str, Any]:
        """Everything about one completion.  Raises OSError where it is there no more."""

    @property
    @abstractmethod
    def progress(self) -> float:
        """The share of the files that is read, 0 to 1."""

    @abstractmethod
    def step_rewards(self, step: int, source: str) -> list[float]:
        """The rewards of a step's completions of a source, NaN where one failed."""

    def find(
        self,
        query: Query,
        after: int | None = None,
        backwards: bool = False,
        most: int = PAGE,
        seconds: float = LOOK_S,
    ) -> tuple[list[Match], int | None]:
        """One page of matches behind the place ``after``, or from the start, and the place to
        continue behind, or None at the end.  It ends early after ``seconds``.
        """
        until, text = monotonic() + seconds, query.text.lower()
        order = self.index.select(query)
        order = order[::-1] if backwards else order
        if after is not None:
            here = np.flatnonzero(order == after)
            order = order[here[0] + 1 :] if len(here) else order[:0]
        matches: list[Match] = []
        for number, place in enumerate(map(int, order), start=1):
            with suppress(OSError):  # of a file that is gone or was cut
                content = self.read(place)
                if not text or text in _words(content):
                    matches.append((place, content))
            if len(matches) >= most or monotonic() >= until:
                return matches, place if number < len(order) else None
        return matches, None


def _words(content: Mapping[str, Any]) -> str:
    texts = [str(content.get(name, "")) for name in ("prompt", "completion", "answer")]
    turns = content.get("messages")
    if isinstance(turns, list):
        texts += [str(turn.get("content", "")) for turn in turns if isinstance(turn, dict)]
    return "\n".join(texts).lower()


class LineCompletions(GrowingFile, Completions):
    """The samples of ``completions.jsonl``, each with the rewards of its group."""

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

    def step_rewards(self, step: int, source: str) -> list[float]:
        """The rewards of whole groups, as far as they were sampled."""
        groups: dict[str, list[float]] = {}
        query = Query(source, first_step=step, last_step=step)
        for place in map(int, self.index.select(query)):
            rewards = self.read(place).get("group_rewards")
            if isinstance(rewards, list):
                groups[self.index.key(place)[2]] = list(map(_finite, rewards))
        return list(chain.from_iterable(groups.values()))


class TableCompletions(Completions):
    """The completions of the Parquet files of ``completions/``, in the order of their steps."""

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
        columns = ["step", "source", "prompt_id", "reward", "tokens"]
        with suppress(OSError, ArrowException, KeyError):  # a damaged file has no completions
            for row in parquet.read_table(path, columns=columns).to_pylist():
                self.index.add(row)

    def step_rewards(self, step: int, source: str) -> list[float]:
        query = Query(source, first_step=step, last_step=step)
        return self.index.rewards[self.index.select(query)].tolist()

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
