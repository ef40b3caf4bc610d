"""A micro-batch computed twice on a GPU has the same bits, unless one is flipped in between."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import GrpoConfig
from isobit.config.precision import Preset
from isobit.config.training import TrainingConfig
from isobit.models.policy import Policy
from isobit.models.scorer import ScoredPass
from isobit.records.batch import PackedBatch
from isobit.records.packing import pack
from isobit.records.sequence import TokenSequence
from isobit.training.trainer import Trainer

GRPO = build_algorithm(GrpoConfig())
MASTER = "layers.1.o_proj.weight"  # in a hybrid too, whose other layers have no attention


def batches() -> list[PackedBatch]:
    """Four sequences of 40 tokens, with advantages of both signs."""
    sequences = []
    for index in range(4):
        prompt, answer = tuple(range(1 + index, 11 + index)), tuple(range(2, 32))
        one = TokenSequence.of_answer(prompt, answer)
        sequences.append(one.with_columns(advantages=1.0 - 2.0 * (index % 2)))
    return pack(sequences, 100)


@pytest.mark.parametrize("preset", ["fp8", "int8", "bf16"])
def test_it_repeats_and_a_flipped_bit_is_named(
    shape: str, preset: Preset, make_policy: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(make_policy(shape, preset), TrainingConfig(), total_updates=1)
    found = trainer.repeat(batches(), GRPO, 0)
    assert found.differing == () and found.gradients == len(trainer.policy.masters)
    exact, calls = ScoredPass.backward, []

    def backward(self: ScoredPass, *gradients: Any) -> None:
        exact(self, *gradients)
        calls.append(self)
        grad = trainer.policy.masters[MASTER].grad
        if len(calls) == 2 and grad is not None:
            grad.view(torch.int32)[3, 5] ^= 1

    monkeypatch.setattr(ScoredPass, "backward", backward)
    assert trainer.repeat(batches(), GRPO, 0).differing == (MASTER,)
