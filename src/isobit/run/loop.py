"""The loop of reinforcement learning, as the algorithm reads.

    take prompts -> generate groups -> grade -> advantages, pack, update, publish -> log -> maybe
    evaluate -> maybe save

Everything that can be refused is refused by ``begin`` and ``prepare``, and the first evaluation has
run, before the run's directory is made: a reward that fails on everything leaves nothing behind.
"""

from isobit.clock import Clock
from isobit.config.schema import RunConfig
from isobit.files import disk_errors
from isobit.observe.console import Report
from isobit.observe.summary import Summary
from isobit.records.text import Group
from isobit.rollout.engine import generate
from isobit.run.interruption import Interruption
from isobit.run.log import Evaluation, RunLog
from isobit.run.setup import Run, prepare
from isobit.run.training_run import Recipe
from isobit.store.checkpoint.keeper import CheckpointKeeper
from isobit.store.checkpoint.start import begin
from isobit.store.reward_record import RewardRecord
from isobit.training.step import train_on_groups


def train(config: RunConfig, report: Report | None = None, resume: bool = False) -> Summary:
    """Train a policy as ``config`` says and leave it, with all figures, in ``config.output``; with
    ``resume``, go on there.

    A resumed run leaves the files that it would have left without the interruption, times aside.

    Raises an ``IsobitError``, before anything is written, for input that cannot be used; during the
    run RewardError where too many rewards fail, NonFiniteError where the model's output or too many
    steps in a row are not finite, and StorageError where the disk is full.  SIGTERM and Ctrl-C
    raise Interrupted.  What the run has learnt is in its last checkpoint in each case.
    """
    report, clock = report or Report(), Clock()
    with begin(config, resume, report.line) as start:
        with report.busy("loading"):
            run = prepare(config)
            with run.training_turn(clock):
                start.restore(run)
        report.start(run)
        rewards = start.rewards
        with Interruption() as interruption, disk_errors(config.output, "the files of the run"):
            due = evaluation_is_due(config, start.step) and not start.has_evaluated
            first = evaluate(run, rewards, report, clock, interruption) if due else None
            with (
                RunLog(run, start, report, clock) as log,
                CheckpointKeeper(run, start, log, report) as checkpoints,
            ):
                if first is not None:
                    log.evaluation(start.step, first)
                for step in range(start.step + 1, config.training.steps + 1):
                    with clock("rollout"):
                        groups = next_groups(run, report, interruption)
                    with clock("grading"), report.busy("grading"):
                        grades = rewards.grade(
                            groups, run.reward, config.reward.max_failed_fraction
                        )
                    interruption.check()
                    with clock("training"), report.busy("training"), run.training_turn(clock):
                        trained = train_on_groups(run.trainer, groups, run.algorithm, run.exact)
                    log.step(step, groups, grades, trained)
                    if evaluation_is_due(config, step):
                        log.evaluation(step, evaluate(run, rewards, report, clock, interruption))
                    checkpoints.save_if_due(step)
                    interruption.check()
                checkpoints.save_model()
                return log.finish()


def next_groups(run: Run, report: Report, interruption: Interruption) -> list[Group]:
    """The next prompts, each with its completions from the current policy."""
    requests = run.next_requests()
    with report.generating("rollout") as progress:
        completions = generate(run.engine, requests, interruption.watched(progress))
    return [
        Group(request.prompt, request.visit, samples)
        for request, samples in zip(requests, completions, strict=True)
    ]


def evaluate(
    run: Run, rewards: RewardRecord, report: Report, clock: Clock, interruption: Interruption
) -> Evaluation:
    """Every evaluation set under the current policy."""
    with clock("evaluation"), report.generating("evaluation") as progress:
        return run.evaluator.run(interruption.watched(progress), rewards.grade)


def evaluation_is_due(config: Recipe, step: int) -> bool:
    """Before the first step, after every ``evaluation.every`` steps, and after the last."""
    every = config.evaluation.every
    return step in (0, config.training.steps) or (every > 0 and step % every == 0)
