"""The loop of reinforcement learning, as the algorithm reads.

    take prompts -> generate groups -> grade -> advantages, pack, update, publish -> log -> maybe evaluate;   save at the end

Everything that can be refused is refused by ``prepare``, and the first evaluation has run, before the run's directory is made: a
reward that fails on everything leaves nothing behind.
"""

from isobit.config.schema import RunConfig
from isobit.models.checkpoint import save_policy
from isobit.records import Group
from isobit.rewards.grade import grade
from isobit.run.clock import Clock
from isobit.run.console import Report
from isobit.run.log import Evaluation, RunLog
from isobit.run.setup import Run, prepare
from isobit.run.summary import Summary
from isobit.training.step import train_on_groups


def train(config: RunConfig, report: Report | None = None) -> Summary:
    """Train a policy as ``config`` says and leave it, with all figures, in ``config.output``.

    Raises an ``IsobitError``, before anything is written, for input that cannot be used; during the run RewardError where too many
    rewards fail and NonFiniteError where the model's output or too many steps in a row are not finite.  The weights of the last
    optimiser step are saved in either case.
    """
    run, report, clock = prepare(config), report or Report(), Clock()
    report.start(run)
    evaluation = evaluate(run, report, clock)
    with RunLog(run, report, clock) as log:
        log.evaluation(0, evaluation)
        try:
            for step in range(1, config.training.steps + 1):
                with clock("rollout"):
                    groups = generate(run, report)
                with clock("grading"):
                    grades = grade(groups, run.reward, config.reward.max_failed_fraction)
                with clock("training"):
                    trained = train_on_groups(run.trainer, groups, run.algorithm)
                log.step(step, groups, grades, trained)
                if evaluation_is_due(config, step):
                    log.evaluation(step, evaluate(run, report, clock))
        finally:  # a run that ends early keeps what it learnt
            save_policy(run.model.policy, log.directory.model, tokenizer_from=run.model.folder)
        return log.finish()


def generate(run: Run, report: Report) -> list[Group]:
    """The next prompts, each with its completions from the current policy."""
    requests = run.next_requests()
    with report.generating("rollout") as progress:
        completions = run.engine.generate(requests, progress)
    return [Group(request.prompt, request.visit, samples) for request, samples in zip(requests, completions, strict=True)]


def evaluate(run: Run, report: Report, clock: Clock) -> Evaluation:
    """Every evaluation set under the current policy."""
    with clock("evaluation"), report.generating("evaluation") as progress:
        return run.evaluator.run(progress)


def evaluation_is_due(config: RunConfig, step: int) -> bool:
    """After every ``evaluation.every`` steps, and after the last."""
    every = config.evaluation.every
    return step == config.training.steps or (every > 0 and step % every == 0)
