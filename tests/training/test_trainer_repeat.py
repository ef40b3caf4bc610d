"""A micro-batch computed twice: the same bits, unless one of them is flipped in between."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import GrpoConfig
from isobit.models.scorer import ScoredPass
from isobit.records.batch import PackedBatch
from isobit.records.text import Group
from isobit.training.repeat import digest_of
from isobit.training.trainer import Trainer
from tests.training.test_trainer import batches_of

GRPO = build_algorithm(GrpoConfig())
MakeTrainer = Callable[..., Trainer]
MakeGroups = Callable[..., list[Group]]


def batches(trainer: Trainer, make_groups: MakeGroups) -> list[PackedBatch]:
    return batches_of(make_groups(trainer, num_groups=2, samples=3), 64)


def test_it_repeats_and_leaves_nothing_behind(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    trainer, other = make_trainer("fp8"), make_trainer("fp8")
    given = batches(trainer, make_groups)
    for pick in (0, 5):
        found = trainer.repeat(given, GRPO, pick)
        assert found.differing == ()
        assert found.gradients == len(trainer.policy.masters)
    assert all(master.grad is None for master in trainer.policy.masters.values())
    assert trainer.update(given, GRPO) == other.update(given, GRPO)
    for name, master in trainer.policy.masters.items():
        assert torch.equal(master, other.policy.masters[name])


def test_one_bit_of_one_gradient(
    make_trainer: MakeTrainer, make_groups: MakeGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, calls = make_trainer("fp8"), []
    exact = ScoredPass.backward

    def backward(self: ScoredPass, *gradients: Any) -> None:
        exact(self, *gradients)
        calls.append(self)
        if len(calls) == 2:
            grad = trainer.policy.masters["layers.0.o_proj.weight"].grad
            assert grad is not None
            grad.view(torch.int32)[3, 5] ^= 1

    monkeypatch.setattr(ScoredPass, "backward", backward)
    found = trainer.repeat(batches(trainer, make_groups), GRPO, 1)
    assert found.differing == ("layers.0.o_proj.weight",)


def test_one_bit_of_a_weight_between_the_passes(
    make_trainer: MakeTrainer, make_groups: MakeGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer("fp8")
    exact = ScoredPass.forward

    def forward(self: ScoredPass) -> Any:
        matrix: Any = trainer.policy.weights("training").linears["layers.0.down_proj"].matrix
        matrix.values.view(torch.uint8)[7, 9] ^= 8
        return exact(self)

    monkeypatch.setattr(ScoredPass, "forward", forward)
    found = trainer.repeat(batches(trainer, make_groups), GRPO, 0)
    assert "forward" in found.differing
    assert "layers.0.qkv_proj.weight" in found.differing


def test_the_digest_sees_every_bit_and_where_it_is() -> None:
    x = torch.randn((1 << 20) + 3)
    first = digest_of(x)
    for place in (0, 1 << 20, len(x) - 1):
        for bit in (1, -(1 << 31)):
            y = x.clone()
            y.view(torch.int32)[place] ^= bit
            assert digest_of(y) != first
    assert digest_of(x.flip(0)) != first
    assert digest_of(torch.empty(0)) == digest_of(torch.empty(0))
