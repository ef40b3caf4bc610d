"""Where a training's policy comes from: a model folder, or random weights of a shape of the
recipe's own with a folder's tokenizer.
"""

from dataclasses import dataclass, replace

import torch

from isobit.config.precision import PrecisionConfig
from isobit.config.rules import check_shape
from isobit.config.shape import ModelShape
from isobit.data.tokenizer import load_tokenizer, stop_token_ids
from isobit.errors import ConfigError
from isobit.models.config import ModelConfig
from isobit.models.folder import load_policy, read_config, weight_files
from isobit.models.loaded import DescribedModel, LoadedModel, describe_model, model_folder
from isobit.models.policy import random_policy
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

    def load(self, precision: PrecisionConfig, seed: int, device: torch.device) -> LoadedModel:
        """The model with its weights, published in the given flow on a device; ``seed`` draws
        random ones.
        """
        described = self.described
        if self.from_scratch:
            policy = random_policy(described.config, precision, seed, device)
        else:
            value_head = described.config.value_head
            policy = load_policy(described.folder, precision, device, value_head=value_head)
        return LoadedModel(described.folder, policy, described.tokenizer, described.stop_token_ids)


def describe_source(model: str, shape: ModelShape | None = None) -> ModelSource:
    """The folder ``model`` (or ``starter``), or a decoder of ``shape`` with that folder's
    tokenizer.

    Raises ModelError for a folder, ConfigError for a shape that cannot be used.
    """
    if shape is None:
        return ModelSource(describe_model(model), from_scratch=False)
    folder = model_folder(model)
    tokenizer = load_tokenizer(folder)
    described = DescribedModel(
        folder, decoder_of(shape, len(tokenizer)), tokenizer, stop_token_ids(tokenizer, folder)
    )
    return ModelSource(described, from_scratch=True)


def source_config(model: str, shape: ModelShape | None = None) -> ModelConfig:
    """The decoder alone; raises as ``describe_source`` does."""
    if shape is None:
        return read_config(model_folder(model))
    return decoder_of(shape, len(load_tokenizer(model_folder(model))))


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
    )
