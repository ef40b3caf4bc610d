"""Shapes of real models by name, for checks and benchmarks with random weights: the values of their
``config.json``.
"""

from dataclasses import replace

from isobit.errors import ConfigError
from isobit.models.config import Experts, ModelConfig


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


SHAPES: dict[str, ModelConfig] = {
    "smollm2-135m": ModelConfig(
        "llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, 1e5, tied_embeddings=True
    ),
    "smollm2-360m": ModelConfig(
        "llama", 49152, 960, 2560, 32, 15, 5, 64, 8192, 1e-5, 1e5, tied_embeddings=True
    ),
    "qwen3-0.6b": _qwen3(hidden=1024, mlp=3072, layers=28, heads=16, tied=True),
    "qwen3-8b": _qwen3(hidden=4096, mlp=12288, layers=36, heads=32),
    "qwen2.5-7b": ModelConfig(
        "qwen2", 152064, 3584, 18944, 28, 28, 4, 128, 32768, 1e-6, 1e6, tied_embeddings=False
    ),
    "qwen3-32b": _qwen3(hidden=5120, mlp=25600, layers=64, heads=64),
    "qwen3-30b-a3b": replace(
        _qwen3(hidden=2048, mlp=6144, layers=48, heads=32),
        family="qwen3_moe",
        num_kv_heads=4,
        experts=Experts(128, 8, 768, renormalise=True),
    ),
    # Of no checkpoint: experts of Qwen3-30B-A3B, few enough of them to train on one card.
    "moe-2.7b": replace(
        _qwen3(hidden=2048, mlp=6144, layers=16, heads=16),
        family="qwen3_moe",
        num_kv_heads=4,
        vocab_size=32000,
        experts=Experts(32, 4, 768, renormalise=True),
    ),
}


def model_shape(name: str) -> ModelConfig:
    """The configuration of a named shape; raises ConfigError with the names that are known."""
    if name not in SHAPES:
        raise ConfigError(f"the shape {name!r} is not known; known are {', '.join(SHAPES)}")
    return SHAPES[name]
