"""Checksums of what an update leaves (``isobit.models.checksum``), the same on any number of
processes:

    weights    the published bytes and scales, which both sides read
    masters    the FP32 numbers
    moments    AdamW's state

Each rank adds what it owns of masters and moments.  Published weights are whole on all ranks, and
so they are compared: a byte that one rank alone has otherwise is trained and sampled with, and no
log-probability shows it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from isobit.models.checksum import added_up, checksum, checksum_of
from isobit.store.checkpoint.format import Checkpoint
from isobit.store.checkpoint.share import Share
from isobit.store.training_run import TrainingRun


@dataclass(frozen=True, slots=True)
class StateDigest:
    """16 hexadecimal digits each."""

    weights: str
    masters: str
    moments: str


def state_digest(run: TrainingRun) -> StateDigest:
    """Of a run between two updates; all ranks together, in the trainer's turn.  Raises
    MismatchError, on all, where ranks read other published bytes.
    """
    policy = run.model.policy
    share = Share(policy.shapes, policy.ownership, policy.world.rank)
    masters = checksum(share.masters(policy.masters).items())
    moments = checksum(share.moments(run.trainer.moments()).items())
    _, weights = policy.compare(policy.world)
    found = policy.world.messages([masters, moments])
    return StateDigest(
        _digits(weights),
        _digits(added_up(one[0] for one in found)),
        _digits(added_up(one[1] for one in found)),
    )


def checkpoint_digest(checkpoint: Checkpoint) -> dict[str, str]:
    """Of the masters and the moments in a checkpoint's files, by name."""
    masters, moments = checkpoint.tensors()
    return {"masters": _of_file(masters), "moments": _of_file(moments)}


def _of_file(tensors: Mapping[str, Tensor]) -> str:
    """One after the other: a file may be larger than the memory."""
    return _digits(added_up(checksum_of({name: tensors[name]}) for name in tensors))


def _digits(checksum: int) -> str:
    return f"{checksum:016x}"
