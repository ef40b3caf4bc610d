"""A checkpoint holds every master, the value head's too: training goes on from it to the bit."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from isobit.algorithms.objective import LossOutputs, Shares
from isobit.config.precision import PrecisionConfig
from isobit.config.training import TrainingConfig
from isobit.models.config import ModelConfig
from isobit.models.policy import random_policy
from isobit.models.safetensors import Slice
from isobit.records.batch import PackedBatch, TokenScores
from isobit.store.checkpoint import Snapshot, read_checkpoint, write_checkpoint
from isobit.training.trainer import Trainer

CONFIG = ModelConfig("qwen3", 64, 128, 256, 1, 4, 2, 32, 128, 1e-6, 1e4, True, value_head=True)


class ActorAndCritic:
    """A loss that depends on every score."""

    def shares(self, batches: Sequence[PackedBatch]) -> list[Shares]:
        return [Shares(torch.full_like(batch.temperatures, 0.01)) for batch in batches]

    def loss(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> LossOutputs:
        assert scores.values is not None
        errors = (scores.values - batch.targets / 64).square()
        of_each = errors - 0.1 * scores.entropies - scores.log_probs
        return LossOutputs((shares.mean * of_each).sum())


def a_batch(seed: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(64, (50,), generator=generator)
    rows, nothing = torch.arange(10, 49), torch.zeros(39)
    return PackedBatch(
        token_ids=ids, positions=torch.arange(50), lengths=(50,), rows=rows, targets=ids[11:],
        sequence=torch.zeros(39, dtype=torch.int64), temperatures=nothing + 1,
        recorded_log_probs=nothing, old_log_probs=nothing, advantages=nothing,
    )  # fmt: skip


def a_trainer(seed: int) -> Trainer:
    policy = random_policy(CONFIG, PrecisionConfig(preset="fp8"), seed)
    return Trainer(policy, TrainingConfig(learning_rate=1e-2, moments="fp8"), total_updates=9)


def all_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Slice]:
    return {name: Slice.whole(tensor) for name, tensor in tensors.items()}


def test_training_goes_on_from_a_checkpoint_to_the_bit(tmp_path: Path) -> None:
    whole = a_trainer(seed=0)
    for step in range(2):
        assert whole.update([a_batch(step)], ActorAndCritic()).skipped is None
    masters, moments = whole.policy.masters, whole.moments()
    assert masters["value_head.weight"].any()
    snapshot = Snapshot(2, all_of(masters), all_of(moments), {}, {})
    folder = write_checkpoint(tmp_path, snapshot)
    read, read_moments = read_checkpoint(folder).tensors()
    resumed = a_trainer(seed=1)
    resumed.policy.restore(read, whole.policy.version)
    resumed.restore(whole.counters(), read_moments)
    for trainer in (whole, resumed):
        trainer.update([a_batch(2)], ActorAndCritic())
    for name, master in whole.policy.masters.items():
        assert torch.equal(resumed.policy.masters[name], master), name
    scores, again = (trainer.scorer.score(a_batch(3)) for trainer in (whole, resumed))
    assert scores.values is not None and again.values is not None
    assert torch.equal(scores.values, again.values)
    assert torch.equal(scores.log_probs, again.log_probs)
