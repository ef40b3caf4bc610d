"""The policy: FP32 masters that the optimiser moves, and what both sides of the flow read, published from them.

A publication rounds every master to BF16 once and quantises it once, in place: the engine and the trainer hold the same tensors, so new
weights need no copy and no message.  Where rollout and training have the same formats at a site, its weight exists once.

Names of masters: ``embed_tokens.weight``, ``layers.N.{input_norm, post_attention_norm, q_norm, k_norm}.weight``,
``layers.N.{qkv_proj, o_proj, gate_up_proj, down_proj}.weight`` (q, k, v and gate, up are fused along their outputs),
``layers.N.qkv_proj.bias``, ``norm.weight``, and ``lm_head.weight`` where it is not tied.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from isobit.config.schema import PrecisionConfig
from isobit.kernels.grid import snap_rows
from isobit.kernels.linear import LinearWeight
from isobit.kernels.rope import RopeTable
from isobit.models.config import ModelConfig, inverse_frequencies
from isobit.precision.flow import PrecisionFlow, Site, build_flow
from isobit.precision.formats import DTYPES, Side


@dataclass(slots=True)
class PublishedWeights:
    """What one side reads: a LinearWeight for each linear, and the other tensors in the format between operators, by master name."""

    linears: dict[str, LinearWeight] = field(default_factory=dict)
    plain: dict[str, torch.Tensor] = field(default_factory=dict)


class Policy:
    """A decoder's configuration, flow, masters and published weights."""

    def __init__(self, config: ModelConfig, precision: PrecisionConfig, masters: Mapping[str, torch.Tensor]) -> None:
        assert list(masters) == list(master_shapes(config)), "masters do not fit the configuration"
        self.config = config
        self.flow: PrecisionFlow = build_flow(precision, config.shape)
        self.masters = {name: torch.nn.Parameter(tensor.to(torch.float32, copy=True)) for name, tensor in masters.items()}
        self.rope = RopeTable.build(inverse_frequencies(config), config.max_positions)
        self.version = 0
        self._sides: dict[Side, PublishedWeights] = {"rollout": PublishedWeights(), "training": PublishedWeights()}
        self.publish()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The masters, in the order of the forward pass."""
        return iter(self.masters.values())

    def weights(self, side: Side) -> PublishedWeights:
        """What a side reads."""
        return self._sides[side]

    @property
    def head_name(self) -> str:
        """The master that lm_head multiplies with."""
        return "embed_tokens.weight" if self.config.tied_embeddings else "lm_head.weight"

    @torch.no_grad()
    def publish(self) -> None:
        """Quantise each weight once, in place, from the BF16 rounding of its master; ``version`` counts the publications."""
        dtype = DTYPES[self.flow.training.activations]
        for name, master in self.masters.items():
            path, _, kind = name.rpartition(".")
            if path.endswith("_proj"):
                if kind == "weight":
                    self._publish_linear(path, master, self.masters.get(f"{path}.bias"))
            else:
                self._publish_plain(name, master.detach().to(dtype))
        self._publish_plain("head", snap_rows(self.masters[self.head_name].detach().to(dtype)))
        self.version += 1

    @torch.no_grad()
    def restore(self, masters: Mapping[str, torch.Tensor], version: int) -> None:
        """Take the values of other masters of the same names and shapes, publish them, and count on from ``version``."""
        for name, master in self.masters.items():
            master.copy_(masters[name])
        self.publish()
        self.version = version

    def _publish_linear(self, path: str, master: torch.Tensor, bias: torch.Tensor | None) -> None:
        made: dict[Site, LinearWeight] = {}
        for side in ("rollout", "training"):
            site = self.flow.graph(side).site(path)
            published = self._sides[side].linears
            if site not in made:
                made[site] = LinearWeight.publish(site, master, bias)
                if path in published:
                    published[path].copy_(made[site])
                    made[site] = published[path]
            published[path] = made[site]

    def _publish_plain(self, name: str, tensor: torch.Tensor) -> None:
        held = self._sides["rollout"].plain.setdefault(name, tensor)
        held.copy_(tensor)
        self._sides["training"].plain[name] = held


def master_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The masters' names and shapes, in the order of the forward pass."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    linears = config.shape.linears
    for layer in range(config.num_layers):
        path = f"layers.{layer}"
        shapes[f"{path}.input_norm.weight"] = (config.hidden_size,)
        for name, linear in linears.items():
            shapes[f"{path}.{name}.weight"] = (linear.out_features, linear.in_features)
            if name == "qkv_proj":
                if config.qkv_bias:
                    shapes[f"{path}.qkv_proj.bias"] = (linear.out_features,)
                if config.qk_norm:
                    shapes[f"{path}.q_norm.weight"] = shapes[f"{path}.k_norm.weight"] = (config.head_dim,)
            if name == "o_proj":
                shapes[f"{path}.post_attention_norm.weight"] = (config.hidden_size,)
    shapes["norm.weight"] = (config.hidden_size,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def random_policy(config: ModelConfig, precision: PrecisionConfig, seed: int) -> Policy:
    """Masters drawn as transformers draws them: matrices from N(0, 0.02), norms 1, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    masters = {}
    for name, shape in master_shapes(config).items():
        if len(shape) == 2:
            masters[name] = torch.randn(shape, generator=generator) * 0.02
        else:
            masters[name] = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    return Policy(config, precision, masters)
