"""Everything a run needs, made and checked before its directory exists: what can be refused is
refused here.

The cheap refusals come first: a KL penalty is reported before any file is read.  Nothing is
written.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from isobit.algorithms.objective import Algorithm
from isobit.algorithms.registry import build_algorithm
from isobit.clock import Clock
from isobit.config.schema import RunConfig, TrainingConfig
from isobit.config.sft import SftConfig
from isobit.data.prompts import build_prompts, drop_evaluated
from isobit.data.sampler import PromptSampler
from isobit.errors import ConfigError, DataError
from isobit.kernels.backend import backend_of, support
from isobit.memory.device import DevicePlan, DevicePlanner
from isobit.memory.machine import gib, read_memory
from isobit.memory.turns import GpuTurns
from isobit.models.device import choose_device
from isobit.models.folder import load_policy
from isobit.models.function import is_one_function
from isobit.models.loaded import DescribedModel, LoadedModel, describe_model
from isobit.observe.wandb_tracker import check_tracking
from isobit.precision.flow import build_flow
from isobit.records.text import Prompt, SamplingParams
from isobit.rewards.function import RewardFunction, load_reward
from isobit.rollout.engine import RolloutEngine
from isobit.rollout.native.engine import NativeEngine
from isobit.rollout.request import Request
from isobit.run.evaluate import Evaluator, build_evaluator
from isobit.run.training_run import Recipe
from isobit.training.optimiser import advise_smaller_moments
from isobit.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a run, ready to start."""

    config: RunConfig
    model: LoadedModel
    engine: RolloutEngine
    trainer: Trainer
    algorithm: Algorithm
    reward: RewardFunction
    sampler: PromptSampler
    sampling: SamplingParams
    evaluator: Evaluator
    dropped_prompts: int
    """Training prompts left out because an evaluation set holds them too."""
    turns: GpuTurns | None
    """Who has the GPU's memory when; None on a CPU, where engine and trainer have it together."""

    def training_turn(self, clock: Clock) -> AbstractContextManager[None]:
        """A block in which the trainer may take all the memory that it needs; the engine must not
        be asked for anything in it.
        """
        return nullcontext() if self.turns is None else self.turns.training(clock)

    @property
    def exact(self) -> bool:
        """Whether what the engine records and what the trainer computes are one function."""
        return is_one_function(self.engine.function, self.trainer.function)

    @property
    def fingerprint(self) -> str:
        """Of the training prompts."""
        return self.sampler.fingerprint

    def data_figures(self) -> dict[str, Any]:
        """Prompts and problems, in numbers."""
        return {
            "training_prompts": self.sampler.state()["prompts"],
            "dropped_prompts": self.dropped_prompts,
            "evaluation_problems": {
                name: len(prompts) for name, prompts in self.evaluator.sets.items()
            },
        }

    def next_requests(self) -> list[Request]:
        """The prompts of the next step, as the engine takes them."""
        samples = self.config.training.samples_per_prompt
        return [
            Request(prompt, visit, samples, self.sampling) for prompt, visit in self.sampler.next()
        ]


def prepare(config: RunConfig) -> Run:
    """Load and check a run.  Raises an ``IsobitError`` that names what cannot be used; writes
    nothing.
    """
    check_tracking(config.tracking)
    algorithm = build_algorithm(config.algorithm)
    check_batch(config)
    check_best(config)
    reward = load_reward(config.reward.function)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    described = describe_model(config.model)
    device = choose_device(config.device, described.config, config.precision)
    train = build_prompts(
        "train", config.data.train, described.tokenizer, config.data, described.config.max_positions
    )
    sampling = described.sampling(config.rollout)
    rollout, plan = config.rollout, None
    if support(device.type).has_own_memory:
        longest = max(
            request.max_length(described.config.max_positions)
            for request in one_sample_each(train, sampling)
        )
        plan = prepare_turns(described, config, config.training, longest, device)
        rollout = rollout.model_copy(update={"kv_pages": plan.pages})
    policy = load_policy(described.folder, config.precision, device)
    model = LoadedModel(described.folder, policy, described.tokenizer, described.stop_token_ids)
    engine = NativeEngine(policy, rollout, model.tokenizer, config.seed)
    evaluator = build_evaluator(config, model, engine, reward)
    prompts, dropped = drop_evaluated(train, evaluator.sets.values())
    for requests in (evaluator.requests(), one_sample_each(prompts, sampling)):
        engine.check(requests)
        check_fits(requests, model.context)
    training = config.training
    trainer = Trainer(
        model.policy,
        training,
        training.steps * training.updates_per_batch * training.epochs,
        config.seed,
    )
    sampler = PromptSampler(prompts, training.prompts_per_step, config.seed, config.data.shuffle)
    turns = None if plan is None else GpuTurns(plan, engine, trainer)
    return Run(
        config,
        model,
        engine,
        trainer,
        algorithm,
        reward,
        sampler,
        sampling,
        evaluator,
        dropped,
        turns,
    )


def prepare_turns(
    model: DescribedModel,
    config: Recipe,
    training: TrainingConfig,
    longest: int,
    device: torch.device,
) -> DevicePlan:
    """Before anything is in the device's own memory: plan the run and set the allocator for turns.
    Raises ConfigError as ``plan_for_device`` does.
    """
    plan = plan_for_device(model, config, training, longest, device)
    memory = backend_of(device).memory
    assert memory is not None, "the device has a memory of its own"
    memory.allocate_in_pages()
    return plan


def plan_for_device(
    model: DescribedModel,
    config: Recipe,
    training: TrainingConfig,
    longest: int,
    device: torch.device,
) -> DevicePlan:
    """The plan of the memory that a device has for itself, for training sequences of at most
    ``longest`` tokens, as ``training`` says.

    A run without a reward never generates.  Raises ConfigError where the plan does not fit, and
    where the main memory does not hold the moments that are to go there.
    """
    flow, memory = build_flow(config.precision, model.config.shape), read_memory()
    rollout = None if config.reward is None else config.rollout
    planner = DevicePlanner(
        model.config, flow, support(device.type).sizes, available_memory(device)
    )
    plan = planner.plan(rollout, training, longest)
    if memory is not None and plan.host > memory.available:
        smaller = advise_smaller_moments(training.moments)
        raise ConfigError(
            f"training.offload_moments puts {gib(plan.host)} into main memory, and "
            f"{gib(memory.available)} are free: leave it out"
            + (f", or {smaller}" if smaller else "")
        )
    return plan


def available_memory(device: torch.device) -> int:
    """Bytes of a device's own memory that this process has or could have now."""
    memory = backend_of(device).memory
    assert memory is not None, "the device has a memory of its own"
    return memory.available()


def one_sample_each(prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Request]:
    """A request for each prompt."""
    return [Request(prompt, 0, 1, sampling) for prompt in prompts]


def check_fits(requests: Sequence[Request], context: int) -> None:
    """Refuse prompts whose longest answer would not fit the model's context: the context, not the
    limit asked for, would cut it.

    Raises DataError naming the first such prompt and the numbers.
    """
    for request in requests:
        tokens, new = len(request.prompt.token_ids), request.sampling.max_new_tokens
        if tokens + new > context:
            raise DataError(
                f"prompt {request.prompt.id} has {tokens} tokens; with max_new_tokens = {new} that "
                f"is {tokens + new}, more than the "
                f"model's context of {context}: lower max_new_tokens to {context - tokens} or "
                "shorten the prompt"
            )


def check_best(config: Recipe) -> None:
    """The figure that the best checkpoint is best by must be one that some evaluation gives.
    Raises ConfigError.
    """
    name = config.checkpoint.keep_best
    counts = (
        [1 << power for power in range(config.evaluation.samples.bit_length())]
        if config.evaluation.samples > 1
        else []
    )
    graded = ["accuracy", *(f"pass@{k}" for k in counts)] if config.reward is not None else []
    measured = ["loss"] if isinstance(config, SftConfig) else []
    figures = [
        f"eval/{name}/{figure}" for name in config.data.eval for figure in (*graded, *measured)
    ]
    if name is not None and name not in figures:
        raise ConfigError(
            f"checkpoint.keep_best is {name!r}, which no evaluation gives; "
            + (
                f"name one of {', '.join(figures)}"
                if figures
                else "data.eval names no set: add one, or leave keep_best out"
            )
        )


def check_batch(config: RunConfig) -> None:
    """Refuse batches that cannot be cut or that teach nothing.  Raises ConfigError."""
    training = config.training
    if training.updates_per_batch > training.prompts_per_step:
        raise ConfigError(
            f"training.updates_per_batch is {training.updates_per_batch}, but a step has "
            f"{training.prompts_per_step} prompts "
            "(training.prompts_per_step), and each update needs at least one"
        )
    if config.rollout.temperature == 0:
        raise ConfigError(
            "rollout.temperature is 0: greedy samples are all the same, and a group of equals "
            "teaches nothing; set it above 0"
        )
