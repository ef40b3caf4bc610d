"""What a run leaves behind as it goes: metrics, sample completions, lines on the console, and the totals of its summary."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from isobit.records import Group
from isobit.rewards.grade import GradeStats
from isobit.run.budget_record import write_change
from isobit.run.check import check_step
from isobit.run.checkpoint.start import Start
from isobit.run.checkpoint.state import Boundary, take_boundary
from isobit.run.clock import Clock
from isobit.run.console import Report
from isobit.run.directory import RunDirectory
from isobit.run.eval_result import EvalResult
from isobit.run.journal import positions
from isobit.run.metrics import Metrics, MetricsWriter, step_metrics
from isobit.run.setup import Run
from isobit.run.summary import SetSummary, Summary
from isobit.run.wandb_tracker import open_tracker
from isobit.training.budget import BudgetChange
from isobit.training.comparison import Comparison
from isobit.training.step import StepMetrics

SAMPLES_KEPT = 4
"""Completions of a step, and of each set of an evaluation, written to ``completions.jsonl``."""
TOKENS_KEPT = 512
"""Tokens of a completion whose text and log-probability are written with it: the file of a run with long answers stays small."""

Evaluation = Mapping[str, tuple[EvalResult, list[Group]]]


class RunLog:
    """Opens the run's directory and files, where a resumed run left them at ``start``; a context manager."""

    def __init__(self, run: Run, start: Start, report: Report, clock: Clock) -> None:
        self._run, self._report, self._clock = run, report, clock
        start.open(run)
        self.directory: RunDirectory = start.directory
        self._files = ExitStack()
        tracker = open_tracker(run.config.tracking, self.directory.root, run.config.model_dump(mode="json"))
        self._metrics = self._files.enter_context(MetricsWriter(self.directory.metrics, self.directory.tensorboard, tracker, report.line))
        self._completions = self._files.enter_context(self.directory.completions.open("a", encoding="utf-8"))
        self._evaluations: dict[int, dict[str, EvalResult]] = {}
        self._comparison = Comparison()
        self._totals = {"tokens": 0, "failed": 0, "skipped": 0}
        self._seconds = {"rollout": 0.0, "grading": 0.0, "training": 0.0, "evaluation": 0.0, "offload": 0.0}
        if start.log is not None:
            self._restore(start.log)
        self.boundary: Boundary = self._take_boundary(start.step)
        """The last moment between two steps: what a checkpoint holds."""
        run.trainer.budget.on_change = self._budget_changed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._files.__exit__(kind, error, traceback)

    def step(self, step: int, groups: Sequence[Group], grades: GradeStats, trained: StepMetrics) -> None:
        """The figures of one step: a line of metrics, a line on the console, a few completions."""
        seconds = self._take_seconds()
        metrics = step_metrics(groups, grades, self._run.engine.stats, trained, seconds, self._run.config.training.epochs)
        metrics |= self._run.turns.figures() if self._run.turns else {}
        self._metrics.write(step, metrics)
        self._write_completions(step, "train", groups)
        self._comparison += trained.comparison
        self._totals["tokens"] += self._run.engine.stats.generated_tokens
        self._totals["failed"] += grades.failed
        self._totals["skipped"] += trained.skipped_updates
        self._report.step(step, self._run.config.training.steps, metrics)
        self._report.notes(_notes(grades, trained))
        self.boundary = self._take_boundary(step)
        self._report.notes(check_step(self._run.config.check, self._run.model.policy.flow, trained.comparison, self.directory.model))

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """The figures of one evaluation, 0 standing for the one before the first step."""
        seconds = self._take_seconds().get("evaluation", 0.0)
        results = {name: result for name, (result, _) in evaluation.items()}
        if results:
            scalars = {key: value for name, result in results.items() for key, value in result.scalars(name).items()}
            self._metrics.write(step, {**scalars, "time/evaluation_s": seconds})
        for name, (_, groups) in evaluation.items():
            self._write_completions(step, name, groups)
        self._evaluations[step] = results
        self._report.evaluation(step, results)
        self.boundary = self._take_boundary(step)

    def evaluation_figures(self) -> dict[int, Metrics]:
        """The figures of every evaluation so far that are finite, by step."""
        return {
            step: {key: value for name, result in results.items() for key, value in result.scalars(name).items() if math.isfinite(value)}
            for step, results in self._evaluations.items()
        }

    def finish(self) -> Summary:
        """Write the summary and print it."""
        before, after = self._evaluations[0], self._evaluations[max(self._evaluations)]
        sets = {
            name: SetSummary(after[name].problems, before[name].accuracy, after[name].accuracy, before[name].interval, after[name].interval)
            for name in before
        }
        first = next(iter(sets.values()), None)
        seconds = self._seconds
        summary = Summary(
            directory=self.directory.root,
            preset=self._run.config.precision.preset,
            steps=self._run.config.training.steps,
            accuracy_before=first.accuracy_before if first else None,
            accuracy_after=first.accuracy_after if first else None,
            problems=first.problems if first else 0,
            tokens_compared=self._comparison.tokens_compared,
            tokens_differing=self._comparison.tokens_differing,
            max_abs_diff=self._comparison.max_abs_diff,
            tokens_generated=self._totals["tokens"],
            skipped_updates=self._totals["skipped"],
            failed_rewards=self._totals["failed"],
            train_seconds=seconds["rollout"] + seconds["grading"] + seconds["training"],
            rollout_seconds=seconds["rollout"],
            evaluation_seconds=seconds["evaluation"],
            evaluations=sets,
            gpu_memory=self._run.turns.summary() if self._run.turns else None,
        )
        summary.write(self.directory.summary)
        self._report.summary(summary)
        return summary

    def _budget_changed(self, change: BudgetChange) -> None:
        step = self.boundary.step + 1
        write_change(self.directory.budget, step, change)
        self._report.line(describe_change(step, change))

    def _take_boundary(self, step: int) -> Boundary:
        state = {
            "evaluations": {str(done): {name: asdict(result) for name, result in made.items()} for done, made in self._evaluations.items()},
            "comparison": asdict(self._comparison),
            "totals": dict(self._totals),
            "seconds": dict(self._seconds),
        }
        return take_boundary(step, self._run, state, positions(self.directory), self.evaluation_figures().get(step, {}))

    def _restore(self, state: Mapping[str, Any]) -> None:
        for step, made in state["evaluations"].items():
            self._evaluations[int(step)] = {name: EvalResult.from_json(result) for name, result in made.items()}
        self._comparison = Comparison(**state["comparison"])
        self._totals, self._seconds = dict(state["totals"]), {**self._seconds, **state["seconds"]}

    def _take_seconds(self) -> dict[str, float]:
        seconds = self._clock.take()
        for name, value in seconds.items():
            self._seconds[name] += value
        return seconds

    def _write_completions(self, step: int, source: str, groups: Sequence[Group]) -> None:
        for group in groups[:SAMPLES_KEPT]:
            line = completion_line(step, source, group, self._run.model.tokenizer)
            self._completions.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._completions.flush()


def describe_change(step: int, change: BudgetChange) -> str:
    """What an out-of-memory changed, for the console."""
    if change.new > change.old:
        return f"step {step}: a resumed run tries {change.new:,} tokens a micro-batch again"
    return (
        f"step {step}: out of memory with {change.old:,} tokens a micro-batch; the update is done again with {change.new:,}, "
        "as is every later one"
    )


def completion_line(step: int, source: str, group: Group, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The first completion of a group, with the text and the log-probability (nats, the FP32 number) of its first tokens."""
    completion = group.completions[0]
    shown = slice(TOKENS_KEPT)
    return {
        "step": step,
        "source": source,
        "prompt_id": group.prompt.id,
        "prompt": group.prompt.text,
        "completion": completion.text,
        "reward": group.rewards[0],
        "finish_reason": completion.finish_reason,
        "tokens": len(completion.token_ids),
        "token_texts": [tokenizer.decode([token_id]) for token_id in completion.token_ids[shown]],
        "logprobs": [float(f"{logprob:.9g}") for logprob in completion.logprobs[shown]],  # nine digits hold every FP32 number
    }


def _notes(grades: GradeStats, trained: StepMetrics) -> list[str]:
    """What a reader of the line would otherwise not know."""
    notes = [f"an optimiser step was skipped: {reason}" for reason in trained.skip_reasons]
    if grades.failed:
        notes.append(f"{grades.failed} rewards failed and are excluded; the first was {grades.first_error}")
    if not trained.updates:
        notes.append("no group had two valid rewards: the weights did not change")
    return notes
