"""``isobit diff RUN RUN``: two run directories compared file by file, and the first step at which
they differ.

    digests.jsonl        what each step drew, was given and left behind
    rewards.jsonl        every reward, of training and of evaluations
    environment.jsonl    likewise what tools have said
    completions.jsonl    the completions that are kept there, word by word
    metrics.jsonl        every figure but those of the machine (``OF_THE_MACHINE``)
    checkpoints/         tensors byte by byte, and the state but for the log's seconds and the sizes
                         of files, of the steps that both runs have kept
    model/               the trained policy, file by file, but for its card, which restates figures
                         that are compared already

Two runs of one recipe, on the same data, with the same rewards and in one class of bits, are equal
in all of these, whatever was killed, resumed or spread over processes in between.  ``run.json``
says where and when a run was started and is not compared; settings that differ are shown as a note.
Lines are matched by what they are of (a step, a batch that was graded); a line of only one of the
runs is a difference.
"""

import filecmp
import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from operator import itemgetter
from pathlib import Path
from reprlib import repr as repr_of
from typing import Any

import torch

from isobit.models.adapter_folder import CONFIG_FILE, LOCAL
from isobit.models.safetensors import TensorFile
from isobit.observe.model_card import CARD_FILE
from isobit.store.checkpoint import STATE, folders_by_step
from isobit.store.compatible import MAY_CHANGE, changed_keys, is_allowed
from isobit.store.directory import RunDirectory
from isobit.store.journals import read_lines
from isobit.store.lock import is_held
from isobit.util.errors import ConfigError, IsobitError
from isobit.util.plain_files import read_plain
from isobit.util.strict_json import parsed_line
from isobit.util.terminal import counted

OF_THE_MACHINE = ("time/", "tokens_per_s/", "memory/", "rollout/", "waiting/", "kv_scales/")
"""How metrics begin that say how fast, with how much memory and in which batches was computed; the
largest Q, K and V may be those of guesses that were rejected.
"""
_IGNORED = (*OF_THE_MACHINE, "first_error")
"""Beginnings of the keys of lines that are not compared: also the text of a grader's first error,
which may hold an address or a time.
"""
OF_AN_EVALUATION = "time/evaluation_s"
"""A metric that each line of an evaluation has, and no other."""
_OF_THE_LOG = ("log", "files")
"""Keys of a checkpoint's state that hold seconds, and sizes of files in which seconds stand."""
_LAST = 1 << 62
"""Sorts what comes after the last step."""
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FileDifference:
    step: int
    """The step at which the runs differ in the file; ``_LAST`` for the trained model."""
    file: str
    what: str

    @property
    def where(self) -> str:
        """The step in words."""
        return "after the last step" if self.step == _LAST else f"step {self.step}"

    def __str__(self) -> str:
        return f"{self.file} differs: {self.where}: {self.what}"


@dataclass(frozen=True, slots=True)
class RunComparison:
    """What was compared, file by file."""

    equal: Sequence[str]
    """A line for each file that is equal."""
    differences: Sequence[FileDifference]
    """The first of each file; those of earlier steps first."""
    notes: Sequence[str] = ()
    steps: range | None = None
    """Those that were compared, 0 standing for the evaluation before the first; None for all."""

    @property
    def exit_code(self) -> int:
        """1 where anything differs."""
        return int(bool(self.differences))


def diff(one: Path, other: Path) -> RunComparison:
    """Compare two run directories, of which nothing is written.  Raises ConfigError for a directory
    without a run, for one that a process is writing into, and for runs with no file in common.
    """
    left, right = RunDirectory(one), RunDirectory(other)
    configs = [read_run(directory)["config"] for directory in (left, right)]
    found = compare(left, right)
    if not found.equal and not found.differences:
        raise ConfigError(
            f"{one} and {other} have no file that could be compared: neither has finished a step"
        )
    notes = [
        f"note: {key} is {ours!r} and {theirs!r}"
        for key, (ours, theirs) in changed_keys(*configs).items()
        if key == "back_end" or not is_allowed(key, tuple(MAY_CHANGE))
    ]
    return RunComparison(found.equal, found.differences, notes)


def read_run(directory: RunDirectory) -> Mapping[str, Any]:
    """``run.json`` of a run that no process is writing.  Raises ConfigError for another."""
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
        manifest = json.loads(read_plain(directory.manifest))
        dict(manifest["config"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{directory.manifest} cannot be read ({error}); put back a copy"
        ) from None
    return manifest


def compare(left: RunDirectory, right: RunDirectory, steps: range | None = None) -> RunComparison:
    """Every file of two runs; or of the ``steps`` that ``right`` has done again of ``left``, whose
    other lines and files do not count then.
    """

    def lines(name: str, key: Callable[[Line], Any], step_of: Callable[[Line], int] = _step) -> Any:
        return _lines(left.root / name, right.root / name, key, step_of, steps)

    def graded(line: Line) -> Any:
        return [line.get("weights_version"), line.get("prompts")]

    outcomes = [
        lines(left.digests.name, _step),
        lines(left.rewards.name, graded, _steps_of_gradings(left)),
        lines(left.answers.name, graded, _steps_of_gradings(left)),
        lines(left.completions.name, lambda line: [_step(line), line.get("source")]),
        lines(left.metrics.name, lambda line: [_step(line), OF_AN_EVALUATION in line]),
        _checkpoints(left, right),
        _model(left, right, steps is not None),
    ]
    found = [one for one in outcomes if isinstance(one, FileDifference)]
    found.sort(key=lambda difference: difference.step)  # stable: causes before effects
    return RunComparison([one for one in outcomes if isinstance(one, str)], found, steps=steps)


Outcome = str | FileDifference | None
"""A line that a file is equal, or how it differs; None where there is nothing to compare."""


def _lines(
    ours: Path,
    theirs: Path,
    key: Callable[[Line], Any],
    step_of: Callable[[Line], int],
    steps: range | None,
) -> Outcome:
    """Two files of lines, of which lines of one ``key`` are compared in their order."""

    def of_steps(path: Path) -> list[tuple[int, Line]]:
        # a grading, which has no step, is looked up by its key alone
        lines = _with_steps(path, step_of)
        return [
            (step, line)
            for step, line in lines
            if steps is None or step in steps or (line and "step" not in line)
        ]

    found = list[tuple[int, str]]()
    unmatched = defaultdict[str, deque[tuple[int, Line]]](deque)
    for step, line in of_steps(ours):
        unmatched[json.dumps(key(line))].append((step, line))
    lines = of_steps(theirs)  # without the evaluation that a checkpoint may stand before
    for step, line in lines:
        same = unmatched[json.dumps(key(line))]
        if not line or not same:
            found.append((step, _alone(line, theirs, ours)))
        elif what := first_difference(_take(same, steps, line), line):
            found.append((step, what))
    left = [
        (step, _alone(line, ours, theirs))
        for step, line in chain.from_iterable(unmatched.values())
        if steps is None or not line or "step" in line
    ]
    found = left + found
    if found:
        step, what = min(found, key=itemgetter(0))
        return FileDifference(step, ours.name, what)
    return f"{ours.name}: {counted(len(lines), 'lines')} equal" if lines else None


def _take(same: deque[tuple[int, Line]], steps: range | None, line: Line) -> Line:
    """The line of the same key to compare one with.  What a resume has graded again stands there
    twice; steps that are done again are those after it.
    """
    return (same.popleft() if steps is None or "step" in line else same.pop())[1]


def _alone(line: Line, here: Path, there: Path) -> str:
    """What is wrong with a line that one file alone has."""
    return f"{there} has no such line{_prompt_of(line)}" if line else f"{here} has a damaged line"


def _with_steps(path: Path, step_of: Callable[[Line], int]) -> list[tuple[int, Line]]:
    """Lines with their steps; a damaged one is empty, and has the step of the line before it."""
    found, step = list[tuple[int, Line]](), 0
    for line in read_lines(path):
        step = step_of(line) if line else step
        found.append((step, _of_those_asked(line or {})))
    return found


def _of_those_asked(line: Line) -> Line:
    """A line of what tools have said without prompts of which none was asked: those that may begin
    in a step depend on how many steps the run had then.
    """
    answers, prompts = line.get("answers"), line.get("prompts")
    if not isinstance(answers, list) or not isinstance(prompts, list):
        return line
    asked = {str(answer[0][:2]) for answer in answers if _is_answer(answer)}
    return line | {"prompts": [one for one in prompts if str(one) in asked]}


def _is_answer(answer: Any) -> bool:
    return isinstance(answer, list) and answer[:1] != [] and isinstance(answer[0], list)


def _step(line: Line) -> int:
    step = line.get("step")
    return step if isinstance(step, int) else 0


def _steps_of_gradings(run: RunDirectory) -> Callable[[Line], int]:
    """A grading names the version of the weights that sampled, which the updates of each step in
    metrics.jsonl lead to; an evaluation counts for the step after it.
    """
    versions, version = list[tuple[int, int]](), _first_version(run)
    for line in read_lines(run.metrics):
        if line is not None and isinstance(line.get("updates/taken"), int):
            versions.append((version, _step(line)))
            version += line["updates/taken"]

    def step_of(line: Line) -> int:
        sampled = line.get("weights_version", 0)
        steps = [step for version, step in versions if version >= sampled]
        return steps[0] if steps else max((step for _, step in versions), default=0)

    return step_of


def _first_version(run: RunDirectory) -> int:
    """The version of the weights that drew the first batch to learn from.  An evaluation comes
    before it, and between the two a run may publish its weights again (``Run.prove``).
    """
    versions = [
        line.get("weights_version")
        for path in (run.rewards, run.answers)
        for line in read_lines(path)
        if line is not None and _is_learnt_from(line)
    ]
    return min((one for one in versions if isinstance(one, int)), default=1)


def _is_learnt_from(grading: Line) -> bool:
    with suppress(LookupError, TypeError):
        return str(grading["prompts"][0][0]).startswith("train/")
    return False


def first_difference(ours: Line, theirs: Line) -> str | None:
    """The first entry that differs in two lines, with both values; None where the lines are equal.
    NaN equals NaN.
    """
    found = differing = _differing(ours, theirs)
    path = list[Any]()
    one = None
    other = None
    while found:
        key, one, other = found[0]
        path.append(key)
        found = _differing(one, other)
    if not path:
        return None
    number = next((key for key in path if isinstance(key, int)), 0)
    place = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)[1:]
    more = f" ({len(differing) - 1} other keys differ, too)" if differing[1:] else ""
    return f"{place}{_prompt_of(theirs, number)} is {repr_of(one)} and {repr_of(other)}{more}"


def _differing(ours: Any, theirs: Any) -> list[tuple[Any, Any, Any]]:
    """Keys, or places, with the values that differ there, of two objects or of two lists of one
    length.
    """
    pairs: Iterable[tuple[Any, Any, Any]] = ()
    if isinstance(ours, dict) and isinstance(theirs, dict):
        pairs = ((key, ours.get(key), theirs.get(key)) for key in {**ours, **theirs})
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = zip(count(), ours, theirs)
    return [
        (key, one, other)
        for key, one, other in pairs
        if json.dumps(one) != json.dumps(other) and not str(key).startswith(_IGNORED)
    ]


def _prompt_of(line: Line, number: int = 0) -> str:
    """The prompt that a line is of, one of several by its number; empty where it is of none."""
    prompt = line.get("prompt_id")
    with suppress(LookupError, TypeError):
        prompt = line["prompts"][number][0]
    return f" of {prompt}" if prompt is not None else ""


def _checkpoints(left: RunDirectory, right: RunDirectory) -> Outcome:
    ours, theirs = (folders_by_step(directory.checkpoints) for directory in (left, right))
    both = sorted(ours.keys() & theirs.keys())
    for step in both:
        pair = ours[step], theirs[step]
        found = [what for what in different_files(*pair) if ".safetensors" in what]
        states = [_state(folder) for folder in pair]
        if what := next(iter(found), None) or first_difference(*states):
            return FileDifference(step, ours[step].relative_to(left.root).as_posix(), what)
    return f"checkpoints: {counted(len(both), 'steps')} equal" if both else None


def _state(folder: Path) -> Line:
    try:
        state = json.loads(read_plain(folder / STATE, largest=None))
    except (OSError, ValueError) as error:
        return {"unreadable": f"{folder}: {error}"}
    return {f"{STATE}: {name}": value for name, value in state.items() if name not in _OF_THE_LOG}


def _model(left: RunDirectory, right: RunDirectory, is_part: bool) -> Outcome:
    ours, theirs = left.model, right.model
    if not theirs.is_dir() and (is_part or not ours.is_dir()):
        return None
    what = next(different_files(ours, theirs, is_part), None)
    return FileDifference(_LAST, ours.name, what) if what else f"{ours.name}: every file equal"


def different_files(ours: Path, theirs: Path, is_part: bool = False) -> Iterator[str]:
    """What differs in the files of two folders, model cards aside; where the second ``is_part`` of
    the first, other files of the first do not count.
    """
    names = {
        path.relative_to(folder)
        for folder in ([theirs] if is_part else [ours, theirs])
        for path in folder.rglob("*")
        if path.is_file() and path.name != CARD_FILE
    }
    for name in sorted(names):
        pair = ours / name, theirs / name
        if missing := [path for path in pair if not path.is_file()]:
            yield f"{missing[0]} is missing"
        elif not _hold_the_same(*pair):
            first = _first_tensor(*pair) if name.suffix == ".safetensors" else ""
            yield f"{name} differs{first}"


def _hold_the_same(ours: Path, theirs: Path) -> bool:
    """Byte for byte, but for where the base model of adapters is seen from the directory that a
    command was given in.
    """
    if filecmp.cmp(ours, theirs, shallow=False):
        return True
    if ours.name != CONFIG_FILE:
        return False
    one, other = (parsed_line(read_plain(path)) for path in (ours, theirs))
    return one is not None and other is not None and _seen_near(one) == _seen_near(other)


def _seen_near(config: Line) -> Line:
    """The configuration of adapters, as it is where their base model lies in the current
    directory.
    """
    name = str(config.get("base_model_name_or_path"))
    if not name.startswith(LOCAL):
        return config
    return config | {"base_model_name_or_path": LOCAL + name.rpartition("/")[2]}


def _first_tensor(ours: Path, theirs: Path) -> str:
    """The first that differs in a file of tensors, by its name."""
    with suppress(IsobitError, KeyError):
        files = TensorFile(ours), TensorFile(theirs)
        for name in files[1]:
            one, other = (file[name].contiguous().view(-1).view(torch.uint8) for file in files)
            if not torch.equal(one, other):
                return f", {name} first"
    return ", in its header"
