"""The decoder: token ids in, final hidden states out, on every back end and in rollout, scoring and
training.

    h, x = embed(ids), 0                     times a family's factor (``embedding_scale``)
    each layer:  h, x = attention(h, x)   h = h + x,  x = o_proj(attend(qkv_proj(norm(h))))
                 h, x = mlp(h, x)         h = h + x,  x = down_proj(swiglu(gate_up_proj(norm(h))))
                                          or the weighted sum of a token's experts
    return norm(h + x)

The residual stream and everything between operators is BF16 (FP32 in the ``fp32`` flow). The T
tokens of all sequences are concatenated, without padding. Each result is passed to ``observe``, for
``isobit verify --bisect``. The logits of a whole batch exist only when rollout samples.
"""

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Protocol

import torch

from isobit.kernels.backend import Backend
from isobit.kernels.observing import observe
from isobit.kernels.operands import Attend
from isobit.kernels.routing import RouterLoss
from isobit.models.attention import Attention
from isobit.models.config import ModelConfig
from isobit.models.delta_net import DeltaNet
from isobit.models.families import FAMILIES
from isobit.models.layers import (
    Gradient,
    Master,
    Norm,
    Weights,
)
from isobit.models.mlp import MixtureOfExperts, Mlp, Routes
from isobit.parallel.ownership import Ownership
from isobit.precision.flow import DecoderShape, PrecisionFlow, SiteShape
from isobit.precision.quant_tensor import Side

NAME = "embed_tokens.weight"
LM_HEAD = "lm_head"  # its site


@dataclass(frozen=True, slots=True)
class Embedding:
    """The table [V, C], whose rows are multiplied by ``scale``, with ``rounds_scale`` by its
    rounding to their format.
    """

    vocab_size: int
    hidden_size: int
    is_frozen: bool = False
    scale: float = 1.0
    rounds_scale: bool = False

    def masters(self) -> dict[str, Master]:
        rows = {f"model.{NAME}": self.vocab_size}
        return {NAME: Master((self.vocab_size, self.hidden_size), rows)}

    def forward(self, weights: Weights, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, C]."""
        rows = weights.backend.embedding(token_ids, weights.plain[NAME])
        return observe(rows if self.scale == 1 else rows.mul_(self._factor(rows)), "embed_tokens")

    def backward(
        self, weights: Weights, gradient: Gradient, d: torch.Tensor, token_ids: torch.Tensor
    ) -> None:
        """d [T, C] is the gradient of the output of ``forward``."""
        if not self.is_frozen:
            d = d if self.scale == 1 else d * self._factor(d)
            weights.backend.embedding_backward(d, token_ids, gradient(NAME))

    def _factor(self, rows: torch.Tensor) -> float:
        """``scale`` as rows of their format are multiplied by it."""
        return torch.tensor(self.scale).to(rows.dtype).item() if self.rounds_scale else self.scale


@dataclass(frozen=True, slots=True)
class Head:
    """lm_head's matrix [V, C]: its own master, or the embedding's if they are tied.

    Checkpoints often have more rows than their tokenizer has tokens. Only the first ``num_drawn``
    are in the distribution, so that no token without text is drawn. A back end may multiply by the
    others too, whose number keeps the product's size a multiple of its tiles, but reads none of
    their logits.
    """

    vocab_size: int
    hidden_size: int
    tied: bool
    num_drawn: int
    is_frozen: bool = False

    @property
    def master(self) -> str:
        return NAME if self.tied else "lm_head.weight"

    def masters(self) -> dict[str, Master]:
        if self.tied:
            return {}
        rows = {self.master: self.vocab_size}
        return {self.master: Master((self.vocab_size, self.hidden_size), rows)}

    def logits(self, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, C] -> FP32 logits [N, num_drawn], whose rows may lie further apart."""
        mine = weights.backend.head_logits(hidden, weights.lm_head, self.num_drawn)
        return weights.tensor_parallel.columns(mine, weights.tensor_parallel.vocabulary)

    def token_log_probs(
        self,
        weights: Weights,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [N, C], targets int64 [N], temperatures FP32 [N] -> log_probs and entropies, FP32
        [N].
        """
        head = weights.lm_head
        return weights.backend.token_log_probs(hidden, head, targets, temperatures, self.num_drawn)

    def backward(
        self,
        weights: Weights,
        gradient: Gradient,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        d_log_probs: torch.Tensor,
        d_entropies: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The gradients of log_probs and entropies, FP32 [N], None for 0 -> of hidden [N, C]."""
        head, grad = weights.lm_head, None if self.is_frozen else gradient(self.master)
        return weights.backend.token_log_probs_backward(
            hidden, head, targets, temperatures, d_log_probs, grad, d_entropies, self.num_drawn
        )


@dataclass(frozen=True, slots=True)
class ScalarHead:
    """A matrix [1, C] with FP32 sums, published in the activations' format. Its output is the value
    of each state (PPO's critic), or a sequence's score at its last token (a reward model).
    """

    path: str
    width: int
    checkpoint_name: str | None  # None if checkpoints do not have it: then it starts at zeros

    @property
    def master(self) -> str:
        return f"{self.path}.weight"

    def masters(self) -> dict[str, Master]:
        parts = {} if self.checkpoint_name is None else {self.checkpoint_name: 1}
        return {self.master: Master((1, self.width), parts)}

    def forward(self, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, C] -> FP32 [N]."""
        return weights.backend.scalar_head(hidden, weights.plain[self.master][0])

    def backward(
        self, weights: Weights, gradient: Gradient, hidden: torch.Tensor, d: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of the outputs, FP32 [N] -> that of ``hidden`` [N, C]."""
        weight, grad = weights.plain[self.master][0], gradient(self.master)[0]
        return weights.backend.scalar_head_backward(hidden, weight, d, grad)


VALUE_HEAD = "value_head"  # the path of a value head


@dataclass(frozen=True, slots=True)
class Layer:
    attention: Attention | DeltaNet
    mlp: Mlp | MixtureOfExperts

    def forward(
        self,
        weights: Weights,
        h: torch.Tensor,
        x: torch.Tensor | None,
        attend: Attend,
        routes: Routes | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        h, x = self.attention.forward(weights, h, x, attend)
        return self.mlp.forward(weights, h, x, routes)


@dataclass(frozen=True, slots=True)
class Decoder:
    """The units in the order of the forward; ``head`` and ``value`` both read the final hidden
    states.
    """

    embedding: Embedding
    layers: tuple[Layer, ...]
    norm: Norm
    head: Head | None  # lm_head; None in a reward model
    value: ScalarHead | None = None  # the value head, or a reward model's score
    has_adapters: bool = False

    @property
    def shape(self) -> DecoderShape:
        """The sites, for a flow."""
        sites = [SiteShape("embed_tokens", "embedding")]
        for index, layer in enumerate(self.layers):
            sites += [*layer.attention.sites(), *layer.mlp.sites()]
            sites.append(SiteShape(f"layers.{index}.norms", "norm", index))
        head = SiteShape(LM_HEAD, "head", head_features=self.embedding.hidden_size)
        sites += [SiteShape("norm", "norm"), head]
        return DecoderShape(len(self.layers), tuple(sites))

    @property
    def lm_head(self) -> Head:
        """``head`` of a language model."""
        assert self.head is not None, "a reward model has no lm_head"
        return self.head

    def masters(self) -> dict[str, Master]:
        halves = [unit for layer in self.layers for unit in (layer.attention, layer.mlp)]
        heads = [head for head in (self.head, self.value) if head is not None]
        units = (self.embedding, *halves, self.norm, *heads)
        return {name: master for unit in units for name, master in unit.masters().items()}

    def trained(self) -> dict[str, Master]:
        """The masters that learn: with adapters only what checkpoints do not have."""
        masters = self.masters()
        if not self.has_adapters:
            return masters
        return {name: master for name, master in masters.items() if not master.parts}

    def ownership(self, processes: int, hosts: int = 1) -> Ownership:
        """The rows of the masters that learn which each rank owns, of so many processes on so many
        hosts.
        """
        described = self.trained()
        shapes = {name: master.shape for name, master in described.items()}
        parts = {name: tuple(master.parts.values()) for name, master in described.items()}
        return Ownership.of(shapes, parts, processes, hosts)

    def backward_groups(self) -> tuple[tuple[str, ...], ...]:
        """The masters that learn in the order in which a backward completes their gradients: heads
        and last norm, each layer from the last, and the embedding, which may be tied to lm_head.
        """
        trained = self.trained()
        ends = [unit for unit in (self.head, self.value) if unit is not None]
        first = [name for unit in (*ends, self.norm) for name in unit.masters()]
        layers = [
            tuple(name for unit in (layer.attention, layer.mlp) for name in unit.masters())
            for layer in reversed(self.layers)
        ]
        groups = (tuple(first), *layers, tuple(self.embedding.masters()))
        return tuple(tuple(name for name in group if name in trained) for group in groups)

    @property
    def added_in_parts(self) -> frozenset[str]:
        """lm_head's master: a backward adds to its gradient by chunks, and as the embedding if
        tied.
        """
        if self.head is None or self.head.is_frozen:
            return frozenset()
        return frozenset({self.head.master})

    @property
    def is_sparse(self) -> bool:
        """Whether any layer has experts, so that a forward has a routing."""
        return any(isinstance(layer.mlp, MixtureOfExperts) for layer in self.layers)

    def routes(self, loss: RouterLoss | None = None) -> Routes | None:
        """A collector of a forward's routing; None for a dense model."""
        return Routes(loss) if self.is_sparse else None

    def hidden_states(
        self,
        weights: Weights,
        token_ids: torch.Tensor,
        attend: Attend,
        routes: Routes | None = None,
    ) -> torch.Tensor:
        """int64 [T] -> hidden states [T, C], after the final norm. Routing goes to ``routes``."""
        h, x = self.embedding.forward(weights, token_ids), None
        for layer in self.layers:
            h, x = layer.forward(weights, h, x, attend, routes)
        return self.norm.final(weights, h, x)[1]


@cache
def build_decoder(config: ModelConfig) -> Decoder:
    is_frozen = config.lora is not None
    layers = tuple(
        Layer(
            (DeltaNet if layer in config.delta_layers else Attention)(config, layer),
            MixtureOfExperts(config, layer) if config.is_sparse(layer) else Mlp(config, layer),
        )
        for layer in range(config.num_layers)
    )
    norm = Norm(
        "norm",
        config.hidden_size,
        "model.norm.weight",
        config.stream_epsilon,
        residual=f"layers.{config.num_layers - 1}.mlp_residual",
        is_frozen=is_frozen,
        scale=1 / config.multipliers.logits_scaling,
        offset=FAMILIES[config.family].norm_offset,
    )
    sizes = config.vocab_size, config.hidden_size
    traits = FAMILIES[config.family]
    embedding = Embedding(*sizes, is_frozen, config.embedding_scale, traits.scaled_embeddings)
    head = Head(*sizes, config.tied_embeddings, config.num_drawn, is_frozen)
    if config.score_head:
        return Decoder(
            embedding, layers, norm, None, ScalarHead("score", config.hidden_size, "score.weight")
        )
    value = ScalarHead(VALUE_HEAD, config.hidden_size, None) if config.value_head else None
    return Decoder(embedding, layers, norm, head, value, is_frozen)


def decoder_shape(config: ModelConfig) -> DecoderShape:
    return build_decoder(config).shape


def checkpoint_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The Hugging Face checkpoint's tensors and their shapes, in the order of the forward."""
    return {
        part: (rows, *master.shape[1:])
        for master in build_decoder(config).masters().values()
        for part, rows in master.parts.items()
    }


def parameter_count(config: ModelConfig) -> int:
    """The number of parameters in checkpoints."""
    return sum(prod(shape) for shape in checkpoint_shapes(config).values())


def layer_parameters(config: ModelConfig) -> int:
    """The number of parameters in the layers' matrices: without embeddings, the head and norms."""
    shapes = checkpoint_shapes(config).items()
    return sum(prod(one) for name, one in shapes if ".layers." in name and len(one) > 1)


def master_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the masters that learn, in the order of the forward."""
    return {name: master.shape for name, master in build_decoder(config).trained().items()}


class Scorable(Protocol):
    """The attributes that a scorer needs; a policy and a frozen model have them."""

    backend: Backend
    flow: PrecisionFlow
    decoder: Decoder

    def weights(self, side: Side) -> Weights: ...
