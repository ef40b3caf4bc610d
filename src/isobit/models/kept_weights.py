"""A copy of the published weights as they were when rollouters were last sent some, for those that
die and come back after the trainers have learnt on (``isobit.run.rollouters``).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from isobit.models.frozen import places_in
from isobit.parallel.world import run_on_all
from isobit.util.errors import MismatchError
from isobit.util.terminal import say

if TYPE_CHECKING:
    from isobit.models.policy import Policy


class KeptWeights:
    """The rows of a policy's published weights that this rank passes on, in one buffer of host
    memory, which the plan of the memory counts (``isobit.memory.activations.kept_bytes``).  On a
    GPU it is page-locked, where that is not refused, and the host does not wait for the copies,
    which are made in the order of the stream.
    """

    def __init__(self, policy: "Policy") -> None:
        self._policy = policy
        self._rows: list[torch.Tensor] | None = None
        self.version: int | None = None
        """That of the copy; None before there is one."""
        self._kv_scales: dict[str, Any] | None = None

    def keep(self) -> None:
        """Copy the weights as they are, in the place of the last copy.  All ranks of the policy's
        world do.  Raises, on all, what a rank without host memory for the first copy raises.
        """
        policy = self._policy
        if self._rows is None:
            self._rows = run_on_all(policy.world, partial(_places, policy))
        with torch.no_grad():
            for kept, row in zip(self._rows, policy.passed_rows(), strict=True):
                kept.copy_(row, non_blocking=True)
        self.version, self._kv_scales = policy.version, _scales_of(policy)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A block in which the policy has the weights of the copy, and the copy those of the
        policy, so that nothing is held twice.  All ranks of its world enter and leave it.  Raises
        MismatchError, on all, if the policy does not have its own again afterwards.
        """
        policy, checksum = self._policy, self._policy.checksum()
        self._exchange()
        try:
            yield
        finally:
            self._exchange()
        run_on_all(policy.world, partial(_check, policy, checksum))

    @torch.no_grad()
    def _exchange(self) -> None:
        policy, scales, version = self._policy, _scales_of(self._policy), self._policy.version
        assert self._rows is not None, "nothing was kept"
        assert self.version is not None, "it has a version from then on"
        for held, kept in zip(policy.passed_rows(), self._rows, strict=True):
            _exchange(held, kept)
        policy.complete_rows()
        if policy.kv_scales is not None:
            assert self._kv_scales is not None
            policy.kv_scales.restore(self._kv_scales)
        policy.version, self.version, self._kv_scales = self.version, version, scales


def _places(policy: "Policy") -> list[torch.Tensor]:
    """A place in host memory for each of the rows.  Where page-locked memory is refused it is
    ordinary memory, which is only copied more slowly.
    """
    rows, memory = policy.passed_rows(), policy.backend.memory
    size = sum(row.nbytes for row in rows)
    if memory is not None:
        try:
            return places_in(memory.host_buffer(size), rows)
        except RuntimeError as error:
            say(
                "isobit: the weights for rollouters that come back are kept in ordinary memory, "
                f"and copied more slowly, since page-locked memory was refused: {error}"
            )
    return places_in(torch.empty(size, dtype=torch.uint8), rows)


def _exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """Give each of two tensors the numbers of the other."""
    before = one.clone()
    one.copy_(other, non_blocking=True)
    other.copy_(before, non_blocking=True)


def _scales_of(policy: "Policy") -> dict[str, Any] | None:
    return None if policy.kv_scales is None else policy.kv_scales.state()


def _check(policy: "Policy", checksum: int) -> None:
    if policy.checksum() != checksum:
        raise MismatchError(
            "the published weights are not what they were before older ones were sent to "
            "rollouters that have come back: a memory is faulty; go on with --resume"
        )
