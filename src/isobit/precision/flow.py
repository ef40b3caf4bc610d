"""The precision flow: for every site of the decoder, the format of each operand in rollout and in
training.

A flow holds one graph for each side, a list of sites in the order of the forward. The two sides are
exact under Jet-RL's condition (arXiv 2601.14243, section 4.1): the inference graph is a subgraph of
the training forward graph, that is, every site reads and writes the same formats on both sides.
``graph_differences`` checks this site by site, before the first token.

FProp is Y = X W^T, DGrad is dX = dY W, WGrad is dW = dY^T X. In E4M3, X and dY have 1x128 groups
along the contraction, W has 128x128 blocks, and WGrad's two operands have groups of 128 tokens.
In INT8, X and W have one scale a row, DGrad's operands one a row for each matrix that is fused, and
WGrad's one a row over all tokens; ``precision.dgrad`` and ``precision.wgrad`` name other formats.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

from isobit.config.precision import KvCalibration, PrecisionConfig
from isobit.precision.quant_tensor import EIGHT_BITS, INT8_SUMMANDS, Format, ScaleKind, Side
from isobit.util.errors import ConfigError

SiteKind = Literal[
    "embedding", "norm", "linear", "adapter", "router", "attention", "kv_cache", "delta", "head"
]


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear of the decoder: the output sizes of the checkpoint's matrices that it fuses, by
    name, and its input size. With ``experts`` there are so many matrices of one shape, concatenated
    along the rows; each multiplies the tokens that are routed to it.
    """

    parts: Mapping[str, int]
    in_features: int
    experts: int = 1
    is_plain: bool = False
    """Whether it has the format between operators in every flow."""

    @property
    def out_features(self) -> int:
        """Rows of the fused matrix, all experts together."""
        return sum(self.parts.values())

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(self.parts.values())


@dataclass(frozen=True, slots=True)
class SiteShape:
    """A site before a flow gives it formats."""

    name: str
    kind: SiteKind
    layer: int | None = None
    linear: LinearShape | None = None
    adapter: LinearShape | None = None
    """A matrix of LoRA: a linear in the format between operators, in every flow."""
    head_features: int = 0
    """Numbers of a hidden state, of which lm_head makes logits."""

    @property
    def aliases(self) -> set[str]:
        """A linear's names in ``precision.modules_bf16``: its own or a part's, in one or all
        layers.
        """
        assert self.linear is not None
        names = {name.rpartition(".")[2] for name in (self.name, *self.linear.parts)}
        return names | {f"layers.{self.layer}.{name}" for name in names}


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What a flow needs to know of a model: its sites, in the order of the forward."""

    num_layers: int
    sites: tuple[SiteShape, ...]

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        return tuple(site.linear for site in self.sites if site.linear is not None)

    def linears_of(self, layer: int) -> tuple[LinearShape, ...]:
        return tuple(
            site.linear for site in self.sites if site.linear is not None and site.layer == layer
        )


@dataclass(frozen=True, slots=True)
class Site:
    """One operation and its formats; ``dgrad``, ``wgrad`` and ``parts`` are for linears and
    adapters only.
    """

    name: str
    kind: SiteKind
    forward: Format
    scales: ScaleKind = "power_of_two"
    dgrad: Format | None = None
    wgrad: Format | None = None
    parts: tuple[int, ...] = ()
    """Rows of each matrix that a linear fuses, at which blocks begin anew; empty: one matrix."""
    per_tensor: bool = False
    """Attention and KV cache have one scale each for Q, K and V, not one a token and head."""

    @property
    def forward_formats(self) -> tuple[str, Format, ScaleKind, bool]:
        """What must be the same on both sides."""
        return self.name, self.forward, self.scales, self.per_tensor

    def wgrad_of(self, tokens: int) -> Format | None:
        """The format of WGrad of a micro-batch of so many tokens: INT8 has no sums of more than
        ``INT8_SUMMANDS``, beyond which it is BF16.
        """
        return "bf16" if self.wgrad == "int8" and tokens > INT8_SUMMANDS else self.wgrad


@dataclass(frozen=True, slots=True)
class Graph:
    """One side's sites in the order of the forward; ``activations`` is the format between
    operators.
    """

    sites: tuple[Site, ...]
    activations: Format
    _by_name: Mapping[str, Site] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {site.name: site for site in self.sites})

    def site(self, name: str) -> Site:
        """A lookup, since every linear asks at every call."""
        return self._by_name[name]

    def linear(self, layer: int, name: str) -> Site:
        """The linear ``name`` ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") of a layer."""
        return self.site(f"layers.{layer}.{name}")

    def attention_format(self, layer: int) -> Format:
        """The format of Q, K, V and of the layer's KV cache."""
        return self.site(f"layers.{layer}.attention").forward

    def has_tensor_scales(self, layer: int) -> bool:
        """Whether the layer has one scale for each of Q, K and V."""
        site = self._by_name.get(f"layers.{layer}.attention")  # or the layer has a delta rule
        return site is not None and site.per_tensor

    @property
    def num_layers(self) -> int:
        return sum(site.kind in ("attention", "delta") for site in self.sites)

    def without_adapters(self) -> "Graph":
        """The same, without LoRA's sites."""
        sites = tuple(site for site in self.sites if site.kind != "adapter")
        return Graph(sites, self.activations)

    def with_token_scales(self) -> "Graph":
        """The same, with scales of Q, K and V a token and head everywhere."""
        return Graph(
            tuple(replace(site, per_tensor=False) for site in self.sites), self.activations
        )


@dataclass(frozen=True, slots=True)
class PrecisionFlow:
    """The graphs of both sides."""

    preset: str
    rollout: Graph
    training: Graph
    kv_calibration: KvCalibration | None = None
    """None where no layer has scales a tensor."""
    name: str = field(default="", compare=False)
    """The preset with its options, as a recipe names them."""

    @property
    def exact(self) -> bool:
        """Whether both sides compute the same function, so that log-probabilities have the same
        bits.
        """
        return is_same_forward(self.rollout, self.training)

    def graph(self, side: Side) -> Graph:
        return self.rollout if side == "rollout" else self.training

    def one_sided(self, side: Side) -> "PrecisionFlow":
        """The flow of a model that only one side reads."""
        return replace(self, rollout=self.graph(side), training=self.graph(side))

    def without_adapters(self) -> "PrecisionFlow":
        """The flow of a policy's base."""
        sides = self.rollout.without_adapters(), self.training.without_adapters()
        return replace(self, rollout=sides[0], training=sides[1])

    def frozen(self, side: Side) -> "PrecisionFlow":
        """The flow of a model that only scores: nobody calibrates it, and Q, K and V have scales a
        token.
        """
        graph = self.graph(side).with_token_scales()
        return replace(self, rollout=graph, training=graph, kv_calibration=None)


# Formats of (linears, KV cache and attention) on each side.
_PRESETS: dict[str, dict[Side, tuple[Format, Format]]] = {
    "fp32": {"rollout": ("fp32", "fp32"), "training": ("fp32", "fp32")},
    "bf16": {"rollout": ("bf16", "bf16"), "training": ("bf16", "bf16")},
    "fp8-rollout": {"rollout": ("e4m3", "e4m3"), "training": ("bf16", "bf16")},
    "fp8-linear": {"rollout": ("e4m3", "bf16"), "training": ("e4m3", "bf16")},
    "fp8": {"rollout": ("e4m3", "e4m3"), "training": ("e4m3", "e4m3")},
    "int8-rollout": {"rollout": ("int8", "int8"), "training": ("bf16", "bf16")},
    "int8-linear": {"rollout": ("int8", "bf16"), "training": ("int8", "bf16")},
    "int8": {"rollout": ("int8", "int8"), "training": ("int8", "int8")},
}


def build_flow(config: PrecisionConfig, shape: DecoderShape) -> PrecisionFlow:
    """Resolve a preset and its options for a model. Raises ConfigError if they do not fit it."""
    _check_options(config, shape)
    rollout, training = (_build_graph(config, shape, side) for side in ("rollout", "training"))
    has_tensor_scales = any(site.per_tensor for site in rollout.sites)
    calibration = config.kv_calibration if has_tensor_scales else None
    return PrecisionFlow(config.preset, rollout, training, calibration, config.name)


def _check_options(config: PrecisionConfig, shape: DecoderShape) -> None:
    if config.first_layers_bf16 + config.last_layers_bf16 > shape.num_layers:
        raise ConfigError(
            "precision.first_layers_bf16 + precision.last_layers_bf16 is "
            f"{config.first_layers_bf16 + config.last_layers_bf16}, "
            f"but the model has {shape.num_layers} layers"
        )
    if config.head == "int8" and config.preset == "fp32":
        raise ConfigError(
            'precision.head is "int8", but everything is in FP32 in the flow fp32; leave the key '
            "out, or take another preset"
        )
    if config.attention is not None and config.preset in ("fp32", "bf16"):
        raise ConfigError(
            f'precision.attention is "{config.attention}", but the preset {config.preset!r} has no '
            "linears in 8 bits; take one that has, or leave the key out"
        )
    _check_kv_scales(config)
    _check_backward(config)
    known = {name for site in shape.sites if site.linear is not None for name in site.aliases}
    for module in config.modules_bf16:
        if module not in known:
            names = sorted(name for name in known if not name.startswith("layers."))
            raise ConfigError(
                f"precision.modules_bf16 names {module!r}, which the model does not have; name one "
                f"of {', '.join(names)}, "
                f"alone or as layers.N.NAME with N below {shape.num_layers}"
            )


def _check_backward(config: PrecisionConfig) -> None:
    """Refuse formats of a backward that the preset does not have."""
    linears = _PRESETS[config.preset]["training"][0]
    eight: Mapping[Format, str] = {"e4m3": "FP8", "int8": "INT8"}
    for key, value in {"dgrad": config.dgrad, "wgrad": config.wgrad}.items():
        known = ("int8",) if key == "dgrad" or value == "int8" else tuple(eight)
        if value is None or linears in known or _NAMED[value] == linears == "bf16":
            continue
        fitting = [name for name, sides in _PRESETS.items() if sides["training"][0] in known]
        raise ConfigError(
            f'precision.{key} is "{value}", but in the preset {config.preset!r} no linear is '
            f"trained in {' or '.join(eight[one] for one in known)}; take one of "
            f"{', '.join(fitting)}, or leave the key out"
        )


def _check_kv_scales(config: PrecisionConfig) -> None:
    if config.kv_scales == "per_token":
        if config.kv_calibration != "trainer":
            raise ConfigError(
                f'precision.kv_calibration is "{config.kv_calibration}", but precision.kv_scales '
                'is "per_token", which needs no calibration; set it to "per_tensor", or leave '
                "kv_calibration out"
            )
        return
    if _formats_of(config, "rollout")[1] == "e4m3":
        return
    fitting = [name for name, sides in _PRESETS.items() if sides["rollout"][1] == "e4m3"]
    if config.preset in fitting:
        but = f'precision.attention is "{config.attention}"; leave one of them out'
    else:
        but = f"the preset is {config.preset!r}; take one of {', '.join(fitting)}, or leave it out"
    raise ConfigError(
        f'precision.kv_scales is "per_tensor", which needs Q, K and V in FP8, but {but}'
    )


def _build_graph(config: PrecisionConfig, shape: DecoderShape, side: Side) -> Graph:
    linears, attention = _formats_of(config, side)
    base: Format = "fp32" if config.preset == "fp32" else "bf16"
    last = shape.num_layers - config.last_layers_bf16
    has_adapters = any(site.adapter is not None for site in shape.sites)
    if has_adapters:
        # X and dY of a linear are read by its adapter's WGrad, and by no other
        config = config.model_copy(update={"wgrad": "bf16"})
    sites: list[Site] = []
    for site in shape.sites:
        kept = site.layer is not None and not config.first_layers_bf16 <= site.layer < last
        if site.linear is not None:
            named = bool(site.aliases & set(config.modules_bf16))
            wanted = base if kept or named or site.linear.is_plain else linears
            sites.append(_linear_site(config, site.name, site.linear, wanted))
        elif site.adapter is not None:
            rows = site.adapter.rows
            sites.append(Site(site.name, site.kind, base, dgrad=base, wgrad=base, parts=rows))
        elif site.kind in ("kv_cache", "attention"):
            format = base if kept else attention
            per_tensor = format == "e4m3" and config.kv_scales == "per_tensor"
            sites.append(Site(site.name, site.kind, format, per_tensor=per_tensor))
        elif site.kind == "head":
            format = _head_format(config, side, base)
            if format == "int8":
                _check_sums(site.name, site.head_features, "leave precision.head out")
            sites.append(Site(site.name, site.kind, format))
        else:
            sites.append(Site(site.name, site.kind, base))
    return Graph(tuple(sites), base)


_NAMED: Mapping[str, Format] = {"fp8": "e4m3", "int8": "int8", "bf16": "bf16"}


def _formats_of(config: PrecisionConfig, side: Side) -> tuple[Format, Format]:
    """The formats of linears, and of KV cache and attention."""
    linears, attention = _PRESETS[config.preset][side]
    if config.attention is None or linears not in EIGHT_BITS:
        return linears, attention
    return linears, _NAMED[config.attention]


def _linear_site(config: PrecisionConfig, name: str, linear: LinearShape, format: Format) -> Site:
    if format not in EIGHT_BITS:
        return Site(name, "linear", format, dgrad=format, wgrad=format, parts=linear.rows)
    if format == "int8":
        own = name.rpartition(".")[2]
        advice = f'name "{own}" in precision.modules_bf16, or take the precision "fp8" or "bf16"'
        _check_sums(name, linear.in_features, advice)
    dgrad, wgrad = _backward_formats(config, linear, format)
    return Site(name, "linear", format, config.scales, dgrad, wgrad, linear.rows)


def _check_sums(name: str, features: int, advice: str) -> None:
    """Refuse a product in INT8 whose sums an INT32 does not hold."""
    if features > INT8_SUMMANDS:
        raise ConfigError(
            f"{name} has {features:,} input features, and a product in INT8 is exact for at most "
            f"{INT8_SUMMANDS:,}, whose sum an INT32 holds; {advice}"
        )


def _backward_formats(
    config: PrecisionConfig, linear: LinearShape, format: Format
) -> tuple[Format, Format]:
    """The formats of DGrad and WGrad of a linear in 8 bits; DGrad in INT8 has no sums of more than
    ``INT8_SUMMANDS``.
    """
    if format == "e4m3":
        return "e4m3", _NAMED[config.wgrad or "fp8"]
    # neither is named in int8-rollout, whose linears in INT8 have no backward
    dgrad, wgrad = config.dgrad or "fp8", config.wgrad or "bf16"
    if max(linear.rows) > INT8_SUMMANDS:
        dgrad = "fp8"
    return _NAMED[dgrad], _NAMED[wgrad]


def _head_format(config: PrecisionConfig, side: Side, base: Format) -> Format:
    """The rollout-only flows leave the training side as it is, here too."""
    sides = _PRESETS[config.preset]
    is_plain = side == "training" and sides["rollout"] != sides["training"]
    return "int8" if config.head == "int8" and not is_plain else base


@dataclass(frozen=True, slots=True)
class Difference:
    """A site whose forward formats differ between the sides; None for a side that lacks it."""

    name: str
    rollout: Site | None
    training: Site | None


def graph_differences(rollout: Graph, training: Graph) -> list[Difference]:
    """Every site that the sides do not compute in the same formats, in the order of the forward."""
    by_name = {site.name: site for site in training.sites}
    differences = []
    for site in rollout.sites:
        other = by_name.pop(site.name, None)
        if other is None or other.forward_formats != site.forward_formats:
            differences.append(Difference(site.name, site, other))
    return differences + [Difference(name, None, site) for name, site in by_name.items()]


def is_same_forward(rollout: Graph, training: Graph) -> bool:
    """Whether both graphs have the same formats at and between all sites."""
    activations = rollout.activations == training.activations
    return activations and not graph_differences(rollout, training)


def describe_flow(flow: PrecisionFlow) -> list[str]:
    """One line per site, with equal layers folded, then whether the sides are one function."""
    training = {site.name: site for site in flow.training.sites}
    adapters = [site for site in flow.rollout.sites if site.kind == "adapter"]
    rows = [
        (site.name, *_sides(site, training[site.name], bool(adapters)))
        for site in flow.rollout.sites
        if site.kind != "adapter"
    ]
    layers: dict[int, list[tuple[str, str, str]]] = {}
    for name, a, b in rows:
        if name.startswith("layers."):
            layers.setdefault(int(name.split(".")[1]), []).append((name.split(".", 2)[2], a, b))
    lines = [_line(*rows[0])]
    for key, members in groupby(layers.items(), key=lambda item: item[1]):
        numbers = [layer for layer, _ in members]
        span = f"layers.{numbers[0]}" if len(numbers) == 1 else f"layers.{numbers[0]}-{numbers[-1]}"
        lines += [_line(f"{span}.{name}", a, b) for name, a, b in key]
    lines += [_line(*row) for row in rows[1:] if not row[0].startswith("layers.")]
    if adapters:
        what = f"{_formats(adapters[0])}, added to {len(adapters) // 2} linears' outputs"
        lines.append(_line("LoRA", what, what))
    differing = len(graph_differences(flow.rollout, flow.training))
    total = len(flow.rollout.sites)
    verdict = (
        "one function in rollout and training"
        if flow.exact
        else f"{differing} of {total} sites differ between rollout and training"
    )
    return [*lines, f"{flow.name}: {verdict}"]


def _sides(rollout: Site, training: Site, is_frozen: bool) -> tuple[str, str]:
    """What is said of a site in rollout and in training, which alone has a backward; a matrix that
    ``is_frozen`` has no gradient.
    """
    backward = _backward(training, is_frozen)
    sides = _formats(rollout), _formats(training)
    return sides[0] + (backward if sides[0] == sides[1] else ""), sides[1] + backward


def _backward(site: Site, is_frozen: bool) -> str:
    if site.kind != "linear":
        return ""
    dgrad, wgrad = (_NAMES[one or site.forward] for one in (site.dgrad, site.wgrad))
    return f"  dgrad {dgrad}, " + ("no wgrad" if is_frozen else f"wgrad {wgrad}")


_NAMES: Mapping[Format, str] = {"e4m3": "E4M3", "int8": "INT8", "bf16": "BF16", "fp32": "FP32"}


def _formats(site: Site) -> str:
    text = _NAMES[site.forward]
    if site.kind == "linear":
        if site.forward == "e4m3":
            text += " 1x128 x 128x128" + (", FP32 scales" if site.scales == "fp32" else "")
        elif site.forward == "int8":
            text += " times Hadamard, a scale a row"
    elif site.kind == "head" and site.forward == "int8":
        text += " times Hadamard, a scale a row"
    elif site.kind in ("kv_cache", "attention") and site.forward in EIGHT_BITS:
        text += ", a scale a tensor" if site.per_tensor else ", a scale a token and head"
    return text


def _line(name: str, rollout: str, training: str) -> str:
    return (
        f"{name:28} {rollout}"
        if rollout == training
        else f"{name:28} rollout {rollout} | training {training}"
    )
