"""The log that every training keeps: metrics, sample completions, changes of the micro-batch
budget and its summary.

Of several processes each keeps the log, and rank 0 writes it.  A checkpoint holds the log's state
(``state``) and the sizes of its files (``positions``).  The summary is one record from which the
last lines on the console and ``summary.json`` are both made.
"""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar

from transformers import PreTrainedTokenizerBase

from isobit.memory.sharing import PhaseMemory
from isobit.observe.console import Console, TimeLeft
from isobit.observe.metrics import MetricsWriter, open_trackers
from isobit.records.metrics import Metrics
from isobit.records.rounding import are_level
from isobit.records.text import Completion, Group
from isobit.store.budget_record import write_change
from isobit.store.directory import RunDirectory, completions_file, write_json
from isobit.store.journals import positions
from isobit.store.resume import Start
from isobit.store.training_run import TrainingRun
from isobit.training.budget import BudgetChange
from isobit.util.clock import Clock
from isobit.util.disk_space import LineFile, disk_errors
from isobit.util.files import sync
from isobit.util.strict_json import json_line, json_text


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The summary of any finished training."""

    directory: Path
    preset: str
    precision: str
    """The preset with its options, as a recipe names them."""
    steps: int
    gpu_memory: Mapping[str, PhaseMemory] | None = field(default=None, kw_only=True)
    """Device memory of this process by phase, rollout and training; None on a CPU."""

    @property
    def model(self) -> Path:
        """The trained policy, as a Hugging Face folder."""
        return self.directory / "model"

    def as_json(self) -> dict[str, Any]:
        """The record with paths as text."""
        return {**asdict(self), "directory": str(self.directory), "model": str(self.model)}

    def describe_memory(self) -> list[str]:
        """A line a phase; none on a CPU."""
        return [
            f"device memory in {phase}: {memory.peak_gib:.1f} GiB at most, "
            f"{memory.planned_gib:.1f} planned"
            for phase, memory in (self.gpu_memory or {}).items()
        ]

    def write(self, path: Path) -> None:
        write_json(path, self.as_json())


SAMPLES_KEPT = 4
"""Groups of a step, and of each set of an evaluation, that ``completions.jsonl`` has completions
of: the best and the worst, where rewards differ.
"""
TOKENS_KEPT = 512
"""Tokens of a completion whose text and log-probability are written with it: the file of a run with
long answers stays small.
"""
REFERENCES = ("answer", "solution", "target", "ground_truth", "reference", "label")
"""Columns of a dataset, the first that there is, that a completion is written beside."""


class SetFigures(Protocol):
    """The results on one set: a dataclass of values that JSON can hold."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def scalars(self, name: str) -> Metrics:
        """The figures by name, for the metrics file: all under ``eval/NAME/``."""
        ...


Result = TypeVar("Result", bound=SetFigures)


class TrainingLog(ABC, Generic[Result]):
    """Opens the run's directory and files, where a resumed run left them at ``start``; a context
    manager.
    """

    phases: ClassVar[tuple[str, ...]]
    """Parts of a step whose seconds are counted."""
    counts: ClassVar[tuple[str, ...]]
    """Totals of the summary."""

    def __init__(self, run: TrainingRun, start: Start, console: Console, clock: Clock) -> None:
        self._training, self._console, self._clock = run, console, clock
        self._world, self._place = start.world, start.watch
        start.open(run)
        self.directory: RunDirectory = start.directory
        self._files = ExitStack()
        self._room = start.writer
        self._given = start.rewards, start.answers, start.schedule
        self._unwritten: deque[Callable[[], None]] = deque()
        self._writers: tuple[MetricsWriter, LineFile] | None = None
        self._room.write_on_first(self._open_writers)
        self._evaluations: dict[int, dict[str, Result]] = {}
        self._totals = dict.fromkeys(self.counts, 0)
        self._time_left = TimeLeft(run.config.training.steps)
        self._seconds = dict.fromkeys((*self.phases, "evaluation", "offload"), 0.0)
        if start.log is not None:
            self._restore(start.log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._files.__exit__(*raised)

    def evaluation(
        self, step: int, evaluation: Mapping[str, tuple[Result, Sequence[Group]]]
    ) -> None:
        """The figures of one evaluation, 0 standing for the one before the first step."""
        seconds = self._take_seconds().get("evaluation", 0.0)
        results = {name: result for name, (result, _) in evaluation.items()}
        if results:
            scalars = {
                key: value
                for name, result in results.items()
                for key, value in result.scalars(name).items()
            }
            self._add_metrics(step, {**scalars, "time/evaluation_s": seconds})
        groups = {name: groups for name, (_, groups) in evaluation.items()}
        self._add_completions(step, groups, evaluates=True)
        self._write()
        self._evaluations[step] = results
        self._say_evaluation(step, results)

    def budget_changed(self, step: int, change: BudgetChange) -> None:
        """Journal and print a change of the tokens a micro-batch in a step; on the disk when this
        returns.
        """
        self._room.write_on_first(lambda: write_change(self.directory.budget, step, change))
        if change.new < change.old:  # else the run ends, with an error that says why
            self._console.line(describe_change(step, change))

    def evaluation_figures(self) -> dict[int, Metrics]:
        """The figures of every evaluation so far that are finite, by step."""
        return {
            step: {
                key: value
                for name, result in results.items()
                for key, value in result.scalars(name).items()
                if math.isfinite(value)
            }
            for step, results in self._evaluations.items()
        }

    def _first_and_last(self) -> dict[str, tuple[Result, Result]]:
        """Each set before the first step and at the end; a resume may have changed the sets."""
        before, after = self._evaluations[0], self._evaluations[max(self._evaluations)]
        return {name: (before[name], after[name]) for name in before if name in after}

    @abstractmethod
    def _say_evaluation(self, step: int, results: Mapping[str, Result]) -> None:
        """Lines on the console."""

    @abstractmethod
    def _result(self, content: Mapping[str, Any]) -> Result:
        """The figures of a set from what ``dataclasses.asdict`` and JSON made of them."""

    def state(self) -> dict[str, Any]:
        """What the log itself has to know to go on, ready for JSON."""
        return {
            "evaluations": {
                str(done): {name: asdict(result) for name, result in made.items()}
                for done, made in self._evaluations.items()
            },
            "totals": dict(self._totals),
            "seconds": dict(self._seconds),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Go on with what ``state`` was."""
        for step, made in state["evaluations"].items():
            self._evaluations[int(step)] = {
                name: self._result(result) for name, result in made.items()
            }
        self._totals, self._seconds = (
            {**self._totals, **state["totals"]},
            {**self._seconds, **state["seconds"]},
        )

    def positions(self) -> Mapping[str, int]:
        """Sizes in bytes of the files that grow, by name, where the directory is now; they stay
        open where it is moved.  Records of what the run is given are longer where some of it comes
        again.
        """
        place = self._place.now()
        if self._writers is None or place is None:
            return {}
        found, here = positions(RunDirectory(place)), self.directory
        names = here.rewards.name, here.answers.name, here.schedule.name
        records = zip(names, self._given, strict=True)
        return found | {name: one.position for name, one in records if name in found}

    def _take_seconds(self) -> dict[str, float]:
        seconds = self._clock.take()
        for name, value in seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + value
        return seconds

    def _waiting_figures(self) -> Metrics:
        """How long ranks have waited for each other since the last step; of several, which ask
        together.
        """
        if self._world.size == 1:
            return {}
        waited = self._world.all_gather(self._world.pulse.take_waited())
        return {
            "waiting/mean_s": fmean(waited),
            "waiting/max_s": max(waited),
            "waiting/min_s": min(waited),
            "waiting/min_rank": waited.index(min(waited)),
        }

    def _open_writers(self) -> None:
        """Open the writers of figures and of completions."""
        config, directory = self._training.config, self.directory
        tracking = config.tracking
        trackers = open_trackers(tracking, directory.root, config.model_dump(mode="json"))
        if tracking.completions:
            directory.kept_completions.mkdir(exist_ok=True)
        metrics = MetricsWriter(
            directory.metrics,
            directory.tensorboard,
            trackers,
            self._console.line,
            with_texts="tensorboard" in tracking.services(),
        )
        completions = self._open_lines(directory.completions)
        self._writers = self._files.enter_context(metrics), completions

    def _open_lines(self, path: Path) -> LineFile:
        """A file that grows, until the log is closed."""
        file = LineFile(path)
        self._files.callback(file.close)
        return file

    def _write(self) -> None:
        """Write what has been added; of several ranks an error of the one that writes is that of
        all.
        """

        def rest() -> None:
            while self._unwritten:
                self._unwritten[0]()
                self._unwritten.popleft()

        self._room.write_on_first(rest)

    def _write_summary(self, summary: RunSummary) -> None:
        self._room.write_on_first(lambda: summary.write(self.directory.summary))

    def _add_metrics(self, step: int, metrics: Metrics) -> None:
        if self._writers is not None:
            self._unwritten += self._writers[0].writes(step, metrics)

    def _add_completions(
        self, step: int, groups: Mapping[str, Sequence[Group]], evaluates: bool = False
    ) -> None:
        """Samples of a step's groups, or by set of those of the evaluation after it, and as many
        completions as are to be kept.
        """
        if self._writers is None:
            return
        metrics, file = self._writers
        for source, found in groups.items():
            lines = [
                completion_line(step, source, group, place, self._training.model.tokenizer)
                for group in found[:SAMPLES_KEPT]
                for place in best_and_worst(group.rewards)
            ]
            for line in lines:
                self._add_line(file, json_line(line))
            if lines:
                self._unwritten += metrics.tables(step, source, lines)
        count = self._training.config.tracking.completions
        if count and any(groups.values()):
            path = completions_file(self.directory, step, evaluates)
            self._unwritten.append(partial(write_completions, path, step, groups, count))

    def _add_line(self, file: LineFile, line: bytes) -> None:
        self._unwritten.append(partial(file.write, line))


def describe_change(step: int, change: BudgetChange) -> str:
    """What an out-of-memory changed, for the console."""
    return (
        f"step {step}: out of memory with {change.old:,} tokens a micro-batch; the update is done "
        f"again with {change.new:,}, "
        "as is every later one"
    )


def best_and_worst(rewards: Sequence[float | None]) -> list[int]:
    """The places of the first completion with the highest reward and of the first with the lowest,
    in their order; the first alone where no two valid rewards differ but for rounding.
    """
    valid = {place: reward for place, reward in enumerate(rewards) if reward is not None}
    if are_level(valid.values()):
        return [0]
    return sorted((max(valid, key=valid.__getitem__), min(valid, key=valid.__getitem__)))


def write_completions(
    path: Path, step: int, groups: Mapping[str, Sequence[Group]], count: int | Literal["all"]
) -> None:
    """Write the first ``count`` completions of each source, or all, as a Parquet file that appears
    whole or not at all.  Raises StorageError.
    """
    import pyarrow as pa
    from pyarrow import parquet

    kept = None if count == "all" else count
    rows = [
        row
        for source, found in groups.items()
        for row in islice(completion_rows(step, source, found), kept)
    ]
    lists = {"token_ids": pa.list_(pa.int32())}
    lists |= dict.fromkeys(("log_probs", "advantages"), pa.list_(pa.float32()))
    types = {"step": pa.int64(), "visit": pa.int64(), "sample": pa.int32(), "tokens": pa.int32()}
    types |= {"reward": pa.float64(), "advantage": pa.float64()} | lists
    types |= {"turn_rewards": pa.list_(pa.float64())}
    types |= {"reward_parts": pa.map_(pa.string(), pa.float64())}
    schema = pa.schema([(name, types.get(name, pa.string())) for name in ROW_COLUMNS])
    unfinished = path.with_name(f".{path.name}")
    with disk_errors(path.parent, f"the completions of step {step}"):
        parquet.write_table(pa.Table.from_pylist(rows, schema), unfinished)
        sync(unfinished)
        unfinished.replace(path)


ROW_COLUMNS = (
    *("step", "source", "prompt_id", "visit", "sample", "prompt", "completion", "answer"),
    *("reward", "reward_parts", "finish_reason", "tokens", "token_ids", "log_probs"),
    *("advantage", "advantages", "messages", "turn_rewards"),
)
"""Columns of a Parquet file of completions."""


def completion_rows(step: int, source: str, groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Every completion, with its place in its group as ``sample`` and the values of
    ``ROW_COLUMNS``; of a failed reward None.  ``advantage`` is the mean over its tokens, None where
    it is not learnt from, and ``advantages`` has one of each token where they differ.  ``messages``
    are the turns of an episode as JSON, ``turn_rewards`` their rewards by the environment.
    """
    for group in groups:
        answer = reference_of(group)
        for place, completion in enumerate(group.completions):
            yield {
                "step": step,
                "source": source,
                "prompt_id": group.prompt.id,
                "visit": group.visit,
                "sample": place,
                "prompt": group.prompt.text,
                "completion": completion.text,
                "answer": None if answer is None else str(answer),
                "reward": group.rewards[place] if group.rewards else None,
                "reward_parts": {name: found[place] for name, found in group.reward_parts.items()},
                "finish_reason": completion.finish_reason,
                "tokens": completion.length,
                "token_ids": list(completion.token_ids),
                "log_probs": list(completion.log_probs),
                "advantage": group.advantages[place] if group.advantages else None,
                "advantages": _differing_advantages(group, completion),
                "messages": None
                if completion.episode is None
                else json_text(completion.episode.messages, ascii=True),
                "turn_rewards": completion.sequence.rewards_of_turns,
            }


def _differing_advantages(group: Group, completion: Completion) -> list[float] | None:
    if not group.advantages:
        return None
    sequence = completion.sequence
    advantages = sequence.of_response(sequence.advantages).tolist()
    return advantages if len(set(advantages)) > 1 else None


def reference_of(group: Group) -> str | int | float | None:
    """The dataset's own answer to the prompt, where there is one."""
    references = (group.prompt.row.get(name) for name in REFERENCES)
    return next((one for one in references if isinstance(one, str | int | float)), None)


def completion_line(
    step: int, source: str, group: Group, place: int, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """A completion of a group, with the text and the log-probability (nats, the FP32 number) of its
    first tokens, and the digests of their experts; beside it the rewards of the whole group, and
    the dataset's own answer where there is one.
    """
    completion, answer = group.completions[place], reference_of(group)
    turn_rewards, shown = completion.sequence.rewards_of_turns, slice(TOKENS_KEPT)
    return {
        "step": step,
        "source": source,
        "prompt_id": group.prompt.id,
        "prompt": group.prompt.text,
        "completion": completion.text,
        "reward": group.rewards[place],
        "group_rewards": list(group.rewards),
        **({} if answer is None else {"answer": answer}),
        "finish_reason": completion.finish_reason,
        **({} if completion.episode is None else {"messages": completion.episode.messages}),
        **({} if turn_rewards is None else {"turn_rewards": turn_rewards}),
        "tokens": completion.length,
        "token_texts": [tokenizer.decode([token_id]) for token_id in completion.token_ids[shown]],
        "log_probs": [
            float(f"{log_prob:.9g}") for log_prob in completion.log_probs[shown]
        ],  # nine digits hold every FP32 number
        **({} if completion.routings is None else {"routings": completion.routings[shown]}),
    }
