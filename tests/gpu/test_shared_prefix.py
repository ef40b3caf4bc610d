"""Rows that sequences with one prompt share, on a GPU: the bits of the forward are those of
sequences alone, and gradients repeat and are as good as the CPU's.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.training import Recompute
from isobit.models.policy import Policy
from isobit.models.scorer import ScoredPass, Scorer
from isobit.records.batch import PackedBatch
from isobit.records.packing import lay_end_to_end, pack
from isobit.records.sequence import TokenSequence
from tests.gpu.test_training import errors, most, on_cpu

MakePolicy = Callable[..., Policy]
PRESETS: list[Preset] = ["fp8", "int8", "bf16"]


def samples() -> list[TokenSequence]:
    """Prompts that end within a KV tile and on its edge, with several answers and with one."""
    random, found = np.random.default_rng(0), list[TokenSequence]()
    for prompt, answers in ((1, (5, 200)), (127, (1, 3, 90)), (128, (70, 300, 2)), (300, (40,))):
        ids = random.integers(0, 100, prompt).tolist()
        for length in answers:
            answer = random.integers(0, 100, length).tolist()
            found.append(TokenSequence.of_answer(ids, answer))
    return found


def gradients(
    policy: Policy, batch: PackedBatch, recompute: Recompute = "none"
) -> dict[str, torch.Tensor]:
    scored = ScoredPass(policy, batch, recompute)
    scored.forward()
    scored.backward(torch.sin(1.0 + batch.targets.float()) / len(batch.targets))
    found = {n: one.grad.cpu() for n, one in policy.masters.items() if one.grad is not None}
    for master in policy.parameters():
        master.grad = None
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_log_probabilities_are_those_of_sequences_alone(
    shape: str, preset: Preset, make_policy: MakePolicy
) -> None:
    policy, ours = make_policy(shape, preset), samples()
    scorer = Scorer(policy)
    alone = {
        batch.token_ids.numpy().tobytes(): scorer.score(batch).log_probs for batch in pack(ours, 1)
    }
    (shared,) = pack(ours, 1 << 14, shared_prefix=True)
    assert shared.num_rows < len(shared.token_ids)
    for level in get_args(Recompute):
        scores = ScoredPass(policy, shared, level).forward().log_probs
        for index, ids in enumerate(shared.token_ids.split(list(shared.lengths))):
            mine = scores[shared.sequence == index]
            assert torch.equal(mine, alone[ids.numpy().tobytes()])


@pytest.mark.parametrize("preset", PRESETS)
def test_gradients_repeat_and_are_as_good_as_the_cpus(
    shape: str, preset: Preset, make_policy: MakePolicy
) -> None:
    policy = make_policy(shape, preset)
    (shared,) = pack(samples(), 1 << 14, shared_prefix=True)
    levels: tuple[Recompute, ...] = ("none", "none", "mlp", "full")
    first, *others = (gradients(policy, shared, level) for level in levels)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    last = 1 if shape == "llama" else 0
    cpu = gradients(on_cpu(policy, PrecisionConfig(preset=preset, last_layers_bf16=last)), shared)
    exact = gradients(on_cpu(policy, PrecisionConfig(preset="fp32")), shared)
    ours, theirs = (errors(one, exact) for one in (first, cpu))
    for kind, error in ours.items():
        assert error < most(kind, preset) * theirs[kind], kind


@pytest.mark.parametrize("preset", PRESETS)
def test_one_answer_has_the_gradients_of_a_sequence_that_shares_nothing(
    shape: str, preset: Preset, make_policy: MakePolicy
) -> None:
    policy = make_policy(shape, preset)
    plain = lay_end_to_end(samples()[-1:])
    gathered = replace(plain, row_of=torch.arange(len(plain.token_ids)))
    expected, found = gradients(policy, plain), gradients(policy, gathered)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
