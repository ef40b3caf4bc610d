"""The directory of a run: where each file lies, and the refusal of one that is already used.

    run.json            manifest: versions, machine, resolved configuration, precision graph
    metrics.jsonl       one JSON object a step
    tensorboard/        the same figures as TensorBoard events
    completions.jsonl   a few graded completions of each step and evaluation
    rewards.jsonl       every reward that the run was given
    digests.jsonl       of each step of reinforcement learning, digests of its tokens,
                        log-probabilities, rewards, and of what its update left
    budget.jsonl        changes of the tokens a micro-batch after an out-of-memory; there only if
                        one came
    checkpoints/        the whole state after some of the steps: ``step_000010``, ..
                        (``isobit.store.checkpoint``)
    model/              the trained policy as a Hugging Face folder, with its tokenizer
    summary.json        the figures at the end
    ending.json         why the run has ended before its time, until it goes on

A run writes into a directory that holds anything only to go on in it (``--resume``): two runs would
mix their metrics.  The directory itself may be a link; a file of the run that is one is refused:
behind it lies what belongs to somebody else.

The files of a run that only grow, and how they go back to where a checkpoint was taken.

A checkpoint records the size of each: ``metrics.jsonl``, ``completions.jsonl``, ``rewards.jsonl``,
``digests.jsonl``, ``budget.jsonl`` and the event files of TensorBoard. Everything in them up to
there belongs to steps before the checkpoint, and everything after it to steps that a resumed run
does again.

One process at a time in a run's directory: an advisory lock of the kernel on ``.lock``, which
ends with the process, however it ends.

The file names the holder for the message to the other one; it stays, empty of meaning, when nobody
holds the lock.  A process that is forked from the holder (by a reward, say) gives its copy of the
descriptor up: it must not hold the directory once the run is dead.

Where the directory of a run is: somebody may move or remove it while the run goes on.

The directory is held open, and Linux says where what is open lies now.  Files that are open go with
it; what is opened by its path would be made anew at the old place, apart from all the rest.

The lines of a run's files that only grow, read to be compared, whatever has become of them.
"""

import fcntl
import json
import os
import shlex
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobit.util.errors import CheckpointError, ConfigError, StorageError
from isobit.util.files import sync

LOCK_FILE = ".lock"
_BEFORE_A_RUN = {LOCK_FILE, ".run.json.partial"}
_ADVICE = "name another directory (--output PATH)"


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of a run's files."""

    root: Path

    @property
    def manifest(self) -> Path:
        """``run.json``: what is needed to understand or repeat the run."""
        return self.root / "run.json"

    @property
    def metrics(self) -> Path:
        """``metrics.jsonl``: the figures of each step and evaluation."""
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard's events: the figures of ``metrics.jsonl``."""
        return self.root / "tensorboard"

    @property
    def completions(self) -> Path:
        """``completions.jsonl``: a few graded completions of each step and evaluation."""
        return self.root / "completions.jsonl"

    @property
    def rewards(self) -> Path:
        """``rewards.jsonl``: every reward that the run was given."""
        return self.root / "rewards.jsonl"

    @property
    def digests(self) -> Path:
        """``digests.jsonl``: what each step drew, was given and left, as digests."""
        return self.root / "digests.jsonl"

    @property
    def budget(self) -> Path:
        """``budget.jsonl``: changes of the tokens a micro-batch after an out-of-memory."""
        return self.root / "budget.jsonl"

    @property
    def growing(self) -> tuple[Path, ...]:
        """The files that grow line by line."""
        return (self.metrics, self.completions, self.rewards, self.digests, self.budget)

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints, from which the run can be resumed."""
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        """The trained policy as a Hugging Face folder."""
        return self.root / "model"

    @property
    def summary(self) -> Path:
        """``summary.json``: the figures at the end, written last."""
        return self.root / "summary.json"

    @property
    def ending(self) -> Path:
        """``ending.json``: why the run has ended before its time; only then, until it goes on."""
        return self.root / "ending.json"


def check_unused(root: Path) -> None:
    """Refuse a path that a run cannot have to itself: a file, a directory with anything in it, or a
    place that is not writable.

    Writes nothing.  Raises ConfigError naming the path and the ways out.
    """
    if root.exists() and not root.is_dir():
        raise ConfigError(
            f"output is {str(root)!r}, which is a file; name a directory that is new or empty"
        )
    check_no_links(root)
    if not is_empty(root):
        raise ConfigError(
            f"output is {str(root)!r}, which already holds files of a run; {_ADVICE}, go on with "
            f"that run (--resume), or move this one away{_removal(root)}"
            if is_run(root)
            else f"output is {str(root)!r}, which already holds files that are no run; {_ADVICE}"
        )
    above = next(path for path in (root, *root.absolute().parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(
            f"output is {str(root)!r}, but nothing can be written in {str(above)!r}; name another "
            "directory (--output PATH)"
        )


def check_no_links(root: Path) -> None:
    """Refuse a directory where a file or folder of the run is a symbolic link: writing, cutting or
    removing it would reach what lies elsewhere.  Raises ConfigError with the link and its target.
    """
    directory = RunDirectory(root)
    own = (
        *(root / name for name in sorted(_BEFORE_A_RUN)),
        directory.manifest,
        *directory.growing,
        directory.tensorboard,
        directory.checkpoints,
        directory.model,
        directory.summary,
    )
    for path in own:
        if path.is_symlink():
            raise ConfigError(
                f"{path} is a link to {os.readlink(path)}, and a run writes and removes files of "
                f"its own only; put the file itself there, or {_ADVICE}"
            )


def is_run(root: Path) -> bool:
    """Whether the directory is recognised as that of a run, by ``run.json`` or its checkpoints."""
    directory = RunDirectory(root)
    return directory.manifest.is_file() or any(directory.checkpoints.glob("step_*/manifest.json"))


def holds_run(root: Path) -> bool:
    """Whether there is a run to go on with; not in a directory that is new or empty.  Raises
    ConfigError as ``check_no_links`` does, and for one that holds other files.
    """
    if is_empty(root):
        return False
    check_no_links(root)
    if not is_run(root):
        raise no_run(root)
    return True


def no_run(root: Path) -> ConfigError:
    """What is said of a directory without a run."""
    return ConfigError(f"{root} holds files, but no run that could be resumed; {_ADVICE}")


def is_empty(root: Path) -> bool:
    """Whether a path holds nothing, or only what a process leaves that was killed before its run
    had begun.
    """
    return not root.is_dir() or all(path.name in _BEFORE_A_RUN for path in root.iterdir())


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file as a whole: a reader sees the old one or the new one, never a part."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # a killed process's; of a link only the link goes
    with partial.open("x", encoding="utf-8") as file:
        file.write(text)
    partial.replace(path)


def _removal(root: Path) -> str:
    """Advice to remove a run; none where the directory holds the user's home or where they are."""
    place, home = root.resolve(), Path(os.path.expanduser("~")).resolve()
    holds_more = any(here == place or place in here.parents for here in (home, Path.cwd()))
    return "" if holds_more else f", or remove it (rm -r {shlex.quote(str(root))})"


EVENTS_SUFFIX = ".isobit"
"""Of the event files that a run writes: only these are cut and removed, whatever else lies in the
folder.
"""
Positions = Mapping[str, int]
"""Bytes by path relative to the run's directory."""


def positions(directory: RunDirectory) -> dict[str, int]:
    """The sizes of the files now; whoever writes them has flushed."""
    return {
        str(path.relative_to(directory.root)): path.stat().st_size for path in _journals(directory)
    }


def sync_journals(directory: RunDirectory) -> None:
    """Wait until the files are on the disk: a checkpoint that counts on them comes after."""
    for path in _journals(directory):
        sync(path)
    for folder in (directory.tensorboard, directory.root):
        if folder.is_dir():
            sync(folder)


def check_positions(directory: RunDirectory, recorded: Positions) -> None:
    """Raise CheckpointError for a file that is gone or shorter than a checkpoint recorded."""
    for name, size in recorded.items():
        path = directory.root / name
        try:
            found = path.stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing, which had {size:,} bytes then") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
        if found < size:
            raise CheckpointError(
                f"{path} has {found:,} bytes, fewer than the {size:,} it had then"
            )


def rewind(directory: RunDirectory, recorded: Positions) -> None:
    """Cut every file to its recorded size and remove those of the run that were not there.

    ``rewards.jsonl`` and ``budget.jsonl`` stay whole: what lies beyond their positions is wanted
    for the steps that are done again.  A file that has lost lines keeps those that are whole.
    """
    names = {str(path.relative_to(directory.root)) for path in _journals(directory)}
    for name in sorted(names | recorded.keys()):
        path, size = directory.root / name, recorded.get(name)
        if path in (directory.rewards, directory.budget):
            continue
        if size is None:
            path.unlink()
        elif path.is_file():
            is_short = path.stat().st_size < size
            os.truncate(path, sum(map(len, whole_lines(path, 0))) if is_short else size)


def whole_lines(path: Path, position: int) -> list[bytes]:
    """The lines after byte ``position``, none where there is no file; one that a killed process
    left unfinished is no line, nor is anything after a damaged one.
    """
    if not path.is_file():
        return []
    lines: list[bytes] = []
    for line in path.read_bytes()[position:].splitlines(keepends=True):
        try:
            whole = line.endswith(b"\n") and isinstance(json.loads(line), dict)
        except ValueError:
            whole = False
        if not whole:
            break
        lines.append(line)
    return lines


def _journals(directory: RunDirectory) -> list[Path]:
    """The files that are there, and no link: those behind one are not the run's."""
    events = sorted(directory.tensorboard.glob(f"events.out.tfevents.*{EVENTS_SUFFIX}"))
    files = (*directory.growing, *events)
    return [path for path in files if path.is_file() and not path.is_symlink()]


_held: set[int] = set()
"""Descriptors of this process's locks."""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory.  Raises ConfigError naming the process, and its machine, that holds it
    already.
    """
    descriptor = os.open(
        directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666
    )
    with open(descriptor, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{directory} is in use by {_holder(directory / LOCK_FILE)}; "
                "wait for it or stop it, or name another directory (--output PATH)"
            ) from None
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")
        file.flush()
        _held.add(descriptor)
        try:
            yield
        finally:
            _held.discard(descriptor)


def is_held(directory: Path) -> bool:
    """Whether a process of this machine writes into a run's directory; changes nothing."""
    try:
        with open(directory / LOCK_FILE, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _let_go() -> None:
    """In a forked child the lock is the parent's; the number stays taken, for who closes it."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in _held:
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_let_go)


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


_REMOVED = " (deleted)"


class DirectoryWatch:
    """Of a run's directory, once it is held."""

    def __init__(self) -> None:
        self._root = Path()
        self._descriptor: int | None = None
        self._name: str | None = None
        """What the kernel called it at first."""

    def hold(self, root: Path) -> None:
        """Keep the directory open until ``release``.  Raises OSError."""
        self.release()
        self._root = root
        self._descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        self._name = self._name_now()

    def release(self) -> None:
        """Hold it no longer."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def now(self) -> Path | None:
        """Where the directory is: its path as the run knows it, or another; None where it was
        removed.
        """
        if self._descriptor is None:
            return self._root
        name = self._name_now()
        if name is None or name == self._name:
            return self._root if _is_there(Path(name or self._root)) else None
        return None if name.endswith(_REMOVED) else Path(name)

    def check(self) -> None:
        """Raise StorageError, with what became of it, where it is no longer where it was."""
        place = self.now()
        if place == self._root:
            return
        if place is None:
            raise StorageError(
                f"the run's directory {self._root} was removed while the run went on: its metrics, "
                "completions and checkpoints are lost"
            )
        raise StorageError(
            f"the run's directory {self._root} was moved to {place} while the run went on; put it "
            f"back, or go on there (--output {place} --resume)"
        )

    def _name_now(self) -> str | None:
        """None where the system does not say it."""
        try:
            return os.readlink(f"/proc/self/fd/{self._descriptor}")
        except OSError:
            return None


def _is_there(path: Path) -> bool:
    """A disk that does not answer says nothing of what is on it."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def read_lines(path: Path, position: int = 0) -> list[dict[str, Any] | None]:
    """The lines from byte ``position`` on, in order, none where there is no file; None for one that
    is damaged, and no JSON object.  Raises OSError.
    """
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(position)
        return [_parsed(line) for line in file]


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
