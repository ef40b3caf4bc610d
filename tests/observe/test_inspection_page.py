"""The page of an inspection: self-contained, escaped, and of every kind of folder."""

from dataclasses import replace
from pathlib import Path

import pytest

from isobit.config.precision import PrecisionConfig
from isobit.models.config import ModelConfig
from isobit.models.policy import random_policy
from isobit.models.saving import PolicyTensors, fp8_contents, save_policy, write_folder
from isobit.observe.inspection import inspect_folder
from isobit.observe.inspection_page import MARKER, write_inspection
from isobit.util.errors import ConfigError
from tests.models.policies import delta_nets
from tests.observe.pages import Page, assert_self_contained

CONFIG = ModelConfig("qwen3", 64, 128, 128, 3, 2, 2, 64, 128, 1e-6, 1e4, False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_policy(random_policy(CONFIG, PrecisionConfig(preset="fp8"), seed=0), tmp_path / "model")
    return tmp_path / "model"


def test_it_says_what_the_tables_say(folder: Path, tmp_path: Path) -> None:
    found = inspect_folder(folder, PrecisionConfig(preset="fp8"), gpu="h200")
    page = Page(write_inspection(found, tmp_path / "page.html"))
    assert_self_contained(page)
    for words in (
        "Error", "Worst block", "Flushed", "Saturated", "Scales", "qkv_proj", "down_proj",
        "fp8-rollout", "two functions", "Memory on 1 x H200", "published weights",
        "model.layers.2.mlp.up_proj.weight", "layer 1, ",
    ):  # fmt: skip
        assert words in page.text, words
    assert page.source.startswith(MARKER)


def test_a_model_with_delta_nets_has_the_attention_of_a_layer_that_has_one(tmp_path: Path) -> None:
    config = replace(CONFIG, family="qwen3_5_text", **delta_nets("qwen3_5_text", CONFIG.num_layers))
    save_policy(random_policy(config, PrecisionConfig(preset="fp8"), seed=0), tmp_path / "model")
    found = inspect_folder(tmp_path / "model", PrecisionConfig(preset="fp8"))
    page = Page(write_inspection(found, tmp_path / "page.html"))
    assert "linear_attn.out_proj.weight" in page.text


def test_stored_bytes_have_scales_alone(folder: Path, tmp_path: Path) -> None:
    policy = random_policy(CONFIG, PrecisionConfig(preset="fp8"), seed=0)
    contents = fp8_contents(CONFIG, policy.flow, PolicyTensors(policy))
    write_folder(tmp_path / "fp8", CONFIG, contents)
    found = inspect_folder(tmp_path / "fp8", PrecisionConfig(preset="fp8"))
    page = Page(write_inspection(found, tmp_path / "page.html"))
    assert_self_contained(page)
    assert "stored in FP8" in page.text and "F32 scales" in page.text
    assert "Worst block" not in page.text and "Saturated" in page.text


def test_a_name_is_no_markup_and_no_other_file_is_overwritten(folder: Path, tmp_path: Path) -> None:
    found = replace(
        inspect_folder(folder, PrecisionConfig(preset="fp8")), folder=Path("<b>evil\u202e</b>")
    )
    path = write_inspection(found, tmp_path / "page.html")
    page = Page(path)
    assert_self_contained(page)
    assert "<b>evil" not in page.source and "[U+202E]" in page.text
    assert write_inspection(found, path) == path
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        write_inspection(found, path)


def test_a_flow_without_fp8_has_no_charts(folder: Path, tmp_path: Path) -> None:
    found = inspect_folder(folder, PrecisionConfig(preset="bf16"))
    page = Page(write_inspection(found, tmp_path / "page.html"))
    assert "bf16: no matrix is in 8 bits" in page.text and "svg" not in page.tags
