"""Figures of quantised matrices against their definitions.

Inspections of folders, as a record and as text.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from isobit.config.commands import InspectConfig
from isobit.config.precision import PrecisionConfig
from isobit.kernels.spec.quantise import dequantise_int8, publish, quantise_blocks
from isobit.memory.cards import GPUS, read_card
from isobit.models.config import ModelConfig
from isobit.models.decoder import build_decoder
from isobit.models.policy import Policy, random_policy
from isobit.models.saving import save_policy
from isobit.models.shapes import model_shape
from isobit.observe.inspection import GpuFigures, gpu_figures, inspect_folder
from isobit.observe.inspection_page import (
    WIDTH,
    describe_inspection,
    percent,
    scale_text,
    write_inspection,
)
from isobit.precision.flow import Site, build_flow
from isobit.precision.quant_tensor import (
    E4M3,
    EightBitFigures,
    Int8Rows,
    QuantTensor,
    dequantise,
    measure_published,
    measure_stored,
    together,
)
from isobit.util.errors import ConfigError


def test_a_matrix_worked_out_by_hand() -> None:
    """One block with the scale 2: 896 is the largest; 17, half way from 16 to 18, goes to 16, whose
    mantissa is even; 0.001 is flushed.
    """
    x = torch.zeros(2, 3)
    x[0] = torch.tensor([896.0, 17.0, 0.001])
    x[1, 0] = 64.0
    figures = measure_published(x, quantise_blocks(x))
    squares = 896.0**2 + 17.0**2 + 0.001**2 + 64.0**2
    assert figures.smallest_scale == figures.largest_scale == 2.0
    assert figures.error == pytest.approx(((1.0 + 0.001**2) / squares) ** 0.5, rel=1e-6)
    assert figures.worst_block == pytest.approx(figures.error)
    assert figures.saturated == 1 / 6
    assert figures.flushed == 1 / 6


@pytest.mark.parametrize("scales", ["power_of_two", "fp32"])
def test_several_blocks_and_short_ones(scales) -> None:
    """Against a loop over blocks in FP64."""
    torch.manual_seed(1)
    x = torch.randn(200, 300) * 10.0 ** torch.randint(-4, 4, (200, 1))
    x[128:, 256:] = 0.0
    published = quantise_blocks(x, scales)
    figures = measure_published(x, published)
    q = dequantise(published).double()
    errors = []
    for row in (slice(0, 128), slice(128, 200)):
        for column in (slice(0, 128), slice(128, 256), slice(256, 300)):
            part, difference = x[row, column].double(), (q - x.double())[row, column]
            errors.append(float(difference.norm() / part.norm()) if part.any() else 0.0)
    assert figures.worst_block == pytest.approx(max(errors), rel=1e-6)
    assert figures.error == pytest.approx(
        float((q - x.double()).norm() / x.double().norm()), rel=1e-6
    )
    assert figures.flushed == pytest.approx(float(((q == 0) & (x != 0)).double().mean()))
    assert figures.flushed and figures.flushed > 0
    largest = (published.values.float().abs() == 448).double().mean()
    assert figures.saturated == pytest.approx(float(largest))
    if scales == "fp32":
        assert figures.saturated >= 5 / x.numel(), "each block's largest is the largest byte"


def test_an_int8_matrix_worked_out_by_hand() -> None:
    """H has two rows.  Times it, the first row is (127, 0.25) with the scale 1 and its second
    number flushed, and the second row (16, 0).
    """
    x = torch.tensor([[63.625, 63.375], [8.0, 8.0]])
    figures = measure_published(x, published(x))
    squares = 63.625**2 + 63.375**2
    assert (figures.largest_scale, figures.smallest_scale) == (1 / 2, pytest.approx(16 / 127 / 2))
    error = 0.25**2 / 2  # H H = 2
    assert figures.error == pytest.approx((error / (squares + 128)) ** 0.5, rel=1e-6)
    assert figures.worst_block == pytest.approx((error / squares) ** 0.5, rel=1e-6)
    assert figures.snr == pytest.approx(10 * math.log10((squares + 128) / error))
    assert figures.crest == pytest.approx(2**0.5)
    assert (figures.saturated, figures.flushed) == (2 / 4, 1 / 4)


def published(x: torch.Tensor) -> Int8Rows:
    made = publish(Site("case", "linear", "int8", parts=(len(x),)), x)
    assert isinstance(made, Int8Rows)
    return made


@pytest.mark.parametrize("columns", [576, 96, 67])
def test_the_error_of_int8_is_that_of_its_numbers(columns: int) -> None:
    x = torch.randn(40, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    made = published(x)
    figures = measure_published(x, made)
    difference = (dequantise_int8(made) - x.float()).double()
    assert figures.error == pytest.approx(float(difference.norm() / x.double().norm()), rel=1e-3)
    of_rows = difference.norm(dim=1) / x.double().norm(dim=1)
    assert figures.worst_block == pytest.approx(float(of_rows.max()), rel=1e-3)


def test_several_matrices_have_the_figures_of_one_made_of_them() -> None:
    torch.manual_seed(2)
    whole = torch.randn(512, 128) * torch.logspace(-3, 3, 4).repeat_interleave(128)[:, None]
    parts = [measure_published(part, quantise_blocks(part)) for part in whole.split(128)]
    one, several = measure_published(whole, quantise_blocks(whole)), together(parts)
    assert several.error == pytest.approx(one.error, rel=1e-9)
    for name in ("worst_block", "saturated", "flushed", "smallest_scale", "largest_scale"):
        assert getattr(several, name) == getattr(one, name), name


def test_of_stored_bytes_only_scales_and_saturation_are_known() -> None:
    values = torch.tensor([[448.0, -448.0, 1.0, 0.0]]).to(E4M3)
    figures = measure_stored(QuantTensor(values, torch.tensor([[0.25]]), "128x128"))
    assert (figures.saturated, figures.smallest_scale, figures.largest_scale) == (0.5, 0.25, 0.25)
    assert figures.error is figures.flushed is figures.worst_block is None
    mixed = figures + EightBitFigures(4, 0, 0.5, 2.0, 1, 2.0, 0.5, 0.5)
    assert mixed.error is None and mixed.saturated == 0.25 and mixed.largest_scale == 2.0


CONFIG = ModelConfig("qwen2", 64, 256, 384, 3, 4, 2, 64, 128, 1e-6, 1e4, False)


@pytest.fixture
def policy() -> Policy:
    """The O projection of layer 1 has a block with an outlier, which flushes its other numbers."""
    made = random_policy(CONFIG, PrecisionConfig(preset="fp8"), seed=0)
    with torch.no_grad():
        made.masters["layers.1.o_proj.weight"][3, 5] = 1e4
    return made


@pytest.fixture
def folder(policy: Policy, tmp_path: Path) -> Path:
    save_policy(policy, tmp_path / "model")
    return tmp_path / "model"


def test_the_layer_with_an_outlier_stands_out(folder: Path) -> None:
    found = inspect_folder(folder, PrecisionConfig(preset="fp8"))
    assert found.parameters == sum(found.numbers for found in found.formats)
    assert [one.format for one in found.formats] == ["BF16"]
    layers = found.by_layer()
    assert list(layers) == [0, 1, 2]
    assert list(layers[0]) == ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    hurt = layers[1]["o_proj"]
    assert hurt.flushed is not None and hurt.flushed > 0.2 and hurt.largest_scale == 32.0
    others = [
        figures for layer, each in layers.items() for name, figures in each.items()
        if (layer, name) != (1, "o_proj")
    ]  # fmt: skip
    assert all(figures.flushed is not None and figures.flushed < 0.001 for figures in others)
    assert all(figures.error is not None and 0.02 < figures.error < 0.03 for figures in others)
    assert [matrix.name for matrix in found.worst(100)].index(
        "model.layers.1.self_attn.o_proj.weight"
    ) == len(found.matrices) - 1, "relative to the outlier itself the error is small"


def test_int8_has_less_error_and_a_row_with_a_high_crest_is_named(
    policy: Policy, tmp_path: Path
) -> None:
    """Equal numbers become a single one; the outlier of another matrix is spread over 128."""
    with torch.no_grad():
        weight = policy.masters["layers.2.down_proj.weight"]
        weight[7, :128] = 1.0
    save_policy(policy, tmp_path / "model")
    found = inspect_folder(tmp_path / "model", PrecisionConfig(preset="int8"))
    assert found.format == "int8" and len(found.matrices) == 21
    (named,) = found.with_high_crest()
    assert named.name == "model.layers.2.mlp.down_proj.weight"
    text = describe_inspection(replace(found, folder=Path("model")))
    assert max(map(len, text)) <= WIDTH
    page = "\n".join(text)
    for words in ("the 21 matrices in INT8: int8", "SNR", "high crest", "precision.modules_bf16"):
        assert words in page, words
    calm = inspect_folder(tmp_path / "model", PrecisionConfig(preset="int8")).by_layer()[0]
    assert all(one.error is not None and one.error < 0.012 for one in calm.values())
    without = PrecisionConfig(preset="int8", modules_bf16=("down_proj",))
    assert "high crest" not in "\n".join(
        describe_inspection(inspect_folder(tmp_path / "model", without))
    )
    write_inspection(found, tmp_path / "page.html")
    assert "INT8 by layer: int8" in (tmp_path / "page.html").read_text()
    json.dumps(found.as_json(), allow_nan=False)


def test_matrices_are_reported_as_they_are_done(folder: Path) -> None:
    done: list[tuple[int, int]] = []
    inspect_folder(folder, PrecisionConfig(preset="fp8"), on_matrix=lambda *each: done.append(each))
    assert done == [(number, 21) for number in range(1, 22)]


def test_the_flow_decides_what_is_measured(folder: Path) -> None:
    kept = PrecisionConfig(modules_bf16=("o_proj",), last_layers_bf16=1, scales="fp32")
    found = inspect_folder(folder, kept)
    assert list(found.by_layer()) == [0, 1] and "o_proj" not in found.linears
    assert found.matrices[0].figures.saturated > 0
    none = inspect_folder(folder, PrecisionConfig(preset="bf16"))
    assert not none.matrices and "bf16: no matrix is in 8 bits" in describe_inspection(none)


def test_presets_say_what_they_quantise(folder: Path) -> None:
    found = inspect_folder(folder, PrecisionConfig(preset="fp8"))
    by_name = {one.preset: one for one in found.presets}
    linears = 3 * 256 * (4 * 64 + 2 * 2 * 64 + 256 + 3 * 384)
    for name, (rollout, training, cache, exact) in {
        "fp32": (0, 0, "fp32", True),
        "bf16": (0, 0, "bf16", True),
        "fp8-rollout": (linears, 0, "e4m3", False),
        "fp8-linear": (linears, linears, "bf16", True),
        "fp8": (linears, linears, "e4m3", True),
        "int8-rollout": (linears, 0, "int8", False),
        "int8": (linears, linears, "int8", True),
    }.items():
        one = by_name[name]
        assert one.rollout_8bit == rollout / found.parameters
        assert one.training_8bit == training / found.parameters
        assert (one.cache, one.exact) == (cache, exact)
    assert by_name["fp8"].published_bytes < by_name["bf16"].published_bytes


@pytest.mark.parametrize("gpu", [None, "h200"])
def test_the_text_fits_a_terminal(folder: Path, gpu: str | None) -> None:
    found = inspect_folder(folder, PrecisionConfig(preset="fp8"), gpu)
    text = describe_inspection(replace(found, folder=Path("model")))
    assert max(map(len, text)) <= WIDTH
    page = "\n".join(text)
    for words in ("qwen2, ", "3 layers", "the 21 matrices in E4M3: fp8", "  all ", "2^5", "BF16"):
        assert words in page, words
    assert ("on an H200 with 139 GiB free" in page) == (gpu is not None)
    assert any(line.startswith("  fp32 ") for line in text) == (gpu is None), "not on a GPU"
    said = re.search(r"if all 256 completions have (\d+) tokens, behind prompts of (\d+)", page)
    assert (said is not None) == (gpu is not None)
    if said is not None:
        assert found.gpu is not None and sum(map(int, said.groups())) == found.gpu.longest
    json.dumps(found.as_json(), allow_nan=False)


def test_what_does_not_fit_a_gpu_is_said_and_the_rest_shown() -> None:
    def figures_of(config: ModelConfig, gpu: str) -> GpuFigures:
        flow = build_flow(PrecisionConfig(preset="fp8"), build_decoder(config).shape)
        return gpu_figures(config, flow, read_card(gpu), 4096)

    small = replace(model_shape("qwen3-0.6b"), num_layers=4)
    large = replace(small, hidden_size=16384, intermediate_size=81920)
    figures = figures_of(large, "h100")
    assert figures.training is None and "take a smaller model" in figures.problem
    assert sum(figures.generating.values()) < GPUS["h100"].total and figures.cached_tokens > 100_000
    fits = figures_of(small, "h100")
    assert fits.training is not None and not fits.problem
    with pytest.raises(ConfigError, match="'tpu' is not known; known are h100, h200"):
        figures_of(small, "tpu")


def test_a_plan_reads_no_weights_and_follows_the_settings(
    config_alone: Callable[[str], Path],
) -> None:
    folder = config_alone("qwen3-8b")
    settings = InspectConfig.model_validate({"training": {"moments": "bf16", "recompute": "mlp"}})

    def plan(gpus: int = 1, settings: InspectConfig = settings) -> GpuFigures:
        found = inspect_folder(
            folder,
            PrecisionConfig(preset="fp8"),
            "h200",
            8192,
            settings=settings,
            gpus=gpus,
            weights=False,
        )
        assert not found.matrices and not found.formats
        assert found.gpu is not None
        text = describe_inspection(replace(found, folder=Path("model")))
        assert max(map(len, text)) <= WIDTH and not any("stored" in line for line in text)
        json.dumps(found.as_json(), allow_nan=False)
        return found.gpu

    one, two = plan(), plan(2)
    assert one.training is not None and two.training is not None
    assert one.time is not None and two.time is not None
    assert two.training.peaks["training"] < one.training.peaks["training"]
    assert two.time.total < one.time.total
    assert "moments = 'bf16'" in plan(settings=InspectConfig()).problem


def test_numbers_for_readers() -> None:
    assert [percent(x) for x in (None, 0.0, 0.026543, 1.0, 2.3e-6)] == [
        "-", "0", "2.65%", "100%", "0.00023%",
    ]  # fmt: skip
    assert [scale_text(x) for x in (1.0, 2.0**-11, 0.3)] == ["2^0", "2^-11", "0.3"]
