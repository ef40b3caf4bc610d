"""What every kind of training has, whatever it learns from: the seam on which checkpoints, the
manifest and the log are built.

``isobit train`` and ``isobit sft`` each prepare their own parts; those named here are all that has
to be saved to go on later.
"""

from typing import Any, Protocol

from isobit.config.schema import RunConfig
from isobit.config.sft import SftConfig
from isobit.data.sampler import PromptSampler
from isobit.models.loaded import LoadedModel
from isobit.training.trainer import Trainer

Recipe = RunConfig | SftConfig
"""The configuration of a training."""


class TrainingRun(Protocol):
    """The parts of a training, ready to start."""

    @property
    def config(self) -> Recipe:
        """What it was made from."""
        ...

    @property
    def model(self) -> LoadedModel:
        """The policy that learns."""
        ...

    @property
    def trainer(self) -> Trainer:
        """The optimiser, its counters and its budget."""
        ...

    @property
    def sampler(self) -> PromptSampler:
        """The order of what is learnt from, and the place in it."""
        ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that is learnt from: a run goes on with the same data only."""
        ...

    def data_figures(self) -> dict[str, Any]:
        """What it learns from and is measured on, in numbers, for the manifest."""
        ...
