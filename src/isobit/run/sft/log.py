"""What a run of supervised fine-tuning leaves behind as it goes, in the files and under the names of ``isobit train``."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from isobit.data.examples import Example
from isobit.run.budget_record import write_change
from isobit.run.clock import Clock
from isobit.run.console import Report, describe_result, model_line
from isobit.run.directory import RunDirectory, create_directory, write_json
from isobit.run.log import SAMPLES_KEPT, completion_line, describe_change
from isobit.run.manifest import manifest_of
from isobit.run.metrics import Metrics, MetricsWriter
from isobit.run.model import write_model
from isobit.run.sft.evaluate import HeldOut
from isobit.run.sft.setup import SftRun
from isobit.run.sft.summary import SftSummary, describe_summary, summarise_set
from isobit.run.wandb_tracker import open_tracker
from isobit.training.budget import BudgetChange
from isobit.training.trainer import UpdateMetrics


class SftLog:
    """Opens the run's directory and files; a context manager."""

    def __init__(self, run: SftRun, report: Report, clock: Clock) -> None:
        self._run, self._report, self._clock = run, report, clock
        self.directory: RunDirectory = create_directory(run.config.output)
        write_json(self.directory.manifest, manifest_of(run.model, data_figures(run), run.config))
        self._files = ExitStack()
        tracker = open_tracker(run.config.tracking, self.directory.root, run.config.model_dump(mode="json"))
        self._metrics = self._files.enter_context(MetricsWriter(self.directory.metrics, self.directory.tensorboard, tracker, report.line))
        self._completions = self._files.enter_context(self.directory.completions.open("a", encoding="utf-8"))
        self._evaluations: list[Mapping[str, HeldOut]] = []
        self._seconds = {"training": 0.0, "evaluation": 0.0, "offload": 0.0}
        self._tokens = self._skipped = 0
        run.trainer.budget.on_change = self._budget_changed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._files.__exit__(kind, error, traceback)
        if error is not None and self._run.trainer.is_whole:
            write_model(self._run.model, self.directory.model)
            self._report.line(f"stopped early: the weights of the last optimiser step are in {self.directory.model}")

    def step(self, step: int, examples: Sequence[Example], update: UpdateMetrics) -> None:
        """The figures of one step: a line of metrics and a line on the console."""
        spent = self._take_seconds()
        seconds = spent["training"]
        metrics = {
            **update.scalars(),
            "updates/skipped": int(update.skipped is not None),
            **{f"time/{name}_s": value for name, value in spent.items()},
            "tokens_per_s/training": sum(example.tokens for example in examples) / seconds,
        }
        metrics |= self._run.turns.figures() if self._run.turns else {}
        self._metrics.write(step, metrics)
        self._tokens += update.tokens
        self._skipped += update.skipped is not None
        self._report.line(describe_step(step, self._run.config.training.steps, metrics))
        if update.skipped is not None:
            self._report.notes([f"the optimiser step was skipped: {update.skipped}"])

    def evaluation(self, step: int, figures: Mapping[str, HeldOut]) -> None:
        """The figures of one evaluation, 0 standing for the one before the first step."""
        seconds = self._take_seconds().get("evaluation", 0.0)
        if figures:
            scalars = {key: value for name, held_out in figures.items() for key, value in held_out.scalars(name).items()}
            self._metrics.write(step, {**scalars, "time/evaluation_s": seconds})
        for name, held_out in figures.items():
            for group in held_out.groups[:SAMPLES_KEPT]:
                line = completion_line(step, name, group, self._run.model.tokenizer)
                self._completions.write(json.dumps(line, ensure_ascii=False) + "\n")
            when = "before" if step == 0 else f"after step {step}"
            self._report.line(f"{when}: {name} loss {held_out.loss:.4f} nats a token on {held_out.examples} examples")
            if held_out.result is not None:
                self._report.line(f"{when}: {describe_result(name, held_out.result)}")
        self._completions.flush()
        self._evaluations.append(figures)

    def finish(self) -> SftSummary:
        """Write the model and the summary, and print the latter."""
        write_model(self._run.model, self.directory.model)
        before, after = self._evaluations[0], self._evaluations[-1]
        sets = {name: summarise_set(before[name], after[name]) for name in before}
        first = next(iter(sets.values()), None)
        summary = SftSummary(
            directory=self.directory.root,
            preset=self._run.config.precision.preset,
            steps=self._run.config.training.steps,
            loss_before=first.loss_before if first else None,
            loss_after=first.loss_after if first else None,
            accuracy_before=first.accuracy_before if first else None,
            accuracy_after=first.accuracy_after if first else None,
            tokens_trained=self._tokens,
            skipped_updates=self._skipped,
            train_seconds=self._seconds["training"],
            evaluation_seconds=self._seconds["evaluation"],
            evaluations=sets,
        )
        summary.write(self.directory.summary)
        for line in describe_summary(summary):
            self._report.line(line)
        return summary

    def _budget_changed(self, change: BudgetChange) -> None:
        step = change.update + 1
        write_change(self.directory.budget, step, change)
        if change.new < change.old:  # else the run ends, with an error that says why
            self._report.line(describe_change(step, change))

    def _take_seconds(self) -> dict[str, float]:
        seconds = self._clock.take()
        for name, value in seconds.items():
            self._seconds[name] += value
        return seconds


def announce(run: SftRun, report: Report) -> None:
    """The first lines: the model, the data, how often it is gone through, and the flow."""
    config = run.config
    figures = data_figures(run)
    sets = ", ".join(f"{count} in {name}" for name, count in figures["held_out_examples"].items()) or "none"
    dropped = f" ({run.dropped_examples} more also stand in an evaluation set: dropped)" if run.dropped_examples else ""
    passes = config.training.steps * config.training.prompts_per_step / figures["training_examples"]
    report.line(model_line("from scratch" if config.from_scratch else config.model, run.model.policy))
    report.line(f"data: {figures['training_examples']} examples{dropped}, each seen {passes:.2g} times; held out: {sets}")
    report.flow(run.model.policy.flow)
    for line in run.turns.plan.describe() if run.turns else ():
        report.line(line)


def data_figures(run: SftRun) -> dict[str, Any]:
    """What the run learns from and is measured on, in numbers."""
    return {
        "training_examples": run.sampler.state()["prompts"],
        "dropped_examples": run.dropped_examples,
        "held_out_examples": {name: len(examples) for name, examples in run.sets.items()},
    }


def describe_step(step: int, steps: int, metrics: Metrics) -> str:
    """One step in one line."""
    parts = [
        f"step {step:>{len(str(steps))}}/{steps}",
        f"loss {metrics['loss']:.4f}",
        f"entropy {metrics['entropy']:.3f}",
        f"grad_norm {metrics['grad_norm']:.3f}",
        f"training {metrics['tokens_per_s/training']:,.0f} tok/s",
        f"{metrics['time/training_s']:.1f} s",
    ]
    return "  ".join(parts)
