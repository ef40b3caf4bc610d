"""Rows that sequences with one prompt share: the bits of the forward are those of sequences that
share nothing, and gradients are the same sums in a stated order.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.training import Recompute
from isobit.models.config import Experts, Lora, ModelConfig
from isobit.models.mlp import RouterCoefficients
from isobit.models.packed_pass import PackedPass
from isobit.models.policy import Policy, random_policy
from isobit.models.rope import YarnScaling
from isobit.models.scorer import ScoredPass, Scorer
from isobit.models.shared_prefix import RowSum, SharedAttention, SharedRows
from isobit.records.batch import PackedBatch, TokenScores
from isobit.records.packing import lay_end_to_end, pack
from isobit.records.sequence import TokenSequence
from tests.models.policies import delta_nets, disturbed, small_experts
from tests.models.test_packed_pass import PlainDecoder, error

LEVELS: tuple[Recompute, ...] = get_args(Recompute)
PRESETS: list[Preset] = ["fp32", "bf16", "fp8-linear", "fp8", "int8"]
CONFIG = ModelConfig("qwen3", 64, 128, 256, 2, 4, 2, 32, 256, 1e-6, 1e4, False)
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {},
    "biases": {"family": "qwen2"},
    "window in a prompt": {"sliding_window": 20, "full_layers": 1},
    "window over a prompt": {"sliding_window": 90},
    "experts": {"family": "qwen3_moe", "experts": Experts(4, 2, 64, True)},
    "adapters": {"lora": Lora(4, 8.0, ("q_proj", "v_proj", "down_proj"))},
    "value head": {"value_head": True},
    "turned in part": {"family": "phi3", "partial_rotary_factor": 0.75},
    "norms on both sides": {
        "family": "gemma3_text",
        "sliding_window": 20,
        "windowless_layers": (1,),
        "window_rope_theta": 1e3,
    },
    "norms behind": {
        "family": "olmo3",
        "sliding_window": 20,
        "windowless_layers": (1,),
        "rope_scaling": YarnScaling(4.0, 32),
    },
    "delta rules": {"family": "qwen3_5_text", **delta_nets("qwen3_5_text", 2)},
    "adapters of delta rules": {
        "family": "qwen3_5_text",
        "lora": Lora(4, 8.0, ("q_proj", "in_proj_z", "in_proj_a", "out_proj")),
        **delta_nets("qwen3_5_text", 2),
    },
    "shared expert": {
        "family": "qwen3_next",
        "experts": small_experts("qwen3_next", 4, 64),
        **delta_nets("qwen3_next", 2),
    },
    "sinks": {
        "family": "gpt_oss",
        "experts": Experts(4, 2, 64, True),
        "sliding_window": 20,
        "windowless_layers": (1,),
    },
}
PROMPTS = (1, 63, 64, 65, 130)


def make(preset: Preset, **changes: Any) -> Policy:
    """Norms, biases and adapters do something."""
    return disturbed(
        random_policy(replace(CONFIG, **changes), PrecisionConfig(preset=preset), seed=0)
    )


def answers(prompt: int, lengths: Sequence[int], seed: int = 0) -> list[TokenSequence]:
    """Of one random prompt; a tool has said two tokens of each answer that is long enough."""
    random = np.random.default_rng((seed, prompt))
    ids = random.integers(0, 64, prompt).tolist()
    return [
        TokenSequence.of_answer(
            ids,
            random.integers(0, 64, length).tolist(),
            temperature=0.5 + 0.25 * number,
            given=[(prompt + 2, prompt + 4)] if length > 6 else (),
        )
        for number, length in enumerate(lengths)
    ]


def samples() -> list[TokenSequence]:
    """Of several prompts, one of which has one answer."""
    of_prompts = [one for prompt in PROMPTS for one in answers(prompt, (5, 1, 70))]
    return [*of_prompts, *answers(7, (9,))]


def by_sequence(batches: Sequence[PackedBatch], scored: Sequence[TokenScores]) -> dict[bytes, Any]:
    """All scores of each sequence."""
    found = dict[bytes, Any]()
    for batch, scores in zip(batches, scored, strict=True):
        columns = scores.log_probs, scores.entropies, scores.values, scores.routings
        for index, ids in enumerate(batch.token_ids.split(list(batch.lengths))):
            mine = batch.sequence == index
            found[ids.numpy().tobytes()] = [None if one is None else one[mine] for one in columns]
    return found


def assert_same_bits(expected: dict[bytes, Any], found: dict[bytes, Any]) -> None:
    assert expected.keys() == found.keys()
    for key, columns in expected.items():
        for one, other in zip(columns, found[key], strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)


def gradients(
    policy: Policy, batch: PackedBatch, recompute: Recompute = "none"
) -> dict[str, torch.Tensor]:
    """Of a loss that weighs each sequence's tokens differently."""
    scored = ScoredPass(policy, batch, recompute, RouterCoefficients(0.1, 0.01))
    scores = scored.forward()
    weights = torch.sin(1.0 + batch.targets.float() + batch.temperatures) / len(batch.targets)
    values = None if scores.values is None else 0.3 * weights
    scored.backward(weights, 0.1 * weights, values)
    found = {n: one.grad for n, one in policy.masters.items() if one.grad is not None}
    for master in policy.parameters():
        master.grad = None
    return found


@pytest.mark.few(3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("preset", PRESETS)
def test_scores_have_the_bits_of_sequences_that_share_nothing(preset: Preset, shape: str) -> None:
    policy, ours = make(preset, **SHAPES[shape]), samples()
    scorer = Scorer(policy)
    alone, shared = pack(ours, 1), pack(ours, 4000, shared_prefix=True)
    assert [batch.row_of for batch in alone] == [None] * len(ours)
    assert [batch.num_rows for batch in shared] == [sum(PROMPTS) + 76 * len(PROMPTS) + 16]
    expected = by_sequence(alone, [scorer.score(batch) for batch in alone])
    assert_same_bits(expected, by_sequence(shared, [scorer.score(batch) for batch in shared]))
    for level in LEVELS:
        passed = [ScoredPass(policy, batch, level).forward() for batch in shared]
        assert_same_bits(expected, by_sequence(shared, passed))


@pytest.mark.few(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("preset", PRESETS)
def test_gradients_repeat_whatever_is_computed_again(preset: Preset, shape: str) -> None:
    policy = make(preset, **SHAPES[shape])
    (batch,) = pack(answers(65, (30, 4, 70)), 1000, shared_prefix=True)
    first = gradients(policy, batch)
    for level in LEVELS:
        again = gradients(policy, batch, level)
        assert first.keys() == again.keys()
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.few(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("preset", PRESETS)
def test_one_answer_has_the_gradients_of_a_sequence_that_shares_nothing(
    preset: Preset, shape: str
) -> None:
    """By the same code that several share rows with."""
    policy, (sequence,) = make(preset, **SHAPES[shape]), answers(65, (40,))
    plain = lay_end_to_end([sequence], shared_prefix=True)
    assert plain.row_of is None, "nothing is shared"
    gathered = replace(plain, row_of=torch.arange(sequence.length))
    expected, found = gradients(policy, plain), gradients(policy, gathered)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.few(2)
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_gradients_are_those_of_autograd(family: str, prompt: int) -> None:
    """Against FP64 over whole sequences, with FP32 over the same as the yardstick."""
    policy = make("fp32", family=family)
    (batch,) = pack(answers(prompt, (30, 4, 70)), 1000, shared_prefix=True)
    weights = torch.sin(1.0 + batch.targets.float() + batch.temperatures) / len(batch.targets)

    def by_autograd(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        plain = PlainDecoder(policy, dtype)
        scores = plain.scores(batch)
        loss = ((scores["log_probs"] + 0.1 * scores["entropies"]) * weights.to(dtype)).sum()
        found = torch.autograd.grad(loss, list(plain.masters.values()))
        return dict(zip(plain.masters, found, strict=True))

    exact, yardstick = by_autograd(torch.float64), by_autograd(torch.float32)
    for name, ours in gradients(policy, batch).items():
        assert error(ours, exact[name]) < 3 * error(yardstick[name], exact[name]) + 1e-6, name


@pytest.mark.few(2)
@pytest.mark.parametrize("shape", ["dense", "experts", "window in a prompt", "adapters"])
@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8"])
def test_gradients_are_no_further_from_fp32_than_without_sharing(
    preset: Preset, shape: str
) -> None:
    """Over all masters together."""
    ours = samples()
    (plain,), (shared,) = pack(ours, 4000), pack(ours, 4000, shared_prefix=True)
    exact = gradients(make("fp32", **SHAPES[shape]), plain)
    policy = make(preset, **SHAPES[shape])

    def distance(batch: PackedBatch) -> float:
        found = gradients(policy, batch)
        whole = [torch.cat([one[name].flatten() for name in exact]) for one in (found, exact)]
        return error(*whole)

    assert 0 < distance(shared) < 1.1 * distance(plain)


def test_a_router_loses_the_same_with_and_without_sharing() -> None:
    policy = make("fp32", **SHAPES["experts"])
    ours = samples()
    losses = []
    for share in (False, True):
        (batch,) = pack(ours, 4000, share)
        router = ScoredPass(policy, batch, "none", RouterCoefficients(0.1, 0.1)).forward().router
        assert router is not None
        ids = batch.token_ids.split(list(batch.lengths))
        keys = [one.numpy().tobytes() for one in ids]
        losses.append(dict(zip(keys, zip(router.balance, router.z, strict=True), strict=True)))
    for key, pair in losses[0].items():
        torch.testing.assert_close(pair, losses[1][key], rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_sums_in_the_order_of_the_sequences(dtype: torch.dtype) -> None:
    """dK and dV of a prompt against FP32 sums of what whole sequences give, one after another."""
    policy = make("bf16")
    (batch,) = pack(answers(65, (20, 20, 20, 20)), 1000, shared_prefix=True)
    shared = SharedRows.of(batch, lambda x: x)
    layout = (policy, batch.token_ids, batch.positions, batch.lengths, "none", None, shared)
    assert PackedPass(*layout).forward().shape == (65 + 4 * 20, 128)
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(len(batch.token_ids), 2, 3, generator=generator).to(dtype)

    class Tokens:
        """Attention whose dK and dV are given, and whose dQ are its dO."""

        def backward(self, attended: Any, d: torch.Tensor, _: None) -> tuple[torch.Tensor, ...]:
            assert torch.equal(d.nonzero()[:, 0].unique(), shared.sum.first)
            return d, parts, -parts

    class Rows:
        def rows(self, index: torch.Tensor) -> None:
            assert torch.equal(index, shared.row_of)

    of_rows = SharedAttention(Tokens(), shared)  # pyright: ignore[reportArgumentType]
    dq, dk, dv = of_rows.backward(Rows(), torch.ones(145, 6))  # pyright: ignore
    assert torch.equal(dq, torch.ones(145, 6))
    prompts = [one[:65].float() for one in parts.split(list(batch.lengths))]
    total = prompts[0]
    for one in prompts[1:]:
        total = total + one
    assert torch.equal(dk[:65], total.to(dtype))
    own = torch.cat([one[65:] for one in parts.split(list(batch.lengths))])
    assert torch.equal(dk[65:], own)
    assert torch.equal(dv, -dk)
    if dtype == torch.float32:
        another = prompts[0] + prompts[3] + prompts[2] + prompts[1]
        assert not torch.equal(another, total), "another order has other bits"


@given(st.lists(st.integers(0, 6), max_size=30), st.sampled_from([torch.float32, torch.bfloat16]))
def test_sums_are_those_of_a_loop(row_of: list[int], dtype: torch.dtype) -> None:
    rows = max(row_of, default=-1) + 2
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(len(row_of), 3, generator=generator).to(dtype)
    totals = dict[int, torch.Tensor]()
    for row, part in zip(row_of, parts, strict=True):
        totals[row] = totals[row] + part.float() if row in totals else part.float()
    zero = torch.zeros(3)
    found = RowSum.of(torch.tensor(row_of, dtype=torch.int64), rows, lambda x: x)(parts)
    expected = [totals.get(row, zero).to(dtype) for row in range(rows)]
    assert torch.equal(found, torch.stack(expected))
