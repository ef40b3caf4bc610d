"""What a run of ``isobit train`` leaves behind as it goes: the figures of its steps, lines on the
console, and its summary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from isobit.clock import Clock
from isobit.observe.console import Report
from isobit.observe.eval_result import EvalResult
from isobit.observe.metrics import step_metrics
from isobit.observe.summary import SetSummary, Summary
from isobit.observe.training_log import TrainingLog
from isobit.proof.check import check_step
from isobit.records.text import Group
from isobit.rewards.grade import GradeStats
from isobit.run.setup import Run
from isobit.store.checkpoint.start import Start
from isobit.training.comparison import Comparison
from isobit.training.step import StepMetrics

Evaluation = Mapping[str, tuple[EvalResult, list[Group]]]


class RunLog(TrainingLog[EvalResult]):
    """The log of reinforcement learning."""

    phases = ("rollout", "grading", "training")
    counts = ("tokens", "failed", "skipped")

    def __init__(self, run: Run, start: Start, report: Report, clock: Clock) -> None:
        self._run = run
        self._comparison = Comparison()
        super().__init__(run, start, report, clock)

    def step(
        self, step: int, groups: Sequence[Group], grades: GradeStats, trained: StepMetrics
    ) -> None:
        """The figures of one step: a line of metrics, a line on the console, a few completions."""
        seconds = self._take_seconds()
        metrics = step_metrics(
            groups,
            grades,
            self._run.engine.stats,
            trained,
            seconds,
            self._run.config.training.epochs,
        )
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
        self._report.notes(
            check_step(
                self._run.config.check,
                self._run.model.policy.flow,
                trained.comparison,
                self.directory.model,
            )
        )

    def finish(self) -> Summary:
        """Write the summary and print it."""
        before, after = self._evaluations[0], self._evaluations[max(self._evaluations)]
        sets = {
            name: SetSummary(
                after[name].problems,
                before[name].accuracy,
                after[name].accuracy,
                before[name].interval,
                after[name].interval,
            )
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

    def _say_evaluation(self, step: int, results: Mapping[str, EvalResult]) -> None:
        self._report.evaluation(step, results)

    def _result(self, content: Mapping[str, Any]) -> EvalResult:
        return EvalResult.from_json(content)

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "comparison": asdict(self._comparison)}

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        self._comparison = Comparison(**state["comparison"])


def _notes(grades: GradeStats, trained: StepMetrics) -> list[str]:
    """What a reader of the line would otherwise not know."""
    notes = [f"an optimiser step was skipped: {reason}" for reason in trained.skip_reasons]
    if grades.failed:
        notes.append(
            f"{grades.failed} rewards failed and are excluded; the first was {grades.first_error}"
        )
    if not trained.updates:
        notes.append("no group had two valid rewards: the weights did not change")
    return notes
