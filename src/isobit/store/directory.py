"""The directory of a run: its files, its lock, and where it is.

    run.json            manifest: versions, machine, resolved configuration, precision graph
    metrics.jsonl       the figures of each step and evaluation
    tensorboard/        the same figures as TensorBoard events
    completions.jsonl   a few graded completions of each step and evaluation
    completions/        as many as ``tracking.completions`` says, in a Parquet file for each step
                        and each evaluation
    rewards.jsonl       every reward that the run was given
    environment.jsonl   with an environment: all that its tools have said
    digests.jsonl       of each step of reinforcement learning, digests of its tokens,
                        log-probabilities, rewards, and of the state after its update
    budget.jsonl        changes of the tokens a micro-batch after an out-of-memory, if any
    checkpoints/        the state after some of the steps: ``step_000010``, ..
                        (``isobit.store.checkpoint``)
    model/              the trained policy as a Hugging Face folder, with its tokenizer
    summary.json        the figures at the end, written last
    ending.json         why the run ended early, until it is resumed
    on_save.log         what ``checkpoint.on_save`` has printed, if it is set

A run uses a directory that is not empty only to resume (``--resume``): two runs would mix their
metrics.  The directory itself may be a link; a link in place of one of its files is refused, since
its target is not the run's.

A checkpoint records the size of each file that only grows (the ``.jsonl`` files and TensorBoard's
events).  What follows belongs to steps that a resumed run repeats, and is cut.
"""

import fcntl
import json
import os
import shlex
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from isobit.util.errors import CheckpointError, ConfigError, StorageError
from isobit.util.files import sync
from isobit.util.plain_files import open_plain, read_plain
from isobit.util.strict_json import json_text

LOCK_FILE = ".lock"
_BEFORE_A_RUN = {LOCK_FILE, ".run.json.partial"}
_ADVICE = "name another directory (--output PATH)"


class RunDirectory:
    """The paths of a run's files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifest = root / "run.json"
        self.metrics = root / "metrics.jsonl"
        self.tensorboard = root / "tensorboard"
        self.completions = root / "completions.jsonl"
        self.kept_completions = root / "completions"
        self.rewards = root / "rewards.jsonl"
        self.answers = root / "environment.jsonl"
        self.digests = root / "digests.jsonl"
        self.budget = root / "budget.jsonl"
        self.growing = (
            *(self.metrics, self.completions, self.rewards, self.answers, self.digests),
            self.budget,
        )
        self.checkpoints = root / "checkpoints"
        self.model = root / "model"
        self.summary = root / "summary.json"
        self.ending = root / "ending.json"
        self.hook_output = root / "on_save.log"


def check_unused(root: Path) -> None:
    """Refuse a path that a run cannot have to itself: a file, a directory that is not empty, or a
    place that is not writable.

    Writes nothing.  Raises ConfigError with the path and what to do.
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
    """Raise ConfigError where a file or folder of the run is a symbolic link."""
    directory = RunDirectory(root)
    own = (
        *(root / name for name in sorted(_BEFORE_A_RUN)),
        directory.manifest,
        *directory.growing,
        directory.kept_completions,
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
    """Whether the directory is that of a run, by ``run.json`` or its checkpoints."""
    directory = RunDirectory(root)
    return directory.manifest.is_file() or any(directory.checkpoints.glob("step_*/manifest.json"))


def holds_run(root: Path) -> bool:
    """Whether there is a run to resume; not in a directory that is new or empty.  Raises
    ConfigError as ``check_no_links`` does, and for one that holds other files.
    """
    if is_empty(root):
        return False
    check_no_links(root)
    if not is_run(root):
        raise no_run(root)
    return True


def no_run(root: Path) -> ConfigError:
    """The error for a directory without a run."""
    return ConfigError(f"{root} holds files, but no run that could be resumed; {_ADVICE}")


def is_empty(root: Path) -> bool:
    """Whether a path holds nothing but what a process leaves that is killed before its run."""
    return not root.is_dir() or all(path.name in _BEFORE_A_RUN for path in root.iterdir())


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    text = json_text(content, indent=2) + "\n"
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # a killed process's; of a link only the link goes
    with partial.open("x", encoding="utf-8") as file:
        file.write(text)
    partial.replace(path)


def _removal(root: Path) -> str:
    """Advice to remove a run, unless the directory contains the home or working directory."""
    place, home = root.resolve(), Path(os.path.expanduser("~")).resolve()
    holds_more = any(here == place or place in here.parents for here in (home, Path.cwd()))
    return "" if holds_more else f", or remove it (rm -r {shlex.quote(str(root))})"


EVENTS_SUFFIX = ".isobit"
"""Of the event files that a run writes; other files in their folder are left alone."""
Positions = Mapping[str, int]  # bytes by path relative to the run's directory


def positions(directory: RunDirectory) -> dict[str, int]:
    """The sizes of the files now, once they are flushed."""
    return {
        str(path.relative_to(directory.root)): path.stat().st_size for path in _journals(directory)
    }


def sync_journals(directory: RunDirectory) -> None:
    """Sync the files, before a checkpoint that records their sizes."""
    for path in _journals(directory):
        sync(path)
    for folder in (directory.tensorboard, directory.root):
        if folder.is_dir():
            sync(folder)


def check_positions(directory: RunDirectory, recorded: Positions) -> None:
    """Raise CheckpointError for a file that is missing or shorter than a checkpoint recorded."""
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
    """Cut every file to its recorded size and remove those of the run that did not exist.

    ``rewards.jsonl``, ``environment.jsonl`` and ``budget.jsonl`` stay whole: repeated steps read
    what follows.  A file that has lost lines keeps those that are whole.
    """
    names = {str(path.relative_to(directory.root)) for path in _journals(directory)}
    for name in sorted(names | recorded.keys()):
        path, size = directory.root / name, recorded.get(name)
        if path in (directory.rewards, directory.answers, directory.budget):
            continue
        if size is None:
            path.unlink()
        elif path.is_file():
            is_short = path.stat().st_size < size
            os.truncate(path, sum(map(len, whole_lines(path, 0))) if is_short else size)


def completions_file(directory: RunDirectory, step: int, evaluates: bool) -> Path:
    """The Parquet file of a step's completions, or of those of the evaluation after it."""
    return directory.kept_completions / f"{'evaluation' if evaluates else 'step'}_{step:06}.parquet"


def drop_completions(directory: RunDirectory, step: int) -> None:
    """Remove the Parquet files of later steps, which are done again, and unfinished ones."""
    for path in directory.kept_completions.glob("*.parquet"):
        at = path.stem.rpartition("_")[2]
        if path.name.startswith(".") or not at.isdecimal() or int(at) > step:
            path.unlink()


def whole_lines(path: Path, position: int) -> list[bytes]:
    """The lines after byte ``position``, up to the first that is unfinished or damaged."""
    if not path.is_file():
        return []
    lines: list[bytes] = []
    for line in read_plain(path, largest=None)[position:].splitlines(keepends=True):
        try:
            whole = line.endswith(b"\n") and isinstance(json.loads(line), dict)
        except ValueError:
            whole = False
        if not whole:
            break
        lines.append(line)
    return lines


def _journals(directory: RunDirectory) -> list[Path]:
    """The files that exist and are not links."""
    events = sorted(directory.tensorboard.glob(f"events.out.tfevents.*{EVENTS_SUFFIX}"))
    files = (*directory.growing, *events)
    return [path for path in files if path.is_file() and not path.is_symlink()]


_held: set[int] = set()  # descriptors of this process's locks


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory by an advisory lock of the kernel on ``.lock``, which ends with the
    process. Raises ConfigError naming the process and the machine that holds it, which the file
    names too.
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
        file.write(json_text({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")
        file.flush()
        _held.add(descriptor)
        try:
            yield
        finally:
            _held.discard(descriptor)


def is_held(directory: Path) -> bool:
    """Whether a process of this machine writes into a run's directory."""
    try:
        with open_plain(directory / LOCK_FILE) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _let_go() -> None:
    """A forked child (of a reward, say) gives up its copy of the descriptor, so that it does not
    hold the directory once the run has ended.  The number stays taken until it is closed.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in _held:
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_let_go)


def _holder(path: Path) -> str:
    try:
        holder = json.loads(read_plain(path))
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


_REMOVED = " (deleted)"


class DirectoryWatch:
    """Where the directory of a run is, which a user may move or remove during the run.

    The directory is held open, and Linux says where it is now.  Open files move with it; what is
    opened by its path would be created at the old place.
    """

    def __init__(self) -> None:
        self._root = Path()
        self._descriptor: int | None = None
        self._name: str | None = None  # the kernel's name for it at first

    def hold(self, root: Path) -> None:
        """Keep the directory open until ``release``.  Raises OSError."""
        self.release()
        self._root = root
        self._descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        self._name = self._name_now()

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def now(self) -> Path | None:
        """The directory's path, perhaps a new one; None where it was removed."""
        if self._descriptor is None:
            return self._root
        name = self._name_now()
        if name is None or name == self._name:
            return self._root if _is_there(Path(name or self._root)) else None
        return None if name.endswith(_REMOVED) else Path(name)

    def check(self) -> None:
        """Raise StorageError, saying what happened, where it was moved or removed."""
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
    """Whether a path exists, as far as the disk answers."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def read_lines(path: Path, position: int = 0) -> list[dict[str, Any] | None]:
    """The JSON objects from byte ``position`` on, None for a damaged line.  Raises OSError."""
    if not path.is_file():
        return []
    with open_plain(path) as file:
        file.seek(position)
        return [parsed_line(line) for line in file]


def parsed_line(line: bytes) -> dict[str, Any] | None:
    """A line's JSON object; None where it is damaged."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
