"""Bytes of the models that only score, a reference model, reward models or a shadow, beside a
policy.

stays        the published weights of one side (``isobit.models.frozen``)
offload      in main memory, in a page-locked buffer; on the device only while the model scores
not lasting  made from the policy's masters when it scores, and dropped then: the BF16 shadow that a
             clip is calibrated by (``isobit.training.calibration``)
checkpoint   what a reference that was refreshed takes there: published weights without what is
             a function of others, the rotary table and lm_head's second form
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from isobit.kernels.sizes import Sizes
from isobit.memory.activations import scoring_bytes
from isobit.memory.published import master_bytes, published_bytes
from isobit.models.config import ModelConfig
from isobit.models.frozen import SIDE
from isobit.precision.flow import PrecisionFlow


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """A model that only scores, as a plan knows it."""

    name: str
    """Of its item in the plan; models of the same name are added up."""
    shape: ModelConfig
    flow: PrecisionFlow
    table: str
    """The recipe's table that has its ``model`` and its ``offload``."""
    offload: bool = False
    lasting: bool = True
    """Whether it lies somewhere while it does not score."""

    @property
    def grades(self) -> bool:
        """Whether it is a reward, which whoever samples asks."""
        return self.table.startswith("reward")

    @property
    def stays(self) -> bool:
        """Whether it is on the device while it does not score."""
        return self.lasting and not self.offload

    def weight_bytes(self, sizes: Sizes) -> int:
        """Of all that it holds."""
        return published_bytes(self.shape, self.flow.one_sided(SIDE), sizes)

    def checkpoint_bytes(self, sizes: Sizes) -> int:
        """Of its tensors in a checkpoint."""
        return master_bytes(self.shape, self.flow.one_sided(SIDE), sizes)

    def scoring_bytes(self, sizes: Sizes, tokens: int, longest: int) -> int:
        """The most that it takes beside its weights for ``tokens`` tokens at once."""
        return scoring_bytes(self.shape, self.flow, sizes, tokens, longest)

    def with_offload(self) -> "FrozenModel":
        """The same, in main memory while it does not score."""
        return replace(self, offload=self.lasting)


def page_locked(size: int) -> int:
    """What torch takes of main memory for a page-locked buffer: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def page_locked_bytes(models: Sequence[FrozenModel], sizes: Sizes) -> dict[str, int]:
    """Bytes of main memory by name, of those that are there."""
    total: dict[str, int] = {}
    for model in models:
        if model.offload:
            size = page_locked(model.weight_bytes(sizes))
            total[model.name] = total.get(model.name, 0) + size
    return total


def added_up(models: Sequence[FrozenModel], sizes: Sizes) -> dict[str, int]:
    """Bytes of the weights by name."""
    total: dict[str, int] = {}
    for model in models:
        total[model.name] = total.get(model.name, 0) + model.weight_bytes(sizes)
    return total
