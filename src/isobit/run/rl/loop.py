"""The loop of reinforcement learning, as the algorithm reads.

take prompts -> generate groups -> grade -> advantages, pack, update, publish -> log -> maybe
evaluate -> maybe save
"""

from isobit.config.run import RunConfig
from isobit.models.folder import read_config
from isobit.models.loaded import model_folder
from isobit.observe.console import Console
from isobit.records.text import Group
from isobit.rollout.engine import generate
from isobit.run.course import Course, course
from isobit.run.rl.log import RlLog
from isobit.run.rl.setup import RlRun, prepare_rl
from isobit.run.rl.summary import RlSummary
from isobit.training.step import train_on_groups


def train(config: RunConfig, console: Console | None = None, resume: bool = False) -> RlSummary:
    """Train a policy as ``config`` says and leave it, with all figures, in ``config.output``; with
    ``resume``, go on there.

    A resumed run leaves the files that it would have left without the interruption, times aside.

    Raises an ``IsobitError``, before anything is written, for input that cannot be used; during the
    run RewardError where too many rewards fail, NonFiniteError where the model's output or too many
    updates in a row are not finite, OutOfMemoryError where no smaller micro-batch helps, and
    StorageError where the disk is full.  SIGTERM and Ctrl-C raise Interrupted.  What the run has
    learnt is in its last checkpoint in each case.
    """
    shape = read_config(model_folder(config.model))
    with course(config, shape, prepare_rl, RlLog, console, resume) as training:
        run = training.run
        for step in training.steps():
            groups = next_groups(training)
            grades = training.grade(groups)
            with training.learning():
                trained = train_on_groups(run.trainer, groups, run.algorithm, run.exact)
            training.log.step(step, groups, grades, trained)
            training.end_step(step)
        training.save_model()
        return training.log.finish()


def next_groups(training: Course[RlRun, RlLog]) -> list[Group]:
    """The next prompts, each with its completions from the current policy."""
    with training.clock("rollout"), training.console.generating("rollout") as progress:
        requests = training.run.next_requests()
        watched = training.interruption.watched(progress)
        completions = generate(training.run.engine, requests, watched)
    return [
        Group(request.prompt, request.visit, samples)
        for request, samples in zip(requests, completions, strict=True)
    ]
