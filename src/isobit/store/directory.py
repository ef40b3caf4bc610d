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
"""

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobit.errors import ConfigError

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
