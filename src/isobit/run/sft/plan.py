"""A run of fine-tuning before it starts: what ``isobit sft --dry-run`` prints.  As
``isobit.run.plan``, it never reads the weights.
"""

from dataclasses import dataclass, replace

from isobit.config.sft import SftConfig
from isobit.memory.host import MemoryEstimate
from isobit.memory.machine import Memory
from isobit.models.device import choose_device
from isobit.models.folder import weight_files
from isobit.models.loaded import DescribedModel
from isobit.precision.flow import build_flow
from isobit.rewards.function import load_reward
from isobit.rollout.native.limits import Limits, check_limits
from isobit.rollout.request import Request
from isobit.run.evaluate import evaluation_sampling
from isobit.run.setup import check_best, check_fits
from isobit.run.sft.data import SftData, load_data
from isobit.run.sft.setup import check_reward, describe_start, trainer_config
from isobit.run.training_plan import TrainingPlan, plan_checkpoints, plan_memory
from isobit.store.directory import check_unused


@dataclass(frozen=True, slots=True)
class SftPlan(TrainingPlan):
    """What a run would use and take."""

    config: SftConfig
    data: SftData


def plan_sft(config: SftConfig, resume: bool = False) -> SftPlan:
    """Check a run and work out what it takes; with ``resume`` its directory may be in use.

    Raises an ``IsobitError`` that names what cannot be used.
    """
    if not resume:
        check_unused(config.output)
    check_reward(config)
    check_best(config)
    model = describe_start(config)
    flow = build_flow(config.precision, model.config.shape)
    weight_bytes = (
        0
        if config.from_scratch
        else sum(file.stat().st_size for file in weight_files(model.folder))
    )
    data = load_data(config, model)
    device = choose_device(config.device, model.config, config.precision)
    memory, limits = plan_memory(config, trainer_config(config), model, flow, data.longest, device)
    if config.reward is not None:
        load_reward(config.reward.function)
        _check_requests(config, model, data, limits)
    elif isinstance(memory, MemoryEstimate):  # there is no engine
        memory = replace(
            memory, items=tuple(item for item in memory.items if item.name != "KV pages")
        )
    return SftPlan(
        config,
        model,
        weight_bytes,
        flow,
        data.longest,
        memory,
        plan_checkpoints(config, model),
        data,
    )


def describe_plan(plan: SftPlan, memory: Memory | None) -> list[str]:
    """The plan as text, with the memory against what is free now."""
    training = plan.config.training
    steps = f"steps: {training.steps} of {training.prompts_per_step} examples; sequences of at most {plan.longest} tokens"
    return plan.describe([plan.data.describe(plan.config), steps], memory)


def _check_requests(
    config: SftConfig, model: DescribedModel, data: SftData, limits: Limits
) -> None:
    """Refuse prompts that the engine or the context could not take."""
    sampling = evaluation_sampling(config.evaluation, config.rollout, model)
    examples = [example for name in data.sets for example in data.sets[name]]
    requests = [
        Request(example.prompt, 0, config.evaluation.samples, sampling) for example in examples
    ]
    check_limits(requests, limits)
    check_fits(requests, limits.context)
