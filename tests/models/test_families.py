"""Stretched rotary positions are those of transformers, in both notations of a config.json."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.models.config import ModelConfig, inverse_frequencies
from isobit.models.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from isobit.util.errors import ModelError
from tests.suites import examples

HIDDEN, POSITIONS = 64, 4096
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip


def read(**changes: Any) -> ModelConfig:
    """A config.json without rotary keys, and ``changes``."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32,
        "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": POSITIONS, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    return ModelConfig.from_hf(config | changes, "config.json")


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Any]:
    """A ``rope_scaling`` with everything that may be left out there or not."""
    kind = draw(st.sampled_from(["linear", "llama3", "yarn"]))
    factors = st.sampled_from([1.0, 1.5, 4, 32.0])
    table: dict[str, Any] = {"rope_type": kind, "factor": draw(factors)}
    if kind == "llama3":
        low = draw(st.sampled_from([0.5, 1, 2.0]))
        return table | {
            "low_freq_factor": low,
            "high_freq_factor": low * draw(st.sampled_from([1.5, 4])),
            "original_max_position_embeddings": draw(st.sampled_from([64, 1024])),
        }
    if kind == "yarn":
        options: dict[str, st.SearchStrategy[Any]] = {
            "original_max_position_embeddings": st.sampled_from([16, 100, 2048]),
            "attention_factor": st.sampled_from([None, 0.7, 1.3]),
            "beta_fast": st.sampled_from([None, 0, 8, 32.0, 50.0]),
            "beta_slow": st.sampled_from([None, 0, 0.5, 1, 4.0]),
            "mscale": st.sampled_from([None, 0.0, 0.8, 1.0]),
            "mscale_all_dim": st.sampled_from([0.0, 0.5, 1.0]),
            "truncate": st.booleans(),
        }
        for key, values in options.items():
            if draw(st.booleans()):
                table[key] = draw(values)
    return table


@settings(max_examples=examples(100), deadline=None)
@given(tables(), st.sampled_from([1e4, 5e5]), st.sampled_from([8, 64, 128]))
def test_frequencies_and_attention_factor_are_those_of_transformers(
    table: dict[str, Any], theta: float, head_dim: int
) -> None:
    from transformers import LlamaConfig  # here: it takes 2 s of each worker
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    hf = LlamaConfig(
        hidden_size=HIDDEN,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=POSITIONS,
        rope_parameters=table | {"rope_theta": theta},
    )
    expected, scaling = ROPE_INIT_FUNCTIONS[table["rope_type"]](hf, torch.device("cpu"))
    ours = read(rope_scaling=table, rope_theta=theta, head_dim=head_dim)
    torch.testing.assert_close(
        inverse_frequencies(ours), expected.double(), rtol=1e-5, atol=0
    )  # theirs are FP32
    assert ours.attention_scaling == pytest.approx(scaling, rel=1e-12)
    newer = read(rope_parameters=table | {"rope_theta": theta}, head_dim=head_dim)
    assert newer == ours == ModelConfig.from_hf(ours.to_hf(), "config.json")


@pytest.mark.parametrize(
    ("scaling", "written"),
    [
        (LinearScaling(2.0), {"rope_type": "linear", "factor": 2.0}),
        (Llama3Scaling(8.0, 1.0, 4.0, 512), LLAMA3),
        (
            YarnScaling(4.0, 1024),
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
            | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True},
        ),
    ],
)
def test_it_is_written_for_readers_of_either_time(
    scaling: RopeScaling, written: dict[str, Any]
) -> None:
    written_by_us = read(rope_scaling=written, rope_theta=5e5).to_hf()
    assert written_by_us["rope_scaling"] == written
    assert written_by_us["rope_theta"] == 5e5
    assert written_by_us["rope_parameters"] == written | {"rope_theta": 5e5}
    assert read(rope_scaling=written).rope_scaling == scaling


def test_what_is_not_written_is_what_transformers_takes() -> None:
    assert read().rope_theta == 1e4 and read().rope_scaling is None
    assert read(rope_scaling=None, rope_parameters={}) == read(rope_scaling={"type": "default"})
    assert read(rope_scaling={"type": "linear", "factor": 2}).rope_scaling == LinearScaling(2.0)
    yarn = {"rope_type": "yarn", "factor": 2.0}
    assert read(rope_scaling=yarn).rope_scaling == YarnScaling(2.0, POSITIONS)
    beside = read(rope_scaling=yarn, original_max_position_embeddings=64)
    assert beside.rope_scaling == YarnScaling(2.0, 64)
    by_ratio = read(rope_scaling=yarn | {"factor": None}, original_max_position_embeddings=1024)
    assert by_ratio.rope_scaling == YarnScaling(4.0, 1024)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type = 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type = 'longrope'"),
        ({"rope_scaling": {"rope_type": "su"}}, "supported are default, linear, llama3, yarn"),
        ({"rope_scaling": {"rope_type": 3}}, "rope_type = 3 .*expected a string"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'rope_scaling.factor' is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "expected a number from 1 to"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "type = 'linear'.*'yarn'"),
        ({"rope_scaling": [1]}, r"rope_scaling = \[1\] is not supported; expected an object"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "more than low_freq_factor, 1"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 0}}, "low_freq_factor = 0"),
        ({"rope_scaling": LLAMA3 | {"factor": float("nan")}}, "factor = nan"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_slow": 40}}, "at most beta_fast, 32"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "truncate": 1}}, "truncate = 1"),
        ({"rope_scaling": {"full_attention": {}, "rope_type": "default"}}, "full_attention = {}"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}}, "something else"),
        ({"rope_parameters": {"rope_theta": 2e4}, "rope_theta": 1e4}, "own rope_theta is 10000"),
        ({"rope_theta": 1}, "rope_theta = 1 .*expected a number from 1.01"),
        ({"rope_theta": 10**30}, "expected a number from"),
        ({"rope_theta": "10000"}, "rope_theta = '10000'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor = 0.25"),
        (
            {"rope_scaling": LLAMA3, "original_max_position_embeddings": 64},
            "original_max_position_embeddings = 512.*is 64",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"config.json: .*{message}"):
        read(**changes)
