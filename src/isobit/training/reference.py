"""What a checkpoint holds of the reference model: a frozen model that may follow the policy.

    refresh_if_due   every ``refresh_every`` steps it takes the policy's weights as they are then
                     (the reset of ProRL, arXiv 2505.24864)

Once it has, a checkpoint holds its tensors.  Until then they are a function of a folder, and the
checkpoint holds their digest, which a resumed run has to find again.
"""

from collections.abc import Mapping
from typing import Any

import torch

from isobit.errors import CheckpointError
from isobit.models.frozen import FrozenPolicy
from isobit.models.policy import Policy


class Reference:
    """The reference model of one policy (``isobit.store.training_run.Extra``)."""

    def __init__(
        self, frozen: FrozenPolicy, policy: Policy, folder: str, refresh_every: int = 0
    ) -> None:
        """``folder`` is where its weights come from; 0 steps is never."""
        self.frozen = frozen
        self.refreshes = 0
        """How often it has taken the policy's weights."""
        self._policy, self._folder, self._every = policy, folder, refresh_every

    def refresh_if_due(self, step: int) -> bool:
        """After ``step`` steps, before anything of the step is recorded: take the policy's weights,
        if it is time; -> whether it was.
        """
        if not self._every or step % self._every:
            return False
        self.frozen.take(self._policy)
        self.refreshes += 1
        return True

    def state(self) -> dict[str, Any]:
        """How often it was refreshed, and before the first time the digest of its weights."""
        if self.refreshes:
            return {"refreshes": self.refreshes}
        back_end = self.frozen.backend.name
        return {"refreshes": 0, "back_end": back_end, "sha256": self.frozen.digest()}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Its weights, once they are not those of the folder."""
        return self.frozen.tensors() if self.refreshes else {}

    def restore(self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Be what it was.  Raises CheckpointError where the folder no longer holds the weights that
        the run began with, and for tensors of another model.
        """
        if state["refreshes"]:
            self.frozen.restore(tensors)
        elif state["back_end"] == self.frozen.backend.name:  # others publish other bytes of BF16
            self._check(state["sha256"])
        self.refreshes = state["refreshes"]

    def _check(self, recorded: str) -> None:
        found = self.frozen.digest()
        if found != recorded:
            raise CheckpointError(
                f"the weights in {self._folder} are not those that this run was held to: published "
                f"they have the SHA-256 {found}, and {recorded} was recorded; put the folder's old "
                "files back, or start a new run (--output PATH)"
            )
