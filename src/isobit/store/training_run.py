"""What a run's directory has to know of a training, whatever it learns from: the parts that a
checkpoint saves and puts back, and what the manifest says of the others.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from isobit.config.recipe import Recipe
from isobit.data.sampler import PromptSampler
from isobit.models.loaded import LoadedModel
from isobit.training.trainer import Trainer


class Extra(Protocol):
    """A part of a training, beside policy and trainer, that a checkpoint saves and puts back: a
    reference model, for example, or a replay buffer.
    """

    def state(self) -> Mapping[str, Any]:
        """Ready for JSON, and never the same again once ``tensors`` are others: this says whether
        they still are those of the last moment between two steps.
        """
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """What a file of its own holds, by name; where there are none, there is no file."""
        ...

    def restore(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Be what it was when both were taken.  Raises CheckpointError where that cannot be."""
        ...


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
    def extras(self) -> Mapping[str, Extra]:
        """What else a checkpoint holds, by the name of its file."""
        ...

    @property
    def inputs(self) -> Mapping[str, str]:
        """Digests by name of what is read beside the recipe: data, tokenizer, code of the user's
        (``isobit.run.inputs``).  A run goes on with the same only.
        """
        ...

    def data_figures(self) -> dict[str, Any]:
        """What it learns from and is measured on, in numbers, for the manifest."""
        ...

    def engine_figures(self) -> dict[str, Any] | None:
        """The sizes that its engine has, for the manifest; None where nothing is generated."""
        ...
