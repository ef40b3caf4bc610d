"""Moments go to the host and come back with their bits, and the state that holds them does not
notice.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from isobit.config.precision import PrecisionConfig
from isobit.config.training import TrainingConfig
from isobit.memory.sharing import HostMoments
from isobit.models.policy import random_policy
from isobit.training.trainer import Trainer
from tests.tiny import tiny_model

TINY = tiny_model(vocab_size=96, num_layers=2, max_positions=64)


def make_trainer(moments: str) -> Trainer:
    policy = random_policy(TINY, PrecisionConfig(preset="bf16"), seed=0)
    return Trainer(
        policy,
        TrainingConfig.model_validate({"moments": moments, "learning_rate": 1e-2}),
        total_updates=4,
    )


def step(trainer: Trainer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for master in trainer.policy.parameters():
        master.grad = torch.randn(master.shape, generator=generator)
    trainer._step(1.0, 1e-2)


@pytest.mark.few(2)
@pytest.mark.parametrize("moments", ["fp32", "bf16", "fp8"])
def test_training_goes_on_with_the_same_bits(moments: str, tmp_path: Path) -> None:
    plain, moved = make_trainer(moments), make_trainer(moments)
    host = HostMoments(moved)
    host.to_host()  # before the first step there is nothing to move
    for seed in range(3):
        host.to_device()
        for trainer in (plain, moved):
            step(trainer, seed)
        held = moved.moments()
        host.to_host()
        host.to_host()
        assert all(moved.moments()[name] is tensor for name, tensor in held.items())
        assert all(torch.equal(tensor, plain.moments()[name]) for name, tensor in held.items())
    buffer = host._buffer
    assert buffer is not None
    large = [tensor for name, tensor in moved.moments().items() if not name.endswith(".step")]
    assert buffer.nbytes == sum(tensor.nbytes for tensor in large)
    assert {tensor.untyped_storage().data_ptr() for tensor in large} == {buffer.data_ptr()}, (
        "nothing is left on the device"
    )
    save_file(moved.moments(), tmp_path / "moments.safetensors")  # a checkpoint on this side
    assert all(
        torch.equal(tensor, plain.moments()[name])
        for name, tensor in load_file(tmp_path / "moments.safetensors").items()
    )
    host.to_device()
    assert not {tensor.untyped_storage().data_ptr() for tensor in large} & {buffer.data_ptr()}
    assert all(
        torch.equal(master, other)
        for master, other in zip(plain.policy.parameters(), moved.policy.parameters(), strict=True)
    )


def test_restored_moments_are_moved_like_those_that_were_made() -> None:
    trained = make_trainer("bf16")
    step(trained, 0)
    restored = make_trainer("bf16")
    restored.restore(trained.counters(), trained.moments())
    host = HostMoments(restored)
    host.to_host()
    assert all(
        torch.equal(tensor, trained.moments()[name]) for name, tensor in restored.moments().items()
    )
