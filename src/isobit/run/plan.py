"""A run before it starts: what ``isobit train --dry-run`` prints.  Reads the configuration, the tokenizer and the data; never the weights.

Everything is refused that ``isobit.run.setup`` would refuse, apart from what only the weights can show and from trackers, which would
be called up over the network.  Nothing is written, and no memory is taken that the run would take.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from isobit.algorithms.registry import build_algorithm
from isobit.config.load import dump_config
from isobit.config.schema import RunConfig
from isobit.data.prompts import build_prompts, drop_evaluated
from isobit.kernels.kv_cache import KvCache
from isobit.models.checkpoint import weight_files
from isobit.models.policy import master_shapes
from isobit.precision.compare import describe_flow
from isobit.precision.flow import PrecisionFlow, build_flow
from isobit.records import Prompt
from isobit.rewards.function import load_reward
from isobit.rollout.cache_size import num_pages_for
from isobit.rollout.request import Limits, Request, check_requests
from isobit.run.checkpoint.format import folders_by_step
from isobit.run.checkpoint.space import DiskPlan, plan_disk
from isobit.run.device import choose_device
from isobit.run.directory import RunDirectory, check_unused
from isobit.run.evaluate import evaluation_sampling
from isobit.run.gpu_memory import PAGE_TOKENS, GpuPlan
from isobit.run.machine import Memory, gib
from isobit.run.memory import MemoryEstimate, estimate_memory
from isobit.run.model import DescribedModel, describe_model
from isobit.run.setup import check_batch, check_best, check_fits, one_sample_each, plan_for_gpu


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run would use and take."""

    config: RunConfig
    model: DescribedModel
    weight_bytes: int
    """Of the model's files."""
    flow: PrecisionFlow
    training_prompts: int
    dropped_prompts: int
    """Training prompts left out because an evaluation set holds them too."""
    evaluation_problems: Mapping[str, int]
    longest: int
    """Tokens of the longest sequence that training can meet."""
    memory: MemoryEstimate | GpuPlan
    """Of the device that the run would compute on."""
    disk: DiskPlan


def plan_run(config: RunConfig, resume: bool = False) -> Plan:
    """Check a run and work out what it takes; with ``resume`` its directory may be in use.

    Raises an ``IsobitError`` that names what cannot be used.
    """
    if not resume:
        check_unused(config.output)
    build_algorithm(config.algorithm)
    check_batch(config)
    check_best(config)
    load_reward(config.reward.function)
    model = describe_model(config.model)
    flow = build_flow(config.precision, model.config.shape)
    weight_bytes = sum(file.stat().st_size for file in weight_files(model.folder))
    sets = {name: _prompts(config, model, name) for name in config.data.eval}
    prompts, dropped = drop_evaluated(_prompts(config, model, None), sets.values())
    requests = one_sample_each(prompts, model.sampling(config.rollout))
    longest = max(request.max_length(model.config.max_positions) for request in requests)
    if choose_device(config.device, model.config, config.precision).type == "cuda":
        memory = plan_for_gpu(model, config.precision, config.rollout, config.training, longest)
        pages, page_tokens = memory.pages, PAGE_TOKENS
    else:
        memory = estimate_memory(model.config, flow, config.rollout, config.training, longest)
        pages, page_tokens = num_pages_for(model.config, flow, config.rollout), KvCache.page_tokens
    _check_requests(
        config, model, requests, sets, Limits(model.config.max_positions, model.config.vocab_size, pages, page_tokens, has_tokenizer=True)
    )
    problems = {name: len(problems) for name, problems in sets.items()}
    disk = plan_disk(config, folders_by_step(RunDirectory(config.output).checkpoints))
    disk.check()
    return Plan(config, model, weight_bytes, flow, len(prompts), dropped, problems, longest, memory, disk)


def describe_plan(plan: Plan, memory: Memory | None) -> list[str]:
    """The plan as text: the resolved recipe, what it would use, the precision flow, and the memory against what is free now."""
    shape, training = plan.model.config, plan.config.training
    parameters = sum(prod(sizes) for sizes in master_shapes(shape).values())
    dropped = f" ({plan.dropped_prompts} more also stand in an evaluation set: dropped)" if plan.dropped_prompts else ""
    sets = ", ".join(f"{problems} in {name}" for name, problems in plan.evaluation_problems.items()) or "none"
    samples = training.prompts_per_step * training.samples_per_prompt
    return [
        *dump_config(plan.config).splitlines(),
        "",
        f"model {plan.model.folder}: {shape.family}, {parameters:,} parameters, {shape.num_layers} layers, {gib(plan.weight_bytes)}",
        f"data: {plan.training_prompts} training prompts{dropped}; evaluation problems: {sets}",
        f"steps: {training.steps} of {samples} samples, {training.updates_per_batch * training.epochs} updates each; "
        f"sequences of at most {plan.longest} tokens",
        *(f"  {line}" for line in describe_flow(plan.flow)),
        *(plan.memory.describe() if isinstance(plan.memory, GpuPlan) else _describe_memory(plan.memory, memory)),
        plan.disk.describe(),
        "nothing was written; leave out --dry-run to start",
    ]


def _describe_memory(estimate: MemoryEstimate, memory: Memory | None) -> list[str]:
    free = f" of {gib(memory.available)} free" if memory else ""
    lines = [f"memory, about {gib(estimate.total)}{free}:"]
    for item in estimate.items:
        note = "while it lasts; only the largest counts" if item.passing else ""
        lines.append(f"  {item.name:<22} {gib(item.size):>10}  {note}".rstrip())
    warning = estimate.warning(memory.available) if memory else None
    return [*lines, *([warning] if warning else [])]


def _prompts(config: RunConfig, model: DescribedModel, evaluation_set: str | None) -> list[Prompt]:
    name, source = ("train", config.data.train) if evaluation_set is None else (evaluation_set, config.data.eval[evaluation_set])
    return build_prompts(name, source, model.tokenizer, config.data, model.config.max_positions)


def _check_requests(
    config: RunConfig, model: DescribedModel, training: Sequence[Request], sets: Mapping[str, Sequence[Prompt]], limits: Limits
) -> None:
    """Refuse prompts that the engine or the context could not take."""
    evaluation = evaluation_sampling(config.evaluation, config.rollout, model)
    problems = [Request(prompt, 0, config.evaluation.samples, evaluation) for name in sets for prompt in sets[name]]
    for requests in (problems, training):
        check_requests(requests, limits)
        check_fits(requests, limits.context)
