"""Reads the files of runs for the viewer: a part at a time, while they are being written.

A file of lines is read on from where the last look ended, for a limited time, up to its last whole
line; of ``completions.jsonl`` only the place of each line and a few numbers stay in memory, and of
the Parquet files of ``completions/`` the numbers alone.  A page of results reads its own lines
again.  A file that was replaced or cut, as by a run that is resumed, is read anew.  Links in place
of a run's files are not followed, and of a file that is not there nothing is known.
"""

import json
import math
import os
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any, BinaryIO

from isobit.observe.report.source import RunRecord, add_figures, read_object
from isobit.store.directory import RunDirectory
from isobit.store.journals import parsed_line
from isobit.store.lock import is_held
from isobit.util.plain_files import open_plain

LOOK_S = 0.5
"""How long one look at a file may read."""
LONGEST_LINE = 64 << 20
"""Bytes; a longer line is left out."""
TAIL = 1 << 18
"""Bytes at the end of ``metrics.jsonl`` that the list of runs reads."""
HEAD = 64
"""Bytes before the place of a look that must be as they were, or the file is read anew."""
PAGE = 50
"""Completions of a page of results."""


class GrowingFile(ABC):
    """The whole lines of a file that grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version = 0
        """A number that changes with what is known of the file."""
        self.position, self.size, self.damaged = 0, 0, 0
        """Bytes that were read, bytes that are there, lines that cannot be read."""
        self._identity, self._last, self._in_long_line = (0, 0), b"", False

    @property
    def is_read(self) -> bool:
        """Whether the last look left nothing; an unfinished line does not count."""
        return self.position >= self.size

    def look(self, seconds: float = LOOK_S) -> None:
        """Read on, for that long at most."""
        until = monotonic() + seconds
        try:
            with open_plain(self.path, follow_links=False) as file:
                self._find_place(file)
                for at, line in self._lines(file, until):
                    content = parsed_line(line)
                    self.damaged += content is None
                    if content is not None:
                        self._take(at, content)
                    self.version += 1
        except OSError:
            self._forget()

    def _find_place(self, file: BinaryIO) -> None:
        about = os.fstat(file.fileno())
        identity = about.st_dev, about.st_ino
        file.seek(self.position - len(self._last))
        if identity != self._identity or file.read(len(self._last)) != self._last:
            self._forget()
            file.seek(0)
        self._identity, self.size = identity, about.st_size

    def _forget(self) -> None:
        if self.position:
            self.version += 1
        self.position, self.size, self.damaged = 0, 0, 0
        self._identity, self._last, self._in_long_line = (0, 0), b"", False
        self._clear()

    def _lines(self, file: BinaryIO, until: float) -> Iterator[tuple[int, bytes]]:
        while monotonic() < until:
            line = file.readline(LONGEST_LINE)
            is_whole = line.endswith(b"\n")
            if not is_whole and len(line) < LONGEST_LINE:
                self.size = self.position
                return
            at, self.position = self.position, self.position + len(line)
            self._last = line[-HEAD:]
            if is_whole and not self._in_long_line:
                yield at, line
            self.damaged += is_whole and self._in_long_line
            self._in_long_line = not is_whole

    @abstractmethod
    def _take(self, at: int, content: dict[str, Any]) -> None:
        """Keep what is needed of the object in the line at byte ``at``."""

    @abstractmethod
    def _clear(self) -> None:
        """Forget every line."""


class GrowingFigures(GrowingFile):
    """The figures of ``metrics.jsonl`` by step, as ``RunRecord`` has them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.steps: dict[int, dict[str, float | None]] = {}

    def _take(self, at: int, content: dict[str, Any]) -> None:
        add_figures(self.steps, content)

    def _clear(self) -> None:
        self.steps = {}


def last_figures(path: Path) -> dict[int, dict[str, float | None]]:
    """The figures in the last lines of a file, which may be long; none where there is no file."""
    steps: dict[int, dict[str, float | None]] = {}
    with suppress(OSError), open_plain(path, follow_links=False) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL))
        for line in file.read(TAIL).split(b"\n"):
            if (content := parsed_line(line)) is not None:
                add_figures(steps, content)
    return steps


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


class WatchedRun:
    """A run's directory and what was read of it so far."""

    def __init__(self, root: Path) -> None:
        directory = RunDirectory(root)
        self.root, self._directory = root, directory
        self.figures = GrowingFigures(directory.metrics)
        self.samples = LineCompletions(directory.completions)
        self.kept = TableCompletions(directory.kept_completions)

    def record(self) -> RunRecord:
        """What the report reads, without completions, after one more look at the figures."""
        self.figures.look()
        problems = list[str]()
        if self.figures.damaged:
            problems.append(f"metrics.jsonl: {self.figures.damaged} lines cannot be read")
        return record_of(self.root, self.figures.steps, problems)


def record_of(
    root: Path, steps: Mapping[int, Mapping[str, float | None]], problems: list[str]
) -> RunRecord:
    """The record of a run with these figures and no completions.  ``problems`` may grow."""
    directory = RunDirectory(root)
    return RunRecord(
        root=root,
        manifest={}
        if directory.manifest.is_symlink()
        else read_object(directory.manifest, problems),
        figures=dict(sorted(steps.items())),
        completions=(),
        finished=directory.summary.is_file(),
        ending={} if directory.ending.is_symlink() else read_object(directory.ending, []),
        is_running=is_held(root),
        problems=tuple(problems),
    )


MOST_FOLDERS = 5000
"""Looked into for runs."""
DEPTH = 4
"""Of folders below the one that was named."""


def find_runs(roots: Sequence[Path]) -> dict[str, Path]:
    """The runs in and below folders, by a name that no two share: the path below the folder.
    Folders that cannot be read are passed over.
    """
    found: dict[str, Path] = {}
    for root in roots:
        for path in _runs_below(root):
            name = path.relative_to(root).as_posix() if path != root else root.resolve().name
            if len(roots) > 1 and path != root:
                name = f"{root.resolve().name}/{name}"
            same = sum(one == name or one.startswith(f"{name} (") for one in found)
            name = f"{name} ({same + 1})" if same else name
            found[name] = path
    return found


def _runs_below(root: Path) -> Iterator[Path]:
    waiting, looked = [(root, 0)], 0
    while waiting and looked < MOST_FOLDERS:
        (folder, depth), looked = waiting.pop(), looked + 1
        directory = RunDirectory(folder)
        if directory.manifest.is_file() or directory.metrics.is_file():
            yield folder
        elif depth < DEPTH:
            with suppress(OSError):
                below = [Path(one.path) for one in os.scandir(folder) if _is_folder(one)]
                waiting += [(one, depth + 1) for one in sorted(below, reverse=True)]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
