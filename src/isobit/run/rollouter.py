"""The program of a process that only samples: it does what the trainers say, until they end
(``isobit.run.rollouters``).

    take weights    published bytes, into the tensors that the engine reads
    sample          a batch, from the trainers' place in the order of prompts: completed, graded,
                    and compared with the trainer's forward over the same weights
    evaluate        every evaluation set

A run of reinforcement learning on the processes of a world, each with its part in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from isobit.config.recipes import RunConfig
from isobit.observe.console import silent
from isobit.parallel.world import ALONE, World
from isobit.records.kept_groups import groups_value
from isobit.rewards.grading import Graders
from isobit.run.course import Sampling, evaluate, open_graders
from isobit.run.grading import Interruption, RecordedGrading
from isobit.run.loop import collect, train
from isobit.run.pending import batch_value, compared
from isobit.run.rollouters import Rollouters, check_parts
from isobit.run.setup import RlRun, prepare_rl
from isobit.store.reward_record import SentRecord
from isobit.util.terminal import Clock


def sample_for_trainers(config: RunConfig, rollouters: Rollouters) -> None:
    """Serve until the trainers are done.  Raises what ``train`` raises of sampling and grading, and
    PeerError where they fail.
    """
    with rollouters.errors_shared(), open_graders(config) as graders:
        run = prepare_rl(config, rollouters.mine, learns=False)
        if graders is not None:
            graders.describe()
        with Interruption(rollouters.mine) as interruption:
            while (command := rollouters.receive_command(interruption.check))["do"] != "end":
                if command["do"] == "take weights":
                    rollouters.transfer_weights(run.model.policy)
                    continue
                scene = _scene(run, rollouters, graders, command)
                make = _sample if command["do"] == "sample" else _evaluate
                rollouters.send_result(lambda made=make, at=scene, told=command: made(at, told))


def _scene(
    run: RlRun,
    rollouters: Rollouters,
    graders: Graders | None,
    command: Mapping[str, Any],
) -> Sampling[RlRun]:
    """What one command is done with: the record begins where the trainers' stands, and a signal
    waits until it is done.
    """
    interruption = Interruption(rollouters.mine)  # hears no signal, and has the pulse beat
    record = SentRecord(lambda _: None, [line.encode() for line in command["record"]])
    grading = RecordedGrading(record, graders, run.model_scores, interruption, rollouters.mine)
    clock = Clock(rollouters.mine.pulse.beat)
    return Sampling(run, silent(), clock, interruption, grading, rollouters.mine)


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


def train_by_ranks(
    config: RunConfig, resume: bool = False, world: World = ALONE, allowed: Sequence[str] = ()
) -> None:
    """``isobit.run.loop.train`` by all ranks of a world, or by its first ones while the others
    sample (``cluster.rollouters``).  Raises as it does, and ConfigError for a world that is too
    small.
    """
    if not config.cluster.rollouters:
        train(config, resume=resume, world=world, allowed=allowed)
        return
    check_parts(config, world)
    rollouters = Rollouters(world, config.cluster.rollouters)
    if rollouters.is_rollouter:
        sample_for_trainers(config, rollouters)
        return
    with rollouters.errors_shared():
        train(config, resume=resume, world=rollouters.mine, rollouters=rollouters, allowed=allowed)
