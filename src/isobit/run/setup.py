"""Everything a run needs, made and checked before its directory exists: what can be refused is refused here.

The cheap refusals come first: a KL penalty is reported before any file is read.  Nothing is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from isobit.algorithms.objective import Algorithm
from isobit.algorithms.registry import build_algorithm
from isobit.config.schema import RunConfig
from isobit.data.prompts import build_prompts, drop_evaluated
from isobit.data.sampler import PromptSampler
from isobit.errors import ConfigError, DataError
from isobit.records import SamplingParams
from isobit.rewards.function import RewardFunction, load_reward
from isobit.rollout.engine import Engine
from isobit.rollout.request import Request
from isobit.run.evaluate import Evaluator, build_evaluator
from isobit.run.model import LoadedModel, load_model_on
from isobit.run.wandb_tracker import check_tracking
from isobit.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a run, ready to start."""

    config: RunConfig
    model: LoadedModel
    engine: Engine
    trainer: Trainer
    algorithm: Algorithm
    reward: RewardFunction
    sampler: PromptSampler
    sampling: SamplingParams
    evaluator: Evaluator
    dropped_prompts: int
    """Training prompts left out because an evaluation set holds them too."""

    def next_requests(self) -> list[Request]:
        """The prompts of the next step, as the engine takes them."""
        samples = self.config.training.samples_per_prompt
        return [Request(prompt, visit, samples, self.sampling) for prompt, visit in self.sampler.next()]


def prepare(config: RunConfig) -> Run:
    """Load and check a run.  Raises an ``IsobitError`` that names what cannot be used; writes nothing."""
    check_tracking(config.tracking)
    algorithm = build_algorithm(config.algorithm)
    check_batch(config)
    check_best(config)
    reward = load_reward(config.reward.function)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    model = load_model_on(config.device, config.model, config.precision, trainable=True)
    engine = Engine(model.policy, config.rollout, model.tokenizer, config.seed)
    evaluator = build_evaluator(config, model, engine, reward)
    train = build_prompts("train", config.data.train, model.tokenizer, config.data, model.context)
    prompts, dropped = drop_evaluated(train, evaluator.sets.values())
    sampling = model.sampling(config.rollout)
    for requests in (evaluator.requests(), [Request(prompt, 0, 1, sampling) for prompt in prompts]):
        engine.check(requests)
        check_fits(requests, model.context)
    training = config.training
    trainer = Trainer(model.policy, training, training.steps * training.updates_per_batch * training.epochs, config.seed)
    sampler = PromptSampler(prompts, training.prompts_per_step, config.seed, config.data.shuffle)
    return Run(config, model, engine, trainer, algorithm, reward, sampler, sampling, evaluator, dropped)


def check_fits(requests: Sequence[Request], context: int) -> None:
    """Refuse prompts whose longest answer would not fit the model's context: the context, not the limit asked for, would cut it.

    Raises DataError naming the first such prompt and the numbers.
    """
    for request in requests:
        tokens, new = len(request.prompt.token_ids), request.sampling.max_new_tokens
        if tokens + new > context:
            raise DataError(
                f"prompt {request.prompt.id} has {tokens} tokens; with max_new_tokens = {new} that is {tokens + new}, more than the "
                f"model's context of {context}: lower max_new_tokens to {context - tokens} or shorten the prompt"
            )


def check_best(config: RunConfig) -> None:
    """The figure that the best checkpoint is best by must be one that some evaluation gives.  Raises ConfigError."""
    name = config.checkpoint.keep_best
    counts = [1 << power for power in range(config.evaluation.samples.bit_length())] if config.evaluation.samples > 1 else []
    figures = [f"eval/{name}/{figure}" for name in config.data.eval for figure in ("accuracy", *(f"pass@{k}" for k in counts))]
    if name is not None and name not in figures:
        raise ConfigError(
            f"checkpoint.keep_best is {name!r}, which no evaluation gives; "
            + (f"name one of {', '.join(figures)}" if figures else "data.eval names no set: add one, or leave keep_best out")
        )


def check_batch(config: RunConfig) -> None:
    """Refuse batches that cannot be cut or that teach nothing.  Raises ConfigError."""
    training = config.training
    if training.updates_per_batch > training.prompts_per_step:
        raise ConfigError(
            f"training.updates_per_batch is {training.updates_per_batch}, but a step has {training.prompts_per_step} prompts "
            "(training.prompts_per_step), and each update needs at least one"
        )
    if config.rollout.temperature == 0:
        raise ConfigError(
            "rollout.temperature is 0: greedy samples are all the same, and a group of equals teaches nothing; set it above 0"
        )
