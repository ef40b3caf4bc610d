"""A training before its weights are read: where its policy comes from, and what it will ask of the
model and of the machine.

    ModelSource    a model folder, or random weights of a shape in the recipe with a folder's
                   tokenizer.  A reward model may also begin as a language model's folder
    Plan           everything that a run is built from (``isobit.run.run``); each kind of training
                   makes its own, and from there on all is the same
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from isobit.config.recipes import Objective, RunConfig, SftConfig
from isobit.config.tables import (
    MIXTURES,
    WINDOWED,
    LoraConfig,
    ModelShape,
    PrecisionConfig,
    RunRolloutConfig,
    TrainingConfig,
)
from isobit.data.tokenizer import (
    check_vocabulary,
    load_tokenizer,
    pad_token_id,
    stop_token_ids,
    tokenizer_size,
)
from isobit.kernels.backend import backend_of, support
from isobit.memory.activations import FrozenModel
from isobit.memory.device import MOMENTS, Card, DevicePlan, DevicePlanner
from isobit.models.config import Experts, Lora, ModelConfig
from isobit.models.decoder import checkpoint_shapes, decoder_shape
from isobit.models.folder import (
    DescribedModel,
    LoadedModel,
    base_folder,
    choose_device,
    model_folder,
    read_config,
    read_masters,
    read_reward_masters,
    reward_config,
)
from isobit.models.policy import Policy, random_policy
from isobit.models.saving import quantised_sites, whole_blocks
from isobit.parallel.gradient_sum import ONE_SLOT, Slots
from isobit.parallel.world import ALONE, World
from isobit.precision.flow import PrecisionFlow, build_flow
from isobit.precision.quant_tensor import BLOCK
from isobit.rollout.requests import Request
from isobit.run.data import RlData, digests
from isobit.run.lessons import SftData
from isobit.store.compatible import ALL_TOKENS
from isobit.training.optimiser import advise_smaller_moments
from isobit.util.errors import ConfigError, DataError
from isobit.util.machine import read_memory
from isobit.util.terminal import gib


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

    def with_lora(self, config: LoraConfig | None) -> "ModelSource":
        """The same, with adapters to be trained. Raises ConfigError where the weights are drawn or
        the folder has adapters, ModelError for a model that cannot have any.
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
        lora = replace(self.described.config, lora=Lora.of(config))
        return replace(self, described=replace(self.described, config=lora))

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
        else:
            if config.score_head:
                masters = read_reward_masters(described.folder, config, seed, device)
            else:
                masters = read_masters(described.folder, config, device, seed)
            policy = Policy(config, precision, masters, device, trainable, world, slots)
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
    config, text = source_config(model, shape, objective, weights), base_folder(folder, False)
    tokenizer = load_tokenizer(text)
    check_vocabulary(tokenizer, config.vocab_size, text)
    described = DescribedModel(
        folder, config, tokenizer, stop_token_ids(tokenizer, text, config.vocab_size)
    )
    return ModelSource(described, from_scratch=shape is not None)


def source_config(
    model: str,
    shape: ModelShape | None = None,
    objective: Objective = "supervised",
    weights: bool = True,
    lora: LoraConfig | None = None,
) -> ModelConfig:
    """The decoder alone; raises as ``describe_source`` does."""
    folder = model_folder(model, weights)
    if shape is None and objective != "preference":
        found = read_config(folder)
        return found if lora is None else replace(found, lora=Lora.of(lora))
    tokenizer = load_tokenizer(folder)
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
    if shape.moe_intermediate_size is not None and shape.family != "qwen3_moe":
        raise ConfigError(
            "from_scratch.moe_intermediate_size is for the family 'qwen3_moe'; experts of "
            "'mixtral' have intermediate_size"
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
    return Experts(shape.num_experts, shape.num_experts_per_tok, width, renormalise=True)


Config = TypeVar("Config", RunConfig, SftConfig)
Data = TypeVar("Data", RlData, SftData)
AnyPlan: TypeAlias = "Plan[Any, Any]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Generic[Config, Data]):
    """A training before any weight is read: what it is made from, and what it asks of the model and
    of the machine.
    """

    config: Config
    source: ModelSource
    data: Data
    training: TrainingConfig
    """As the trainer and the memory plan read it."""
    updates: int
    """Of the whole run: the length of the learning rate's schedule."""
    longest: int
    """Tokens of the longest sequence that training can meet."""
    learning: Sequence[str]
    """Lines on the data and the steps."""
    evaluation: Mapping[str, Sequence[Request]]
    """What the engine is asked for on each evaluation set; empty where nothing is generated."""
    frozen: tuple[FrozenModel, ...] = ()
    """Models that only score: a reference model, reward models."""
    extra_bytes: int = 0
    """Bytes of a checkpoint beside policy and optimiser, at most."""
    head_rate: float = 1.0
    """How many times as fast as the rest a value head learns."""

    @property
    def model(self) -> DescribedModel:
        """The model that the training starts from, without its weights."""
        return self.source.described

    @property
    def inputs(self) -> dict[str, str]:
        """Digests of what is read beside the recipe (``isobit.run.data``); reads the files."""
        content, model = self.data.digests(), self.model
        found = digests(self.config, model.folder, self.source.from_scratch, content)
        drawn = model.config.tokenizer_size
        return found | {"model.tokens": ALL_TOKENS if drawn is None else f"the first {drawn}"}

    @property
    def requests(self) -> Sequence[Sequence[Request]]:
        """All that its engine may be asked for, in sets of which no two are asked for together."""
        return ([one for asked in self.evaluation.values() for one in asked],)

    @property
    def generates(self) -> bool:
        """Whether there is an engine: completions are wanted where a reward grades them."""
        return self.config.reward is not None

    @property
    def samples_here(self) -> bool:
        """Whether that engine has a cache and forwards of its own, beside the trainer."""
        rollout = self.config.rollout
        return self.generates and not (isinstance(rollout, RunRolloutConfig) and rollout.servers)

    def choose_device(self) -> torch.device:
        """Where it computes.  Raises ConfigError where that cannot be."""
        return choose_device(self.config.device, self.model.config, self.config.precision)


def check_requests(
    requests: Sequence[Sequence[Request]], check: Callable[[Sequence[Request]], None], context: int
) -> None:
    """Refuse prompts that the engine, by its ``check``, or the model's context cannot take."""
    for asked_together in requests:
        check(asked_together)
        check_context(asked_together, context)


def check_context(requests: Sequence[Request], context: int) -> None:
    """Refuse prompts whose longest answer would not fit the model's context: the context, not the
    limit asked for, would cut it.

    Raises DataError naming the first such prompt and the numbers.
    """
    for request in requests:
        tokens, new = len(request.prompt.token_ids), request.sampling.max_new_tokens
        if tokens + new > context:
            raise DataError(
                f"prompt {request.prompt.id} has {tokens} tokens; with max_new_tokens = {new} that "
                f"is {tokens + new}, more than the model's context of {context}: lower "
                f"max_new_tokens to {context - tokens} or shorten the prompt"
            )


def plan_device_memory(
    plan: AnyPlan,
    device: torch.device,
    processes: int = 1,
    here: int = 1,
    learns: bool = True,
    hosts: int = 1,
    card: Card | None = None,
) -> DevicePlan:
    """The plan of the memory that a device has for itself, of each of so many processes that train
    together; ``here`` are on this machine.  One that never ``learns`` only samples; ``hosts``
    compute slots side by side.  With a ``card`` nothing of this machine is asked.

    Raises ConfigError where the plan does not fit, and where the main memory does not hold what is
    to go there.
    """
    config, training, shape = plan.config, plan.training, plan.model.config
    flow = build_flow(config.precision, decoder_shape(shape))
    memory = read_memory() if card is None else None
    rollout = config.rollout if plan.samples_here else None
    sizes = support(device.type).sizes
    total = available_memory(device) if card is None else card.total
    frozen = plan.frozen if learns else tuple(one for one in plan.frozen if one.grades)
    planner = DevicePlanner(
        shape, flow, sizes, total, frozen, processes, learns, hosts, _copied_bytes(plan, flow)
    )
    device_plan = planner.plan(rollout, training, plan.longest)
    host = {name: here * size for name, size in device_plan.host.items()}
    if memory is not None and sum(host.values()) > memory.available:
        raise ConfigError(_too_much_offloaded(plan, host, memory.available))
    return device_plan


def _copied_bytes(plan: AnyPlan, flow: PrecisionFlow) -> int:
    """What an engine that does not read the published weights has of its own: matrices of whole
    blocks in E4M3, and all else in BF16.
    """
    rollout, shape = plan.config.rollout, plan.model.config
    if not isinstance(rollout, RunRolloutConfig) or rollout.is_exact or rollout.servers:
        return 0
    whole = whole_blocks(shape, quantised_sites(shape, flow).keys())
    sizes = {name: prod(size) for name, size in checkpoint_shapes(shape).items()}
    return sum(size if name in whole else 2 * size for name, size in sizes.items())


def _too_much_offloaded(plan: AnyPlan, host: Mapping[str, int], available: int) -> str:
    """What would go to main memory, by the keys that send it there."""
    keys = {model.name: f"{model.table}.offload" for model in plan.frozen}
    keys[MOMENTS] = "training.offload_moments"
    parts = [f"{keys[name]} puts {gib(size)} into main memory" for name, size in host.items()]
    smaller = advise_smaller_moments(plan.training.moments) if MOMENTS in host else ""
    return (
        f"{' and '.join(parts)}, and {gib(available)} are free: leave "
        f"{'it' if len(parts) == 1 else 'one'} out{f', or {smaller}' if smaller else ''}"
    )


def available_memory(device: torch.device) -> int:
    """Bytes of a device's own memory that this process has or could have now."""
    memory = backend_of(device).memory
    assert memory is not None, "the device has a memory of its own"
    return memory.available()
