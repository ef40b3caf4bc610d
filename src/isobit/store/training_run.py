"""What a run's directory has to know of a training, whatever it learns from: the parts that a
checkpoint saves and puts back, and what the manifest says of the others.
"""

from typing import Any, Protocol

from isobit.config.recipe import Recipe
from isobit.data.sampler import PromptSampler
from isobit.models.loaded import LoadedModel
from isobit.training.trainer import Trainer


class TrainingRun(Protocol):
    """A training whose parts are ready."""

    @property
    def config(self) -> Recipe:
        """The recipe that the training was made from."""
        ...

    @property
    def model(self) -> LoadedModel:
        """The policy that learns, with its folder and tokenizer."""
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

    def engine_figures(self) -> dict[str, Any] | None:
        """The sizes that its engine has, for the manifest; None where nothing is generated."""
        ...
