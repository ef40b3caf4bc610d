"""config.json in and out: every family, and every way in which the file can be wrong."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from isobit.config.model_shape import HYBRIDS, MIXTURES, SHARING, WINDOWED, Family, ModelShape
from isobit.models.config import Experts, ModelConfig, Multipliers
from isobit.models.decoder import master_shapes
from isobit.models.families import FAMILIES, FEATURES
from isobit.models.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)
from isobit.models.shapes import SHAPES, model_shape
from isobit.run.model_source import decoder_of
from isobit.util.errors import ConfigError, ModelError
from tests.models.policies import EXPERTS, delta_nets
from tests.mutations import COUNT, Outcomes

NAMES: list[Family] = list(FAMILIES)
SCALINGS: list[RopeScaling | None] = [
    None,
    LinearScaling(2.0),
    Llama3Scaling(8.0, 1.0, 4.0, 32),
    YarnScaling(4.0, 32),
    YarnScaling(4.0, 32, 8.0, 2.0, truncate=False, mscale=1.0, mscale_all_dim=0.5),
]
SAID_OTHERWISE = {
    "attention_bias",  # Qwen2 has them whatever it says
    "decoder_sparse_step",  # as the next, layers without experts
    "mlp_only_layers",
    "pad_token_id",  # which counts in reward models alone
    "rope_parameters",  # null in it is a default
    "dtype",
}
"""Keys that a configuration may write with another value than it read."""


def make_config(family: Family = "qwen3", **changes: Any) -> ModelConfig:
    head_dim = 12 if family == "phi3" else 16  # transformers' check has no head_dim
    sizes = 64, 48, 40, 3, 4, 2, head_dim, 128, 1e-5, 1e6, False
    config = ModelConfig(family, *sizes, **delta_nets(family, 3))
    return replace(config, **({"experts": EXPERTS.get(family)} | changes))


def scalings(family: Family) -> list[RopeScaling | None]:
    """Those of the positions that a family can have."""
    known = [one for one in SCALINGS if one is None or one.rope_type in FAMILIES[family].rope_kinds]
    long = LongRopeScaling((1.5,) * 6, tuple(map(float, range(1, 7))), 32, 4.0)
    return [*known, long] if "longrope" in FAMILIES[family].rope_kinds else known


def partly_turned(family: Family) -> list[ModelConfig]:
    """Configurations with layers without rotary positions, where a family can have them."""
    if FAMILIES[family].default_no_rope_interval is None:
        return []
    return [make_config(family, no_rope_layers=layers) for layers in ((), (0, 2), (0, 1, 2))]


def multiplied(family: Family) -> list[ModelConfig]:
    """A configuration with other multipliers, where a family has them."""
    if "query_pre_attn_scalar" in FAMILIES[family].computes:
        return [make_config(family, multipliers=Multipliers(attention=168**-0.5))]
    if "attention_multiplier" not in FAMILIES[family].computes:
        return []
    return [make_config(family, multipliers=Multipliers(12.0, 0.03, 0.22, 16.0))]


def windowed(family: Family) -> list[ModelConfig]:
    """Configurations with the windows that a family can have."""
    windows = FAMILIES[family].windows
    every = [make_config(family, sliding_window=8)] if windows != "none" else []
    if windows == "layer types":
        every.append(make_config(family, sliding_window=8, windowless_layers=(0, 2)))
    if FAMILIES[family].default_window_theta is not None:
        every += [replace(one, window_rope_theta=2e4) for one in every]
    upper = [make_config(family, sliding_window=8, full_layers=2)]
    return every + (upper if windows == "upper layers" else [])


def written_by_transformers(config: ModelConfig, folder: Path) -> dict[str, Any]:
    """Our config.json, read and written again by transformers."""
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    AutoConfig.from_pretrained(folder, local_files_only=True).save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("family", NAMES)
def test_round_trip_here_and_through_transformers(family: Family, tmp_path: Path) -> None:
    is_partial = FAMILIES[family].partial_rotary
    configs = [make_config(family, rope_scaling=scaling) for scaling in scalings(family)]
    for config in [
        *configs,
        make_config(family, tied_embeddings=True),
        *windowed(family),
        *partly_turned(family),
        *multiplied(family),
        *([make_config(family, partial_rotary_factor=2 / 3)] if is_partial else []),
    ]:
        assert ModelConfig.from_hf(config.to_hf(), "ours") == config
        again = written_by_transformers(config, tmp_path)
        assert "rope_scaling" not in again, "transformers writes the newer notation alone"
        assert ModelConfig.from_hf(again, "theirs") == config


@pytest.mark.parametrize("family", NAMES)
def test_transformers_makes_the_model_that_is_meant(family: Family, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(make_config(family).to_hf()))
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert type(made).__name__ == FAMILIES[family].architecture
    traits = FAMILIES[family]  # of layer types a window that no layer has
    unused = traits.default_window if traits.windows == "layer types" else None
    assert getattr(made.config, "sliding_window", unused) == unused
    reward = FAMILIES[family].reward_architecture
    if reward is not None:
        config = make_config(family, score_head=True, pad_token_id=3)
        (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
        scorer = AutoModelForSequenceClassification.from_config(
            AutoConfig.from_pretrained(tmp_path)
        )
        assert type(scorer).__name__ == reward and scorer.score.weight.shape == (1, 48)
        assert ModelConfig.from_hf(config.to_hf(), "ours") == config


def read(family: Family = "qwen3", without: str | None = None, **changes: Any) -> ModelConfig:
    config = make_config(family).to_hf()
    config.pop(without or "", None)
    return ModelConfig.from_hf(config | changes, "config.json")


def test_keys_that_are_missing_are_what_transformers_takes() -> None:
    assert read("mistral", without="sliding_window").sliding_window == 4096
    assert read("mistral", sliding_window=None).sliding_window is None
    assert read("mixtral", without="sliding_window").sliding_window is None
    assert read("qwen3", without="head_dim").head_dim == 128
    assert read("llama", without="head_dim").head_dim == 12
    assert read("llama", num_key_value_heads=None).num_kv_heads == 4
    bare = make_config("mixtral").to_hf()
    for key in ("rope_theta", "rope_parameters"):
        del bare[key]
    assert ModelConfig.from_hf(bare, "config.json").rope_theta == 1e6
    assert read("smollm3", no_rope_layers=None).no_rope_layers == ()
    assert read("granite", without="attention_multiplier").multipliers == Multipliers(1.0, 1.0)
    of_types = read("olmo3", "layer_types", num_hidden_layers=9, sliding_window=7)
    assert (of_types.sliding_window, of_types.windowless_layers) == (7, (3, 7))
    of_types = read("gemma3_text", "layer_types", num_hidden_layers=9, sliding_window_pattern=2)
    assert (of_types.sliding_window, of_types.windowless_layers) == (4096, (1, 3, 5, 7))
    assert read("smollm3", num_hidden_layers=9, no_rope_layers=None).no_rope_layers == (3, 7)
    bare = make_config("gpt_oss", num_layers=4).to_hf()
    for key in ("rope_theta", "rope_parameters", "layer_types", "sliding_window", "head_dim",
                "attention_bias", "swiglu_limit", "swiglu_alpha"):  # fmt: skip
        del bare[key]
    read_bare = ModelConfig.from_hf(bare, "config.json")
    assert read_bare.rope_scaling == YarnScaling(32.0, 4096, truncate=False)
    assert (read_bare.rope_theta, read_bare.head_dim) == (1.5e5, 64)
    assert (read_bare.sliding_window, read_bare.windowless_layers) == (128, (1, 3))
    assert read_bare.other_rope_layers == ()


def test_experts_by_either_name_and_dense_layers_by_either_way() -> None:
    def experts(without: str | None = None, **changes: Any) -> Experts:
        found = read("qwen3_moe", without, **changes).experts
        assert found is not None
        return found

    renamed = experts("num_experts", num_local_experts=4)
    assert renamed == experts() == EXPERTS["qwen3_moe"]
    assert experts(mlp_only_layers=None, decoder_sparse_step=2).dense_layers == (0, 2)
    assert experts(mlp_only_layers=[1], decoder_sparse_step=3).dense_layers == (0, 1)
    assert experts("norm_topk_prob").renormalise is False
    config = make_config("qwen3_moe")
    assert [config.is_sparse(layer) for layer in range(3)] == [True, False, True]


def test_a_shape_from_scratch_knows_of_the_families_what_the_families_say() -> None:
    assert set(MIXTURES) == {name for name in NAMES if FAMILIES[name].experts is not None}
    assert set(WINDOWED) == {name for name in NAMES if FAMILIES[name].windows == "every layer"}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 1, "num_heads": 4}
    shape = ModelShape.model_validate(
        {**sizes, "family": "mixtral", "num_experts": 8, "sliding_window": 16}
    )
    config = decoder_of(shape, tokens=99)
    assert config.experts == Experts(8, 2, 96, renormalise=True) and config.window(0) == 16
    assert ModelConfig.from_hf(config.to_hf(), "config.json") == config
    assert set(SHARING) == {name for name in MIXTURES if has_shared_expert(name)}
    assert set(HYBRIDS) == {name for name in NAMES if FAMILIES[name].is_hybrid}
    for family in SHARING:
        own = {"family": family, "num_experts": 8, "moe_intermediate_size": 40}
        for given, width in ({}, 40), ({"shared_expert_intermediate_size": 24}, 24):
            config = decoder_of(ModelShape.model_validate({**sizes, **own, **given}), tokens=99)
            assert config.experts == Experts(8, 2, 40, renormalise=True, shared_size=width)
            assert ModelConfig.from_hf(config.to_hf(), "config.json") == config


def has_shared_expert(family: Family) -> bool:
    names = FAMILIES[family].experts
    return names is not None and names.shared_width is not None


@pytest.mark.parametrize("name", ["qwen3.5-35b-a3b", "qwen3-next-80b-a3b"])
def test_a_named_shape_is_the_default_of_transformers(name: str) -> None:
    """But for the context, theta and the width of MLPs that no layer has: transformers has other
    defaults.
    """
    config = model_shape(name)
    theirs = type(AutoConfig.for_model(config.family))().to_dict()
    theirs["architectures"] = [FAMILIES[config.family].architecture]
    read_theirs = ModelConfig.from_hf(theirs, "theirs")
    published = {"max_positions": 262_144, "rope_theta": 1e7}
    published["intermediate_size"] = 5120 if config.family == "qwen3_next" else 512
    assert replace(read_theirs, **published) == config


def test_qwen_windows_are_for_the_upper_layers() -> None:
    window: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8}
    window["max_window_layers"] = 2
    config = read("qwen2", **window)
    assert [config.window(layer) for layer in range(3)] == [None, None, 8]
    kinds = ["full_attention"] * 2 + ["sliding_attention"]
    assert read("qwen2", **window, layer_types=kinds) == config
    unused = read("qwen2", None, **(window | {"max_window_layers": 28}))
    assert unused == read("qwen2", None, **(window | {"use_sliding_window": False}))


PUBLISHED: dict[str, str] = {
    "llama-3.1-8b": """{"architectures": ["LlamaForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128001,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0", "use_cache": true, "vocab_size": 128256}""",
    "mistral-7b": """{"architectures": ["MistralForCausalLM"], "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.34.0.dev0", "use_cache": true, "vocab_size": 32000}""",
    "qwen2.5-0.5b": """{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu",
        "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
        "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2",
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true,
        "transformers_version": "4.40.1", "use_mrope": false, "use_sliding_window": false,
        "vocab_size": 151936}""",
    "qwen3-30b-a3b": """{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1,
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
        "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": true,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false,
        "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001, "sliding_window": null, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
        "use_sliding_window": false, "vocab_size": 151936}""",
    "smollm3-3b": """{"architectures": ["SmolLM3ForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "bos_token_id": null, "eos_token_id": 128012,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 11008, "layer_types": ["full_attention", "full_attention",
        "full_attention", "full_attention", "full_attention", "full_attention",
        "full_attention", "full_attention", "full_attention", "full_attention",
        "full_attention", "full_attention", "full_attention", "full_attention",
        "full_attention", "full_attention", "full_attention", "full_attention",
        "full_attention", "full_attention", "full_attention", "full_attention",
        "full_attention", "full_attention", "full_attention", "full_attention",
        "full_attention", "full_attention", "full_attention", "full_attention",
        "full_attention", "full_attention", "full_attention", "full_attention",
        "full_attention", "full_attention"],
        "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": false,
        "model_type": "smollm3", "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0, 1,
        1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1,
        1, 0], "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4,
        "pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": null,
        "rope_theta": 5000000.0, "sliding_window": null, "torch_dtype": "bfloat16",
        "transformers_version": "4.54.0.dev0", "use_cache": false, "use_sliding_window": false,
        "vocab_size": 128256}""",
    "granite-3.3-2b": """{"architectures": ["GraniteForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "attention_multiplier": 0.015625, "bos_token_id": 0,
        "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
        "logits_scaling": 8.0, "max_position_embeddings": 131072, "mlp_bias": false,
        "model_type": "granite", "num_attention_heads": 32, "num_hidden_layers": 40,
        "num_key_value_heads": 8, "pad_token_id": 0, "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000000.0,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "transformers_version": "4.49.0", "use_cache": true, "vocab_size": 49159}""",
    "phi-4-mini": """{"architectures": ["Phi3ForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "bos_token_id": 199999, "embd_pdrop": 0.0,
        "eos_token_id": 199999, "full_attn_mod": 1, "hidden_act": "silu", "hidden_size": 3072,
        "initializer_range": 0.02, "intermediate_size": 8192, "interpolate_factor": 1,
        "lm_head_bias": false, "max_position_embeddings": 131072, "mlp_bias": false,
        "model_type": "phi3", "num_attention_heads": 24, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "original_max_position_embeddings": 4096,
        "pad_token_id": 199999, "partial_rotary_factor": 0.75, "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05, "rope_scaling": {"long_factor":
        [1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817,
        2.187582649, 2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687,
        4.279200023, 4.785517845, 5.351743533, 5.984965424, 6.693110555, 7.485043894,
        8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215,
        18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13,
        32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16,
        47.77], "short_factor": [
        1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0,
        1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0,
        1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        "type": "longrope"},
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": true,
        "torch_dtype": "bfloat16", "transformers_version": "4.45.0", "use_cache": true,
        "vocab_size": 200064}""",
    "olmo2-1b": """{"architectures": ["Olmo2ForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "bos_token_id": 100257, "eos_token_id": 100257,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "olmo2",
        "num_attention_heads": 16, "num_hidden_layers": 16, "num_key_value_heads": 16,
        "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": null,
        "rope_theta": 500000, "tie_word_embeddings": false, "torch_dtype": "float32",
        "transformers_version": "4.47.0", "use_cache": true, "vocab_size": 100352}""",
    "olmo3-7b": """{"architectures": ["Olmo3ForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "bos_token_id": 100257, "dtype": "bfloat16",
        "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 11008, "layer_types":
        ["sliding_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention"],
        "max_position_embeddings": 65536, "model_type": "olmo3", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277,
        "rms_norm_eps": 1e-06, "rope_scaling": {"attention_factor": 1.2079441541679836,
        "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn"}, "rope_theta": 500000,
        "sliding_window": 4096, "tie_word_embeddings": false, "transformers_version": "4.57.0",
        "use_cache": true, "vocab_size": 100278}""",
    "gemma-3-1b": """{"architectures": ["Gemma3ForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "attn_logit_softcapping": null, "bos_token_id": 2,
        "cache_implementation": "hybrid", "eos_token_id": [1, 106],
        "final_logit_softcapping": null, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
        "initializer_range": 0.02, "intermediate_size": 6912,
        "max_position_embeddings": 32768, "model_type": "gemma3_text",
        "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000, "rope_scaling": null, "rope_theta": 1000000,
        "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0", "use_cache": true, "vocab_size": 262144}""",
    "gemma-3-4b": """{"architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999, "eoi_token_index": 256000, "eos_token_id": [1, 106],
        "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "model_type": "gemma3", "text_config": {"hidden_size": 2560,
        "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
        "model_type": "siglip_vision_model", "num_attention_heads": 16,
        "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": false}}""",
    "qwen3.5-9b": """{"architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 248056, "model_type": "qwen3_5", "text_config": {
        "attention_bias": false, "attention_dropout": 0.0, "attn_output_gate": true,
        "dtype": "bfloat16", "eos_token_id": 248044, "full_attention_interval": 4,
        "head_dim": 256, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 12288,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_value_head_dim": 128, "max_position_embeddings": 262144,
        "mlp_only_layers": [], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
        "num_attention_heads": 16, "num_hidden_layers": 32, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06, "rope_parameters": {"mrope_interleaved": true,
        "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_type": "default"}, "tie_word_embeddings": false,
        "use_cache": true, "vocab_size": 248320}, "tie_word_embeddings": false,
        "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5"},
        "vision_start_token_id": 248053}""",
    "qwen3.5-35b-a3b": """{"architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "image_token_id": 248056, "model_type": "qwen3_5_moe", "text_config": {
        "attention_bias": false, "attention_dropout": 0.0, "attn_output_gate": true,
        "bos_token_id": 248044, "dtype": "bfloat16", "eos_token_id": 248044,
        "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "layer_types": ["linear_attention",
        "linear_attention", "linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
        "mlp_only_layers": [], "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": false, "num_attention_heads": 16,
        "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40,
        "num_key_value_heads": 2, "output_router_logits": false, "pad_token_id": null,
        "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_parameters": {
        "mrope_interleaved": true, "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": false, "use_cache": true, "vocab_size": 248320},
        "tie_word_embeddings": false, "video_token_id": 248057, "vision_config": {
        "deepstack_visual_indexes": [], "depth": 27, "hidden_size": 1152,
        "intermediate_size": 4304, "model_type": "qwen3_5_moe", "num_heads": 16,
        "out_hidden_size": 2048, "patch_size": 16}, "vision_end_token_id": 248054,
        "vision_start_token_id": 248053}""",
    "qwen3-next-80b-a3b": """{"architectures": ["Qwen3NextForCausalLM"],
        "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 151643,
        "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4,
        "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 5120, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "max_position_embeddings": 262144, "mlp_only_layers": [],
        "model_type": "qwen3_next", "moe_intermediate_size": 512, "norm_topk_prob": true,
        "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10,
        "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": false,
        "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": null,
        "rope_theta": 10000000, "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "transformers_version": "4.57.0.dev0", "use_cache": true,
        "use_sliding_window": false, "vocab_size": 151936}""",
    "mixtral-8x7b": """{"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0,
        "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "output_router_logits": false, "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": null,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0", "use_cache": true, "vocab_size": 32000}""",
    "gpt-oss-20b": """{"architectures": ["GptOssForCausalLM"], "attention_bias": true,
        "attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4,
        "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
        "layer_types":
        ["sliding_attention",
        "full_attention"],
        "max_position_embeddings": 131072, "model_type": "gpt_oss",
        "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": false,
        "pad_token_id": 199999, "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0,
        "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": false}, "rope_theta": 150000,
        "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": false, "transformers_version": "4.55.0.dev0",
        "use_cache": true, "vocab_size": 201088}""",
}
"""As the makers of these checkpoints wrote them.

The files of Qwen3.5-35B-A3B and Qwen3-Next were not at hand. Layers, heads, widths, experts and the
vocabulary are those of their model cards; contexts, thetas and Qwen3-Next's intermediate_size those
of slime's scripts and Megatron's configuration; the keys of Qwen3.5 those of Qwen3.6-35B-A3B, which
is the same model. initializer_range, dropout and router_aux_loss_coef are transformers' defaults.
"""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_the_shapes_of_that_name(name: str) -> None:
    config = json.loads(PUBLISHED[name])
    decoder = config.get("text_config", config)
    if "layer_types" in decoder:  # the first of them
        decoder["layer_types"] *= decoder["num_hidden_layers"] // len(decoder["layer_types"])
    assert ModelConfig.from_hf(config, name) == model_shape(name)


def test_what_is_harmless_is_ignored() -> None:
    """Keys of real folders."""
    harmless = {
        "_name_or_path": "x", "attention_dropout": 0.0, "auto_map": {}, "bos_token_id": 1,
        "eos_token_id": [1, 2], "initializer_range": 0.02, "is_llama_config": True,
        "output_router_logits": False, "pretraining_tp": 1, "rope_interleaved": False,
        "router_aux_loss_coef": 0.001, "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {}}, "use_cache": True, "n_group": 1,
        "logits_scaling": 1.0, "final_logit_softcapping": None,
        "shared_expert_intermediate_size": 0,
    }  # fmt: skip
    assert read("llama", **harmless) == make_config("llama")


WINDOWED_TYPES: dict[str, Any] = {"layer_types": ["sliding_attention"] * 3}
TYPES: dict[str, Any] = {
    "full_attention": {"rope_type": "default"},
    "sliding_attention": {"rope_type": "linear", "factor": 2},
}
LOCAL: dict[str, Any] = {"rope_local_base_freq": 10000, "sliding_window": 8} | WINDOWED_TYPES
THETAS: dict[str, Any] = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
}
LONG: dict[str, Any] = {"type": "longrope", "short_factor": [1] * 6, "long_factor": [1.0]}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"architectures": ["\x1b[2JForCausalLM"]}, r"architectures = \['\\x1b"),
        ("llama", {"architectures": []}, "supported are LlamaForCausalLM"),
        ("llama", {"architectures": {"a": 1}}, "expected a list of str"),
        ("llama", {"architectures": ["LlamaForCausalLM", "x"]}, "supported are LlamaForCausalLM"),
        ("llama", {"model_type": "mistral"}, "model_type = 'mistral'.* expected 'llama'"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; expected 'silu'"),
        ("llama", {"attention_bias": True}, "attention_bias = True"),
        ("mistral", {"mlp_bias": True}, "mlp_bias = True"),
        ("llama", {"sliding_window": 8}, "sliding_window = 8"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, "max_window_layers.*missing"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "layer_types = .*say otherwise"),
        ("mistral", {"sliding_window": 0}, "sliding_window = 0 .*from 1 to"),
        ("llama", {"num_hidden_layers": 10**6}, "num_hidden_layers = 1000000 .*from 1 to 1,000"),
        ("llama", {"vocab_size": 10**30}, "vocab_size = 10+ .*expected a whole number from 1 to"),
        ("llama", {"hidden_size": True}, "hidden_size = True"),
        ("llama", {"hidden_size": "48"}, "hidden_size = '48' .*expected a whole number"),
        ("llama", {"hidden_size": 48.0}, "hidden_size = 48.0"),
        ("llama", {"hidden_size": {"a": [[]]}}, "hidden_size = {"),
        ("llama", {"hidden_size": None}, "the key 'hidden_size' is missing"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads = 0"),
        ("llama", {"num_attention_heads": 3}, "3 query heads cannot share 2 KV heads"),
        ("llama", {"head_dim": 15}, "head size 15"),
        ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps = nan .*expected a number"),
        ("llama", {"rms_norm_eps": -1e-6}, "rms_norm_eps = -1e-06"),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings = 1 .*true or false"),
        ("llama", {"max_position_embeddings": -5}, "max_position_embeddings = -5"),
        ("qwen3_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok = 5 .*from 1 to 4"),
        ("qwen3_moe", {"num_experts": 10**9}, "num_experts = 1000000000"),
        ("qwen3_moe", {"num_local_experts": 8}, "num_local_experts = 8 .*num_experts is 4"),
        ("qwen3_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers = .*a list of int"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ("llama", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers = "),
        ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers = \[1, 0\] .*each of 3 layers"),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, "no_rope_layers = .*expected a 0 or 1"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "_interval = 0"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("phi3", {"rope_scaling": LONG}, "long_factor = .*expected a list of 6 numbers"),
        ("phi3", {"rope_scaling": LONG | {"short_factor": [0] * 6}}, "short_factor = 0 .*a number"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2}}, "supported are default, long"),
        ("phi3", {"partial_rotary_factor": 0.3}, "0.3 .*3 of 12 elements; expected an even"),
        ("olmo2", {"sliding_window": 8}, "sliding_window = 8"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ("olmo3", {"layer_types": ["full_attention"]}, "layer_types = .* for each of 3"),
        ("olmo3", WINDOWED_TYPES | {"sliding_window": None}, "sliding_window = None .*have one"),
        ("olmo3", {"rope_parameters": TYPES}, "sliding_attention = .*default kind, of theta 1e"),
        ("olmo3", {"rope_parameters": TYPES | {"x": 1}}, "rope_parameters.x = 1 .*alone"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu' .*_tanh'"),
        ("gemma3_text", {"hidden_act": "silu"}, "hidden_act = 'silu' .*expected 'gelu_pytorch_ta"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention = T"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("gemma3_text", {"query_pre_attn_scalar": 0.5}, "query_pre_attn_scalar = 0.5"),
        ("gemma3_text", LOCAL | {"rope_parameters": THETAS}, "rope_theta = 7.*_base_freq is 10000"),
        ("gemma3_text", {"rope_parameters": TYPES}, "sliding_attention = .*default kind, with"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters = .*full_att"),
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 3}, "expected full_attention for"),
        (
            "qwen3_5_text",
            {"layer_types": ["full_attention"]},
            "expected linear_at.* of 3",
        ),
        ("qwen3_5_text", {"linear_num_value_heads": 3}, "value_heads = 3 .*a multiple of 2"),
        ("qwen3_5_text", {"linear_key_head_dim": 512}, "linear_key_head_dim = 512"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim = 1"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate = False"),
        ("qwen3_5_text", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_s"),
        (
            "qwen3_next",
            {"shared_expert_intermediate_size": 0},
            "shared_expert_intermediate_size = 0",
        ),
        ("qwen3_next", {"shared_expert_intermediate_size": None}, "_intermediate_size' is missing"),
        ("qwen3_next", {"num_shared_experts": 2}, "num_shared_experts = 2"),
        ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob = False .*expected True"),
        ("qwen3_5_moe_text", {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\] .*expected \[\]"),
        ("mixtral", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2 .*expected 1"),
        ("qwen3", {"rope_parameters": {"mrope_section": [1]}}, "mrope_section = .*known are"),
        ("llama", LOCAL, "rope_local_base_freq = 10000"),
        ("llama", {"architectures": ["Gemma4ForConditionalGeneration"]}, "'Gemma4.*supported are"),
        ("llama", {"architectures": ["Llama4ForConditionalGeneration"]}, "'Llama4.*supported are"),
        ("llama", {"architectures": ["DeepseekV3ForCausalLM"]}, "'DeepseekV3.*supported are"),
        ("llama", {"kv_lora_rank": 512}, "kv_lora_rank = 512"),
        ("granite", {"sliding_window": 8}, "sliding_window = 8"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier = 0 .*a number from 1e-06"),
        ("granite", {"attention_bias": True}, "attention_bias = True"),
        ("granite", {"shared_intermediate_size": 64}, "shared_intermediate_size = 64"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias = False"),
        ("gpt_oss", {"swiglu_limit": 10.0}, "swiglu_limit = 10.0 .*expected 7"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha = 1.0 .*expected 1.702"),
        ("gpt_oss", {"experts_per_token": 4}, "experts_per_token = 4 .*num_experts_per_tok is 2"),
        ("gpt_oss", {"rope_scaling": {"rope_type": "longrope"}}, "rope_type = 'longrope'"),
        ("gpt_oss", WINDOWED_TYPES | {"sliding_window": None}, "sliding_window = None .*have one"),
        ("mixtral", {"swiglu_limit": 7.0}, "swiglu_limit = 7.0"),
        ("qwen3_moe", {"swiglu_alpha": 1.702}, "swiglu_alpha = 1.702"),
        ("llama", {"residual_multiplier": 0.22}, "residual_multiplier = 0.22"),
        ("llama", {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar = 256"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(
    family: Family, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=f"^config.json: .*{message}") as refusal:
        read(family, **changes)
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 600


def random_value(chance: random.Random, value: Any) -> Any:
    """Another value in the place of one: of another kind, size or sign, or a mutation of it."""
    if isinstance(value, dict) and value and chance.random() < 0.7:
        key = chance.choice(list(value))
        return value | {key: random_value(chance, value[key])}
    if isinstance(value, int | float) and chance.random() < 0.5:
        return chance.choice([-value, value + 1, value * 2, value * 10**6, float(value), value / 7])
    nested: Any = 1
    for _ in range(chance.choice([1, 60])):
        nested = chance.choice([[nested], {"a": nested}])
    numbers = [0, -1, 1, 2, 7, 10**6, 10**30, -(10**30), 1e308, 1e-308, math.nan, math.inf]
    return chance.choice([None, True, False, *numbers, "", "7", "\ud800\x1b[31m", [], {}, nested])


def mutated(chance: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    config = dict(config)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        action = chance.random()
        if action < 0.1:
            config.pop(chance.choice(list(config)))
        elif action < 0.25:
            config[chance.choice(list(FEATURES))] = random_value(chance, 1.0)
        elif action < 0.3:
            config[chance.choice(["", "\x1b", "rope_scaling", "x" * 5000])] = random_value(
                chance, 2
            )
        else:
            key = chance.choice(list(config))
            config[key] = random_value(chance, config[key])
    return config


def read_config(config: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_hf(config, "config.json")


def test_no_mutation_gives_a_traceback_or_another_shape_in_silence() -> None:
    """300 mutated files: each is refused by a ModelError, or is a configuration whose file says
    what the mutated one says of every number that both have.
    """
    chance, outcomes = random.Random(7), Outcomes("config.json")
    for index in range(COUNT):
        family = NAMES[index % len(NAMES)]
        known = scalings(family)
        written = make_config(family, rope_scaling=known[index % len(known)]).to_hf()
        config = mutated(chance, written)
        if outcomes.refuses(lambda config=config: read_config(config), ModelError):
            continue
        read = read_config(config)
        again = read.to_hf()
        by_type = FAMILIES[family].windows == "layer types" and read.sliding_window is None
        unread = {"sliding_window", "rope_local_base_freq"} if by_type else set[str]()
        for key in set(again) & set(config) - SAID_OTHERWISE - unread:
            given, known = config[key], again[key]
            if isinstance(given, dict) and isinstance(known, dict):  # null in it is a default
                given = {k: known.get(k) if one is None else one for k, one in given.items()}
            assert given in (known, None, {}), (key, given, known)
    outcomes.check(1 / 2)


PARAMETERS = {
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-8b": 8_190_735_360,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512, "qwen3-32b": 32_762_123_264, "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120, "llama-3.2-1b": 1_235_814_400, "llama-3.1-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096, "qwen3-30b-a3b": 30_532_122_624, "mixtral-8x7b": 46_702_792_704,
    "smollm3-3b": 3_075_098_624, "granite-3.3-2b": 2_533_539_840,
    "olmo2-1b": 1_484_916_736, "olmo3-7b": 7_298_011_136,
    "qwen3.5-9b": 8_953_803_264,  # as transformers counts it, without its vision tower
    "qwen3.5-35b-a3b": 34_660_610_688, "qwen3-next-80b-a3b": 79_674_391_296,  # the same
    "gemma-3-1b": 999_885_952, "gemma-3-4b": 3_880_263_168,  # without its vision tower
    "phi-4-mini": 3_836_021_760, "qwen2.5-32b": 32_763_876_352,
    "llama-3.1-70b": 70_553_706_496,
    "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672,
    "moe-2.7b": 2_715_883_520,  # of no checkpoint
}  # fmt: skip
"""As Hugging Face counts those checkpoints."""


@pytest.mark.parametrize("name", SHAPES)
def test_has_as_many_parameters_as_the_checkpoint(name: str):
    config = model_shape(name)
    shapes = master_shapes(config).values()
    assert sum(math.prod(shape) for shape in shapes) == PARAMETERS[name]
    assert ModelConfig.from_hf(config.to_hf(), name) == config


def test_a_family_without_reward_models_is_refused_as_one() -> None:
    for family in ("granite", "mixtral"):
        with pytest.raises(ModelError, match=f"a {family} model cannot give scores"):
            make_config(family, score_head=True)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'qwen9' is not known; known are smollm2-135m"):
        model_shape("qwen9")
