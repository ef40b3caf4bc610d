"""A training before its weights are read: where its policy comes from, what it will ask of the
model and of the machine, and what ``isobit train --dry-run`` prints of that.

    ModelSource    a model folder, or random weights of a shape in the recipe with a folder's
                   tokenizer.  A reward model may also begin as a language model's folder
    Plan           everything that a run is built from (``isobit.run.run``); each kind of training
                   makes its own, and from there on all is the same
    DryRun         the plan with the memory, the disk and the rewards that the run would take

A dry run reads the configuration, the tokenizer and the data, never the weights.  It refuses what
the run would refuse, apart from what only the weights can show and from trackers, which would be
called over the network.  It writes nothing, and takes none of the memory that the run would take.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from isobit.config.load import dump_config
from isobit.config.recipes import Objective, RunConfig, SftConfig
from isobit.config.reward import RewardConfig
from isobit.config.rules import check_shape
from isobit.config.tables import ModelShape, PrecisionConfig, TrainingConfig
from isobit.data.tokenizer import (
    check_vocabulary,
    load_tokenizer,
    pad_token_id,
    stop_token_ids,
    tokenizer_size,
)
from isobit.kernels.backend import backend_of, support
from isobit.kernels.sizes import Sizes
from isobit.memory.activations import FrozenModel
from isobit.memory.cache_size import num_pages_for
from isobit.memory.device import MOMENTS, DevicePlan, DevicePlanner
from isobit.memory.host import MemoryEstimate, estimate_memory, microbatch_tokens
from isobit.models.checkpoint import weight_files
from isobit.models.config import Experts, ModelConfig
from isobit.models.decoder import decoder_shape, master_shapes
from isobit.models.folder import (
    DescribedModel,
    LoadedModel,
    choose_device,
    load_policy,
    model_folder,
    read_config,
    read_reward_masters,
    reward_config,
)
from isobit.models.policy import Policy, random_policy
from isobit.parallel.slots import ONE_SLOT, Slots
from isobit.parallel.world import ALONE, World
from isobit.precision.flow import PrecisionFlow, build_flow, describe_flow
from isobit.precision.quant_tensor import BLOCK
from isobit.rewards.grading import Graders
from isobit.rollout.engine import Request
from isobit.rollout.native import Limits, check_limits
from isobit.run.data import RlData, digests, settled, with_date_of_run
from isobit.run.lessons import SftData
from isobit.store.checkpoint import folders_by_step
from isobit.store.compatible import ALL_TOKENS
from isobit.store.directory import RunDirectory, check_unused
from isobit.store.disk import DiskPlan, plan_disk
from isobit.store.resume import preview
from isobit.training.optimiser import advise_smaller_moments
from isobit.util.errors import ConfigError, DataError
from isobit.util.machine import Memory, read_memory
from isobit.util.terminal import gib


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model to start from, of which the weights have not been read yet."""

    described: DescribedModel
    from_scratch: bool
    """Whether its weights are drawn; the folder then gives the tokenizer alone."""

    def with_value_head(self) -> "ModelSource":
        """The same, with a value head to be trained on top."""
        config = replace(self.described.config, value_head=True)
        return replace(self, described=replace(self.described, config=config))

    @property
    def weight_bytes(self) -> int:
        """Of the model's files; 0 where it starts from random weights."""
        files = [] if self.from_scratch else weight_files(self.described.folder)
        return sum(file.stat().st_size for file in files)

    def load(
        self,
        precision: PrecisionConfig,
        seed: int,
        device: torch.device,
        world: World = ALONE,
        trainable: bool = True,
        slots: Slots = ONE_SLOT,
    ) -> LoadedModel:
        """The model with its weights, published in the given flow on a device of each rank of a
        world, which share its masters, or keep none; ``seed`` draws random ones, and ``slots`` are
        those of an update.
        """
        described = self.described
        config = described.config
        if self.from_scratch:
            policy = random_policy(config, precision, seed, device, trainable, world, slots)
        elif config.score_head:
            masters = read_reward_masters(described.folder, config, seed, device)
            policy = Policy(config, precision, masters, device, trainable, world, slots)
        else:
            policy = load_policy(
                described.folder, precision, device, trainable, config.value_head, world, slots
            )
        return LoadedModel(described.folder, policy, described.tokenizer, described.stop_token_ids)


def describe_source(
    model: str, shape: ModelShape | None = None, objective: Objective = "supervised"
) -> ModelSource:
    """The folder ``model`` (or ``starter``), or a decoder of ``shape`` with that folder's
    tokenizer; a reward model where the objective is ``preference``.

    Raises ModelError for a folder, ConfigError for a shape that cannot be used.
    """
    folder = model_folder(model)
    config, tokenizer = source_config(model, shape, objective), load_tokenizer(folder)
    check_vocabulary(tokenizer, config.vocab_size, folder)
    described = DescribedModel(
        folder, config, tokenizer, stop_token_ids(tokenizer, folder, config.vocab_size)
    )
    return ModelSource(described, from_scratch=shape is not None)


def source_config(
    model: str, shape: ModelShape | None = None, objective: Objective = "supervised"
) -> ModelConfig:
    """The decoder alone; raises as ``describe_source`` does."""
    folder = model_folder(model)
    if shape is None and objective == "supervised":
        return read_config(folder)
    tokenizer = load_tokenizer(folder)
    if shape is None:
        return reward_config(folder, pad_token_id(tokenizer))
    config = decoder_of(shape, len(tokenizer))
    if objective == "supervised":
        return config.with_tokenizer(tokenizer_size(folder))
    return replace(config, score_head=True, pad_token_id=pad_token_id(tokenizer))


def decoder_of(shape: ModelShape, tokens: int) -> ModelConfig:
    """The decoder of a shape, for a tokenizer of ``tokens`` tokens."""
    check_shape(shape)
    vocab_size = shape.vocab_size or -(-tokens // BLOCK) * BLOCK
    if vocab_size < tokens:
        raise ConfigError(
            f"from_scratch.vocab_size is {vocab_size}, but the tokenizer has {tokens} tokens; "
            "raise it, or leave it out"
        )
    return ModelConfig(
        family=shape.family,
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads or shape.num_heads,
        head_dim=shape.head_dim or shape.hidden_size // shape.num_heads,
        max_positions=shape.max_positions,
        rms_epsilon=shape.rms_epsilon,
        rope_theta=shape.rope_theta,
        tied_embeddings=shape.tied_embeddings,
        experts=_experts(shape),
        sliding_window=shape.sliding_window,
    )


def _experts(shape: ModelShape) -> Experts | None:
    if shape.num_experts is None:
        return None
    width = shape.moe_intermediate_size or shape.intermediate_size
    return Experts(shape.num_experts, shape.num_experts_per_tok, width, renormalise=True)


Config = TypeVar("Config", RunConfig, SftConfig)
Data = TypeVar("Data", RlData, SftData)
AnyPlan: TypeAlias = "Plan[Any, Any]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Generic[Config, Data]):
    """A training before any weight is read: what it is made from, and what it asks of the model and
    of the machine.
    """

    config: Config
    source: ModelSource
    data: Data
    training: TrainingConfig
    """As the trainer and the memory plan read it."""
    updates: int
    """Of the whole run: the length of the learning rate's schedule."""
    longest: int
    """Tokens of the longest sequence that training can meet."""
    learning: Sequence[str]
    """Lines on the data and the steps."""
    evaluation: Mapping[str, Sequence[Request]]
    """What the engine is asked for on each evaluation set; empty where nothing is generated."""
    frozen: tuple[FrozenModel, ...] = ()
    """Models that only score: a reference model, reward models."""
    extra_bytes: int = 0
    """Bytes of a checkpoint beside policy and optimiser, at most."""
    head_rate: float = 1.0
    """How many times as fast as the rest a value head learns."""

    @property
    def model(self) -> DescribedModel:
        """The model that the training starts from, without its weights."""
        return self.source.described

    @property
    def inputs(self) -> dict[str, str]:
        """Digests of what is read beside the recipe (``isobit.run.data``); reads the files."""
        content, model = self.data.digests(), self.model
        found = digests(self.config, model.folder, self.source.from_scratch, content)
        drawn = model.config.tokenizer_size
        return found | {"model.tokens": ALL_TOKENS if drawn is None else f"the first {drawn}"}

    @property
    def requests(self) -> Sequence[Sequence[Request]]:
        """All that its engine may be asked for, in sets of which no two are asked for together."""
        return ([one for asked in self.evaluation.values() for one in asked],)

    @property
    def generates(self) -> bool:
        """Whether there is an engine: completions are wanted where a reward grades them."""
        return self.config.reward is not None

    def choose_device(self) -> torch.device:
        """Where it computes.  Raises ConfigError where that cannot be."""
        return choose_device(self.config.device, self.model.config, self.config.precision)


def check_requests(
    requests: Sequence[Sequence[Request]], check: Callable[[Sequence[Request]], None], context: int
) -> None:
    """Refuse prompts that the engine, by its ``check``, or the model's context cannot take."""
    for asked_together in requests:
        check(asked_together)
        check_context(asked_together, context)


def check_context(requests: Sequence[Request], context: int) -> None:
    """Refuse prompts whose longest answer would not fit the model's context: the context, not the
    limit asked for, would cut it.

    Raises DataError naming the first such prompt and the numbers.
    """
    for request in requests:
        tokens, new = len(request.prompt.token_ids), request.sampling.max_new_tokens
        if tokens + new > context:
            raise DataError(
                f"prompt {request.prompt.id} has {tokens} tokens; with max_new_tokens = {new} that "
                f"is {tokens + new}, more than the model's context of {context}: lower "
                f"max_new_tokens to {context - tokens} or shorten the prompt"
            )


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a training would use and take."""

    plan: AnyPlan
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
        folder, shape = self.plan.model.folder, self.plan.model.config
        parameters = sum(prod(sizes) for sizes in master_shapes(shape).values())
        start = gib(self.weight_bytes) if self.weight_bytes else "from random weights"
        return [
            *dump_config(self.plan.config).splitlines(),
            "",
            f"model {folder}: {shape.family}, {parameters:,} parameters, {shape.num_layers} "
            f"layers, {start}",
            *self.plan.learning,
            *self.rewards,
            *(f"  {line}" for line in describe_flow(self.flow)),
            *describe_rounds(self.plan, self.processes),
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
    read: Callable[[Config], AnyPlan],
    resume: bool = False,
    allowed: Sequence[str] = (),
) -> DryRun:
    """Check a training, which ``read`` plans, and work out what it takes; with ``resume``
    the run in its directory is to go on, though what is ``allowed`` by name be other than it was.

    Raises an ``IsobitError`` that names what cannot be used.
    """
    if not resume:
        check_unused(config.output)
    notes: list[str] = []
    config = settled(with_date_of_run(config, resume), read, notes.append)
    plan = read(config)
    plan = replace(plan, learning=(*notes, *plan.learning))
    rewards = describe_rewards(config.reward)
    model = plan.model.config
    weight_bytes = plan.source.weight_bytes
    flow = build_flow(config.precision, decoder_shape(model))
    device = plan.choose_device()
    start: list[str] = []
    if resume:
        preview(config, plan.inputs, device, allowed, start.append)
    cluster, sizes = plan.config.cluster, support(device.type).sizes
    processes = cluster.processes - cluster.rollouters
    if support(device.type).has_own_memory:
        memory = plan_device_memory(plan, device, processes, cluster.processes)
        pages = memory.pages
    else:
        memory = _plan_main_memory(plan, flow, sizes, processes)
        pages = num_pages_for(model, flow, config.rollout, sizes)
    limits = Limits(model.max_positions, model.vocab_size, pages, sizes.page_tokens, True)
    check = partial(check_limits, limits=limits)
    check_requests(plan.requests, check, model.max_positions)
    disk = plan_disk(
        config.output,
        model,
        config.training,
        config.checkpoint,
        config.evaluation,
        folders_by_step(RunDirectory(config.output).checkpoints),
        plan.extra_bytes,
    )
    disk.check()
    return DryRun(plan, weight_bytes, flow, memory, processes, disk, rewards, start)


def describe_rewards(reward: RewardConfig | None) -> Sequence[str]:
    """The rewards with the forms that were recognised.  Raises RewardError for one that cannot be
    loaded.
    """
    if reward is None:
        return ()
    with Graders(reward) as graders:
        return graders.describe()


def describe_rounds(plan: AnyPlan, processes: int) -> Sequence[str]:
    """How several processes share an update's micro-batches out, if all sequences were as long as
    the longest; no lines of one process.
    """
    if processes == 1:
        return ()
    training, longest = plan.training, plan.longest
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
    plan: AnyPlan,
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
    config, training, shape = plan.config, plan.training, plan.model.config
    flow, memory = build_flow(config.precision, decoder_shape(shape)), read_memory()
    rollout = config.rollout if plan.generates else None
    sizes, total = support(device.type).sizes, available_memory(device)
    frozen = plan.frozen if learns else tuple(one for one in plan.frozen if one.grades)
    planner = DevicePlanner(shape, flow, sizes, total, frozen, processes, learns, hosts)
    device_plan = planner.plan(rollout, training, plan.longest)
    host = {name: here * size for name, size in device_plan.host.items()}
    if memory is not None and sum(host.values()) > memory.available:
        raise ConfigError(_too_much_offloaded(plan, host, memory.available))
    return device_plan


def _too_much_offloaded(plan: AnyPlan, host: Mapping[str, int], available: int) -> str:
    """What would go to main memory, by the keys that send it there."""
    keys = {model.name: f"{model.table}.offload" for model in plan.frozen}
    keys[MOMENTS] = "training.offload_moments"
    parts = [f"{keys[name]} puts {gib(size)} into main memory" for name, size in host.items()]
    smaller = advise_smaller_moments(plan.training.moments) if MOMENTS in host else ""
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
    )
    if plan.generates:
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
