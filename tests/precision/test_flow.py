"""Presets and options of a precision flow."""

from collections.abc import Iterator
from typing import Any

import pytest

from isobit.config.precision import PrecisionConfig, Preset, recorded_precision
from isobit.models.decoder import decoder_shape
from isobit.precision.flow import (
    DecoderShape,
    Graph,
    LinearShape,
    PrecisionFlow,
    Site,
    SiteShape,
    build_flow,
    describe_flow,
    graph_differences,
)
from isobit.precision.quant_tensor import INT8_SUMMANDS
from isobit.util.errors import ConfigError
from tests.sites import shape_of_layers
from tests.tiny import tiny_model


def make_shape(layers: int = 4, hidden: int = 256, intermediate: int = 512) -> DecoderShape:
    linears = {
        "qkv_proj": LinearShape({"q_proj": hidden, "k_proj": 128, "v_proj": 128}, hidden),
        "o_proj": LinearShape({"o_proj": hidden}, hidden),
        "gate_up_proj": LinearShape({"gate_proj": intermediate, "up_proj": intermediate}, hidden),
        "down_proj": LinearShape({"down_proj": hidden}, intermediate),
    }
    return shape_of_layers(layers, linears)


@pytest.mark.parametrize(
    ("preset", "exact", "linears", "attention"),
    [
        ("fp32", True, ("fp32", "fp32"), ("fp32", "fp32")),
        ("bf16", True, ("bf16", "bf16"), ("bf16", "bf16")),
        ("fp8-rollout", False, ("e4m3", "bf16"), ("e4m3", "bf16")),
        ("fp8-linear", True, ("e4m3", "e4m3"), ("bf16", "bf16")),
        ("fp8", True, ("e4m3", "e4m3"), ("e4m3", "e4m3")),
    ],
)
def test_presets(
    preset: Preset, exact: bool, linears: tuple[str, str], attention: tuple[str, str]
) -> None:
    flow = build_flow(PrecisionConfig(preset=preset), make_shape())
    assert flow.exact is exact
    sides = flow.rollout, flow.training
    assert tuple(side.linear(2, "down_proj").forward for side in sides) == linears
    assert tuple(side.attention_format(0) for side in sides) == attention
    assert flow.rollout.site("lm_head").forward == ("fp32" if preset == "fp32" else "bf16")


@pytest.mark.parametrize(
    ("preset", "attention", "exact", "formats"),
    [
        ("fp8", "int8", True, ("int8", "int8")),
        ("fp8", "bf16", True, ("bf16", "bf16")),
        ("int8", "fp8", True, ("e4m3", "e4m3")),
        ("fp8-linear", "int8", True, ("int8", "int8")),
        ("fp8-rollout", "int8", False, ("int8", "bf16")),
    ],
)
def test_attention_may_have_another_format(
    preset: Preset, attention: Any, exact: bool, formats: tuple[str, str]
) -> None:
    plain = build_flow(PrecisionConfig(preset=preset, last_layers_bf16=1), make_shape())
    config = PrecisionConfig(preset=preset, attention=attention, last_layers_bf16=1)
    flow = build_flow(config, make_shape())
    sides = flow.rollout, flow.training
    assert flow.exact is exact
    assert tuple(side.attention_format(0) for side in sides) == formats
    assert {side.attention_format(3) for side in sides} == {"bf16"}
    assert all(
        mine == own or mine.kind in ("kv_cache", "attention")
        for mine, own in zip(flow.rollout.sites, plain.rollout.sites, strict=True)
    )


def test_attention_in_8_bits_needs_linears_in_8_bits() -> None:
    with pytest.raises(ConfigError, match="preset 'bf16' has no linears in 8 bits"):
        build_flow(PrecisionConfig(preset="bf16", attention="int8"), make_shape())
    both = PrecisionConfig(preset="fp8", attention="int8", kv_scales="per_tensor")
    with pytest.raises(ConfigError, match=r'precision\.attention is "int8"; leave one of'):
        build_flow(both, make_shape())


def test_backward_formats() -> None:
    def formats(preset: Preset = "fp8", **options: Any) -> tuple[str | None, ...]:
        flow = build_flow(PrecisionConfig(preset=preset, **options), make_shape())
        site = flow.training.linear(0, "qkv_proj")
        return site.forward, site.dgrad, site.wgrad, site.scales

    assert formats() == ("e4m3", "e4m3", "e4m3", "power_of_two")
    assert formats(wgrad="bf16", scales="fp32") == ("e4m3", "e4m3", "bf16", "fp32")
    for preset in ("int8", "int8-linear"):
        assert formats(preset)[:3] == ("int8", "int8", "int8")
    assert formats("int8", dgrad="fp8", wgrad="bf16")[:3] == ("int8", "e4m3", "bf16")
    assert formats("int8-rollout")[:3] == ("bf16", "bf16", "bf16")
    assert formats("int8", modules_bf16=("qkv_proj",))[:3] == ("bf16", "bf16", "bf16")


@pytest.mark.parametrize("key", ["dgrad", "wgrad"])
@pytest.mark.parametrize("preset", ["fp8", "fp8-linear", "fp8-rollout", "int8-rollout", "bf16"])
def test_a_backward_in_int8_is_for_presets_that_train_in_int8(key: str, preset: Preset) -> None:
    """Not for int8-rollout, which trains in BF16."""
    table = {"preset": preset, key: "int8"}
    with pytest.raises(ConfigError) as refused:
        build_flow(PrecisionConfig.model_validate(table), make_shape())
    assert str(refused.value) == (
        f'precision.{key} is "int8", but in the preset {preset!r} no linear is trained in INT8; '
        "take one of int8-linear, int8, or leave the key out"
    )
    if preset in ("int8-rollout", "bf16", "fp8-rollout"):  # a record of an earlier version
        assert recorded_precision(table)[key] is None


@pytest.mark.parametrize(
    ("preset", "wgrad", "fits"),
    [
        ("fp8-rollout", "fp8", False),
        ("int8-rollout", "fp8", False),
        ("bf16", "fp8", False),
        ("fp32", "bf16", False),
        ("bf16", "bf16", True),
        ("int8-rollout", "bf16", True),
        ("int8", "fp8", True),
        ("fp8", "fp8", True),
    ],
)
def test_a_format_of_wgrad_that_has_no_effect_is_refused(
    preset: Preset, wgrad: Any, fits: bool
) -> None:
    config = PrecisionConfig(preset=preset, wgrad=wgrad)
    if fits:
        assert build_flow(config, make_shape())
        return
    with pytest.raises(ConfigError, match="trained in FP8 or INT8; take one of fp8-linear, fp8, "):
        build_flow(config, make_shape())


def test_wgrad_in_int8_has_no_sums_that_an_int32_does_not_hold() -> None:
    config = PrecisionConfig(preset="int8", wgrad="int8")
    site = build_flow(config, make_shape()).training.linear(0, "qkv_proj")
    assert site.wgrad_of(INT8_SUMMANDS) == "int8"
    assert site.wgrad_of(INT8_SUMMANDS + 1) == "bf16"
    assert INT8_SUMMANDS * 127**2 < 2**31 <= (INT8_SUMMANDS + 1) * 127**2


def test_layers_kept_in_bf16_have_bf16_kv_and_attention() -> None:
    flow = build_flow(
        PrecisionConfig(preset="fp8", first_layers_bf16=1, last_layers_bf16=2), make_shape()
    )
    for layer, expected in enumerate(["bf16", "e4m3", "bf16", "bf16"]):
        assert flow.rollout.attention_format(layer) == expected
        assert flow.rollout.linear(layer, "o_proj").forward == expected
        assert flow.rollout.site(f"layers.{layer}.kv_cache").forward == expected
    assert flow.exact


@pytest.mark.parametrize(
    ("module", "kept"),
    [("down_proj", {0, 1, 2, 3}), ("layers.2.down_proj", {2}), ("layers.1.gate_proj", set())],
)
def test_modules_kept_in_bf16(module: str, kept: set[int]) -> None:
    flow = build_flow(PrecisionConfig(preset="fp8", modules_bf16=(module,)), make_shape())
    formats = [flow.training.linear(layer, "down_proj").forward for layer in range(4)]
    assert {layer for layer in range(4) if formats[layer] == "bf16"} == kept
    assert (flow.training.linear(1, "gate_up_proj").forward == "bf16") is ("gate" in module)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules_bf16": ("donw_proj",)}, "donw_proj"),
        ({"modules_bf16": ("layers.4.down_proj",)}, "layers.4.down_proj"),
        ({"modules_bf16": ("layers.x.down_proj",)}, "layers.x.down_proj"),
        ({"first_layers_bf16": 3, "last_layers_bf16": 2}, "is 5, but the model has 4 layers"),
    ],
)
def test_what_the_model_does_not_have_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_flow(PrecisionConfig(preset="fp8", **options), make_shape())


def test_every_size_is_quantised_and_a_site_knows_the_parts_that_it_fuses() -> None:
    flow = build_flow(PrecisionConfig(preset="fp8"), make_shape(intermediate=320))
    site = flow.training.linear(0, "gate_up_proj")
    assert (site.forward, site.parts) == ("e4m3", (320, 320))
    assert flow.training.linear(0, "qkv_proj").parts == (256, 128, 128)


def test_graph_differences_name_the_sites() -> None:
    flow = build_flow(PrecisionConfig(preset="fp8-rollout", last_layers_bf16=3), make_shape())
    names = [difference.name for difference in graph_differences(flow.rollout, flow.training)]
    assert names == [
        f"layers.0.{name}"
        for name in ("qkv_proj", "kv_cache", "attention", "o_proj", "gate_up_proj", "down_proj")
    ]
    exact = build_flow(PrecisionConfig(preset="fp8"), make_shape())
    assert graph_differences(exact.rollout, exact.training) == []
    shorter = build_flow(PrecisionConfig(preset="fp8"), make_shape(layers=3))
    assert {d.training for d in graph_differences(exact.rollout, shorter.training)} == {None}
    assert {d.rollout for d in graph_differences(shorter.rollout, exact.training)} == {None}


def test_description_folds_equal_layers_and_says_whether_the_sides_agree() -> None:
    exact, differing = (
        describe_flow(build_flow(PrecisionConfig(preset=preset, last_layers_bf16=1), make_shape()))
        for preset in ("fp8", "fp8-rollout")
    )
    assert sum(line.startswith("layers.0-2.") for line in exact) == 7
    assert sum(line.startswith("layers.3.") for line in exact) == 7
    assert "one function" in exact[-1] and "differ" in differing[-1]


class Scanned(tuple[Site, ...]):
    """Sites that must not be gone through."""

    scans = 0

    def __iter__(self) -> Iterator[Site]:
        self.scans += 1
        return super().__iter__()


def test_a_site_is_found_without_going_through_all_of_them() -> None:
    """Every linear of every layer asks for its site at every publication."""
    graph = build_flow(PrecisionConfig(preset="fp8"), make_shape(layers=40)).rollout
    sites = Scanned(graph.sites)
    watched = Graph(sites, graph.activations)
    before = sites.scans
    for layer in range(40):
        assert watched.linear(layer, "o_proj") is graph.linear(layer, "o_proj")
    assert watched.site("lm_head").kind == "head"
    assert sites.scans == before
    assert watched == graph and hash(watched) == hash(graph)
    with pytest.raises(KeyError):
        watched.site("layers.40.o_proj")


WIDE = INT8_SUMMANDS + 1


@pytest.mark.parametrize("preset", ["int8", "int8-linear", "int8-rollout"])
@pytest.mark.parametrize("experts", [1, 4])
def test_a_linear_in_int8_whose_sums_an_int32_does_not_hold_is_refused(
    preset: Preset, experts: int
) -> None:
    """Its forward would overflow without a word."""

    def shape(features: int) -> DecoderShape:
        down = LinearShape({"down_proj": 128 * experts}, features, experts)
        return shape_of_layers(
            2, {"qkv_proj": LinearShape({"q_proj": 128}, 128), "down_proj": down}
        )

    def build(features: int = WIDE, **options: Any) -> PrecisionFlow:
        return build_flow(
            PrecisionConfig.model_validate({"preset": preset} | options), shape(features)
        )

    with pytest.raises(ConfigError) as refused:
        build()
    assert str(refused.value) == (
        "layers.0.down_proj has 133,145 input features, and a product in INT8 is exact for at most "
        '133,144, whose sum an INT32 holds; name "down_proj" in precision.modules_bf16, or take '
        'the precision "fp8" or "bf16"'
    )
    assert build(INT8_SUMMANDS).rollout.linear(0, "down_proj").forward == "int8"
    assert build(modules_bf16=("down_proj",)).rollout.linear(0, "qkv_proj").forward == "int8"
    assert build(preset="fp8").rollout.linear(0, "down_proj").forward == "e4m3"
    with pytest.raises(ConfigError, match=r"layers\.1\.down_proj has"):
        build(first_layers_bf16=1)


def test_a_head_in_int8_whose_sums_an_int32_does_not_hold_is_refused() -> None:
    sites = SiteShape("embed_tokens", "embedding"), SiteShape("lm_head", "head", head_features=WIDE)
    shape = DecoderShape(0, sites)
    for preset in ("bf16", "fp8", "int8"):
        assert build_flow(PrecisionConfig(preset=preset), shape).exact
        with pytest.raises(
            ConfigError, match=r"^lm_head has 133,145 input .*; leave precision\.head out$"
        ):
            build_flow(PrecisionConfig(preset=preset, head="int8"), shape)


def test_the_head_of_a_model_has_the_features_of_its_hidden_states() -> None:
    wide = decoder_shape(tiny_model(hidden_size=WIDE + 7))
    with pytest.raises(ConfigError, match=r"^lm_head has 133,152 input"):
        build_flow(PrecisionConfig(preset="fp8", head="int8"), wide)
    with pytest.raises(ConfigError, match=r"^layers\.0\.qkv_proj has 133,152 input"):
        build_flow(PrecisionConfig(preset="int8"), wide)
