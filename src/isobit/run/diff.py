"""``isobit diff RUN RUN``: two run directories compared file by file, and the first step at which
they differ.

    digests.jsonl        what each step drew, was given and left behind
    rewards.jsonl        every reward, of training and of evaluations
    completions.jsonl    the completions that are kept there, word by word
    metrics.jsonl        every figure but those of the machine (``OF_THE_MACHINE``)
    checkpoints/         tensors byte by byte, and the state but for the log's seconds and the sizes
                         of files, of the steps that both runs have kept
    model/               the trained policy, file by file

Two runs of one recipe, on the same data, with the same rewards and in one class of bits, are equal
in all of these, whatever was killed, resumed or spread over processes in between.  ``run.json``
says where and when a run was started, so it is not compared; settings that differ are shown as a
note, because they explain what else differs.

Steps that only one of the runs has are a difference.  A file that neither run has is not mentioned:
fine-tuning, for example, draws nothing and leaves no digests.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from isobit.run.redo_compare import NAMES, Line, different_files, first_reward
from isobit.store.checkpoint import STATE, folders_by_step
from isobit.store.compatible import MAY_CHANGE, changed_keys, is_allowed
from isobit.store.directory import RunDirectory, is_held, read_lines
from isobit.store.state import read_digests
from isobit.util.errors import ConfigError

OF_THE_MACHINE = ("time/", "tokens_per_s/", "memory/", "rollout/", "waiting/")
"""How metrics begin that say how fast, with how much memory and in which batches was computed."""
_OF_THE_LOG = ("log", "files")
"""Keys of a checkpoint's state that hold seconds, and sizes of files in which seconds stand."""
_LAST = 1 << 62
"""Sorts what comes after the last step."""


@dataclass(frozen=True, slots=True)
class FileDifference:
    """The first difference in a file."""

    step: int
    """At which the runs differ there; ``_LAST`` for the trained model."""
    file: str
    what: str

    @property
    def where(self) -> str:
        """In words."""
        return "after the last step" if self.step == _LAST else f"step {self.step}"

    def __str__(self) -> str:
        return f"{self.file} differs: {self.where}: {self.what}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was compared, file by file."""

    equal: Sequence[str]
    """A line for each file that is equal."""
    differences: Sequence[FileDifference]
    """The first of each file; those of earlier steps first."""
    notes: Sequence[str]

    @property
    def exit_code(self) -> int:
        """1 where anything differs."""
        return int(bool(self.differences))


def diff(one: Path, other: Path) -> Comparison:
    """Compare two run directories, of which nothing is written.  Raises ConfigError for a directory
    without a run, for one that a process is writing into, and for runs with no file in common.
    """
    left, right = RunDirectory(one), RunDirectory(other)
    manifests = [_manifest(directory) for directory in (left, right)]
    equal: list[str] = []
    found: list[FileDifference] = []
    for compare in (_digests, _rewards, _completions, _metrics, _checkpoints, _model):
        for outcome in compare(left, right):
            if isinstance(outcome, FileDifference):
                found.append(outcome)
            else:
                equal.append(outcome)
    if not equal and not found:
        raise ConfigError(
            f"{one} and {other} have no file that could be compared: neither has finished a step"
        )
    found.sort(key=lambda difference: difference.step)  # stable: causes before effects
    changed = changed_keys(*(manifest["config"] for manifest in manifests))
    notes = [
        f"note: {key} is {ours!r} and {theirs!r}"
        for key, (ours, theirs) in changed.items()
        if not is_allowed(key, tuple(MAY_CHANGE))
    ]
    return Comparison(equal, found, notes)


Outcomes = Iterator[str | FileDifference]
"""Of a file: a line that it is equal, or how it differs; nothing where neither run has it."""


def _manifest(directory: RunDirectory) -> Mapping[str, Any]:
    if not directory.manifest.is_file():
        raise ConfigError(
            f"{directory.root} holds no run (there is no run.json); name the directory that a run "
            "wrote"
        )
    if is_held(directory.root):
        raise ConfigError(
            f"{directory.root} is in use by another process, which writes into it; wait for it, or "
            "stop it"
        )
    try:
        manifest = json.loads(directory.manifest.read_text(encoding="utf-8"))
        dict(manifest["config"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{directory.manifest} cannot be read ({error}); put back a copy"
        ) from None
    return manifest


def _digests(left: RunDirectory, right: RunDirectory) -> Outcomes:
    ours, theirs = read_digests(left.root), read_digests(right.root)
    name, steps = left.digests.name, sorted(ours.keys() | theirs.keys())
    for step in steps:
        pair = ours.get(step), theirs.get(step)
        if None in pair:
            yield FileDifference(step, name, _only(left, right, pair, "it"))
            return
        mine, other = (line.by_name() for line in pair if line is not None)
        differing = [NAMES[key] for key in mine if mine[key] != other[key]]
        if differing:
            yield FileDifference(step, name, f"{', '.join(differing)} differ")
            return
    if steps:
        yield f"{name}: {_count(len(steps), 'step')} equal"


def _rewards(left: RunDirectory, right: RunDirectory) -> Outcomes:
    """A line names the version of the weights that sampled, which the updates of each step in
    metrics.jsonl lead to; an evaluation counts for the step after it.
    """
    versions, version = list[tuple[int, int]](), 1
    for line in read_lines(left.metrics):
        if line is not None and "updates/taken" in line:
            versions.append((version, _step(line)))
            version += line["updates/taken"]

    def step_of(line: Line) -> int:
        sampled = line.get("weights_version", 0)
        steps = [step for version, step in versions if version >= sampled]
        return steps[0] if steps else max((step for _, step in versions), default=0)

    yield from _lines(left.rewards, right.rewards, step_of, _of_gradings, left, right)


def _completions(left: RunDirectory, right: RunDirectory) -> Outcomes:
    def of_pair(ours: Line, theirs: Line) -> str | None:
        names = _differing(ours, theirs)
        return f"{', '.join(names)} of {ours.get('prompt_id')} differ" if names else None

    yield from _lines(left.completions, right.completions, _step, of_pair, left, right)


def _metrics(left: RunDirectory, right: RunDirectory) -> Outcomes:
    def of_pair(ours: Line, theirs: Line) -> str | None:
        names = [name for name in _differing(ours, theirs) if not name.startswith(OF_THE_MACHINE)]
        if not names:
            return None
        first = names[0]
        more = f" (and {_count(len(names) - 1, 'other figure')})" if names[1:] else ""
        return f"{first} is {ours.get(first)} and {theirs.get(first)}{more}"

    yield from _lines(left.metrics, right.metrics, _step, of_pair, left, right)


def _lines(
    ours: Path,
    theirs: Path,
    step_of: Callable[[Line], int],
    of_pair: Callable[[Line, Line], str | None],
    left: RunDirectory,
    right: RunDirectory,
) -> Outcomes:
    """Two files of lines, compared one by one in their order, to the first pair that differs."""
    lines = read_lines(ours), read_lines(theirs)
    step = 0
    for number, pair in enumerate(zip_longest(*lines), start=1):
        step = next((step_of(line) for line in pair if line is not None), step)
        mine, other = pair
        if mine is None or other is None:
            yield FileDifference(
                step, ours.name, _only(left, right, pair, f"a whole line {number}")
            )
            return
        problem = of_pair(mine, other)
        if problem is not None:
            yield FileDifference(step, ours.name, f"line {number}: {problem}")
            return
    if lines[0]:
        yield f"{ours.name}: {_count(len(lines[0]), 'line')} equal"


def _step(line: Line) -> int:
    step = line.get("step")
    return step if isinstance(step, int) else 0


def _of_gradings(ours: Line, theirs: Line) -> str | None:
    names = _differing(ours, theirs)
    if not names:
        return None
    if names == ["rewards"]:
        return first_reward(ours["prompts"], "rewards", ours["rewards"], theirs["rewards"])
    return f"{', '.join(names)} differ"


def _checkpoints(left: RunDirectory, right: RunDirectory) -> Outcomes:
    ours, theirs = (folders_by_step(directory.checkpoints) for directory in (left, right))
    both = sorted(ours.keys() & theirs.keys())
    for step in both:
        name = ours[step].relative_to(left.root).as_posix()
        tensors = [what for what in _of_folders(ours[step], theirs[step]) if ".safetensors" in what]
        if tensors:
            yield FileDifference(step, name, tensors[0])
            return
        states = [_state(folder) for folder in (ours[step], theirs[step])]
        names = _differing(*states)
        if names:
            yield FileDifference(step, name, f"{', '.join(names)} in {STATE} differ")
            return
    if both:
        yield f"checkpoints: {_count(len(both), 'step')} equal"


def _state(folder: Path) -> Line:
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {"unreadable": f"{folder}: {error}"}
    return {name: value for name, value in state.items() if name not in _OF_THE_LOG}


def _model(left: RunDirectory, right: RunDirectory) -> Outcomes:
    models = left.model, right.model
    if not any(model.is_dir() for model in models):
        return
    pair = [model if model.is_dir() else None for model in models]
    found = [_only(left, right, pair, "it")] if None in pair else _of_folders(*models)
    if found:
        yield FileDifference(_LAST, left.model.name, found[0])
        return
    yield f"{left.model.name}: every file equal"


def _of_folders(ours: Path, theirs: Path) -> list[str]:
    """What differs in the first folder's files, and then files that the second alone has."""
    missing = [
        ours / path.relative_to(theirs)
        for path in sorted(theirs.rglob("*"))
        if path.is_file() and not (ours / path.relative_to(theirs)).is_file()
    ]
    return [*different_files(theirs, ours), *(f"{path} is missing" for path in missing)]


def _differing(ours: Line, theirs: Line) -> list[str]:
    """Keys whose values differ, in the order in which the lines have them; NaN equals NaN."""
    return [
        name
        for name in {**ours, **theirs}
        if json.dumps(ours.get(name)) != json.dumps(theirs.get(name))
    ]


def _only(left: RunDirectory, right: RunDirectory, pair: Sequence[Any], what: str) -> str:
    """Which of the runs has something that the other has not."""
    has = [run.root for run, one in zip((left, right), pair, strict=True) if one is not None]
    return f"only {has[0]} has {what}" if has else f"neither run has {what}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
