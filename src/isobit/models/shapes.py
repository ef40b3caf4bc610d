"""Shapes of real models by name, for checks and benchmarks with random weights: the values of their
``config.json``.
"""

from dataclasses import replace

from isobit.errors import ConfigError
from isobit.models.config import Experts, ModelConfig
from isobit.models.rope_scaling import Llama3Scaling


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


_LLAMA3_SCALING = Llama3Scaling(8.0, 1.0, 4.0, 8192)

SHAPES: dict[str, ModelConfig] = {
    "smollm2-135m": ModelConfig(
        "llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, 1e5, tied_embeddings=True
    ),
    "smollm2-360m": ModelConfig(
        "llama", 49152, 960, 2560, 32, 15, 5, 64, 8192, 1e-5, 1e5, tied_embeddings=True
    ),
    "qwen3-0.6b": _qwen3(hidden=1024, mlp=3072, layers=28, heads=16, tied=True),
    "qwen3-8b": _qwen3(hidden=4096, mlp=12288, layers=36, heads=32),
    "qwen2.5-0.5b": ModelConfig(
        "qwen2", 151936, 896, 4864, 24, 14, 2, 64, 32768, 1e-6, 1e6, tied_embeddings=True
    ),
    "qwen2.5-7b": ModelConfig(
        "qwen2", 152064, 3584, 18944, 28, 28, 4, 128, 32768, 1e-6, 1e6, tied_embeddings=False
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
    "mistral-7b": ModelConfig(
        *("mistral", 32000, 4096, 14336, 32, 32, 8, 128, 32768, 1e-5, 1e4),
        tied_embeddings=False,
        sliding_window=4096,
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
    # Of no checkpoint: experts of Qwen3-30B-A3B, few enough of them to train on one card.
    "moe-2.7b": ModelConfig(
        *("qwen3_moe", 32000, 2048, 6144, 16, 16, 4, 128, 40960, 1e-6, 1e6),
        tied_embeddings=False,
        experts=Experts(32, 4, 768, renormalise=True),
    ),
}


def model_shape(name: str) -> ModelConfig:
    """The configuration of a named shape; raises ConfigError with the names that are known."""
    if name not in SHAPES:
        raise ConfigError(f"the shape {name!r} is not known; known are {', '.join(SHAPES)}")
    return SHAPES[name]
