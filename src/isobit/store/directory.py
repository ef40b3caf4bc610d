"""The directory of a run: its files, its lock, and where it is.

    run.json            manifest: versions, machine, resolved configuration, precision graph
    metrics.jsonl       the figures of each step and evaluation
    tensorboard/        the same figures as TensorBoard events
    completions.jsonl   a few graded completions of each step and evaluation
    completions/        as many as ``tracking.completions`` says, in a Parquet file for each step
                        and each evaluation
    rewards.jsonl       every reward that the run was given
    environment.jsonl   with an environment: all that its tools have said
    schedule.jsonl      with ``async.max_staleness``: which step learns from which groups, and which
                        weights drew what
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

import os
import shlex
from pathlib import Path
from typing import Any

from isobit.store.lock import LOCK_FILE
from isobit.util.errors import ConfigError
from isobit.util.strict_json import json_text

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
        self.schedule = root / "schedule.jsonl"
        self.digests = root / "digests.jsonl"
        self.budget = root / "budget.jsonl"
        self.growing = (
            *(self.metrics, self.completions, self.rewards, self.answers, self.digests),
            *(self.schedule, self.budget),
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


def completions_file(directory: RunDirectory, step: int, evaluates: bool) -> Path:
    """The Parquet file of a step's completions, or of those of the evaluation after it."""
    return directory.kept_completions / f"{'evaluation' if evaluates else 'step'}_{step:06}.parquet"


def drop_completions(directory: RunDirectory, step: int) -> None:
    """Remove the Parquet files of later steps, which are done again, and unfinished ones."""
    for path in directory.kept_completions.glob("*.parquet"):
        at = path.stem.rpartition("_")[2]
        if path.name.startswith(".") or not at.isdecimal() or int(at) > step:
            path.unlink()
