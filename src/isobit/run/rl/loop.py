"""The loop of reinforcement learning, as the algorithm reads.

take prompts -> generate groups -> grade -> (wait, with a lag) -> advantages, pack, update, publish
-> log -> maybe evaluate -> maybe save
"""

from collections.abc import Sequence
from functools import partial

from isobit.config.run import RunConfig
from isobit.models.folder import read_config
from isobit.models.loaded import model_folder
from isobit.observe.console import Console
from isobit.parallel.world import ALONE, World
from isobit.run.course import Course, course
from isobit.run.rl.ahead import sampling
from isobit.run.rl.apart import Apart, check_parts
from isobit.run.rl.log import RlLog
from isobit.run.rl.setup import RlRun, extra_bytes, prepare_rl
from isobit.run.rl.summary import RlSummary
from isobit.store.state_digest import state_digest


def train(
    config: RunConfig,
    console: Console | None = None,
    resume: bool = False,
    world: World = ALONE,
    apart: Apart | None = None,
    allowed: Sequence[str] = (),
) -> RlSummary:
    """Train a policy as ``config`` says and leave it, with all figures, in ``config.output``; with
    ``resume``, go on there, though settings or inputs that are ``allowed`` by name be others.

    With a ``world`` of several processes each of them calls this, with the same configuration;
    where others sample for them, ``apart`` has these (``isobit.run.rl.ranks``).

    A resumed run leaves the files that it would have left without the interruption, times aside.

    Raises an ``IsobitError``, before anything is written, for input that cannot be used; during the
    run RewardError where too many rewards fail, NonFiniteError where the model's output or too many
    updates in a row are not finite, OutOfMemoryError where no smaller micro-batch helps, and
    StorageError where the disk is full.  SIGTERM and Ctrl-C raise Interrupted.  What the run has
    learnt is in its last checkpoint in each case.
    """
    if config.cluster.rollouters and apart is None:
        check_parts(config, ALONE)
    shape = read_config(model_folder(config.model))
    more = extra_bytes(config, shape)
    prepare = prepare_rl if apart is None else partial(prepare_rl, apart=apart)
    with course(
        config,
        shape,
        prepare,
        RlLog,
        console,
        resume,
        extra_bytes=more,
        world=world,
        allowed=allowed,
    ) as training:
        for step in training.steps():
            take_step(training, step)
        training.save_model()
        return training.log.finish()


def take_step(training: Course[RlRun, RlLog], step: int) -> None:
    """One step, whose number is the next."""
    run = training.run
    with sampling(training, step), training.learning():
        training.log.check_state()
        batch, trained = run.learn(step)
        run.refresh_reference(step)
        state = state_digest(run)
    training.log.step(step, batch, trained, state)
    training.end_step(step)
