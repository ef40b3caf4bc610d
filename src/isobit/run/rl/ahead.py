"""When a batch is sampled: before the step that is due for it, or beside its learning, by the
rollouters where there are some (``isobit.run.rl.apart``).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from isobit.rollout.progress import EngineStats
from isobit.run.course import Sampling
from isobit.run.rl.apart import Apart, append_lines, lines_ahead
from isobit.run.rl.collect import collect
from isobit.run.rl.collected import Collected
from isobit.run.rl.setup import RlRun


@contextmanager
def sampling(training: Sampling[RlRun], step: int) -> Iterator[None]:
    """A block that learns from the batch of ``step``: it is there when the block begins, and when
    it ends, so is the one that the weights of its beginning sample.
    """
    run, apart = training.run, training.run.apart
    if apart is None:
        for _ in run.pending.missing(step):
            run.pending.add(collect(training))
        yield
        return
    for _ in run.pending.missing(step - 1):
        _begin(training, apart)
        run.pending.add(_finished(training, apart))
    beside = run.pending.missing(step)
    for _ in beside:
        _begin(training, apart)
    yield
    for _ in beside:
        run.pending.add(_finished(training, apart))


def _begin(training: Sampling[RlRun], apart: Apart) -> None:
    """Have the rollouters sample the next batch."""
    run = training.run
    apart.pass_on(run.model.policy)
    state, ahead = run.sampler.state(), lines_ahead(training.grading)
    apart.tell({"do": "sample", "sampler": state, "record": ahead})


def _finished(training: Sampling[RlRun], apart: Apart) -> Collected:
    """Wait for it, and go on from where it ends."""
    run = training.run
    with training.clock("waiting"), training.console.busy("waiting for the rollouters"):
        value = apart.take()
    for name, seconds in value["seconds"].items():
        training.clock.add(name, seconds)
    run.sampler.restore(value["sampler"])
    append_lines(training.grading, value["gradings"])
    return replace(run.pending.batch_of(value["batch"]), engine=EngineStats(**value["engine"]))
