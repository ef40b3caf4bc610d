"""What a run of ``isobit train`` leaves behind as it goes: the figures of its steps, lines on the
console, and its summary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from isobit.clock import Clock
from isobit.errors import MismatchError
from isobit.files import LineFile
from isobit.observe.console import Console, describe_moment, describe_result
from isobit.observe.eval_result import EvalResult
from isobit.observe.metrics import Metrics, step_metrics
from isobit.observe.step_line import BAD, GOOD, WARNING, Part, time_left
from isobit.observe.training_log import TrainingLog
from isobit.proof.check import check_state, check_step
from isobit.records.text import Group
from isobit.rewards.grade import GradeStats
from isobit.run.rl.collected import Collected
from isobit.run.rl.setup import RlRun
from isobit.run.rl.signal_watch import SignalWatch
from isobit.run.rl.summary import RlSummary, describe_summary, summarise_set
from isobit.store.checkpoint.start import Start
from isobit.store.state_digest import StateDigest, state_digest
from isobit.store.step_digests import StepDigests
from isobit.training.comparison import Comparison
from isobit.training.step import StepMetrics

BESIDE = ("training", "waiting")
"""Phases of a step whose batch the rollouters sample: learning, and then waiting for them."""


class RlLog(TrainingLog[EvalResult]):
    """The log of reinforcement learning: figures, lines and sample completions of its steps."""

    phases = ("rollout", "grading", "training")
    counts = ("tokens", "failed", "skipped", "without_signal", "steps_without_signal")

    def __init__(self, run: RlRun, start: Start, console: Console, clock: Clock) -> None:
        self._run = run
        self._comparison = Comparison()
        self._watch = SignalWatch(run.config.check)
        self._digests: LineFile | None = None
        self._left: StateDigest | None = None
        super().__init__(run, start, console, clock)

    def _open_writers(self) -> None:
        super()._open_writers()
        self._digests = self._open_lines(self.directory.digests)

    def check_state(self) -> None:
        """Whether the weights, masters and moments that are about to learn are what this process's
        last update left; all ranks together, in the trainer's turn.  Raises MismatchError where
        the run is to stop at that: then they are written nowhere.
        """
        check = self._run.config.check
        if self._left is None or not check.state or check.on_mismatch == "ignore":
            return
        try:
            self._console.notes(check_state(check, self._left, state_digest(self._run)))
        except MismatchError:
            self._run.trainer.is_whole = False
            raise

    def step(
        self, step: int, collected: Collected, trained: StepMetrics, state: StateDigest
    ) -> None:
        """The figures of one step: a line of metrics, a line on the console, a few completions; and
        the digests of all of them and of the ``state`` that the update has left.
        """
        seconds = dict.fromkeys((*self.phases, *self._phases_of_step), 0.0) | self._take_seconds()
        groups, grades, engine = collected.groups, collected.grades, self._run.pending.take_engine()
        metrics = step_metrics(groups, grades, engine, trained, seconds)
        metrics |= self._optional_figures(collected)
        metrics |= self._run.turns.figures()
        metrics |= self._waiting_figures()
        self._add_metrics(step, metrics)
        self._add_completions(step, "train", groups)
        self._add_digests(step, groups, state)
        self._write()
        self._left = state
        self._comparison += trained.comparison
        self._totals["tokens"] += engine.generated_tokens
        self._totals["failed"] += grades.failed
        self._totals["skipped"] += trained.skipped_updates
        self._totals["without_signal"] += trained.without_signal
        self._totals["steps_without_signal"] += not trained.has_signal
        steps, left = self._run.config.training.steps, self._time_left.after(step)
        self._watch.count(trained.has_signal)
        self.boundary = self._take_boundary(step)
        self._console.parts(describe_step(step, steps, metrics, self._run.exact, left))
        self._console.notes(_notes(grades, trained, self._watch.steps))
        self._console.notes(self._watch.notes(metrics))
        self._console.notes(
            check_step(
                self._run.config.check,
                self._run.model.policy.flow,
                trained,
                self.directory.model,
            )
        )

    def _add_digests(self, step: int, groups: Sequence[Group], state: StateDigest) -> None:
        if self._digests is not None:
            self._add_line(self._digests, StepDigests.of(step, groups, state).line())

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
            updates_without_signal=self._totals["without_signal"],
            steps_without_signal=self._totals["steps_without_signal"],
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
        return {
            **super()._state(),
            "comparison": asdict(self._comparison),
            "last_steps_without_signal": self._watch.steps,
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        self._comparison = Comparison(**state["comparison"])
        self._watch.steps = state.get("last_steps_without_signal", 0)


def describe_step(
    step: int, steps: int, metrics: Metrics, exact: bool, seconds_left: float
) -> list[Part]:
    """Reward, length, entropy, differing tokens, rates and seconds of one step, and how long the
    run will still take; ``exact`` says whether no token may differ.
    """
    phases = BESIDE if "time/waiting_s" in metrics else RlLog.phases
    seconds = sum(metrics[f"time/{phase}_s"] for phase in phases)
    length = metrics["response_length/mean"]
    return [
        Part(f"step {step:>{len(str(steps))}}/{steps}"),
        Part(f"reward {metrics['reward/mean']:.3f}")
        if "reward/mean" in metrics
        else Part("no reward", BAD),
        Part(f"length {length:.1f}", shorter=((4, f"length {length:.0f}"), (6, ""))),
        _learnt(metrics),
        *_compared(metrics, exact),
        *_routings(metrics, exact),
        *_rates(metrics),
        Part(f"{seconds:.1f} s"),
        time_left(seconds_left),
    ]


def _learnt(metrics: Metrics) -> Part:
    if "entropy" in metrics:
        return Part(f"entropy {metrics['entropy']:.3f}", shorter=((5, ""),))
    return Part("no signal" if metrics["updates/without_signal"] else "no update", WARNING)


def _compared(metrics: Metrics, exact: bool) -> list[Part]:
    """Tokens that differ in rollout and training, of those compared; of none nothing is said."""
    differing = metrics["log_prob_diff/tokens_differing"]
    compared = metrics["log_prob_diff/tokens_compared"]
    if not compared:
        return []
    style = (BAD if differing else GOOD) if exact else ""
    short = f"{differing:.0f} differ"
    return [Part(f"differing {differing:.0f} of {compared:.0f}", style, ((3, short),))]


def _routings(metrics: Metrics, exact: bool) -> list[Part]:
    """Of a mixture of experts."""
    if "routing_diff/tokens_differing" not in metrics:
        return []
    differing = metrics["routing_diff/tokens_differing"]
    return [Part(f"routings {differing:.0f}", (BAD if differing else GOOD) if exact else "")]


def _rates(metrics: Metrics) -> list[Part]:
    """Of a step that sampled or trained anything: with a lag, the last ones learn from what is
    there.
    """
    return [
        Part(f"{name} {metrics[f'tokens_per_s/{name}']:,.0f} tok/s", shorter=((order, ""),))
        for order, name in enumerate(("rollout", "training"), start=1)
        if f"tokens_per_s/{name}" in metrics
    ]


def _notes(grades: GradeStats, trained: StepMetrics, without_signal: int) -> list[str]:
    """What a reader of the line would otherwise not know."""
    notes = [f"an update was skipped: {reason}" for reason in trained.skip_reasons]
    if grades.failed:
        notes.append(
            f"{grades.failed} rewards failed and are excluded; the first was {grades.first_error}"
        )
    if grades.counts:
        met = ", ".join(f"{number:,} {kind}" for kind, number in grades.counts.items())
        notes.append(f"graders met: {met}")
    if without_signal == 1:  # the first of several: later ones say it in their line
        done = "the weights moved by momentum alone" if trained.updates else "no weight changed"
        notes.append(f"no signal: all rewards of each prompt are equal; {done}")
    return notes
