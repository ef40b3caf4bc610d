"""What a run of ``isobit train`` leaves behind as it goes: the figures of its steps, lines on the
console, and its summary.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from isobit.clock import Clock
from isobit.observe.console import Console, describe_moment, describe_result
from isobit.observe.eval_result import EvalResult
from isobit.observe.metrics import Metrics, step_metrics
from isobit.observe.training_log import TrainingLog
from isobit.proof.check import check_step
from isobit.rewards.grade import GradeStats
from isobit.run.rl.collected import Collected
from isobit.run.rl.setup import RlRun
from isobit.run.rl.summary import RlSummary, describe_summary, summarise_set
from isobit.store.checkpoint.start import Start
from isobit.training.comparison import Comparison
from isobit.training.step import StepMetrics

BESIDE = ("training", "waiting")
"""Phases of a step whose batch the rollouters sample: learning, and then waiting for them."""


class RlLog(TrainingLog[EvalResult]):
    """The log of reinforcement learning: figures, lines and sample completions of its steps."""

    phases = ("rollout", "grading", "training")
    counts = ("tokens", "failed", "skipped")

    def __init__(self, run: RlRun, start: Start, console: Console, clock: Clock) -> None:
        self._run = run
        self._comparison = Comparison()
        super().__init__(run, start, console, clock)

    def step(self, step: int, collected: Collected, trained: StepMetrics) -> None:
        """The figures of one step: a line of metrics, a line on the console, a few completions."""
        seconds = dict.fromkeys((*self.phases, *self._phases_of_step), 0.0) | self._take_seconds()
        groups, grades, engine = collected.groups, collected.grades, self._run.pending.take_engine()
        metrics = step_metrics(groups, grades, engine, trained, seconds)
        metrics |= self._optional_figures(collected)
        metrics |= self._run.turns.figures()
        metrics |= self._waiting_figures()
        self._write_metrics(step, metrics)
        self._write_completions(step, "train", groups)
        self._comparison += trained.comparison
        self._totals["tokens"] += engine.generated_tokens
        self._totals["failed"] += grades.failed
        self._totals["skipped"] += trained.skipped_updates
        self.boundary = self._take_boundary(step)
        self._console.line(describe_step(step, self._run.config.training.steps, metrics))
        self._console.notes(_notes(grades, trained))
        self._console.notes(
            check_step(
                self._run.config.check,
                self._run.model.policy.flow,
                trained.comparison,
                self.directory.model,
            )
        )

    @property
    def _phases_of_step(self) -> tuple[str, ...]:
        """Those that a step takes one after the other: rollouters work beside the trainers."""
        return self.phases if self._run.apart is None else BESIDE

    def _optional_figures(self, collected: Collected) -> Metrics:
        """Of what a run may do without."""
        figures: Metrics = {}
        if self._run.config.algorithm.dynamic_sampling:
            figures["rollout/refills"] = collected.refills
            figures["rollout/dropped_groups"] = collected.dropped_groups
        if self._run.replay is not None:
            figures["replay/size"] = len(self._run.replay)
            figures["replay/mib"] = self._run.replay.num_bytes / (1 << 20)
        return figures

    def finish(self) -> RlSummary:
        """Write ``summary.json``, print the last lines, and return what the run achieved."""
        sets = {name: summarise_set(*ends) for name, ends in self._first_and_last().items()}
        first = next(iter(sets.values()), None)
        seconds = self._seconds
        summary = RlSummary(
            directory=self.directory.root,
            preset=self._run.config.precision.preset,
            steps=self._run.config.training.steps,
            accuracy_before=first.accuracy_before if first else None,
            accuracy_after=first.accuracy_after if first else None,
            problems=first.problems if first else 0,
            tokens_compared=self._comparison.tokens_compared,
            tokens_differing=self._comparison.tokens_differing,
            max_abs_diff=self._comparison.max_abs_diff,
            routings_compared=self._comparison.routings_compared,
            routings_differing=self._comparison.routings_differing,
            tokens_generated=self._totals["tokens"],
            skipped_updates=self._totals["skipped"],
            failed_rewards=self._totals["failed"],
            train_seconds=sum(seconds.get(phase, 0.0) for phase in self._phases_of_step),
            rollout_seconds=seconds["rollout"],
            evaluation_seconds=seconds["evaluation"],
            evaluations=sets,
            gpu_memory=self._run.turns.summary(),
        )
        self._write_summary(summary)
        self._console.lines(describe_summary(summary))
        return summary

    def _say_evaluation(self, step: int, results: Mapping[str, EvalResult]) -> None:
        for name, result in results.items():
            self._console.line(f"{describe_moment(step)}: {describe_result(name, result)}")

    def _result(self, content: Mapping[str, Any]) -> EvalResult:
        return EvalResult.from_json(content)

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "comparison": asdict(self._comparison)}

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        self._comparison = Comparison(**state["comparison"])


def describe_step(step: int, steps: int, metrics: Metrics) -> str:
    """Reward, length, entropy, differing tokens, rates and seconds of one step in one line."""
    phases = BESIDE if "time/waiting_s" in metrics else RlLog.phases
    seconds = sum(metrics[f"time/{phase}_s"] for phase in phases)
    parts = [
        f"step {step:>{len(str(steps))}}/{steps}",
        f"reward {metrics['reward/mean']:.3f}",
        f"length {metrics['response_length/mean']:.1f}",
        f"entropy {metrics['entropy']:.3f}" if "entropy" in metrics else "no update",
        f"differing {metrics['log_prob_diff/tokens_differing']:.0f} of "
        f"{metrics['log_prob_diff/tokens_compared']:.0f}",
        *_routings(metrics),
        *_sampling(metrics),
        f"training {metrics['tokens_per_s/training']:,.0f} tok/s",
        f"{seconds:.1f} s",
    ]
    return "  ".join(parts)


def _sampling(metrics: Metrics) -> list[str]:
    """Of a step that sampled anything: with a lag, the last ones learn from what is there."""
    if "tokens_per_s/rollout" not in metrics:
        return []
    return [f"rollout {metrics['tokens_per_s/rollout']:,.0f} tok/s"]


def _routings(metrics: Metrics) -> list[str]:
    """Of a mixture of experts."""
    if "routing_diff/tokens_differing" not in metrics:
        return []
    return [f"routings {metrics['routing_diff/tokens_differing']:.0f}"]


def _notes(grades: GradeStats, trained: StepMetrics) -> list[str]:
    """What a reader of the line would otherwise not know."""
    notes = [f"an update was skipped: {reason}" for reason in trained.skip_reasons]
    if grades.failed:
        notes.append(
            f"{grades.failed} rewards failed and are excluded; the first was {grades.first_error}"
        )
    if grades.counts:
        met = ", ".join(f"{number:,} {kind}" for kind, number in grades.counts.items())
        notes.append(f"graders met: {met}")
    if not trained.updates:
        notes.append("no group had two valid rewards: the weights did not change")
    return notes
