import math

import pytest

from isobit.errors import ConfigError
from isobit.models.config import ModelConfig
from isobit.models.decoder import master_shapes
from isobit.models.shapes import SHAPES, model_shape

PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    "moe-2.7b": 2_715_883_520,  # of no checkpoint
}
"""As Hugging Face counts those checkpoints."""


@pytest.mark.parametrize("name", SHAPES)
def test_has_as_many_parameters_as_the_checkpoint(name: str):
    assert (
        sum(math.prod(shape) for shape in master_shapes(model_shape(name)).values())
        == PARAMETERS[name]
    )


@pytest.mark.parametrize("name", SHAPES)
def test_survives_a_config_json(name: str):
    assert ModelConfig.from_hf(model_shape(name).to_hf(), name) == model_shape(name)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(
        ConfigError,
        match=r"'qwen9' is not known; known are smollm2-135m, smollm2-360m, qwen3-0\.6b",
    ):
        model_shape("qwen9")
