"""GRPO and its relatives: the loop of ``isobit train``, one step after the other.

                  +---------------------- weights, published in 8 bits ----------------------+
                  v                                                                          |
    prompts --> rollout --> groups --> grade --> batch --> advantages --> pack, forward, loss,
    (sampler)   (engine)                         (pending)                backward, AdamW (trainer)

    rollout     completes the step's prompts, ``samples_per_prompt`` times each; every token is
                recorded with its log-probability under the policy that drew it; with an
                environment a completion has several turns (``isobit.rollout.episodes``)
    grade       asks the reward for a number a completion
    advantages  the reward of each completion against those of its group: for GRPO
                (reward - mean) / deviation; with them what else the loss reads, as old
                log-probabilities (``isobit.training.advantage_estimator``)
    learn       ``updates_per_batch`` times ``epochs`` updates of AdamW; the last one's weights are
                what the next rollout samples with (``isobit.training.step``)

Who waits for whom:

- Grading begins as soon as a group is complete, beside the rollout of the others, on the rank that
  has taken its prompt.  All ranks get all groups with their rewards.
- Engine and trainer take turns with the device's memory (``isobit.memory.sharing``).
- A schedule says when a batch is sampled (``isobit.records.schedule``), and a queue has it until it
  is learnt from (``isobit.run.pending``): for k steps with ``async.lag`` = k.
- With ``async.max_staleness`` a step learns as soon as enough groups are whole; half-done samples
  go on with the next weights (``isobit.run.free_batches``).
- With ``cluster.rollouters`` some of the processes only sample: while the trainers learn batch t,
  they roll out, grade and compare batch t + k (``isobit.run.rollouters``).

With dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) a group of which no completion that is
learnt from has an advantage is replaced by the group of a further prompt, until the step has as
many groups as it should or has refilled often enough; then such groups fill the rest.

Where the algorithm wants a baseline from it (ReMax), each prompt is also completed once greedily;
that completion is graded and not learnt from.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any, TypeAlias

from isobit.config.recipes import RunConfig
from isobit.config.rules import check_started
from isobit.observe.console import Console, silent
from isobit.parallel.world import ALONE, World
from isobit.records.text import Completion, Group
from isobit.rewards.tally import GradeStats
from isobit.rollout.engine_stats import EngineStats, Progress
from isobit.rollout.requests import Request
from isobit.run.free_batches import FreeBatches
from isobit.run.log import RlLog, RlSummary
from isobit.run.open_run import OpenRun, begin_run, start_run
from isobit.run.pending import GradedBatch
from isobit.run.resolved import as_begun, resolve, settled, with_check_of_run
from isobit.run.rl_run import RlRun, extra_bytes, prepare_rl, read_rl
from isobit.run.rollouters import Rollouters, ask_for, receive_for
from isobit.run.run import Surroundings
from isobit.store.state import StepDigests, state_digest
from isobit.training.comparison import Comparison
from isobit.training.step import Findings, StepMetrics
from isobit.training.token_count import check_sampled
from isobit.util.errors import MismatchError


def train(
    config: RunConfig,
    console: Console | None = None,
    resume: bool = False,
    world: World = ALONE,
    rollouters: Rollouters | None = None,
    allowed: Sequence[str] = (),
) -> RlSummary:
    """Train a policy as ``config`` says and leave it, with all figures, in ``config.output``.  With
    ``resume`` the run found there goes on; settings and inputs listed in ``allowed`` may differ
    from what it had.

    With a ``world`` of several processes each of them calls this, with the same configuration;
    where other processes sample for them, ``rollouters`` reaches these (``train_by_ranks``).

    A resumed run leaves the files that it would have left without the interruption, times aside.

    Raises an ``IsobitError``, before anything is written, for input that cannot be used; during the
    run RewardError where too many rewards fail, NonFiniteError where the model's output or too many
    updates in a row are not finite, OutOfMemoryError where no smaller micro-batch helps, and
    StorageError where the disk is full.  SIGTERM and Ctrl-C raise Interrupted.  In each case the
    last checkpoint has what the run has learnt.
    """
    with open_run(config, console, resume, world, rollouters, allowed) as opened:
        for step in opened.steps():
            take_step(opened, step)
        opened.save_model()
        return opened.log.finish()


OpenRlRun: TypeAlias = OpenRun[RlRun, RlLog]


def take_step(opened: OpenRlRun, step: int) -> StepDigests:
    """One step: sample what is missing, learn from the batch that is due, log, evaluate, save.
    Returns digests of the batch and of the weights, masters and moments after it.
    """
    run, log = opened.run, opened.log
    run.calibrate_if_due()  # before the first step, where it was not evaluated
    run.pending.grade(partial(graded, run))  # after a resume with another reward
    with sampling(run, log, step), opened.learning():
        log.check_state()
        batch = next_batch(run, log)
        estimated = estimate_advantages(run, batch)  # GRPO: (reward - group's mean) / deviation
        trained = learn(run, log, batch, estimated, step)
        digests = StepDigests.of(step, batch.groups, state_digest(run))
    trained = run.pending.with_findings(trained)
    run.pending.end_step(step)
    run.calibrate_if_due()
    log.step(step, batch, run.pending.take_engine(), trained, digests, estimated)
    log.note_once(batch.groups)
    opened.end_step(step)
    if run.free_batches is not None:
        run.free_batches.check()
    log.check_step()
    opened.evaluate_if_due(step)
    opened.save_if_due(step)
    return digests


def sampling(run: RlRun, log: RlLog, step: int) -> AbstractContextManager[None]:
    """A block in which ``step`` learns, from a batch that is in the queue when it begins; what else
    the schedule has in this step is sampled before, or meanwhile by others.
    """
    free, rollouters = run.free_batches, run.rollouters
    if free is not None and rollouters is not None:
        return sampling_freely_by_rollouters(run, rollouters, free, log, step)
    if free is not None:
        return sampling_freely(run, free, step)
    if rollouters is not None:
        return sampling_by_rollouters(run, rollouters, log, step)
    return sampling_in_turn(run, step)


@contextmanager
def sampling_in_turn(run: RlRun, step: int) -> Iterator[None]:
    """Whole batches, drawn here before the step learns."""
    for _ in run.pending.missing(step):
        run.pending.add(collect(run))
    yield


@contextmanager
def sampling_by_rollouters(
    run: RlRun, rollouters: Rollouters, log: RlLog, step: int
) -> Iterator[None]:
    """Whole batches, drawn by other processes while the step learns."""

    def receive() -> None:
        value = received(run, rollouters)
        batch = run.pending.batch_of(value["batch"])
        log.inspect_ahead(batch.findings)  # before a checkpoint holds it
        run.pending.add(replace(batch, engine=EngineStats(**value["engine"])))

    for _ in run.pending.missing(step - 1):  # at the start and after a resume nothing is there yet
        ask_for("batch", rollouters, run)
        receive()
    beside = run.pending.missing(step)
    for _ in beside:
        ask_for("batch", rollouters, run)
    yield
    for _ in beside:
        receive()


@contextmanager
def sampling_freely(run: RlRun, free: FreeBatches, step: int) -> Iterator[None]:
    """Groups, drawn until a batch of them is whole; half-done samples wait while the step learns,
    or servers draw them on.
    """
    run.pending.add(draw_batch(run, free, step))
    with free.beside():
        yield
    run.pending.engine += free.end_step(step)


def draw_batch(run: RlRun, free: FreeBatches, step: int) -> GradedBatch:
    """The graded groups of a step, drawn until they can be chosen."""
    version = run.model.policy.version
    with run.clock("rollout"), run.console.generating("rollout") as progress:
        groups, ranks = free.sample(step, version, run.interruption.watched(progress))
    run.console.notes(run.notes())
    run.check_noise_of(version, groups)
    grades = graded(run, groups, ranks)
    return GradedBatch(groups, grades, EngineStats(), to_compare=free.to_compare)


@contextmanager
def sampling_freely_by_rollouters(
    run: RlRun, rollouters: Rollouters, free: FreeBatches, log: RlLog, step: int
) -> Iterator[None]:
    """Groups, drawn by other processes until a batch of them is whole, and on while the step
    learns; they compare what they draw.
    """
    open_groups = None if rollouters.have_open_groups else free.value()
    ask_for(
        "chosen",
        rollouters,
        run,
        anew=lambda: {"open": free.value()},
        step=step,
        open=open_groups,
    )
    batch = run.pending.batch_of(received(run, rollouters)["batch"])
    run.pending.add(replace(batch, to_compare=()))
    with rollouters.told_when_learnt():
        ask_for("open", rollouters, run, follows=True, step=step)
        yield
    value = received(run, rollouters)
    free.restore(**value["open"])
    free.note_late(value["late"])
    run.pending.engine += EngineStats(**value["engine"])
    if run.pending.is_ahead:
        findings = Findings(Comparison(**value["comparison"]), value["mismatch"])
        run.pending.note_findings(findings)
        log.inspect(findings)  # before a checkpoint holds the step


def received(run: RlRun, rollouters: Rollouters) -> dict[str, Any]:
    """The rollouters' answer, once it is there, with the seconds of their clock in the run's."""
    with run.clock("waiting"), run.console.busy("waiting for the rollouters"):
        value = receive_for(rollouters, run)
    for name, seconds in value["seconds"].items():
        run.clock.add(name, seconds)
    return value


def collect(run: RlRun) -> GradedBatch:
    """The graded groups of the next step: rolled out, graded, and refilled where zero-variance
    groups are replaced.
    """
    settings, wanted = run.config.algorithm, run.config.training.prompts_per_step
    batch = rollout(run, wanted)
    if not settings.dynamic_sampling:
        return batch
    estimator, refills = run.learner.estimator, 0
    have_advantages = estimator.has_advantages(batch.groups)
    while refills < settings.max_refills and (missing := wanted - sum(have_advantages)) > 0:
        batch += rollout(run, missing)
        refills += 1
        have_advantages = estimator.has_advantages(batch.groups)
    lack_them = [not one for one in have_advantages]
    kept = [*compress(batch.groups, have_advantages), *compress(batch.groups, lack_them)][:wanted]
    dropped = len(batch.groups) - len(kept)
    return replace(batch, groups=kept, refills=refills, dropped_groups=dropped)


def rollout(run: RlRun, count: int) -> GradedBatch:
    """Complete the next ``count`` prompts, and grade each group from the moment it is complete."""
    requests = run.next_requests(count)
    greedy = [_greedy(request) for request in requests] if run.algorithm.needs_greedy else []
    requests_of_all, submitted = [*requests, *greedy], dict[int, Group]()

    def group_of(index: int, completions: list[Completion]) -> Group:
        request = requests_of_all[index]
        return Group(request.prompt, request.visit, completions)

    def submit(index: int, completions: list[Completion]) -> None:
        submitted[index] = group_of(index, completions)
        run.grading.submit(submitted[index])

    with run.clock("rollout"), run.console.generating("rollout") as progress:

        def watch(moment: Progress) -> None:
            run.grading.poll()
            if progress is not None:
                progress(moment)

        watched = run.interruption.watched(watch)
        completions, ranks, stats = run.generate(requests_of_all, watched, submit)
    run.console.notes(run.notes())
    groups = [submitted.get(index) or group_of(index, of) for index, of in enumerate(completions)]
    check_sampled(groups, stats.generated_tokens)
    run.check_noise(requests_of_all, completions)
    grades = graded(run, groups, ranks)
    for group, of_greedy in zip(groups[:count], groups[count:], strict=False):
        group.baseline = _baseline(of_greedy)
        group.baseline_length = of_greedy.completions[0].length
    return GradedBatch(groups[:count], grades, stats)


def graded(run: RlRun, groups: Sequence[Group], ranks: Sequence[int] | None = None) -> GradeStats:
    """Fill the rewards of groups, which these ranks have begun to grade, or none has."""
    with run.clock("grading"), run.console.busy("grading"):
        return run.grading(groups, ranks)


def _greedy(request: Request) -> Request:
    """The same prompt completed greedily; the visit, which keys no noise here, is another name."""
    sampling = replace(request.sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    return Request(request.prompt, ~request.visit, 1, sampling)


def _baseline(greedy: Group) -> float | None:
    """The greedy completion's reward and those of its turns; None where one is missing."""
    reward, turns = greedy.rewards[0], greedy.completions[0].sequence.rewards_of_turns
    if reward is None or turns is None:
        return reward
    valid = [one for one in turns if one is not None]
    return reward + math.fsum(valid) if len(valid) == len(turns) else None


def next_batch(run: RlRun, log: RlLog) -> GradedBatch:
    """The batch whose turn it is.  What has just been sampled ahead is compared with the trainer's
    forward first: both have the same weights only until the first update.  Raises MismatchError
    where the run is to stop at what was found, so that no checkpoint holds such a batch.
    """
    run.pending.compare(run.trainer)
    for findings in run.pending.findings():
        log.inspect_ahead(findings)
    return run.pending.front()


def estimate_advantages(run: RlRun, batch: GradedBatch) -> list[Group]:
    """The batch's groups, and behind them replayed ones, with advantages and all else that the loss
    reads in their sequences: old log-probabilities, the reference's, values, weights of
    corrections.
    """
    return run.learner.with_advantages(batch.groups)


def learn(
    run: RlRun, log: RlLog, batch: GradedBatch, estimated: Sequence[Group], step: int
) -> StepMetrics:
    """Pack, forward, loss, backward, AdamW and publish, for each update of the step.  -> What was
    done with the batch.  Raises MismatchError, before any weight changes, where the run is to stop
    at what was found.
    """

    def inspect(findings: Findings) -> None:
        try:
            log.inspect(findings)
        except MismatchError:
            log.stopped(step, batch, estimated, findings)
            raise

    if batch.comparison is not None:
        inspect(batch.findings)
    trained = run.learner.update(batch.groups, estimated, step, inspect)
    if run.reference is not None:
        run.reference.refresh_if_due(step)
    return trained


@contextmanager
def open_run(
    config: RunConfig,
    console: Console | None = None,
    resume: bool = False,
    world: World = ALONE,
    rollouters: Rollouters | None = None,
    allowed: Sequence[str] = (),
) -> Iterator[OpenRlRun]:
    """A block with all steps of a run, which begins in ``config.output`` or is resumed there."""
    if rollouters is None and (config.cluster.rollouters or world.size > 1):
        check_started(config, 1 if config.cluster.rollouters else world.size)
    console = console or (Console() if world.rank == 0 else silent())
    config = with_check_of_run(config, resume, world, console.line)
    recipe = settled(as_begun(resolve(config), resume, world), read_rl, console.line)
    extra = extra_bytes(recipe.config, recipe.shape)

    def prepare(around: Surroundings) -> RlRun:
        return prepare_rl(recipe, world, rollouters, around)

    with (
        begin_run(recipe, console, resume, world, allowed, extra) as begun,
        start_run(recipe, prepare, RlRun.open_log, *begun, samples=rollouters is None) as opened,
    ):
        yield opened
