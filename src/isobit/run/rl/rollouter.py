"""The program of a process that only samples: it does what the trainers say, until they end
(``isobit.run.rl.apart``).

    take weights    published bytes, into the tensors that the engine reads
    sample          a batch, from the trainers' place in the order of prompts: completed, graded,
                    and compared with the trainer's forward over the same weights
    evaluate        every evaluation set
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from isobit.clock import Clock
from isobit.config.run import RunConfig
from isobit.observe.console import silent
from isobit.records.kept_groups import groups_value
from isobit.rewards.grading import Graders
from isobit.run.course import Sampling, evaluate, open_graders
from isobit.run.grading import RecordedGrading
from isobit.run.interruption import Interruption
from isobit.run.rl.apart import Apart
from isobit.run.rl.collect import collect
from isobit.run.rl.pending import batch_value, compared
from isobit.run.rl.setup import RlRun, prepare_rl
from isobit.store.reward_record import SentRecord


def sample_for_trainers(config: RunConfig, apart: Apart) -> None:
    """Serve until the trainers are done.  Raises what ``train`` raises of sampling and grading, and
    PeerError where they fail.
    """
    with apart.attended(), open_graders(config) as graders:
        run = prepare_rl(config, apart.mine, learns=False)
        if graders is not None:
            graders.describe()
        with Interruption(apart.mine) as interruption:
            while (command := apart.told(interruption.check))["do"] != "end":
                if command["do"] == "take weights":
                    apart.give(run.model.policy)
                    continue
                scene = _scene(run, apart, graders, command)
                make = _sample if command["do"] == "sample" else _evaluate
                apart.bring(lambda made=make, at=scene, told=command: made(at, told))


def _scene(
    run: RlRun,
    apart: Apart,
    graders: Graders | None,
    command: Mapping[str, Any],
) -> Sampling[RlRun]:
    """What one command is done with: the record begins where the trainers' stands, and a signal
    waits until it is done.
    """
    interruption = Interruption(apart.mine)  # hears no signal, and has the pulse beat
    record = SentRecord(lambda _: None, [line.encode() for line in command["record"]])
    grading = RecordedGrading(record, graders, run.model_scores, interruption, apart.mine)
    clock = Clock(apart.mine.pulse.beat)
    return Sampling(run, silent(), clock, interruption, grading, apart.mine)


def _sample(scene: Sampling[RlRun], command: Mapping[str, Any]) -> dict[str, Any]:
    """The next batch, and where it has led to."""
    run = scene.run
    run.sampler.restore(command["sampler"])
    batch = collect(scene)
    with run.turns.training(scene.clock):
        batch = compared(batch, run.trainer)
    return {
        "batch": batch_value(batch),
        "engine": asdict(batch.engine),
        "seconds": scene.clock.take(),
        "sampler": run.sampler.state(),
        "gradings": _gradings(scene),
    }


def _evaluate(scene: Sampling[RlRun], command: Mapping[str, Any]) -> dict[str, Any]:
    """The graded groups of each set."""
    made = evaluate(
        scene.run, scene.console, scene.clock, scene.grading, scene.interruption, scene.world
    )
    sets = {name: groups_value(groups) for name, (_, groups) in made.items()}
    return {"sets": sets, "gradings": _gradings(scene)}


def _gradings(scene: Sampling[RlRun]) -> list[str]:
    """Lines for the trainers' record."""
    record = scene.grading.record
    assert isinstance(record, SentRecord)
    return [line.decode() for line in record.gradings]
