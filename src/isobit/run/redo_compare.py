"""A step that was done again, compared with what the run has recorded of it:

    digests.jsonl        what it drew, was given, and left
    rewards.jsonl        every reward, of training and of evaluations
    completions.jsonl    the completions that are kept there, word by word
    model/               the trained policy, file by file

Both sides are the files that a run writes: those of the recorded one, and those that doing its
steps again has written so far.  Lines are found by what they are of, not by their places: one that
has become longer must not make those behind it others.
"""

import filecmp
import json
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from isobit.models.safetensors import TensorFile
from isobit.store.directory import RunDirectory, read_lines
from isobit.store.state import StepDigests
from isobit.util.errors import IsobitError

Line = dict[str, Any]
NAMES = {
    "tokens": "tokens",
    "log_probs": "log-probabilities",
    "rewards": "rewards",
    "weights": "published weights",
    "masters": "masters",
    "moments": "AdamW's moments",
}
"""What a digest is of."""
LEFT = ("weights", "masters", "moments")
_TRAINING = "train"
"""The source of the completions of a step."""


class Comparer:
    """Compares one step after the other."""

    def __init__(
        self,
        recorded: RunDirectory,
        digests: Mapping[int, StepDigests | None],
        again: RunDirectory,
        of_evaluations: Collection[str],
    ) -> None:
        """``again`` is where the steps are being done; ``of_evaluations`` are the ids of the
        prompts of all evaluation sets.
        """
        self._digests, self._again = digests, again
        self._of_evaluations = frozenset(of_evaluations)
        self._gradings: dict[str, deque[Line]] = defaultdict(deque)
        self._completions: dict[str, list[Line]] = defaultdict(list)
        for line in _whole(recorded.rewards):
            self._gradings[_key(line)].append(line)
        for line in _whole(recorded.completions):
            self._completions[_place(line.get("step"), line.get("source"))].append(line)
        self._evaluated = {
            str(line.get("step"))
            for line in _whole(recorded.metrics)
            if any(name.startswith("eval/") for name in line)
        }
        self._read: dict[Path, int] = {}
        self.parted = False
        """Whether a step has left other weights than the recorded one: all later ones differ."""

    def differences(self, step: int) -> list[str]:
        """What differs in a step that has just been done, or in the evaluation after it; of step 0
        in the one before the first.
        """
        found = list(self._of_digests(step)) if step else []
        for line in self._new(self._again.rewards):
            if self._is_recorded(step, self._is_of_evaluation(line)):
                found += self._of_grading(line)
        made: dict[str, list[Line]] = defaultdict(list)
        for line in self._new(self._again.completions):
            made[line["source"]].append(line)
        for source, lines in made.items():
            if self._is_recorded(step, source != _TRAINING):
                found += _of_completions(source, self._completions[_place(step, source)], lines)
        return found

    def _of_digests(self, step: int) -> Iterator[str]:
        made = next(iter(self._new(self._again.digests)))
        recorded = self._digests.get(step)
        if recorded is None:
            yield "digests.jsonl has no whole line of it"
            return
        for name, digest in recorded.by_name().items():
            if made[name] != digest:
                self.parted = self.parted or name in LEFT
                yield (
                    f"{NAMES[name]} differ: digests.jsonl has {digest[:16]}, done again "
                    f"{made[name][:16]}"
                )

    def _of_grading(self, made: Line) -> list[str]:
        prompts, known = made["prompts"], self._gradings[_key(made)]
        recorded = known.popleft() if known else None
        if recorded is None:
            return [f"rewards.jsonl has no grading of {_some(prompts)}"]
        found = list[str]()
        if made["completions"] != recorded.get("completions"):
            found.append(f"tokens differ: rewards.jsonl has graded others of {_some(prompts)}")
        for column in ("rewards", *(f"parts.{name}" for name in made.get("parts", {}))):
            ours, theirs = _column(made, column), _column(recorded, column)
            if ours != theirs:
                found.append(first_reward(prompts, column, theirs, ours))
        return found

    def _is_of_evaluation(self, line: Line) -> bool:
        return all(prompt in self._of_evaluations for prompt, _ in line["prompts"])

    def _is_recorded(self, step: int, of_evaluation: bool) -> bool:
        """Not an evaluation that the run, which had another ``evaluation.every`` then, has not
        made.
        """
        return not of_evaluation or str(step) in self._evaluated

    def _new(self, path: Path) -> list[Line]:
        """The lines that have been written since this was last asked."""
        position = self._read.get(path, 0)
        self._read[path] = path.stat().st_size if path.is_file() else 0
        return [line for line in read_lines(path, position) if line is not None]


def different_files(recorded: Path, again: Path) -> Iterator[str]:
    """Of a model folder that was made again, what differs in the recorded one."""
    for path in sorted(path for path in again.rglob("*") if path.is_file()):
        other = recorded / path.relative_to(again)
        if not other.is_file():
            yield f"{other} is missing"
        elif not filecmp.cmp(other, path, shallow=False):
            yield (
                f"weights differ: {other}{_first_tensor(other, path)}"
                if (path.suffix == ".safetensors")
                else f"{other} differs"
            )


def _first_tensor(recorded: Path, again: Path) -> str:
    """The first that differs in a file of tensors, for its name."""
    try:
        theirs, ours = TensorFile(recorded), TensorFile(again)
        for name in ours:
            left, right = (
                one[name].contiguous().view(-1).view(torch.uint8) for one in (theirs, ours)
            )
            if not torch.equal(left, right):
                return f", {name} first"
    except (IsobitError, KeyError):
        pass
    return ", in its header"


def _whole(path: Path) -> Iterator[Line]:
    return (line for line in read_lines(path) if line is not None)


def _key(line: Line) -> str:
    return json.dumps([line.get("weights_version"), line.get("prompts")])


def _place(step: Any, source: Any) -> str:
    return json.dumps([step, source])


def _some(prompts: Sequence[Sequence[Any]]) -> str:
    return f"{prompts[0][0]}, .. ({len(prompts)} prompts)"


def _column(line: Line, column: str) -> Any:
    found: Any = line
    for name in column.split(".", 1):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def first_reward(
    prompts: Sequence[Sequence[Any]], column: str, recorded: Any, made: Sequence[Sequence[Any]]
) -> str:
    """The first that differs, by prompt and sample."""
    what = "rewards differ" if column == "rewards" else f"rewards differ in {column}"
    for place, of_prompt in enumerate(made):
        for sample, reward in enumerate(of_prompt):
            try:
                theirs = recorded[place][sample]
            except (IndexError, KeyError, TypeError):
                return f"{what}: rewards.jsonl has none of {prompts[place][0]}, sample {sample}"
            if theirs != reward:
                return (
                    f"{what}: {prompts[place][0]}, sample {sample}: {theirs} in rewards.jsonl, "
                    f"{reward} graded again"
                )
    return f"{what}: rewards.jsonl has more of {_some(prompts)} than there are completions"


def _of_completions(source: str, recorded: Sequence[Line], made: Sequence[Line]) -> list[str]:
    where = "completions.jsonl" if source == _TRAINING else f"completions.jsonl, {source}"
    if len(recorded) != len(made):
        return [f"{where} has {len(recorded)} whole lines of it, done again {len(made)}"]
    for place, (theirs, ours) in enumerate(zip(recorded, made, strict=True)):
        names = [name for name in ours.keys() | theirs.keys() if theirs.get(name) != ours.get(name)]
        if names:
            return [
                f"{where} differs in line {place + 1} of it ({ours['prompt_id']}): "
                f"{', '.join(sorted(names))}"
            ]
    return []
