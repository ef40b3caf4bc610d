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
from isobit.models.checkpoint import load_policy
from isobit.models.config import ModelConfig
from isobit.models.policy import Policy, random_policy
from isobit.precision.formats import BLOCK
from isobit.records import PackedBatch
from isobit.rewards.function import load_reward
from isobit.rollout.engine import Engine
from isobit.run.clock import Clock
from isobit.run.device import choose_device
from isobit.run.directory import check_unused
from isobit.run.evaluate import Evaluator, evaluation_sampling
from isobit.run.model import DescribedModel, LoadedModel, describe_model, model_folder
from isobit.run.setup import check_fits, plan_for_gpu
from isobit.run.turns import GpuTurns, allocate_in_pages
from isobit.run.wandb_tracker import check_tracking
from isobit.training.out_of_memory import within_memory
from isobit.training.supervised import SupervisedObjective, mean_loss, pack_pairs
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

    def training_turn(self, clock: Clock, evaluation_is_next: bool) -> AbstractContextManager[None]:
        """As ``isobit.run.setup.Run.training_turn``; an evaluation is the engine's turn."""
        return nullcontext() if self.turns is None else self.turns.training(clock, engine_is_next=evaluation_is_next)

    def next_examples(self) -> list[Example]:
        """Those of the next step."""
        return [self.examples[prompt.id] for prompt, _ in self.sampler.next()]

    def learn(self, examples: Sequence[Example]) -> UpdateMetrics:
        """One optimiser step."""

        def attempt(tokens: int) -> UpdateMetrics:
            return self.trainer.update(pack_examples(examples, tokens), SupervisedObjective())

        return within_memory(self.trainer, [example.tokens for example in examples], attempt, shorter="leave out the longest examples")

    def loss_of(self, examples: Sequence[Example]) -> float:
        """The mean loss of examples that are not learnt from; on a GPU the engine gives its memory back for it."""
        if self.turns is not None and self.evaluator is not None:
            self.evaluator.engine.release()
        return mean_loss(self.trainer, pack_examples(examples, self.trainer.budget.at(self.trainer.updates)))


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
    start = describe_start(config)
    device = choose_device(config.device, start.config, config.precision)
    sets = {name: _examples(name, source, start, config) for name, source in config.data.eval.items()}
    train = _examples("train", config.data.train, start, config)
    held_out = [[example.prompt for example in examples] for examples in sets.values()]
    prompts, dropped = drop_evaluated([example.prompt for example in train], held_out)
    training = _training_config(config)
    rollout, plan = config.rollout, None
    if device.type == "cuda":
        plan = plan_for_gpu(start, config.precision, rollout, training, max(example.tokens for example in train))
        rollout = rollout.model_copy(update={"kv_pages": plan.pages})
        allocate_in_pages()
    model = LoadedModel(start.folder, _start_policy(config, start, device), start.tokenizer, start.stop_token_ids)
    evaluator = _build_evaluator(config, rollout, model, sets)
    by_id = {example.prompt.id: example for example in train}
    sampler = PromptSampler(prompts, config.training.prompts_per_step, config.seed, config.data.shuffle)
    trainer = Trainer(model.policy, training, training.steps, config.seed)
    turns = None if plan is None else GpuTurns(plan, evaluator.engine if evaluator else None, trainer)
    return SftRun(config, model, trainer, by_id, sampler, sets, evaluator, dropped, turns)


def describe_start(config: SftConfig) -> DescribedModel:
    """The model to start from, without weights: a folder's, or one of the configured shape with the folder's tokenizer."""
    if config.from_scratch is None:
        return describe_model(config.model)
    folder = model_folder(config.model)
    tokenizer = load_tokenizer(folder)
    return DescribedModel(folder, decoder_of(config.from_scratch, len(tokenizer)), tokenizer, stop_token_ids(tokenizer, folder))


def _training_config(config: SftConfig) -> TrainingConfig:
    """As the trainer and the memory plan read it: a prompt has one completion, and moments stay where no engine ever generates."""
    training = TrainingConfig.model_validate(config.training.model_dump())
    offload = training.offload_moments and config.reward is not None
    return training.model_copy(update={"samples_per_prompt": 1, "offload_moments": offload})


def _start_policy(config: SftConfig, start: DescribedModel, device: torch.device) -> Policy:
    if config.from_scratch is None:
        return load_policy(start.folder, config.precision, device)
    return random_policy(start.config, config.precision, config.seed, device)


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


def _examples(name: str, source: ExampleSource, model: DescribedModel, config: SftConfig) -> list[Example]:
    examples = build_examples(name, source, model.tokenizer, model.stop_token_ids, config.data, model.config.max_positions)
    largest = max(max((*example.prompt.token_ids, *example.completion_ids)) for example in examples)
    if largest >= model.config.vocab_size:
        raise CheckpointError(
            f"{model.folder}: the tokenizer gives the token {largest}, but the model knows 0 to {model.config.vocab_size - 1}: the "
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
