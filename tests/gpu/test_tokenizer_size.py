"""Rows of lm_head beyond the tokenizer, on the GPU: no bit of a forward is another than without
them. Of 1,000 rows the product takes 960 for 937 tokens (DeepGEMM) and all for 984 (Triton).
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.rollout import RolloutConfig
from isobit.models.config import ModelConfig
from isobit.models.decoder import NAME
from isobit.models.policy import Policy, random_masters
from isobit.models.scorer import ScoredPass, Scorer
from isobit.proof.verify import VerifyOptions, verify_policy
from isobit.records.text import Prompt, SamplingParams
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from tests.gpu.conftest import SHAPES
from tests.models.policies import whole_batch

ROWS = 1000
PRESETS: tuple[Preset, ...] = ("fp8", "fp8-linear", "bf16")
TOKENS = [937, 984]  # a multiple of nothing; of 8 alone


def policy(name: str, preset: Preset, tokens: int, rows: int = ROWS) -> Policy:
    """Whatever the rows, the same numbers; those beyond the tokens would win each draw."""
    config = replace(SHAPES[name], vocab_size=rows, tokenizer_size=tokens).with_tokenizer(tokens)
    masters = wide_masters(replace(config, vocab_size=ROWS, tokenizer_size=None), tokens, rows)
    return Policy(config, PrecisionConfig(preset=preset), masters, "cuda")


def wide_masters(config: ModelConfig, tokens: int, rows: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name, values in random_masters(config, 0, "cuda"):
        if values.shape[0] == ROWS:
            values[tokens:] = 8 * values[: ROWS - tokens]
            yield name, values[:rows].clone()
        else:
            yield name, values


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ["qwen3", "qwen2"])  # an own head, and a tied one
def test_scores_are_those_of_a_model_without_these_rows_which_get_no_gradient(
    name: str, preset: Preset, tokens: int
) -> None:
    ids = torch.arange(300) * 37 % tokens
    packed, d = whole_batch(ids, (200, 100), ids.flip(0)), torch.linspace(-1, 1, 300)
    both = [policy(name, preset, tokens), policy(name, preset, tokens, rows=tokens)]
    scores = []
    for one in both:
        step = ScoredPass(one, packed, "none")
        scores.append([step.forward(), Scorer(one).score(packed)])
        step.backward(d, d.flip(0))
    for mine, other in zip(*scores, strict=True):
        assert torch.equal(mine.log_probs, other.log_probs)
        assert torch.equal(mine.entropies, other.entropies)
    for master, values in both[0].masters.items():
        if master in (NAME, "lm_head.weight"):
            assert values.grad is not None and values.grad[:tokens].any()
            assert len(values.grad) == ROWS and not values.grad[tokens:].any()


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
def test_no_log_probability_differs(name: str, preset: Preset, tokens: int) -> None:
    options = VerifyOptions(prompts=10, samples=3, max_new_tokens=24)
    result = verify_policy(policy(name, preset, tokens), options)
    assert result.comparison.tokens_differing == 0
    assert result.missing == () and result.comparison.tokens_compared > 10_000


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.0}, {"top_k": 990}, {"top_p": 0.95}, {"min_p": 0.01}],
    ids=str,
)
def test_they_are_never_drawn(sampling: dict[str, float]) -> None:
    largest = []
    for tokens in (937, ROWS):
        made = policy("qwen3", "fp8", 937) if tokens == 937 else _every_row()
        engine = NativeEngine(made, RolloutConfig(), None, seed=0)
        params = SamplingParams(64, **sampling)  # type: ignore[arg-type]
        groups = generate(engine, [Request(Prompt("p", "", (1, 5, 8)), 0, 16, params)])
        largest.append(max(token for one in groups[0] for token in one.token_ids))
    assert largest[0] < 937 <= largest[1]


def _every_row() -> Policy:
    masters = wide_masters(SHAPES["qwen3"], 937, ROWS)
    return Policy(SHAPES["qwen3"], PrecisionConfig(preset="fp8"), masters, "cuda")
