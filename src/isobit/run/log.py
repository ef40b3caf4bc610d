"""The log of ``isobit train``: the metrics and console lines of its steps, and its summary.

A step's metrics come from its groups, its graders, the engine, the learner and the clock as
dictionaries by the names of ``isobit.records.metrics``; what that table lacks is not written.  A
run that learns nothing for several steps says so, and can stop (``check.on_no_signal``).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from isobit.config.recipes import RunConfig
from isobit.config.tables import CheckConfig
from isobit.memory.sharing import MemorySharing
from isobit.observe.console import (
    BAD,
    WARNING,
    Console,
    Part,
    describe_gain,
    describe_moment,
    describe_result,
    metric_parts,
    shares_right,
    time_left,
)
from isobit.observe.evaluation import EvalResult
from isobit.observe.group_metrics import describe_failed_calls, describe_hidden, group_metrics
from isobit.observe.training_log import RunSummary, TrainingLog
from isobit.parallel.world import raised_on_all
from isobit.records.metrics import METRICS, Metrics, listed
from isobit.records.no_signal import describe_reasons
from isobit.records.text import Group, SamplingParams
from isobit.rewards.tally import GradeStats
from isobit.rollout.engine_stats import EngineStats
from isobit.run.pending import COMPARED, GradedBatch
from isobit.store.resume import Start
from isobit.store.state import StateDigest, StepDigests, state_digest
from isobit.store.training_run import TrainingRun
from isobit.training.advantage_estimator import sequences_learnt_from
from isobit.training.checks import action_of, check_state, check_step
from isobit.training.comparison import Comparison
from isobit.training.replay_buffer import ReplayBuffer
from isobit.training.step import Findings, StepMetrics
from isobit.util.clock import Clock
from isobit.util.disk_space import LineFile
from isobit.util.errors import MismatchError, NoSignalError
from isobit.util.terminal import counted


class SignalWatch:
    """Counts the last steps that had no signal, on every rank alike: all have all rewards."""

    def __init__(self, config: CheckConfig) -> None:
        self._config = config
        self.steps = 0
        """The last steps that had no signal."""
        self.reasons: Counter[str] = Counter()
        """Their completions, by the reason."""

    def count(self, has_signal: bool, reasons: Mapping[str, int]) -> None:
        if has_signal:
            self.steps, self.reasons = 0, Counter()
        else:
            self.steps, self.reasons = self.steps + 1, self.reasons + Counter(reasons)

    def notes(self) -> list[str]:
        """What to print after a step: nothing, or one line where it is time.

        Raises NoSignalError instead where the run is to stop; every rank does.
        """
        patience = self._config.no_signal_steps
        if self._config.on_no_signal == "ignore" or self.steps == 0 or self.steps % patience:
            return []
        steps = "the last step" if self.steps == 1 else f"the last {self.steps} steps"
        problem = f"{steps} had no signal: {describe_reasons(self.reasons, advise=True)}"
        if self._config.on_no_signal == "warn":
            return [f"{problem} (check.on_no_signal)"]
        raise raised_on_all(
            NoSignalError(
                f'{problem}. check.on_no_signal is "stop", and check.no_signal_steps '
                f'{patience}; with "warn" the run goes on'
            )
        )


@dataclass(frozen=True, slots=True)
class RlSetSummary:
    """One evaluation set before and after the run; accuracies are mean rewards, intervals cover
    95%.  ``right`` are the shares that are exactly right at both ends, None where every reward was
    0 or 1, so that the accuracies are these shares.
    """

    problems: int
    accuracy_before: float
    accuracy_after: float
    interval_before: tuple[float, float] | None
    interval_after: tuple[float, float] | None
    right: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class RlSummary(RunSummary):
    """The figures of a finished run.  The accuracies and ``problems`` on top are those of the first
    evaluation set, None without one.
    """

    accuracy_before: float | None
    accuracy_after: float | None
    problems: int
    tokens_compared: int
    """Response tokens whose recorded log-probability was compared with the trainer's, bit for
    bit.
    """
    tokens_differing: int
    max_abs_diff: float
    tokens_generated: int
    skipped_updates: int
    failed_rewards: int
    train_seconds: float
    """Wall seconds of the steps: rollout, grading and training, without evaluation and loading."""
    rollout_seconds: float
    evaluation_seconds: float
    evaluations: Mapping[str, RlSetSummary]
    routings_compared: int = 0
    """Response tokens of a mixture of experts whose recorded experts were compared with the
    trainer's; 0 for another model.
    """
    routings_differing: int = 0
    updates_without_signal: int = 0
    """Updates that had nothing to learn from."""
    steps_without_signal: int = 0
    """Steps all of whose updates had nothing to learn from."""
    tokens_learnt: int = 0
    """Response tokens of the steps' own completions that were learnt from, once each."""
    compared: str = ""
    """The completions whose tokens were compared, where not all were."""
    untaught: Mapping[str, int] = field(default_factory=dict)
    """The completions of these steps, by the reason (``no_signal/NAME``)."""


def summarise_set(before: EvalResult, after: EvalResult) -> RlSetSummary:
    """The figures of one set at both ends of a run."""
    return RlSetSummary(
        after.problems,
        before.accuracy,
        after.accuracy,
        before.interval,
        after.interval,
        shares_right(before, after),
    )


def describe_summary(summary: RlSummary) -> list[str]:
    """What a finished run of reinforcement learning prints last."""
    lines = []
    for name, figures in summary.evaluations.items():
        ends = figures.accuracy_before, figures.accuracy_after
        change = describe_gain(ends, figures.right, points=True)
        lines.append(f"{name}: {change} on {counted(figures.problems, 'problems')}")
    return [
        *lines,
        *_describe_signal(summary),
        *summary.describe_memory(),
        f"{summary.precision}: {_describe_comparison(summary)}",
        f"time: {summary.train_seconds:.1f} s for {counted(summary.steps, 'steps')}, "
        f"{summary.evaluation_seconds:.1f} s for evaluation",
        f"model: {summary.model}",
        f"files: {summary.directory} (summary.json, metrics.jsonl, completions.jsonl, "
        "tensorboard/, run.json)",
        f"figures as a page: isobit report {summary.directory}",
    ]


def _describe_signal(summary: RlSummary) -> list[str]:
    """A line where steps had no signal; one that cannot be missed where none had."""
    without, steps = summary.steps_without_signal, summary.steps
    if without == 0:
        return []
    if without < steps:
        why = describe_reasons(summary.untaught)
        return [f"no signal in {without:,} of {steps:,} steps: {why}"]
    why = describe_reasons(summary.untaught, advise=True)
    return [f"warning: no step had a signal, and nothing was learnt: {why}"]


def _describe_comparison(summary: RlSummary) -> str:
    compared, learnt = summary.tokens_compared, summary.tokens_learnt
    if not compared:
        return "no log-probability was compared, since no completion was learnt from"
    text = (
        f"{summary.tokens_differing:,} of {compared:,} log-probabilities"
        f"{_routing_summary(summary)} differ in rollout and training"
    )
    if compared < learnt:
        text += f"; compared were {compared / learnt:.0%}, {summary.compared}"
    return text


def _routing_summary(summary: RlSummary) -> str:
    if not summary.routings_compared:
        return ""
    return f", {summary.routings_differing:,} of {summary.routings_compared:,} routings"


BESIDE = ("training", "waiting")
"""Phases of a step whose batch the rollouters sample: learning, and then waiting for them."""


class RlLog(TrainingLog[EvalResult]):
    """The log of reinforcement learning: figures, lines and sample completions of its steps."""

    phases = ("rollout", "grading", "training")
    counts = ("tokens", "learnt", "failed", "skipped", "without_signal", "steps_without_signal")

    def __init__(
        self,
        run: TrainingRun,
        start: Start,
        console: Console,
        clock: Clock,
        *,
        sampling: SamplingParams,
        exact: bool,
        turns: MemorySharing,
        replay: ReplayBuffer | None,
        samples_here: bool,
    ) -> None:
        """``exact``: recorded and trained log-probabilities are of one function; ``samples_here``:
        no rollouters sample for this process.
        """
        assert isinstance(run.config, RunConfig)
        self._run = run
        self._config = run.config
        self._sampling = sampling
        self._exact = exact
        self._turns, self._samples_here = turns, samples_here
        self.replay = replay
        self._comparison = Comparison()
        self._watch = SignalWatch(run.config.check)
        self._warnings: list[str] = []
        """Warnings of the step, until its line has been printed."""
        self._reasons: Counter[str] = Counter()
        self._noted = set[Callable[..., str | None]]()
        """What was said once."""
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
        check, exact = self._config.check, self._exact
        if self._left is None or not check.state or action_of(check, exact) == "ignore":
            return
        try:
            stands = state_digest(self._run)
            self._console.notes(check_state(check, self._left, stands, exact))
        except MismatchError:
            self._run.trainer.is_whole = False
            raise

    def step(
        self,
        step: int,
        collected: GradedBatch,
        engine: EngineStats,
        trained: StepMetrics,
        digests: StepDigests,
        estimated: Sequence[Group],
    ) -> Metrics:
        """Write the figures of one step: a line of metrics, a few completions, the line of
        ``digests``, a line on the console.  ``engine`` counts what was sampled since the last step.
        ``estimated`` are the groups of ``collected`` with advantages, and others behind them.
        -> The metrics.
        """
        seconds = dict.fromkeys((*self.phases, *self._phases_of_step), 0.0) | self._take_seconds()
        groups, grades = collected.groups, collected.grades
        metrics = listed(
            {
                **group_metrics(groups),
                "reward/failed": grades.failed,
                "reward/counted": sum(grades.counts.values()),
                **self._optional_figures(collected, engine),
                **trained.metrics,
                **trained.comparison.metrics(trained.tokens_learnt),
                **trained.mismatch,
                **_speed_metrics(engine, trained.tokens, seconds),
                **self._turns.figures(),
                **self._waiting_figures(),
            },
            "train",
        )
        self._add_metrics(step, metrics)
        self._add_completions(step, {"train": _with_advantages(groups, estimated)})
        if self._digests is not None:
            self._add_line(self._digests, digests.line())
        self._write()
        self._left = digests.left
        self._comparison += trained.comparison
        self._totals["tokens"] += engine.generated_tokens
        self._totals["learnt"] += trained.tokens_learnt
        self._totals["failed"] += grades.failed
        self._totals["skipped"] += len(trained.skip_reasons)
        self._totals["without_signal"] += int(metrics["updates/without_signal"])
        self._totals["steps_without_signal"] += not trained.has_signal
        steps, left = self._config.training.steps, self._time_left.after(step)
        self._reasons.update(trained.reasons_without_signal)
        self._watch.count(trained.has_signal, trained.reasons_without_signal)
        self._console.parts(describe_step(step, steps, metrics, self._exact, left))
        self._console.notes(_notes(grades, trained, self._watch.steps))
        return metrics

    def note_once(self, groups: Sequence[Group]) -> None:
        """Say once that rewards do not see all that was sampled, and that no tool works."""
        completions = [one for group in groups for one in group.completions]
        self._note_once(describe_failed_calls, completions)
        sampling, tokenizer = self._sampling, self._run.model.tokenizer
        if not sampling.special_tokens:
            self._note_once(describe_hidden, completions, tokenizer, sampling.stop_token_ids)

    def _note_once(self, describe: Callable[..., str | None], *of: Any) -> None:
        if describe not in self._noted and (note := describe(*of)) is not None:
            self._noted.add(describe)
            self._console.notes([note])

    def inspect(self, findings: Findings) -> None:
        """Look at what a step has found before it learns; warnings are printed behind its line.
        Raises MismatchError where the run is to stop at that.
        """
        self._warnings += check_step(
            self._config.check,
            self._run.model.policy.flow,
            findings,
            self.directory.model,
            one_function=self._config.rollout.is_exact,
        )

    def inspect_ahead(self, findings: Findings) -> None:
        """Raise MismatchError where the run is to stop at what a batch has that was sampled ahead;
        a warning comes with the step that learns from it.
        """
        if action_of(self._config.check, self._exact) == "stop":
            self.inspect(findings)

    def stopped(
        self, step: int, collected: GradedBatch, estimated: Sequence[Group], findings: Findings
    ) -> None:
        """Write what is known of a step that was stopped before its update: a line of metrics with
        the comparison, and its completions.  A resumed run does the step again, without them.
        """
        fresh = sequences_learnt_from(estimated[: len(collected.groups)])
        learnt = sum(one.response_length for one in fresh)
        figures = {
            **group_metrics(collected.groups),
            **findings.comparison.metrics(learnt),
            **findings.mismatch,
        }
        self._add_metrics(step, listed(figures, "train"))
        self._add_completions(step, {"train": _with_advantages(collected.groups, estimated)})
        self._write()

    def check_step(self) -> None:
        """Print what is wrong with a step: steps without signal, differing log-probabilities.
        Raises NoSignalError where the run is to stop at that.
        """
        warnings, self._warnings = self._warnings, []
        self._console.notes(self._watch.notes())
        self._console.notes(warnings)

    @property
    def _phases_of_step(self) -> tuple[str, ...]:
        """Those that a step takes one after the other: rollouters work beside the trainers."""
        return self.phases if self._samples_here else BESIDE

    @property
    def _compared(self) -> str:
        """The completions whose log-probabilities are compared, where not all are."""
        config = self._config
        if self._comparison.tokens_compared >= self._totals["learnt"]:
            return ""
        if config.asynchrony.lag:
            return f"of {COMPARED} completions of each batch (async.lag)"
        if config.asynchrony.max_staleness:
            return f"of at most {COMPARED} completions of each step (async.max_staleness)"
        updates = config.training.updates_per_batch
        return f"those of the first of {updates} updates a batch (training.updates_per_batch)"

    def _optional_figures(self, collected: GradedBatch, engine: EngineStats) -> Metrics:
        """Figures of what not every run has."""
        figures: Metrics = {}
        if self._config.algorithm.dynamic_sampling:
            figures["rollout/refills"] = collected.refills
            figures["rollout/dropped_groups"] = collected.dropped_groups
        if self._config.environment is not None:
            figures["rollout/kept_tokens"] = engine.kept_tokens
        if self._config.rollout.speculation or engine.drafted_tokens:
            figures["rollout/drafted_tokens"] = engine.drafted_tokens
            figures["rollout/accepted_tokens"] = engine.accepted_tokens
        if self._config.rollout.engine != "native":
            figures["time/update_s"] = engine.update_s
        if self.replay is not None:
            figures["replay/size"] = len(self.replay)
            figures["replay/mib"] = self.replay.num_bytes / (1 << 20)
        return figures

    def finish(self) -> RlSummary:
        """Write ``summary.json``, print the last lines, and return what the run achieved."""
        sets = {name: summarise_set(*ends) for name, ends in self._first_and_last().items()}
        first = next(iter(sets.values()), None)
        seconds = self._seconds
        summary = RlSummary(
            directory=self.directory.root,
            preset=self._config.precision.preset,
            precision=self._config.precision.name,
            steps=self._config.training.steps,
            accuracy_before=first.accuracy_before if first else None,
            accuracy_after=first.accuracy_after if first else None,
            problems=first.problems if first else 0,
            tokens_compared=self._comparison.tokens_compared,
            tokens_differing=self._comparison.tokens_differing,
            max_abs_diff=self._comparison.max_abs_diff,
            routings_compared=self._comparison.routings_compared,
            routings_differing=self._comparison.routings_differing,
            tokens_generated=self._totals["tokens"],
            tokens_learnt=self._totals["learnt"],
            compared=self._compared,
            skipped_updates=self._totals["skipped"],
            updates_without_signal=self._totals["without_signal"],
            steps_without_signal=self._totals["steps_without_signal"],
            untaught=dict(self._reasons),
            failed_rewards=self._totals["failed"],
            train_seconds=sum(seconds.get(phase, 0.0) for phase in self._phases_of_step),
            rollout_seconds=seconds["rollout"],
            evaluation_seconds=seconds["evaluation"],
            evaluations=sets,
            gpu_memory=self._turns.summary(),
        )
        self._write_summary(summary)
        self._console.lines(describe_summary(summary))
        return summary

    def _say_evaluation(self, step: int, results: Mapping[str, EvalResult]) -> None:
        for name, result in results.items():
            self._console.line(f"{describe_moment(step)}: {describe_result(name, result)}")

    def _result(self, content: Mapping[str, Any]) -> EvalResult:
        return EvalResult.from_json(content)

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "comparison": asdict(self._comparison),
            "last_steps_without_signal": self._watch.steps,
            "last_untaught": dict(self._watch.reasons),
            "untaught": dict(self._reasons),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        self._comparison = Comparison(**state["comparison"])
        self._watch.steps = state.get("last_steps_without_signal", 0)
        self._watch.reasons = Counter(state.get("last_untaught", {}))
        self._reasons = Counter(state.get("untaught", {}))


def describe_step(
    step: int, steps: int, metrics: Metrics, exact: bool, seconds_left: float
) -> list[Part]:
    """Reward, length, entropy, differing tokens, rates and seconds of one step, and how long the
    run will still take; ``exact`` says whether no token may differ.
    """
    phases = BESIDE if "time/waiting_s" in metrics else RlLog.phases
    seconds = sum(metrics[f"time/{phase}_s"] for phase in phases)
    parts = metric_parts(metrics, "train", exact)
    if "reward/mean" not in metrics:
        parts = {"reward/mean": Part("no reward", BAD), **parts}
    if not metrics["log_prob_diff/tokens_compared"]:
        del parts["log_prob_diff/tokens_differing"]
        parts.pop("log_prob_diff/share", None)
    if "entropy" not in metrics:
        why = "no signal" if metrics["updates/without_signal"] else "no update"
        parts["entropy"] = Part(why, WARNING)
    order = sorted(parts, key=list(METRICS).index)
    return [
        Part(f"step {step:>{len(str(steps))}}/{steps}"),
        *(parts[name] for name in order),
        Part(f"{seconds:.1f} s"),
        time_left(seconds_left),
    ]


def _speed_metrics(
    engine: EngineStats, trained_tokens: int, seconds: Mapping[str, float]
) -> Metrics:
    """What the engine did, the seconds of each phase, and tokens a second of those that had any."""
    rates = {"rollout": engine.generated_tokens, "training": trained_tokens}
    return {
        "rollout/preemptions": engine.preemptions,
        "rollout/shared_pages": engine.shared_pages,
        "rollout/chunks": engine.chunks,
        **({"kv_scales/largest_ratio": engine.kv_ratio} if engine.kv_ratio else {}),
        **{f"time/{name}_s": value for name, value in seconds.items()},
        **{
            f"tokens_per_s/{phase}": tokens / seconds[phase]
            for phase, tokens in rates.items()
            if tokens and seconds[phase]
        },
    }


def _with_advantages(groups: Sequence[Group], estimated: Sequence[Group]) -> list[Group]:
    """The groups as they were graded, with the advantages and columns of the estimated ones."""
    return [
        replace(group, completions=one.completions, advantages=one.advantages)
        for group, one in zip(groups, estimated, strict=False)  # replayed ones follow
    ]


def _notes(grades: GradeStats, trained: StepMetrics, without_signal: int) -> list[str]:
    """What a reader of the line would otherwise not know."""
    notes = [f"an update was skipped: {reason}" for reason in trained.skip_reasons]
    if grades.failed:
        notes.append(
            f"{counted(grades.failed, 'rewards')} failed, left out; "
            f"the first was {grades.first_error}"
        )
    if grades.counts:
        met = ", ".join(f"{number:,} {kind}" for kind, number in grades.counts.items())
        notes.append(f"graders met: {met}")
    if without_signal == 1:  # the first of several: later ones say it in their line
        done = "the weights moved by momentum alone" if trained.updates else "no weight changed"
        notes.append(f"no signal: {describe_reasons(trained.reasons_without_signal)}; {done}")
    return notes
