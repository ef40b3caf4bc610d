"""A training before it starts: what ``--dry-run`` prints, and the plan of a device's memory that
the run itself follows.

A dry run reads the configuration, the tokenizer and the data; never the weights.  Everything is
refused that the run would refuse, apart from what only the weights can show and from trackers,
which would be called up over the network.  Nothing is written, and no memory is taken that the run
would take.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TypeVar

import torch

from isobit.config.load import dump_config
from isobit.config.reward import RewardConfig
from isobit.config.run import RunConfig
from isobit.config.sft import SftConfig
from isobit.errors import ConfigError
from isobit.kernels.backend import backend_of, support
from isobit.kernels.sizes import Sizes
from isobit.memory.cache_size import num_pages_for
from isobit.memory.device import MOMENTS, DevicePlan, DevicePlanner
from isobit.memory.host import MemoryEstimate, estimate_memory, microbatch_tokens
from isobit.memory.machine import Memory, read_memory
from isobit.models.decoder import decoder_shape, master_shapes
from isobit.precision.compare import describe_flow
from isobit.precision.flow import PrecisionFlow, build_flow
from isobit.rewards.grading import Graders
from isobit.rollout.native.limits import Limits, check_limits
from isobit.run.outline import Material, Outline, check_requests
from isobit.store.checkpoint.format import folders_by_step
from isobit.store.checkpoint.space import DiskPlan, plan_disk
from isobit.store.checkpoint.start import preview
from isobit.store.directory import RunDirectory, check_unused
from isobit.training.optimiser import advise_smaller_moments
from isobit.units import gib

Config = TypeVar("Config", RunConfig, SftConfig)


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What a training would use and take."""

    outline: Outline
    weight_bytes: int
    """Of the model's files; 0 where it starts from random weights."""
    flow: PrecisionFlow
    memory: MemoryEstimate | DevicePlan
    """Of the device that the run would compute on."""
    processes: int
    """That train together."""
    disk: DiskPlan
    rewards: Sequence[str]
    """A line each."""
    start: Sequence[str]
    """Lines on where a resumed run goes on; none of a new one."""

    def describe(self, memory: Memory | None) -> list[str]:
        """The plan as text: the resolved recipe, the model, what is learnt, the precision flow, and
        the memory against what is free now.
        """
        folder, shape = self.outline.model.folder, self.outline.model.config
        parameters = sum(prod(sizes) for sizes in master_shapes(shape).values())
        start = gib(self.weight_bytes) if self.weight_bytes else "from random weights"
        return [
            *dump_config(self.outline.config).splitlines(),
            "",
            f"model {folder}: {shape.family}, {parameters:,} parameters, {shape.num_layers} "
            f"layers, {start}",
            *self.outline.learning,
            *self.rewards,
            *(f"  {line}" for line in describe_flow(self.flow)),
            *describe_rounds(self.outline, self.processes),
            *(
                self.memory.describe()
                if isinstance(self.memory, DevicePlan)
                else _describe_memory(self.memory, memory)
            ),
            self.disk.describe(),
            *self.start,
            "nothing was written; leave out --dry-run to start",
        ]


def plan_training(
    config: Config,
    read: Callable[[Config], Material],
    resume: bool = False,
    allowed: Sequence[str] = (),
) -> TrainingPlan:
    """Check a training, whose material ``read`` makes, and work out what it takes; with ``resume``
    the run in its directory is to go on, though what is ``allowed`` by name be other than it was.

    Raises an ``IsobitError`` that names what cannot be used.
    """
    if not resume:
        check_unused(config.output)
    material = read(config)
    rewards = describe_rewards(config.reward)
    outline = material.outline
    model = outline.model.config
    weight_bytes = outline.source.weight_bytes
    flow = build_flow(config.precision, decoder_shape(model))
    device = outline.choose_device()
    start: list[str] = []
    if resume:
        preview(config, material.inputs, device, allowed, start.append)
    cluster, sizes = outline.config.cluster, support(device.type).sizes
    processes = cluster.processes - cluster.rollouters
    if support(device.type).has_own_memory:
        memory = plan_device_memory(outline, device, processes, cluster.processes)
        pages = memory.pages
    else:
        memory = _plan_main_memory(outline, flow, sizes, processes)
        pages = num_pages_for(model, flow, config.rollout, sizes)
    limits = Limits(model.max_positions, model.vocab_size, pages, sizes.page_tokens, True)
    check = partial(check_limits, limits=limits)
    check_requests(material.requests, check, model.max_positions)
    disk = plan_disk(
        config.output,
        model,
        config.training,
        config.checkpoint,
        config.evaluation,
        folders_by_step(RunDirectory(config.output).checkpoints),
        outline.extra_bytes,
    )
    disk.check()
    return TrainingPlan(outline, weight_bytes, flow, memory, processes, disk, rewards, start)


def describe_rewards(reward: RewardConfig | None) -> Sequence[str]:
    """The rewards with the forms that were recognised.  Raises RewardError for one that cannot be
    loaded.
    """
    if reward is None:
        return ()
    with Graders(reward) as graders:
        return graders.describe()


def describe_rounds(outline: Outline, processes: int) -> Sequence[str]:
    """How several processes share an update's micro-batches out, if all sequences were as long as
    the longest; no lines of one process.
    """
    if processes == 1:
        return ()
    training, longest = outline.training, outline.longest
    prompts = -(-training.prompts_per_step // training.updates_per_batch)
    sequences = prompts * training.samples_per_prompt
    batches = -(-sequences // max(1, microbatch_tokens(training, longest) // longest))
    slots = training.slots
    rounds = sum(-(-len(range(slot, batches, slots)) // processes) for slot in range(slots))
    last = "the last" if slots == 1 else f"the last of {slots} slots each"
    idle = rounds * processes - batches
    return (
        f"processes: {processes}, each with its rows of every master, moment and gradient",
        f"  micro-batches of an update, of {sequences:,} sequences of {longest:,} tokens: "
        f"{batches:,}; rounds: {rounds:,}; "
        f"idle in {last}: {idle} of {slots * processes} processes, "
        f"{idle / (rounds * processes):.1%} of the time of all",
    )


def plan_device_memory(
    outline: Outline,
    device: torch.device,
    processes: int = 1,
    here: int = 1,
    learns: bool = True,
    hosts: int = 1,
) -> DevicePlan:
    """The plan of the memory that a device has for itself, of each of so many processes that train
    together; ``here`` are on this machine.  One that never ``learns`` only samples; ``hosts``
    compute slots side by side.

    Raises ConfigError where the plan does not fit, and where the main memory does not hold what is
    to go there.
    """
    config, training, shape = outline.config, outline.training, outline.model.config
    flow, memory = build_flow(config.precision, decoder_shape(shape)), read_memory()
    rollout = config.rollout if outline.generates else None
    sizes, total = support(device.type).sizes, available_memory(device)
    frozen = outline.frozen if learns else tuple(one for one in outline.frozen if one.grades)
    planner = DevicePlanner(shape, flow, sizes, total, frozen, processes, learns, hosts)
    plan = planner.plan(rollout, training, outline.longest)
    host = {name: here * size for name, size in plan.host.items()}
    if memory is not None and sum(host.values()) > memory.available:
        raise ConfigError(_too_much_offloaded(outline, host, memory.available))
    return plan


def _too_much_offloaded(outline: Outline, host: Mapping[str, int], available: int) -> str:
    """What would go to main memory, by the keys that send it there."""
    keys = {model.name: f"{model.table}.offload" for model in outline.frozen}
    keys[MOMENTS] = "training.offload_moments"
    parts = [f"{keys[name]} puts {gib(size)} into main memory" for name, size in host.items()]
    smaller = advise_smaller_moments(outline.training.moments) if MOMENTS in host else ""
    return (
        f"{' and '.join(parts)}, and {gib(available)} are free: leave "
        f"{'it' if len(parts) == 1 else 'one'} out{f', or {smaller}' if smaller else ''}"
    )


def available_memory(device: torch.device) -> int:
    """Bytes of a device's own memory that this process has or could have now."""
    memory = backend_of(device).memory
    assert memory is not None, "the device has a memory of its own"
    return memory.available()


def _plan_main_memory(
    outline: Outline, flow: PrecisionFlow, sizes: Sizes, processes: int
) -> MemoryEstimate:
    estimate = estimate_memory(
        outline.model.config,
        flow,
        outline.config.rollout,
        outline.training,
        outline.longest,
        sizes,
        outline.frozen,
        processes,
    )
    if outline.generates:
        return estimate
    items = tuple(item for item in estimate.items if item.name != "KV pages")
    return replace(estimate, items=items)


def _describe_memory(estimate: MemoryEstimate, memory: Memory | None) -> list[str]:
    free = f" of {gib(memory.available)} free" if memory else ""
    lines = [f"memory, about {gib(estimate.total)}{free}:"]
    for item in estimate.items:
        note = "while it lasts; only the largest counts" if item.passing else ""
        lines.append(f"  {item.name:<22} {gib(item.size):>10}  {note}".rstrip())
    warning = estimate.warning(memory.available) if memory else None
    return [*lines, *([warning] if warning else [])]
