"""Where a training's policy comes from: a model folder, or random weights of a shape of the
recipe's own with a folder's tokenizer.  What learns from preferences is a reward model, which may
also begin as a language model's folder.
"""

from dataclasses import dataclass, replace

import torch

from isobit.config.precision import PrecisionConfig
from isobit.config.rules import check_shape
from isobit.config.sft import Objective
from isobit.config.shape import ModelShape
from isobit.data.tokenizer import (
    check_vocabulary,
    load_tokenizer,
    pad_token_id,
    stop_token_ids,
)
from isobit.errors import ConfigError
from isobit.models.checkpoint_files import weight_files
from isobit.models.config import Experts, ModelConfig
from isobit.models.folder import (
    load_policy,
    read_config,
    read_reward_masters,
    reward_config,
)
from isobit.models.loaded import DescribedModel, LoadedModel, model_folder
from isobit.models.policy import Policy, random_policy
from isobit.parallel.slots import ONE_SLOT, Slots
from isobit.parallel.world import ALONE, World
from isobit.precision.formats import BLOCK


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
        return config
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
