"""The loop of reinforcement learning, as the algorithm reads.

take prompts -> generate groups -> grade -> (wait, with a lag) -> advantages, pack, update, publish
-> log -> maybe evaluate -> maybe save

The graded groups of a step: prompts taken, completed, graded, and replaced where they teach
nothing.  Grading begins as soon as a group is complete, beside the rollout of the others: on the
rank that has taken its prompt.  All ranks get all groups, with their rewards.

With dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) a group whose rewards are all equal,
which has no gradient, makes room for a group of a further prompt, until the step has as many groups
as it should or has refilled often enough; then level groups fill the rest.

Where the algorithm wants a baseline from it (ReMax), each prompt is also completed once greedily,
beside its samples; that completion is graded, and not learnt from.

When a batch is sampled: before the step that is due for it, or beside its learning, by the
rollouters where there are some (``isobit.run.rollouters``).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from isobit.config.recipes import RunConfig
from isobit.models.folder import model_folder, read_config
from isobit.observe.console import Console, silent
from isobit.parallel.world import ALONE, World
from isobit.records.kept_groups import groups_value
from isobit.records.text import Completion, Group
from isobit.rewards.grading import Graders
from isobit.rollout.engine import EngineStats, Progress, Request
from isobit.rollout.shared import generate_shared
from isobit.run.course import Course, Sampling, course, evaluate, open_graders
from isobit.run.grading import Interruption, RecordedGrading
from isobit.run.log import RlLog, RlSummary
from isobit.run.pending import Collected, batch_value, compared
from isobit.run.rollouters import Rollouters, append_lines, check_parts, lines_ahead
from isobit.run.setup import RlRun, extra_bytes, prepare_rl
from isobit.store.reward_record import SentRecord
from isobit.store.state import state_digest
from isobit.util.terminal import Clock


def collect(training: Sampling[RlRun]) -> Collected:
    """The groups of the next step, graded."""
    run = training.run
    settings, wanted = run.config.algorithm, run.config.training.prompts_per_step
    made = _sample(training, wanted)
    if not settings.dynamic_sampling:
        return made
    refills = 0
    while refills < settings.max_refills and (missing := wanted - _num_telling(made.groups)) > 0:
        made = _joined(made, _sample(training, missing))
        refills += 1
    telling = [group for group in made.groups if not group.is_level]
    level = [group for group in made.groups if group.is_level]
    kept = [*telling, *level][:wanted]
    return replace(made, groups=kept, refills=refills, dropped_groups=len(made.groups) - len(kept))


def _sample(training: Sampling[RlRun], count: int) -> Collected:
    """The groups of the next ``count`` prompts."""
    run = training.run
    requests = run.next_requests(count)
    greedy = [_greedy(request) for request in requests] if run.algorithm.needs_greedy else []
    asked, begun = [*requests, *greedy], dict[int, Group]()

    def complete(place: int, completions: list[Completion]) -> None:
        begun[place] = Group(asked[place].prompt, asked[place].visit, completions)
        training.submit(begun[place])

    with training.clock("rollout"), training.console.generating("rollout") as progress:

        def watch(moment: Progress) -> None:
            training.grading.poll()
            if progress is not None:
                progress(moment)

        watched = training.interruption.watched(watch)
        made = generate_shared(training.world, run.engine, asked, watched, complete)
    groups = [
        begun.get(place) or Group(asked[place].prompt, asked[place].visit, completions)
        for place, completions in enumerate(made.completions)
    ]
    grades = training.grade(groups, made.homes)
    for group, alone in zip(groups[:count], groups[count:], strict=False):
        group.baseline = alone.rewards[0]
    return Collected(groups[:count], grades, made.stats)


def _greedy(request: Request) -> Request:
    """The same prompt completed greedily; the visit, which keys no noise here, is another name."""
    sampling = replace(request.sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    return Request(request.prompt, ~request.visit, 1, sampling)


def _num_telling(groups: Sequence[Group]) -> int:
    return sum(not group.is_level for group in groups)


def _joined(first: Collected, second: Collected) -> Collected:
    return Collected(
        [*first.groups, *second.groups],
        first.grades + second.grades,
        first.engine + second.engine,
    )


@contextmanager
def sampling(training: Sampling[RlRun], step: int) -> Iterator[None]:
    """A block that learns from the batch of ``step``: it is there when the block begins, and when
    it ends, so is the one that the weights of its beginning sample.
    """
    run, rollouters = training.run, training.run.rollouters
    if rollouters is None:
        for _ in run.pending.missing(step):
            run.pending.add(collect(training))
        yield
        return
    for _ in run.pending.missing(step - 1):
        _begin(training, rollouters)
        run.pending.add(_finished(training, rollouters))
    beside = run.pending.missing(step)
    for _ in beside:
        _begin(training, rollouters)
    yield
    for _ in beside:
        run.pending.add(_finished(training, rollouters))


def _begin(training: Sampling[RlRun], rollouters: Rollouters) -> None:
    """Have the rollouters sample the next batch."""
    run = training.run
    rollouters.update_weights(run.model.policy)
    state, ahead = run.sampler.state(), lines_ahead(training.grading)
    rollouters.send_command({"do": "sample", "sampler": state, "record": ahead})


def _finished(training: Sampling[RlRun], rollouters: Rollouters) -> Collected:
    """Wait for it, and go on from where it ends."""
    run = training.run
    with training.clock("waiting"), training.console.busy("waiting for the rollouters"):
        value = rollouters.receive_result()
    for name, seconds in value["seconds"].items():
        training.clock.add(name, seconds)
    run.sampler.restore(value["sampler"])
    append_lines(training.grading, value["gradings"])
    return replace(run.pending.batch_of(value["batch"]), engine=EngineStats(**value["engine"]))


def train(
    config: RunConfig,
    console: Console | None = None,
    resume: bool = False,
    world: World = ALONE,
    rollouters: Rollouters | None = None,
    allowed: Sequence[str] = (),
) -> RlSummary:
    """Train a policy as ``config`` says and leave it, with all figures, in ``config.output``; with
    ``resume``, go on there, though settings or inputs that are ``allowed`` by name be others.

    With a ``world`` of several processes each of them calls this, with the same configuration;
    where others sample for them, ``rollouters`` has these (below).

    A resumed run leaves the files that it would have left without the interruption, times aside.

    Raises an ``IsobitError``, before anything is written, for input that cannot be used; during the
    run RewardError where too many rewards fail, NonFiniteError where the model's output or too many
    updates in a row are not finite, OutOfMemoryError where no smaller micro-batch helps, and
    StorageError where the disk is full.  SIGTERM and Ctrl-C raise Interrupted.  What the run has
    learnt is in its last checkpoint in each case.
    """
    if config.cluster.rollouters and rollouters is None:
        check_parts(config, ALONE)
    shape = read_config(model_folder(config.model))
    more = extra_bytes(config, shape)
    prepare = prepare_rl if rollouters is None else partial(prepare_rl, rollouters=rollouters)
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
                make = _sampled if command["do"] == "sample" else _evaluate
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


def _sampled(scene: Sampling[RlRun], command: Mapping[str, Any]) -> dict[str, Any]:
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
