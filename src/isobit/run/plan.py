"""A run before it starts: what ``isobit train --dry-run`` prints.  Reads the configuration, the
tokenizer and the data; never the weights.

Everything is refused that ``isobit.run.setup`` would refuse, apart from what only the weights can
show and from trackers, which would be called up over the network.  Nothing is written, and no
memory is taken that the run would take.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isobit.algorithms.registry import build_algorithm
from isobit.config.schema import RunConfig
from isobit.data.prompts import build_prompts, drop_evaluated
from isobit.memory.machine import Memory
from isobit.models.device import choose_device
from isobit.models.folder import weight_files
from isobit.models.loaded import DescribedModel, describe_model
from isobit.precision.flow import build_flow
from isobit.records.text import Prompt
from isobit.rewards.function import load_reward
from isobit.rollout.native.limits import Limits, check_limits
from isobit.rollout.request import Request
from isobit.run.evaluate import evaluation_sampling
from isobit.run.setup import check_batch, check_best, check_fits, one_sample_each
from isobit.run.training_plan import TrainingPlan, plan_checkpoints, plan_memory
from isobit.store.directory import check_unused


@dataclass(frozen=True, slots=True)
class Plan(TrainingPlan):
    """What a run would use and take."""

    config: RunConfig
    training_prompts: int
    dropped_prompts: int
    """Training prompts left out because an evaluation set holds them too."""
    evaluation_problems: Mapping[str, int]


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
    device = choose_device(config.device, model.config, config.precision)
    memory, limits = plan_memory(config, config.training, model, flow, longest, device)
    _check_requests(config, model, requests, sets, limits)
    problems = {name: len(problems) for name, problems in sets.items()}
    disk = plan_checkpoints(config, model)
    return Plan(
        config, model, weight_bytes, flow, longest, memory, disk, len(prompts), dropped, problems
    )


def describe_plan(plan: Plan, memory: Memory | None) -> list[str]:
    """The plan as text, with the memory against what is free now."""
    training = plan.config.training
    dropped = (
        f" ({plan.dropped_prompts} more also stand in an evaluation set: dropped)"
        if plan.dropped_prompts
        else ""
    )
    sets = (
        ", ".join(f"{problems} in {name}" for name, problems in plan.evaluation_problems.items())
        or "none"
    )
    samples = training.prompts_per_step * training.samples_per_prompt
    learning = [
        f"data: {plan.training_prompts} training prompts{dropped}; evaluation problems: {sets}",
        f"steps: {training.steps} of {samples} samples, "
        f"{training.updates_per_batch * training.epochs} updates each; "
        f"sequences of at most {plan.longest} tokens",
    ]
    return plan.describe(learning, memory)


def _prompts(config: RunConfig, model: DescribedModel, evaluation_set: str | None) -> list[Prompt]:
    name, source = (
        ("train", config.data.train)
        if evaluation_set is None
        else (evaluation_set, config.data.eval[evaluation_set])
    )
    return build_prompts(name, source, model.tokenizer, config.data, model.config.max_positions)


def _check_requests(
    config: RunConfig,
    model: DescribedModel,
    training: Sequence[Request],
    sets: Mapping[str, Sequence[Prompt]],
    limits: Limits,
) -> None:
    """Refuse prompts that the engine or the context could not take."""
    evaluation = evaluation_sampling(config.evaluation, config.rollout, model)
    problems = [
        Request(prompt, 0, config.evaluation.samples, evaluation)
        for name in sets
        for prompt in sets[name]
    ]
    for requests in (problems, training):
        check_limits(requests, limits)
        check_fits(requests, limits.context)
