"""A copy of the published weights as they were when rollouters were last sent some, for those that
die and come back after the trainers have learnt on (``isobit.run.rollouters``).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from isobit.parallel.world import run_on_all
from isobit.util.errors import MismatchError

if TYPE_CHECKING:
    from isobit.models.policy import Policy


class KeptWeights:
    """The rows of a policy's published weights that this rank passes on, in host memory.  On a GPU
    the host does not wait for the copies, which are made in the order of the stream.
    """

    def __init__(self, policy: "Policy") -> None:
        self._policy = policy
        self._rows: list[torch.Tensor] = []
        self.version: int | None = None
        """That of the copy; None before there is one."""
        self._kv_scales: dict[str, Any] | None = None

    def keep(self) -> None:
        """Copy the weights as they are, in the place of the last copy."""
        policy = self._policy
        self._rows = _copied(policy.passed_rows(), self._rows)
        self.version = policy.version
        self._kv_scales = None if policy.kv_scales is None else policy.kv_scales.state()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A block in which the policy has the weights of the copy.  All ranks of its world enter
        and leave it.  Raises MismatchError, on all, if it does not have its own again afterwards.
        """
        assert self.version is not None, "nothing was kept"
        policy = self._policy
        version, checksum = policy.version, policy.checksum()
        rows = _copied(policy.passed_rows())
        scales = None if policy.kv_scales is None else policy.kv_scales.state()
        self._put(self._rows, self._kv_scales, self.version)
        try:
            yield
        finally:
            self._put(rows, scales, version)
        run_on_all(policy.world, partial(_check, policy, checksum))

    @torch.no_grad()
    def _put(self, rows: list[torch.Tensor], scales: Any, version: int) -> None:
        policy = self._policy
        for held, row in zip(policy.passed_rows(), rows, strict=True):
            held.copy_(row)
        policy.complete_rows()
        if policy.kv_scales is not None:
            policy.kv_scales.restore(scales)
        policy.version = version


def _check(policy: "Policy", checksum: int) -> None:
    if policy.checksum() != checksum:
        raise MismatchError(
            "the published weights are not what they were before older ones were sent to "
            "rollouters that have come back: a memory is faulty; go on with --resume"
        )


@torch.no_grad()
def _copied(rows: list[torch.Tensor], into: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """Copies in host memory, in tensors that there are already where these are given."""
    made = into or [torch.empty(row.shape, dtype=row.dtype, pin_memory=row.is_cuda) for row in rows]
    for copy, row in zip(made, rows, strict=True):
        copy.copy_(row, non_blocking=True)
    return made
