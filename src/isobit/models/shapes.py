"""The shapes of real models by name, for checks and benchmarks with random weights."""

from dataclasses import replace
from typing import Any

from isobit.kernels.operands import DeltaShape
from isobit.models.config import ModelConfig
from isobit.models.family_keys import Experts, Multipliers, every_layer
from isobit.models.rope import LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling
from isobit.util.errors import ConfigError


def _qwen3(hidden: int, mlp: int, layers: int, heads: int, tied: bool = False) -> ModelConfig:
    return ModelConfig(
        family="qwen3",
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        max_positions=40960,
        rms_epsilon=1e-6,
        rope_theta=1e6,
        tied_embeddings=tied,
    )


def _gpt_oss(layers: int, experts: int) -> ModelConfig:
    return ModelConfig(
        *("gpt_oss", 201088, 2880, 2880, layers, 64, 8, 64, 131072, 1e-5, 1.5e5),
        tied_embeddings=False,
        rope_scaling=YarnScaling(32.0, 4096, truncate=False),
        sliding_window=128,
        windowless_layers=every_layer(2, layers),
        experts=Experts(experts, 4, 2880, renormalise=True),
    )


def _delta_nets(layers: int) -> dict[str, Any]:
    of_them = tuple(layer for layer in range(layers) if (layer + 1) % 4)
    return {"delta": DeltaShape(16, 32, 128, 128, 4), "delta_layers": of_them}


_LLAMA3_SCALING = Llama3Scaling(8.0, 1.0, 4.0, 8192)

_PHI4_LONG_FACTOR = (
    1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649,
    2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845,
    5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158,
    11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105,
    25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71,
    32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
)  # fmt: skip

SHAPES: dict[str, ModelConfig] = {
    "smollm2-135m": ModelConfig(
        "llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, 1e5, tied_embeddings=True
    ),
    "smollm2-360m": ModelConfig(
        "llama", 49152, 960, 2560, 32, 15, 5, 64, 8192, 1e-5, 1e5, tied_embeddings=True
    ),
    "qwen3-0.6b": _qwen3(hidden=1024, mlp=3072, layers=28, heads=16, tied=True),
    "qwen3-1.7b": _qwen3(hidden=2048, mlp=6144, layers=28, heads=16, tied=True),
    "qwen3-8b": _qwen3(hidden=4096, mlp=12288, layers=36, heads=32),
    "qwen2.5-0.5b": ModelConfig(
        "qwen2", 151936, 896, 4864, 24, 14, 2, 64, 32768, 1e-6, 1e6, tied_embeddings=True
    ),
    "qwen2.5-7b": ModelConfig(
        "qwen2", 152064, 3584, 18944, 28, 28, 4, 128, 32768, 1e-6, 1e6, tied_embeddings=False
    ),
    "qwen2.5-32b": ModelConfig(
        *("qwen2", 152064, 5120, 27648, 64, 40, 8, 128, 131072, 1e-5, 1e6), tied_embeddings=False
    ),
    "qwen3-32b": _qwen3(hidden=5120, mlp=25600, layers=64, heads=64),
    "llama-3.2-1b": ModelConfig(
        *("llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5, 5e5),
        tied_embeddings=True,
        rope_scaling=replace(_LLAMA3_SCALING, factor=32.0),
    ),
    "llama-3.1-8b": ModelConfig(
        *("llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5, 5e5),
        tied_embeddings=False,
        rope_scaling=_LLAMA3_SCALING,
    ),
    "llama-3.1-70b": ModelConfig(
        *("llama", 128256, 8192, 28672, 80, 64, 8, 128, 131072, 1e-5, 5e5),
        tied_embeddings=False,
        rope_scaling=_LLAMA3_SCALING,
    ),
    "mistral-7b": ModelConfig(
        *("mistral", 32000, 4096, 14336, 32, 32, 8, 128, 32768, 1e-5, 1e4),
        tied_embeddings=False,
        sliding_window=4096,
    ),
    "smollm3-3b": ModelConfig(
        *("smollm3", 128256, 2048, 11008, 36, 16, 4, 128, 65536, 1e-6, 5e6),
        tied_embeddings=True,
        no_rope_layers=every_layer(4, 36),
    ),
    "granite-3.3-2b": ModelConfig(
        *("granite", 49159, 2048, 8192, 40, 32, 8, 64, 131072, 1e-5, 1e7),
        tied_embeddings=True,
        multipliers=Multipliers(12.0, 0.015625, 0.22, 8.0),
    ),
    "phi-4-mini": ModelConfig(
        *("phi3", 200064, 3072, 8192, 32, 24, 8, 128, 131072, 1e-5, 1e4),
        tied_embeddings=True,
        rope_scaling=LongRopeScaling((1.0,) * 48, _PHI4_LONG_FACTOR, 4096, 32.0),
        partial_rotary_factor=0.75,
        sliding_window=262144,
    ),
    "olmo2-1b": ModelConfig(
        *("olmo2", 100352, 2048, 8192, 16, 16, 16, 128, 4096, 1e-6, 5e5), tied_embeddings=False
    ),
    "olmo3-7b": ModelConfig(
        *("olmo3", 100278, 4096, 11008, 32, 32, 32, 128, 65536, 1e-6, 5e5),
        tied_embeddings=False,
        rope_scaling=YarnScaling(8.0, 8192, attention_factor=1.2079441541679836),
        sliding_window=4096,
        windowless_layers=every_layer(4, 32),
    ),
    "gemma-3-1b": ModelConfig(
        *("gemma3_text", 262144, 1152, 6912, 26, 4, 1, 256, 32768, 1e-6, 1e6),
        tied_embeddings=True,
        sliding_window=512,
        windowless_layers=every_layer(6, 26),
        window_rope_theta=1e4,
    ),
    "gemma-3-4b": ModelConfig(
        *("gemma3_text", 262208, 2560, 10240, 34, 8, 4, 256, 131072, 1e-6, 1e6),
        tied_embeddings=True,
        rope_scaling=LinearScaling(8.0),
        sliding_window=1024,
        windowless_layers=every_layer(6, 34),
        window_rope_theta=1e4,
    ),
    "qwen3.5-9b": ModelConfig(
        *("qwen3_5_text", 248320, 4096, 12288, 32, 16, 4, 256, 262144, 1e-6, 1e7),
        tied_embeddings=False,
        partial_rotary_factor=0.25,
        **_delta_nets(32),
    ),
    "qwen3.5-35b-a3b": ModelConfig(
        *("qwen3_5_moe_text", 248320, 2048, 512, 40, 16, 2, 256, 262144, 1e-6, 1e7),
        tied_embeddings=False,
        partial_rotary_factor=0.25,
        experts=Experts(256, 8, 512, renormalise=True, shared_size=512),
        **_delta_nets(40),
    ),
    "qwen3-next-80b-a3b": ModelConfig(
        *("qwen3_next", 151936, 2048, 5120, 48, 16, 2, 256, 262144, 1e-6, 1e7),
        tied_embeddings=False,
        partial_rotary_factor=0.25,
        experts=Experts(512, 10, 512, renormalise=True, shared_size=512),
        **_delta_nets(48),
    ),
    "qwen3-30b-a3b": ModelConfig(
        *("qwen3_moe", 151936, 2048, 6144, 48, 32, 4, 128, 40960, 1e-6, 1e6),
        tied_embeddings=False,
        experts=Experts(128, 8, 768, renormalise=True),
    ),
    "mixtral-8x7b": ModelConfig(
        *("mixtral", 32000, 4096, 14336, 32, 32, 8, 128, 32768, 1e-5, 1e6),
        tied_embeddings=False,
        experts=Experts(8, 2, 14336, renormalise=True),
    ),
    "gpt-oss-20b": _gpt_oss(layers=24, experts=32),
    "gpt-oss-120b": _gpt_oss(layers=36, experts=128),
    # Of no checkpoint: experts of Qwen3-30B-A3B, few enough of them to train on one card.
    "moe-2.7b": ModelConfig(
        *("qwen3_moe", 32000, 2048, 6144, 16, 16, 4, 128, 40960, 1e-6, 1e6),
        tied_embeddings=False,
        experts=Experts(32, 4, 768, renormalise=True),
    ),
}


def model_shape(name: str) -> ModelConfig:
    """The configuration of a named shape. Raises ConfigError with the known names."""
    if name not in SHAPES:
        raise ConfigError(f"the shape {name!r} is not known; known are {', '.join(SHAPES)}")
    return SHAPES[name]
