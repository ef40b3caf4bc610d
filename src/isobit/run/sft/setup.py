"""Everything a run of supervised fine-tuning needs, made and checked before its directory exists.
Nothing is written.

As in ``isobit.run.setup``, what can be refused without the weights is refused before they are
loaded, a GPU without the memory too.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch

from isobit.clock import Clock
from isobit.config.schema import RolloutConfig, TrainingConfig
from isobit.config.sft import ModelShape, SftConfig
from isobit.data.examples import Example
from isobit.data.sampler import PromptSampler
from isobit.data.tokenizer import load_tokenizer, stop_token_ids
from isobit.errors import ConfigError
from isobit.kernels.backend import support
from isobit.memory.turns import GpuTurns
from isobit.models.config import ModelConfig
from isobit.models.device import choose_device
from isobit.models.folder import load_policy
from isobit.models.loaded import DescribedModel, LoadedModel, describe_model, model_folder
from isobit.models.policy import random_policy
from isobit.observe.wandb_tracker import check_tracking
from isobit.precision.formats import BLOCK
from isobit.records.batch import PackedBatch
from isobit.rewards.function import load_reward
from isobit.rollout.native.engine import NativeEngine
from isobit.run.evaluate import Evaluator, evaluation_sampling
from isobit.run.setup import check_best, check_fits, prepare_turns
from isobit.run.sft.data import SftData, load_data
from isobit.training.out_of_memory import within_memory
from isobit.training.supervised import SupervisedObjective, mean_loss, pack_pairs
from isobit.training.trainer import Trainer, UpdateMetrics


@dataclass(frozen=True, slots=True)
class SftRun:
    """The parts of a run, ready to start."""

    config: SftConfig
    model: LoadedModel
    trainer: Trainer
    data: SftData
    examples: Mapping[str, Example]
    """Those to learn from, by the id of their prompt."""
    sampler: PromptSampler
    evaluator: Evaluator | None
    """Completes and grades the held-out prompts, where a reward is configured."""
    turns: GpuTurns | None
    """Who has the GPU's memory when; None on a CPU."""

    @property
    def dropped_examples(self) -> int:
        """Training examples left out because an evaluation set holds their prompt too."""
        return self.data.dropped

    @property
    def fingerprint(self) -> str:
        """Of the training prompts and what is to be learnt behind each."""
        completions = [self.examples[prompt.id].completion_ids for prompt in self.data.prompts]
        return sha256(json.dumps([self.sampler.fingerprint, completions]).encode()).hexdigest()

    def data_figures(self) -> dict[str, Any]:
        """Examples, in numbers."""
        return self.data.figures()

    def training_turn(self, clock: Clock, evaluation_is_next: bool) -> AbstractContextManager[None]:
        """As ``isobit.run.setup.Run.training_turn``; an evaluation is the engine's turn."""
        return (
            nullcontext()
            if self.turns is None
            else self.turns.training(clock, engine_is_next=evaluation_is_next)
        )

    def next_examples(self) -> list[Example]:
        """Those of the next step."""
        return [self.examples[prompt.id] for prompt, _ in self.sampler.next()]

    def learn(self, examples: Sequence[Example]) -> UpdateMetrics:
        """One optimiser step."""

        def attempt(tokens: int) -> UpdateMetrics:
            return self.trainer.update(pack_examples(examples, tokens), SupervisedObjective())

        return within_memory(
            self.trainer,
            [example.tokens for example in examples],
            attempt,
            shorter="leave out the longest examples",
        )

    def loss_of(self, examples: Sequence[Example]) -> float:
        """The mean loss of examples that are not learnt from; on a GPU the engine gives its memory
        back for it.
        """
        if self.turns is not None and self.evaluator is not None:
            self.evaluator.engine.release()
        # The budget of the update before: a resumed run knows already what the next one will
        # change.
        return mean_loss(
            self.trainer, pack_examples(examples, self.trainer.budget.at(self.trainer.updates - 1))
        )


def pack_examples(examples: Sequence[Example], tokens_per_microbatch: int) -> list[PackedBatch]:
    """Examples -> micro-batches."""
    return pack_pairs(
        [(example.prompt.token_ids, example.completion_ids) for example in examples],
        tokens_per_microbatch,
    )


def prepare_sft(config: SftConfig) -> SftRun:
    """Load and check a run.  Raises an ``IsobitError`` that names what cannot be used; writes
    nothing.
    """
    check_tracking(config.tracking)
    check_reward(config)
    check_best(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    start = describe_start(config)
    device = choose_device(config.device, start.config, config.precision)
    data = load_data(config, start)
    training = trainer_config(config)
    rollout, plan = config.rollout, None
    if support(device.type).has_own_memory:
        plan = prepare_turns(start, config, training, data.longest, device)
        rollout = rollout.model_copy(update={"kv_pages": plan.pages})
    model = load_start(config, start, device)
    evaluator = _build_evaluator(config, rollout, model, data)
    by_id = {example.prompt.id: example for example in data.train}
    sampler = PromptSampler(
        data.prompts, config.training.prompts_per_step, config.seed, config.data.shuffle
    )
    trainer = Trainer(model.policy, training, training.steps, config.seed)
    turns = (
        None if plan is None else GpuTurns(plan, evaluator.engine if evaluator else None, trainer)
    )
    return SftRun(config, model, trainer, data, by_id, sampler, evaluator, turns)


def describe_start(config: SftConfig) -> DescribedModel:
    """The model to start from, without its weights: a folder's, or one of a shape of the recipe's
    own with the folder's tokenizer.

    Raises CheckpointError for a folder, ConfigError for a shape that cannot be used.
    """
    if config.from_scratch is None:
        return describe_model(config.model)
    folder = model_folder(config.model)
    tokenizer = load_tokenizer(folder)
    return DescribedModel(
        folder,
        decoder_of(config.from_scratch, len(tokenizer)),
        tokenizer,
        stop_token_ids(tokenizer, folder),
    )


def load_start(config: SftConfig, described: DescribedModel, device: torch.device) -> LoadedModel:
    """Its weights too, on their device: those of the folder, or random ones."""
    if config.from_scratch is None:
        policy = load_policy(described.folder, config.precision, device)
    else:
        policy = random_policy(described.config, config.precision, config.seed, device)
    return LoadedModel(described.folder, policy, described.tokenizer, described.stop_token_ids)


def scratch_shape(config: SftConfig) -> ModelConfig | None:
    """The decoder of a model that no folder describes."""
    return None if config.from_scratch is None else describe_start(config).config


def decoder_of(shape: ModelShape, tokens: int) -> ModelConfig:
    """The decoder of a shape, for a tokenizer of ``tokens`` tokens."""
    vocab_size = shape.vocab_size or -(-tokens // BLOCK) * BLOCK
    if vocab_size < tokens:
        raise ConfigError(
            f"from_scratch.vocab_size is {vocab_size}, but the tokenizer has {tokens} tokens; "
            "raise it, or leave it out"
        )
    if shape.head_dim is None and shape.hidden_size % shape.num_heads:
        raise ConfigError(
            f"from_scratch.hidden_size is {shape.hidden_size}, which {shape.num_heads} heads do "
            "not divide; change one of them, or set "
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


def trainer_config(config: SftConfig) -> TrainingConfig:
    """As the trainer and the memory plan read it: a prompt has one completion, and moments stay
    where no engine ever generates.
    """
    training = TrainingConfig.model_validate(config.training.model_dump())
    offload = training.offload_moments and config.reward is not None
    return training.model_copy(update={"samples_per_prompt": 1, "offload_moments": offload})


def check_reward(config: SftConfig) -> None:
    """Refuse a reward with nothing to grade.  Raises ConfigError."""
    if config.reward is not None and not config.data.eval:
        raise ConfigError(
            "reward is set, but data.eval names no set whose completions it could grade; add one, "
            "or leave the reward out"
        )


def _build_evaluator(
    config: SftConfig, rollout: RolloutConfig, model: LoadedModel, data: SftData
) -> Evaluator | None:
    if config.reward is None:
        return None
    reward = load_reward(config.reward.function)
    sampling = evaluation_sampling(config.evaluation, config.rollout, model)
    prompts = {
        name: [example.prompt for example in examples] for name, examples in data.sets.items()
    }
    engine = NativeEngine(model.policy, rollout, model.tokenizer, config.seed)
    evaluator = Evaluator(
        engine,
        prompts,
        sampling,
        config.evaluation.samples,
        reward,
        config.reward.max_failed_fraction,
    )
    engine.check(evaluator.requests())
    check_fits(evaluator.requests(), model.context)
    return evaluator
