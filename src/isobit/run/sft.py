"""The loop of fine-tuning, on completions or on preferences.

take examples -> pack, loss, backward, update, publish -> log -> maybe evaluate -> maybe save
"""

from collections.abc import Sequence

from isobit.config.recipes import SftConfig
from isobit.observe.console import Console
from isobit.parallel.world import ALONE, World
from isobit.run.course import course
from isobit.run.plan import source_config
from isobit.run.sft_data import prepare_sft
from isobit.run.sft_log import SftLog, SftSummary


def sft(
    config: SftConfig,
    console: Console | None = None,
    resume: bool = False,
    world: World = ALONE,
    allowed: Sequence[str] = (),
) -> SftSummary:
    """Fine-tune a model as ``config`` says and leave it, with all figures, in ``config.output``;
    with ``resume``, go on there, though settings or inputs that are ``allowed`` by name be others.

    With a ``world`` of several processes each of them calls this, with the same configuration.

    A resumed run leaves the files that it would have left without the interruption, times aside.

    Raises an ``IsobitError``, before anything is written, for input that cannot be used; during the
    run NonFiniteError where the model's output or too many updates in a row are not finite,
    OutOfMemoryError where no smaller micro-batch helps, and StorageError where the disk is full.
    SIGTERM and Ctrl-C raise Interrupted.  What the run has learnt is in its last checkpoint in each
    case, and in ``model/``, as far as it can still be written.
    """
    shape = source_config(config.model, config.from_scratch, config.objective)
    with course(
        config,
        shape,
        prepare_sft,
        SftLog,
        console,
        resume,
        model_when_interrupted=True,
        world=world,
        allowed=allowed,
    ) as training:
        run = training.run
        for step in training.steps():
            with training.learning(engine_is_next=training.evaluates_after(step)):
                examples = run.next_examples()
                update = run.learn(examples)
            training.log.step(step, examples, update)
            training.end_step(step)
        training.save_model()
        return training.log.finish()
