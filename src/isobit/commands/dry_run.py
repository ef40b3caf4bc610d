"""What ``isobit train --dry-run`` finds out and prints: the memory, the time, the disk and the
rewards of a training, on this machine or on GPUs that need not be here (``--gpu``).

A dry run reads the configuration, the tokenizer and the data, never the weights.  It refuses what
the run would refuse, apart from what only the weights can show and from trackers, which would be
called over the network.  It writes nothing, and takes none of the memory that the run would take.
For GPUs of another machine, this one's main memory, disk and output directory are not looked at.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from isobit.config.load import dump_config
from isobit.config.recipes import Recipe, RunConfig
from isobit.config.reward import RewardConfig
from isobit.config.rules import check_started
from isobit.kernels.backend import back_end_of
from isobit.kernels.sizes import Sizes
from isobit.memory.cache_size import CARRIES, PAGES, cache_size_for
from isobit.memory.cards import Card, card_here, support_for
from isobit.memory.device import DevicePlan
from isobit.memory.host import MemoryEstimate, estimate_memory, microbatch_tokens
from isobit.memory.speed import (
    SpeedShape,
    StepTime,
    StepWork,
    describe_step,
    estimate_step,
    rows_of_a_token,
)
from isobit.models.adapter_folder import is_adapter_folder, read_adapter_config
from isobit.models.checkpoint import weight_files
from isobit.models.decoder import decoder_shape, parameter_count
from isobit.models.folder import base_folder, model_needs
from isobit.models.hub import is_hub_name
from isobit.models.tensor_parallel import check_shared_by, with_heads_of_a_rank
from isobit.precision.flow import PrecisionFlow, build_flow, describe_flow
from isobit.records.text import Prompt
from isobit.rewards.grading import Graders
from isobit.rollout.requests import EngineLimits, check_limits
from isobit.run.data import SftData
from isobit.run.plan import AnyPlan, check_requests, plan_device_memory
from isobit.run.resolved import as_begun, resolve, settled
from isobit.store.checkpoint import folders_by_step
from isobit.store.directory import RunDirectory, check_unused
from isobit.store.disk_plan import DiskPlan, plan_disk
from isobit.store.resume import preview
from isobit.util.errors import ConfigError, ModelError
from isobit.util.machine import Memory
from isobit.util.terminal import counted, gib

_AT_SERVERS = 1 << 40  # pages: how many servers have is asked when the run begins


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a training would use and take."""

    plan: AnyPlan
    weight_bytes: int
    """Bytes of the model's files; 0 where it starts from random weights, or they are not here."""
    flow: PrecisionFlow
    memory: MemoryEstimate | DevicePlan
    """The plan of the memory of the device that the run would compute on."""
    processes: int
    """Processes that train together."""
    time: StepTime | None
    """None on a CPU, of which there are no rows to estimate from."""
    card: Card | None
    """The GPU; None on a CPU."""
    disk: DiskPlan
    here: bool
    """Whether the run is planned for this machine."""
    rewards: Sequence[str]
    """A line each."""
    start: Sequence[str]
    """Lines on where a resumed run goes on; none of a new one."""

    def describe(self, memory: Memory | None, verbose: bool = False) -> list[str]:
        """The plan as text: the memory, against what is free now, and the time first, then the
        model, what is learnt, the rewards and the disk; with ``verbose`` also the precision flow
        and the resolved recipe.
        """
        plan, cluster, card = self.plan, self.plan.config.cluster, self.card
        note = card.note() if card is not None and not self.here else ""
        lines = [
            *([f"on {cluster.processes} x {card.name} it fits{note}"] if card else []),
            *(
                self.memory.describe()
                if isinstance(self.memory, DevicePlan)
                else _describe_memory(self.memory, memory)
            ),
            *describe_rounds(plan, self.processes),
        ]
        if self.time is not None and card is not None:
            lines += describe_step(self.time, plan.training.steps, card, cluster.processes)
        lines += [
            self._describe_model(),
            *plan.learning,
            *self.rewards,
            self.disk.describe(self.here),
            *self.start,
        ]
        if verbose:
            lines += ["", *describe_flow(self.flow), "", *dump_config(plan.config).splitlines()]
        else:
            lines.append("--verbose adds the formats of all operations and the resolved recipe")
        return [*lines, "nothing was written; leave out --dry-run to start"]

    def _describe_model(self) -> str:
        described = self.plan.model
        shape, folder = described.config, described.folder
        start = gib(self.weight_bytes) if self.weight_bytes else "weights not here"
        if self.plan.source.from_scratch:
            start = "from random weights"
        return (
            f"model {folder}: {shape.family}, {parameter_count(shape):,} parameters, "
            f"{counted(shape.num_layers, 'layers')}, {start}; precision {self.flow.name}"
        )


def plan_training(
    config: Recipe,
    read: Callable[..., AnyPlan],
    resume: bool = False,
    allowed: Sequence[str] = (),
    card: Card | None = None,
) -> DryRun:
    """Check a training, which ``read_rl`` or ``read_sft`` plans, and work out what it takes, on
    this machine or on GPUs like ``card``; with ``resume`` the run in its directory is to go on,
    though what is ``allowed`` by name be other than it was.

    Raises an ``IsobitError`` that names what cannot be used.
    """
    if not resume and card is None:
        check_unused(config.output)
    notes: list[str] = []
    recipe = settled(as_begun(resolve(config, weights=resume), resume), read, notes.append)
    config, plan = recipe.config, read(recipe)
    notes += (f"note: {note}" for note in config.precision.notes)
    check_started(config, config.cluster.processes)
    plan = replace(plan, learning=(*notes, *plan.learning))
    rewards = describe_rewards(config.reward, plan.data.graded)
    model = plan.model.config
    flow = build_flow(config.precision, decoder_shape(model))
    here = card is None
    card = None if card is None else card.by(config.back_end)
    device = _device_here(plan) if card is None else _planned_device(plan, card)
    start: list[str] = []
    if resume:
        preview(config, plan.inputs, device, allowed, start.append)
    cluster, back_end = plan.config.cluster, support_for(device.type, card)
    check_shared_by(cluster.processes, cluster.rollout_tp)
    processes = cluster.processes - cluster.rollouters
    time = None
    if back_end.has_own_memory:
        memory = _plan_device(plan, device, card)
        pages = memory.pages if plan.samples_here else _AT_SERVERS
        work = _step_work(plan, memory, device, card)
        if card is None:
            card = card_here(back_end.device_model(device) or "", memory.total, back_end_of("cuda"))
        time = estimate_step(work, card)
    else:
        memory = _plan_main_memory(plan, flow, back_end.sizes, processes)
        cached = with_heads_of_a_rank(model, cluster.rollout_tp)
        pages = cache_size_for(cached, flow, config.rollout, back_end.sizes, plan.drawn).pages
        pages = pages if plan.samples_here else _AT_SERVERS
    limits = EngineLimits(
        model.max_positions, model.vocab_size, pages, back_end.sizes.page_tokens, True
    )
    check_requests(plan.requests, partial(check_limits, limits=limits), model.max_positions)
    disk = plan_disk(
        config,
        model,
        folders_by_step(RunDirectory(config.output).checkpoints) if here else (),
        plan.extra_bytes,
    )
    if here:
        disk.check()
    size = _weight_bytes(plan, tolerant=not here)
    return DryRun(plan, size, flow, memory, processes, time, card, disk, here, rewards, start)


def _device_here(plan: AnyPlan) -> torch.device:
    """Raises ConfigError for a device that this machine has not, as a run would."""
    try:
        return plan.choose_device()
    except ConfigError as error:
        if plan.config.device != "cuda":
            raise
        raise ConfigError(
            f"{error}, or plan for a GPU that is elsewhere: --gpu NAME and --gpus N"
        ) from None


def _planned_device(plan: AnyPlan, card: Card) -> torch.device:
    """The device of a GPU that need not be here.  Raises ConfigError for a model that it does not
    compute.
    """
    needs = model_needs(plan.model.config, plan.config.precision.preset)
    problem = support_for("cuda", card).model_problem(needs)
    if problem is not None:
        raise ConfigError(f"--gpu {card.name} cannot run this: {problem}; leave --gpu out")
    return torch.device("cuda")


def _weight_bytes(plan: AnyPlan, tolerant: bool) -> int:
    """Raises ModelError for a folder without weights, but for a model of the hub whose weights are
    not fetched yet.
    """
    source = plan.source
    if source.from_scratch:
        return 0
    folder, on_hub = source.described.folder, is_hub_name(plan.config.model)
    if is_adapter_folder(folder):
        on_hub = is_hub_name(read_adapter_config(folder).base)
        folder = base_folder(folder, weights=False)
    try:
        return sum(file.stat().st_size for file in weight_files(folder))
    except ModelError as error:
        if tolerant or on_hub:
            return 0
        raise ModelError(f"{error}; --gpu h200 plans from config.json alone") from None


def _step_work(
    plan: AnyPlan, memory: DevicePlan, device: torch.device, card: Card | None
) -> StepWork:
    """What a step asks of the GPUs, if every completion has all its tokens."""
    config, training = plan.config, plan.training
    cluster, shape = config.cluster, plan.model.config
    flow = build_flow(config.precision, decoder_shape(shape))
    model = SpeedShape(shape, flow)
    trainers = cluster.processes - cluster.rollouters
    batches, rounds = rounds_of(plan, trainers)
    scored = [SpeedShape(one.shape, one.flow) for one in plan.frozen if one.lasting]
    work = StepWork(
        shape=model,
        sequences=training.prompts_per_step,
        length=plan.longest,
        recompute=training.recompute,
        epochs=training.epochs,
        trainers=trainers,
        idle=1 - batches / (rounds * trainers),
        most_at_once=config.rollout.max_sequences,
        scored=tuple(scored),
    )
    if not isinstance(config, RunConfig):
        assert isinstance(plan.data, SftData)
        tokens = sum(one.tokens for one in plan.data.train.values())
        return replace(work, length=tokens / len(plan.data.train))
    is_one_function = flow.exact and config.rollout.is_exact
    if config.training.old_log_probs != "recorded" and not is_one_function:
        work = replace(work, scored=(*scored, model))
    budget = memory.tokens
    if cluster.rollouters:
        memory = _plan_device(plan, device, card, learns=False)
    asked = plan.requests[-1]
    prompt = sum(len(one.prompt.token_ids) for one in asked) / len(asked)
    new = min(config.rollout.max_new_tokens, int(shape.max_positions - prompt))
    return replace(
        work,
        sequences=training.prompts_per_step * training.samples_per_prompt + plan.replayed,
        length=prompt + new,
        rows=rows_of_a_token(training, budget, prompt, new, plan.replayed),
        prompts=training.prompts_per_step,
        prompt_tokens=prompt,
        samples=training.samples_per_prompt,
        new_tokens=new,
        cached_tokens=memory.pages * memory.page_tokens if plan.samples_here else math.inf,
        samplers=len(config.rollout.servers) or cluster.rollouters or cluster.processes,
        sharing=cluster.rollout_tp,
        beside=cluster.rollouters > 0,
    )


def describe_rewards(
    reward: RewardConfig | None, graded: Mapping[str, Sequence[Prompt]]
) -> Sequence[str]:
    """The rewards with the forms that were recognised.  Raises RewardError for one that cannot be
    loaded, or that takes columns which prompts of the sets ``graded`` have not.
    """
    if reward is None:
        return ()
    with Graders(reward) as graders:
        graders.check_columns(graded)
        return graders.describe()


def rounds_of(plan: AnyPlan, processes: int) -> tuple[int, int]:
    """The micro-batches of an update, if all sequences were as long as the longest, and the rounds
    in which so many processes compute them.
    """
    training, longest = plan.training, plan.longest
    tokens = microbatch_tokens(training, longest, plan.replayed)
    batches = -(-_sequences(plan) // max(1, tokens // longest))
    slots = training.slots
    rounds = sum(-(-len(range(slot, batches, slots)) // processes) for slot in range(slots))
    return batches, rounds


def _sequences(plan: AnyPlan) -> int:
    """Sequences of an update, at most."""
    training = plan.training
    prompts = -(-training.prompts_per_step // training.updates_per_batch)
    replayed = -(-plan.replayed // training.updates_per_batch)
    return prompts * training.samples_per_prompt + replayed


def describe_rounds(plan: AnyPlan, processes: int) -> Sequence[str]:
    """How several processes share an update's micro-batches out, if all sequences were as long as
    the longest; no lines of one process.
    """
    if processes == 1:
        return ()
    batches, rounds = rounds_of(plan, processes)
    slots = plan.training.slots
    last = "the last" if slots == 1 else f"the last of {slots} slots each"
    idle = rounds * processes - batches
    return (
        f"processes: {processes}, each with its rows of every master, moment and gradient",
        f"  micro-batches of an update, of {_sequences(plan):,} sequences of "
        f"{plan.longest:,} tokens: {batches:,}; rounds: {rounds:,}; "
        f"idle in {last}: {idle} of {slots * processes} processes, "
        f"{idle / (rounds * processes):.1%} of the time of all",
    )


def _plan_device(
    plan: AnyPlan, device: torch.device, card: Card | None, learns: bool = True
) -> DevicePlan:
    """The plan of each trainer's memory, or of each rollouter's, which never ``learns``."""
    cluster = plan.config.cluster
    trainers, keeps = cluster.processes - cluster.rollouters, learns and cluster.rollouters > 0
    return plan_device_memory(
        plan, device, trainers, cluster.processes, learns, card=card, keeps=keeps
    )


def _plan_main_memory(
    plan: AnyPlan, flow: PrecisionFlow, sizes: Sizes, processes: int
) -> MemoryEstimate:
    estimate = estimate_memory(
        plan.model.config,
        flow,
        plan.config.rollout,
        plan.training,
        plan.longest,
        sizes,
        plan.frozen,
        processes,
        plan.config.cluster.rollout_tp,
        plan.drawn,
        plan.replayed,
        plan.config.cluster.rollouters > 0,
    )
    if plan.samples_here:
        return estimate
    items = tuple(item for item in estimate.items if item.name not in (PAGES, CARRIES))
    return replace(estimate, items=items)


def _describe_memory(estimate: MemoryEstimate, memory: Memory | None) -> list[str]:
    free = f" of {gib(memory.available)} free" if memory else ""
    lines = [f"memory, about {gib(estimate.total)}{free}:"]
    for item in estimate.items:
        note = "while it lasts; only the largest counts" if item.passing else ""
        lines.append(f"  {item.name:<22} {gib(item.size):>10}  {note}".rstrip())
    warning = estimate.warning(memory.available) if memory else None
    return [*lines, *([warning] if warning else [])]
