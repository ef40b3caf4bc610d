"""Everything a run of supervised fine-tuning needs, made and checked before its directory exists.  Nothing is written."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from isobit.config.schema import RolloutConfig, TrainingConfig
from isobit.config.sft import ExampleSource, ModelShape, SftConfig
from isobit.data.examples import Example, build_examples
from isobit.data.prompts import drop_evaluated
from isobit.data.sampler import PromptSampler
from isobit.data.tokenizer import load_tokenizer, stop_token_ids
from isobit.errors import CheckpointError, ConfigError
from isobit.models.config import ModelConfig
from isobit.models.policy import random_policy
from isobit.precision.formats import BLOCK
from isobit.records import PackedBatch
from isobit.rewards.function import load_reward
from isobit.rollout.engine import Engine
from isobit.run.clock import Clock
from isobit.run.device import choose_device
from isobit.run.directory import check_unused
from isobit.run.evaluate import Evaluator, evaluation_sampling
from isobit.run.gpu_memory import device_memory, plan_gpu
from isobit.run.model import LoadedModel, load_model_on, model_folder
from isobit.run.setup import check_fits
from isobit.run.turns import GpuTurns
from isobit.run.wandb_tracker import check_tracking
from isobit.training.out_of_memory import within_memory
from isobit.training.supervised import SupervisedObjective, pack_pairs
from isobit.training.trainer import Trainer, UpdateMetrics


@dataclass(frozen=True, slots=True)
class SftRun:
    """The parts of a run, ready to start."""

    config: SftConfig
    model: LoadedModel
    trainer: Trainer
    examples: Mapping[str, Example]
    """Those to learn from, by the id of their prompt."""
    sampler: PromptSampler
    sets: Mapping[str, Sequence[Example]]
    """The held-out ones of each set."""
    evaluator: Evaluator | None
    """Completes and grades their prompts, where a reward is configured."""
    dropped_examples: int
    """Training examples left out because an evaluation set holds their prompt too."""
    turns: GpuTurns | None
    """Who has the GPU's memory when; None on a CPU."""

    def training_turn(self, clock: Clock) -> AbstractContextManager[None]:
        """As ``isobit.run.setup.Run.training_turn``."""
        return nullcontext() if self.turns is None else self.turns.training(clock)

    def next_examples(self) -> list[Example]:
        """Those of the next step."""
        return [self.examples[prompt.id] for prompt, _ in self.sampler.next()]

    def learn(self, examples: Sequence[Example]) -> UpdateMetrics:
        """One optimiser step."""

        def attempt(tokens: int) -> UpdateMetrics:
            return self.trainer.update(pack_examples(examples, tokens), SupervisedObjective())

        return within_memory(self.trainer, [example.tokens for example in examples], attempt)


def pack_examples(examples: Sequence[Example], tokens_per_microbatch: int) -> list[PackedBatch]:
    """Examples -> micro-batches."""
    return pack_pairs([(example.prompt.token_ids, example.completion_ids) for example in examples], tokens_per_microbatch)


def prepare_sft(config: SftConfig) -> SftRun:
    """Load and check a run.  Raises an ``IsobitError`` that names what cannot be used; writes nothing."""
    check_unused(config.output, resumable=False)
    check_tracking(config.tracking)
    if config.reward is not None and not config.data.eval:
        raise ConfigError("reward is set, but data.eval names no set whose completions it could grade; add one, or leave the reward out")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    model = load_start(config)
    sets = {name: _examples(name, source, model, config) for name, source in config.data.eval.items()}
    train = _examples("train", config.data.train, model, config)
    held_out = [[example.prompt for example in examples] for examples in sets.values()]
    prompts, dropped = drop_evaluated([example.prompt for example in train], held_out)
    training = TrainingConfig.model_validate(config.training.model_dump())  # the keys about sampled groups are not read
    rollout, plan = config.rollout, None
    if model.policy.device.type == "cuda":
        longest = max(example.tokens for example in train)
        plan = plan_gpu(model.policy.config, model.policy.flow, rollout, training, longest, device_memory())
        rollout = rollout.model_copy(update={"kv_pages": plan.pages})
    evaluator = _build_evaluator(config, rollout, model, sets)
    by_id = {example.prompt.id: example for example in train}
    sampler = PromptSampler(prompts, config.training.prompts_per_step, config.seed, config.data.shuffle)
    trainer = Trainer(model.policy, training, training.steps, config.seed)
    turns = None if plan is None else GpuTurns(plan, evaluator.engine if evaluator else None, trainer)
    return SftRun(config, model, trainer, by_id, sampler, sets, evaluator, dropped, turns)


def load_start(config: SftConfig) -> LoadedModel:
    """The model to start from, on its device: a folder's weights, or random ones with the folder's tokenizer."""
    if config.from_scratch is None:
        return load_model_on(config.device, config.model, config.precision, trainable=True)
    folder = model_folder(config.model)
    tokenizer = load_tokenizer(folder)
    shape = decoder_of(config.from_scratch, len(tokenizer))
    policy = random_policy(shape, config.precision, config.seed, choose_device(config.device, shape, config.precision))
    return LoadedModel(folder, policy, tokenizer, stop_token_ids(tokenizer, folder))


def decoder_of(shape: ModelShape, tokens: int) -> ModelConfig:
    """The decoder of a shape, for a tokenizer of ``tokens`` tokens."""
    vocab_size = shape.vocab_size or -(-tokens // BLOCK) * BLOCK
    if vocab_size < tokens:
        raise ConfigError(f"from_scratch.vocab_size is {vocab_size}, but the tokenizer has {tokens} tokens; raise it, or leave it out")
    if shape.head_dim is None and shape.hidden_size % shape.num_heads:
        raise ConfigError(
            f"from_scratch.hidden_size is {shape.hidden_size}, which {shape.num_heads} heads do not divide; change one of them, or set "
            "from_scratch.head_dim"
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
    )


def _examples(name: str, source: ExampleSource, model: LoadedModel, config: SftConfig) -> list[Example]:
    examples = build_examples(name, source, model.tokenizer, model.stop_token_ids, config.data, model.context)
    largest = max(max((*example.prompt.token_ids, *example.completion_ids)) for example in examples)
    if largest >= model.policy.config.vocab_size:
        raise CheckpointError(
            f"{model.folder}: the tokenizer gives the token {largest}, but the model knows 0 to {model.policy.config.vocab_size - 1}: the "
            "tokenizer belongs to another model"
        )
    return examples


def _build_evaluator(
    config: SftConfig, rollout: RolloutConfig, model: LoadedModel, sets: Mapping[str, Sequence[Example]]
) -> Evaluator | None:
    if config.reward is None:
        return None
    reward = load_reward(config.reward.function)
    sampling = evaluation_sampling(config.evaluation, config.rollout, model)
    prompts = {name: [example.prompt for example in examples] for name, examples in sets.items()}
    engine = Engine(model.policy, rollout, model.tokenizer, config.seed)
    evaluator = Evaluator(engine, prompts, sampling, config.evaluation.samples, reward, config.reward.max_failed_fraction)
    engine.check(evaluator.requests())
    check_fits(evaluator.requests(), model.context)
    return evaluator
