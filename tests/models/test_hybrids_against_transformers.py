"""Hybrids in FP32 compute what transformers' own models compute, in more than 300 configurations:
logits, gradients, and greedy tokens of the engine, of all weights or with adapters.

tests/models/test_against_transformers.py has the tolerances, and what is drawn beside adapters:
layers of both kinds, heads, their sizes and how many values share a key, the width of the
convolution, how much of a head is turned, tied embeddings, experts with a shared one, or none.
"""

from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.config.lora import DELTA_TARGETS, LORA_TARGETS
from isobit.config.model_shape import Family
from isobit.models.config import Lora
from isobit.models.families import FAMILIES
from tests.models.test_against_transformers import (
    QUICK,
    check_engine,
    check_logits_and_gradients,
    configurations,
)
from tests.suites import examples

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

HYBRIDS: tuple[Family, ...] = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


@st.composite
def adapters(draw: st.DrawFn, hf_config: "PreTrainedConfig") -> Lora | None:
    """None for a half of the draws; on some of the linears that the model has, or all of them."""
    if draw(st.booleans()):
        return None
    family = cast(Family, hf_config.model_type)
    own = DELTA_TARGETS[4:6] if FAMILIES[family].joins_heads else DELTA_TARGETS[:4]
    mlp = LORA_TARGETS[4:] if FAMILIES[family].experts is None else ()
    having = *LORA_TARGETS[:4], *mlp, *own, DELTA_TARGETS[6]
    some = draw(st.sets(st.sampled_from(having), min_size=1))
    targets = draw(st.sampled_from([having, tuple(name for name in having if name in some)]))
    rank, alpha = draw(st.integers(1, 9)), draw(st.sampled_from([0.5, 4.0, 16.0]))
    return Lora(rank, alpha, targets, rslora=draw(st.booleans()))


@st.composite
def hybrids(draw: st.DrawFn) -> tuple["PreTrainedConfig", Lora | None]:
    hf_config = draw(configurations(HYBRIDS))
    return hf_config, draw(adapters(hf_config))


@pytest.mark.exhaustive
@settings(max_examples=examples(120), deadline=None, suppress_health_check=QUICK)
@given(hybrids(), st.integers(0, 1000))
def test_logits_gradients_and_greedy_tokens(
    drawn: tuple["PreTrainedConfig", Lora | None], seed: int
) -> None:
    hf_config, lora = drawn
    check_logits_and_gradients(hf_config, seed, lora)
    check_engine(hf_config, seed, lora)
