"""The loop of supervised fine-tuning.

    take examples -> pack, loss, backward, update, publish -> log -> maybe evaluate -> maybe save

Everything that can be refused is refused by ``begin`` and ``prepare_sft``, and the first evaluation
has run, before the run's directory is made.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from isobit.clock import Clock
from isobit.config.sft import SftConfig
from isobit.files import disk_errors
from isobit.observe.console import Report
from isobit.records.text import Group
from isobit.run.interruption import Interruption
from isobit.run.loop import evaluation_is_due
from isobit.run.sft.evaluate import HeldOut, measure
from isobit.run.sft.log import SftLog, announce
from isobit.run.sft.setup import SftRun, prepare_sft, scratch_shape
from isobit.run.sft.summary import SftSummary
from isobit.store.checkpoint.keeper import CheckpointKeeper
from isobit.store.checkpoint.start import begin
from isobit.store.reward_record import RewardRecord


def sft(config: SftConfig, report: Report | None = None, resume: bool = False) -> SftSummary:
    """Fine-tune a model as ``config`` says and leave it, with all figures, in ``config.output``;
    with ``resume``, go on there.

    A resumed run leaves the files that it would have left without the interruption, times aside.

    Raises an ``IsobitError``, before anything is written, for input that cannot be used; during the
    run NonFiniteError where the model's output or too many steps in a row are not finite, and
    StorageError where the disk is full.  SIGTERM and Ctrl-C raise Interrupted.  What the run has
    learnt is in its last checkpoint in each case, and in ``model/``, as far as it can still be
    written.
    """
    report, clock = report or Report(), Clock()
    with begin(config, resume, report.line, scratch_shape(config)) as start:
        with report.busy("loading"):
            run = prepare_sft(config)
            evaluates = not start.has_evaluated and (
                start.step == 0 or evaluation_is_due(config, start.step)
            )
            with (
                run.training_turn(clock, evaluation_is_next=evaluates)
                if start.step
                else nullcontext()
            ):
                start.restore(run)
        announce(run, report)
        rewards = start.rewards
        with Interruption() as interruption, disk_errors(config.output, "the files of the run"):
            first = evaluate(run, rewards, report, clock, interruption) if evaluates else None
            with (
                SftLog(run, start, report, clock) as log,
                CheckpointKeeper(
                    run, start, log, report, model_when_interrupted=True
                ) as checkpoints,
            ):
                if first is not None:
                    log.evaluation(start.step, first)
                for step in range(start.step + 1, config.training.steps + 1):
                    due = evaluation_is_due(config, step)
                    with (
                        clock("training"),
                        report.busy("training"),
                        run.training_turn(clock, evaluation_is_next=due),
                    ):
                        examples = run.next_examples()
                        update = run.learn(examples)
                    log.step(step, examples, update)
                    interruption.check()
                    if due:
                        log.evaluation(step, evaluate(run, rewards, report, clock, interruption))
                    checkpoints.save_if_due(step)
                    interruption.check()
                checkpoints.save_model()
                return log.finish()


def evaluate(
    run: SftRun, rewards: RewardRecord, report: Report, clock: Clock, interruption: Interruption
) -> Mapping[str, tuple[HeldOut, Sequence[Group]]]:
    """Every held-out set under the current policy."""
    with clock("evaluation"), report.generating("evaluation") as progress:
        figures = measure(run, interruption.watched(progress), rewards.grade)
    interruption.check()
    return figures
