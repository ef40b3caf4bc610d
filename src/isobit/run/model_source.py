"""The model that a training starts from, before its weights are read: a model folder, or random
weights of a shape in the recipe with a folder's tokenizer.  A reward model may also begin as a
language model's folder.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from isobit.config.lora import LoraConfig
from isobit.config.model_shape import HYBRIDS, MIXTURES, SHARING, WINDOWED, ModelShape
from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import Objective
from isobit.data.stop_tokens import stop_token_ids
from isobit.data.tokenizer import check_vocabulary, load_tokenizer, pad_token_id, tokenizer_size
from isobit.kernels.operands import DeltaShape
from isobit.models.config import Experts, Lora, ModelConfig
from isobit.models.families import FAMILIES
from isobit.models.family_keys import every_layer
from isobit.models.folder import (
    DescribedModel,
    LoadedModel,
    base_folder,
    model_folder,
    read_config,
    read_masters,
    read_reward_masters,
    reward_config,
)
from isobit.models.policy import Policy, random_policy
from isobit.parallel.gradient_sum import ONE_SLOT, Slots
from isobit.parallel.world import ALONE, World
from isobit.precision.quant_tensor import BLOCK
from isobit.util.errors import ConfigError


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

    def with_lora(
        self, config: LoraConfig | None, recorded: Sequence[str] | None = None
    ) -> "ModelSource":
        """The same, with adapters to be trained; ``recorded`` as in ``Lora.of``. Raises ConfigError
        where the weights are drawn or the folder has adapters, ModelError for a model that cannot
        have any.
        """
        if config is None:
            return self
        if self.from_scratch:
            raise ConfigError(
                "lora and from_scratch are both set, but adapters change a model that is stored "
                "somewhere; leave one of them out"
            )
        if self.described.config.lora is not None:
            raise ConfigError(
                f"lora is set, but {self.described.folder} has adapters of its own, which are "
                "trained on; leave [lora] out, or name their base as the model"
            )
        model = self.described.config
        lora = replace(model, lora=Lora.of(config, model, recorded))
        return replace(self, described=replace(self.described, config=lora))

    def load(
        self,
        precision: PrecisionConfig,
        seed: int,
        device: torch.device,
        world: World = ALONE,
        trainable: bool = True,
        slots: Slots = ONE_SLOT,
        sharing: World = ALONE,
    ) -> LoadedModel:
        """The model with its weights, published in the given flow on a device of each rank of a
        world, which share its masters, or keep none; ``seed`` draws random ones, and ``slots`` are
        those of an update.  The ranks ``sharing`` an engine have some of its matrices each.
        """
        described = self.described
        config = described.config
        how = device, trainable, world, slots, sharing
        if self.from_scratch:
            policy = random_policy(config, precision, seed, *how)
        else:
            if config.score_head:
                masters = read_reward_masters(described.folder, config, seed, device)
            else:
                masters = read_masters(described.folder, config, device, seed)
            policy = Policy(config, precision, masters, *how)
        return LoadedModel(described.folder, policy, described.tokenizer, described.stop_token_ids)


def describe_source(
    model: str,
    shape: ModelShape | None = None,
    objective: Objective = "supervised",
    weights: bool = True,
) -> ModelSource:
    """The folder ``model`` (or ``starter``), or a decoder of ``shape`` with that folder's
    tokenizer; a reward model where the objective is ``preference``. Without ``weights`` those of a
    model of the hub are not fetched.

    Raises ModelError for a folder, ConfigError for a shape that cannot be used.
    """
    folder = model_folder(model, weights)
    config = None if _is_made(shape, objective) else read_config(folder)
    text = base_folder(folder, False)
    tokenizer = load_tokenizer(text)
    if config is None:
        config = _made_config(folder, tokenizer, shape, objective)
    check_vocabulary(tokenizer, config.vocab_size, text)
    described = DescribedModel(
        folder, config, tokenizer, stop_token_ids(tokenizer, text, config.vocab_size)
    )
    return ModelSource(described, from_scratch=shape is not None)


def source_config(
    model: str, shape: ModelShape | None = None, objective: Objective = "supervised"
) -> ModelConfig:
    """The decoder alone; raises as ``describe_source`` does."""
    folder = model_folder(model)
    if not _is_made(shape, objective):
        return read_config(folder)
    return _made_config(folder, load_tokenizer(folder), shape, objective)


def _is_made(shape: ModelShape | None, objective: Objective) -> bool:
    """Whether the decoder is another one than that of the folder's config.json."""
    return shape is not None or objective == "preference"


def _made_config(
    folder: Path, tokenizer: PreTrainedTokenizerBase, shape: ModelShape | None, objective: Objective
) -> ModelConfig:
    """A decoder of ``shape``, or the folder's, with a head for scores where those are learnt."""
    if shape is None:
        return reward_config(folder, pad_token_id(tokenizer))
    config = decoder_of(shape, len(tokenizer))
    if objective != "preference":
        return config.with_tokenizer(tokenizer_size(folder))
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
    experts = _experts(shape)
    has_mlps = FAMILIES[shape.family].mlp_width == "intermediate_size"
    return ModelConfig(
        family=shape.family,
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size
        if experts is None or has_mlps
        else experts.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads or shape.num_heads,
        head_dim=shape.head_dim or shape.hidden_size // shape.num_heads,
        max_positions=shape.max_positions,
        rms_epsilon=shape.rms_epsilon,
        rope_theta=shape.rope_theta,
        tied_embeddings=shape.tied_embeddings,
        experts=experts,
        sliding_window=shape.sliding_window,
        no_rope_layers=_no_rope_layers(shape),
        **_delta_net(shape),
    )


def _no_rope_layers(shape: ModelShape) -> tuple[int, ...]:
    interval = FAMILIES[shape.family].default_no_rope_interval
    return () if interval is None else every_layer(interval, shape.num_layers)


def _delta_net(shape: ModelShape) -> dict[str, Any]:
    traits = FAMILIES[shape.family]
    if not traits.is_hybrid:
        return {}
    head_dim = shape.head_dim or shape.hidden_size // shape.num_heads
    key_heads = shape.linear_num_key_heads or shape.num_heads
    key_dim = shape.linear_key_head_dim or head_dim
    rule = DeltaShape(
        key_heads,
        shape.linear_num_value_heads or key_heads,
        key_dim,
        shape.linear_value_head_dim or key_dim,
        width=4,
    )
    full = every_layer(traits.default_interval, shape.num_layers) or (shape.num_layers - 1,)
    layers = tuple(layer for layer in range(shape.num_layers) if layer not in full)
    turned = int(head_dim * traits.default_partial) // 2 * 2
    return {
        "delta": rule,
        "delta_layers": layers,
        "partial_rotary_factor": max(turned, 2) / head_dim,
    }


def check_shape(shape: ModelShape) -> None:
    """Refuse impossible head sizes, and keys that the family does not have."""
    if shape.head_dim is None and shape.hidden_size % shape.num_heads:
        raise ConfigError(
            f"from_scratch.hidden_size is {shape.hidden_size}, which {shape.num_heads} heads do "
            "not divide; change one of them, or set from_scratch.head_dim"
        )
    if (shape.num_experts is not None) != (shape.family in MIXTURES):
        raise ConfigError(
            f"from_scratch.num_experts is {shape.num_experts}, and family {shape.family!r}; "
            f"{', '.join(MIXTURES)} have experts, the others none"
        )
    if shape.num_experts is not None and shape.num_experts_per_tok > shape.num_experts:
        raise ConfigError(
            f"from_scratch.num_experts_per_tok is {shape.num_experts_per_tok}, more than there "
            f"are: num_experts is {shape.num_experts}"
        )
    names = {name: traits.experts for name, traits in FAMILIES.items()}
    own_size = [name for name, one in names.items() if one and one.width == "moe_intermediate_size"]
    if shape.moe_intermediate_size is not None and shape.family not in own_size:
        raise ConfigError(
            f"from_scratch.moe_intermediate_size is for the families {', '.join(own_size)}; "
            "experts of the others have intermediate_size"
        )
    if shape.shared_expert_intermediate_size is not None and shape.family not in SHARING:
        raise ConfigError(
            "from_scratch.shared_expert_intermediate_size is "
            f"{shape.shared_expert_intermediate_size}, and family {shape.family!r}; only "
            f"{' and '.join(SHARING)} have a shared expert"
        )
    of_delta = {key: value for key, value in shape if key.startswith("linear_")}
    if any(of_delta.values()) and not FAMILIES[shape.family].is_hybrid:
        key = next(key for key, value in of_delta.items() if value)
        raise ConfigError(
            f"from_scratch.{key} is {of_delta[key]}, and family {shape.family!r}; only "
            f"{', '.join(HYBRIDS)} have gated delta nets"
        )
    key_heads = shape.linear_num_key_heads or shape.num_heads
    if (shape.linear_num_value_heads or key_heads) % key_heads:
        raise ConfigError(
            f"from_scratch.linear_num_value_heads is {shape.linear_num_value_heads}, which is no "
            f"multiple of {key_heads}, the heads of Q and K"
        )
    if shape.sliding_window is not None and shape.family not in WINDOWED:
        raise ConfigError(
            f"from_scratch.sliding_window is {shape.sliding_window}, and family {shape.family!r}; "
            f"{', '.join(WINDOWED)} have windows"
        )


def _experts(shape: ModelShape) -> Experts | None:
    if shape.num_experts is None:
        return None
    width = shape.moe_intermediate_size or shape.intermediate_size
    shared = shape.shared_expert_intermediate_size or width
    return Experts(
        *(shape.num_experts, shape.num_experts_per_tok, width),
        renormalise=True,
        shared_size=shared if shape.family in SHARING else None,
    )
