"""The precision flow: for every site of the decoder, the format of each operand in rollout and in
training.

A flow holds two graphs, one a side.  A graph is a list of sites in the order of the forward pass.
The condition for exactness is Jet-RL's (arXiv 2601.14243, section 4.1): the inference graph is a
subgraph of the training forward graph, that is, every site reads and writes the same formats on
both sides.  ``isobit.precision.compare`` checks it site by site.

FProp is Y = X W^T, DGrad is dX = dY W, WGrad is dW = dY^T X.  In E4M3, X and dY have 1x128 groups
along the contraction, W has 128x128 blocks, and WGrad's two operands have groups of 128 tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from isobit.config.precision import PrecisionConfig
from isobit.errors import ConfigError
from isobit.precision.formats import BLOCK, Format, ScaleKind, Side

SiteKind = Literal["embedding", "norm", "linear", "attention", "kv_cache", "head"]


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear of the decoder: the output sizes of the checkpoint's matrices that it fuses, by
    name, and its input size.
    """

    parts: Mapping[str, int]
    in_features: int

    @property
    def out_features(self) -> int:
        """Rows of the fused matrix: outputs of the linear."""
        return sum(self.parts.values())

    @property
    def fills_blocks(self) -> bool:
        """Whether 128x128 blocks tile it without a remainder and without crossing from one fused
        matrix into the next.
        """
        return all(size % BLOCK == 0 for size in (*self.parts.values(), self.in_features))


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What a flow needs to know of a model: its linears, layer by layer, by site name."""

    num_layers: int
    linears: Mapping[str, LinearShape]


@dataclass(frozen=True, slots=True)
class Site:
    """One operation of the decoder and the formats it works in; ``dgrad`` and ``wgrad`` are set for
    linears only.
    """

    name: str
    kind: SiteKind
    forward: Format
    scales: ScaleKind = "power_of_two"
    dgrad: Format | None = None
    wgrad: Format | None = None

    @property
    def forward_formats(self) -> tuple[str, Format, ScaleKind]:
        """Name, format and scales: what a site must share with the other side's."""
        return self.name, self.forward, self.scales


@dataclass(frozen=True, slots=True)
class Graph:
    """The sites of one side, in the order of the forward pass; ``activations`` is the format
    between operators.
    """

    sites: tuple[Site, ...]
    activations: Format
    _by_name: Mapping[str, Site] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {site.name: site for site in self.sites})

    def site(self, name: str) -> Site:
        """The site of that name; found at once, as every linear asks at every call."""
        return self._by_name[name]

    def linear(self, layer: int, name: str) -> Site:
        """The linear ``name`` ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") of a layer."""
        return self.site(f"layers.{layer}.{name}")

    def attention_format(self, layer: int) -> Format:
        """The format of Q, K, V and of the layer's KV cache."""
        return self.site(f"layers.{layer}.attention").forward


@dataclass(frozen=True, slots=True)
class PrecisionFlow:
    """The graphs of both sides, and the linears that had to stay in BF16 with the reason for
    each.
    """

    preset: str
    rollout: Graph
    training: Graph
    fallbacks: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether both sides compute the same function, so that recorded log-probabilities are the
        trainer's own.
        """
        return self.rollout.activations == self.training.activations and all(
            a.forward_formats == b.forward_formats
            for a, b in zip(self.rollout.sites, self.training.sites, strict=True)
        )

    def graph(self, side: Side) -> Graph:
        """The sites of one side, ``rollout`` or ``training``."""
        return self.rollout if side == "rollout" else self.training

    def one_sided(self, side: Side) -> "PrecisionFlow":
        """The flow of a model that only one side ever reads: its weights exist in that side's
        formats alone.
        """
        return replace(self, rollout=self.graph(side), training=self.graph(side))


# Formats of (linears, KV cache and attention) on each side.
_PRESETS: dict[str, dict[Side, tuple[Format, Format]]] = {
    "fp32": {"rollout": ("fp32", "fp32"), "training": ("fp32", "fp32")},
    "bf16": {"rollout": ("bf16", "bf16"), "training": ("bf16", "bf16")},
    "fp8-rollout": {"rollout": ("e4m3", "e4m3"), "training": ("bf16", "bf16")},
    "fp8-linear": {"rollout": ("e4m3", "bf16"), "training": ("e4m3", "bf16")},
    "fp8": {"rollout": ("e4m3", "e4m3"), "training": ("e4m3", "e4m3")},
}


def build_flow(config: PrecisionConfig, shape: DecoderShape) -> PrecisionFlow:
    """Resolve a preset and its options for a model.

    Raises ConfigError for a module that the model does not have, or for more BF16 layers than it
    has.
    """
    _check_options(config, shape)
    graphs: dict[Side, Graph] = {
        side: _build_graph(config, shape, side) for side in ("rollout", "training")
    }
    uses_fp8 = any(site.forward == "e4m3" for graph in graphs.values() for site in graph.sites)
    fallbacks = tuple(
        f"{name} stays in BF16: its sizes {tuple(linear.parts.values())} x {linear.in_features} "
        f"are no multiples of {BLOCK}"
        for name, linear in shape.linears.items()
        if uses_fp8 and not linear.fills_blocks
    )
    return PrecisionFlow(config.preset, graphs["rollout"], graphs["training"], fallbacks)


def _check_options(config: PrecisionConfig, shape: DecoderShape) -> None:
    if config.first_layers_bf16 + config.last_layers_bf16 > shape.num_layers:
        raise ConfigError(
            "precision.first_layers_bf16 + precision.last_layers_bf16 is "
            f"{config.first_layers_bf16 + config.last_layers_bf16}, "
            f"but the model has {shape.num_layers} layers"
        )
    known = {alias for name, linear in shape.linears.items() for alias in (name, *linear.parts)}
    for module in config.modules_bf16:
        layer, _, name = module.removeprefix("layers.").rpartition(".")
        if name not in known or (
            layer and not (layer.isdecimal() and int(layer) < shape.num_layers)
        ):
            raise ConfigError(
                f"precision.modules_bf16 names {module!r}, which the model does not have; name one "
                f"of {', '.join(sorted(known))}, "
                f"alone or as layers.N.NAME with N below {shape.num_layers}"
            )


def _build_graph(config: PrecisionConfig, shape: DecoderShape, side: Side) -> Graph:
    linears, attention = _PRESETS[config.preset][side]
    base: Format = "fp32" if config.preset == "fp32" else "bf16"
    sites = [Site("embed_tokens", "embedding", base)]
    for layer in range(shape.num_layers):
        kept = (
            layer < config.first_layers_bf16 or layer >= shape.num_layers - config.last_layers_bf16
        )
        layer_linears, layer_attention = (base, base) if kept else (linears, attention)
        path = f"layers.{layer}"
        for name, linear in shape.linears.items():
            sites.append(_linear_site(config, f"{path}.{name}", linear, layer_linears, base))
            if name == "qkv_proj":
                sites.append(Site(f"{path}.kv_cache", "kv_cache", layer_attention))
                sites.append(Site(f"{path}.attention", "attention", layer_attention))
        sites.append(Site(f"{path}.norms", "norm", base))
    sites += [Site("norm", "norm", base), Site("lm_head", "head", base)]
    return Graph(tuple(sites), base)


def _linear_site(
    config: PrecisionConfig, path: str, linear: LinearShape, wanted: Format, base: Format
) -> Site:
    layer_path, _, name = path.rpartition(".")
    aliases = {alias for part in (name, *linear.parts) for alias in (part, f"{layer_path}.{part}")}
    if wanted != "e4m3" or not linear.fills_blocks or aliases & set(config.modules_bf16):
        return Site(path, "linear", base, dgrad=base, wgrad=base)
    wgrad: Format = "e4m3" if config.wgrad == "fp8" else "bf16"
    return Site(path, "linear", "e4m3", config.scales, dgrad="e4m3", wgrad=wgrad)
