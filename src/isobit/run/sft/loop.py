"""The loop of supervised fine-tuning.

    take examples -> pack, loss, backward, update, publish -> log -> maybe evaluate;   save at the end

Everything that can be refused is refused by ``prepare_sft``, and the first evaluation has run, before the run's directory is made.
"""

from isobit.config.sft import SftConfig
from isobit.run.clock import Clock
from isobit.run.console import Report
from isobit.run.interruption import Interruption
from isobit.run.loop import evaluation_is_due
from isobit.run.sft.evaluate import HeldOut, measure
from isobit.run.sft.log import SftLog, announce
from isobit.run.sft.setup import SftRun, prepare_sft
from isobit.run.sft.summary import SftSummary
from isobit.run.storage import disk_errors


def sft(config: SftConfig, report: Report | None = None) -> SftSummary:
    """Fine-tune a model as ``config`` says and leave it, with all figures, in ``config.output``.

    Raises an ``IsobitError``, before anything is written, for input that cannot be used; during the run NonFiniteError where the
    model's output or too many steps in a row are not finite, and StorageError where the disk is full.  SIGTERM and Ctrl-C raise
    Interrupted.  The weights of the last optimiser step are saved in each case, as far as they can still be written.
    """
    report, clock = report or Report(), Clock()
    with report.busy("loading"):
        run = prepare_sft(config)
    announce(run, report)
    with Interruption() as interruption, disk_errors(config.output, "the files of the run", way_on="start again"):
        held_out = evaluate(run, report, clock, interruption)
        with SftLog(run, report, clock) as log:
            log.evaluation(0, held_out)
            for step in range(1, config.training.steps + 1):
                due = evaluation_is_due(config, step)
                with clock("training"), report.busy("training"), run.training_turn(clock, evaluation_is_next=due):
                    examples = run.next_examples()
                    update = run.learn(examples)
                log.step(step, examples, update)
                interruption.check()
                if due:
                    log.evaluation(step, evaluate(run, report, clock, interruption))
            return log.finish()


def evaluate(run: SftRun, report: Report, clock: Clock, interruption: Interruption) -> dict[str, HeldOut]:
    """Every held-out set under the current policy."""
    with clock("evaluation"), report.generating("evaluation") as progress:
        return measure(run, interruption.watched(progress))
