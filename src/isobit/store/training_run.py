"""What the run directory has to know of a training: ``TrainingRun``, and the ``Extra`` parts of its
state.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from isobit.config.recipes import Recipe
from isobit.data.sampler import PromptSampler
from isobit.models.folder import LoadedModel
from isobit.training.trainer import Trainer


class Extra(Protocol):
    """A part of a training, beside policy and trainer, that a checkpoint saves and restores, such
    as a reference model or a replay buffer.
    """

    def state(self) -> Mapping[str, Any]:
        """Serialisable as JSON; must differ whenever ``tensors`` differ."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors of its own file, by name; without any there is no file."""
        ...

    def restore(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Return to a saved state.  Raises CheckpointError where that is impossible."""
        ...


@dataclass(frozen=True, slots=True)
class Dropped:
    """What a part of a checkpoint had drawn for steps to come, and is not learnt from."""

    state: Mapping[str, Any]
    """The part's state without it."""
    samples: int
    tokens: int
    prompts: int
    """The prompts, the last that the sampler has given, that it is to give again."""


@runtime_checkable
class DrawnAhead(Extra, Protocol):
    """A part that holds samples for steps to come."""

    @property
    def can_regrade(self) -> bool:
        """Whether new rewards can be given to all that it holds."""
        ...

    def regrade(self) -> None:
        """Have what was restored graded again before a step learns from it."""
        ...

    def dropped(
        self, state: Mapping[str, Any], tensors: Mapping[str, Tensor], step: int, again: bool
    ) -> Dropped:
        """What the saved state after ``step`` steps holds; ``again`` says whether its prompts are
        to be drawn again.
        """
        ...


class TrainingRun(Protocol):
    """A prepared training."""

    @property
    def config(self) -> Recipe: ...

    @property
    def model(self) -> LoadedModel: ...

    @property
    def trainer(self) -> Trainer: ...

    @property
    def sampler(self) -> PromptSampler: ...

    @property
    def extras(self) -> Mapping[str, Extra]:
        """The extras, by the names of their files."""
        ...

    @property
    def inputs(self) -> Mapping[str, str]:
        """Digests by name of what is read beside the recipe: data, tokenizer, the user's code
        (``isobit.run.data``).  They must be the same when a run is resumed.
        """
        ...

    def data_figures(self) -> dict[str, Any]:
        """Numbers about the data, for the manifest."""
        ...

    def engine_figures(self) -> dict[str, Any] | None:
        """The sizes of its engine, for the manifest; None where nothing is generated."""
        ...
