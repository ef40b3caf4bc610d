"""A training as far as it is known without the weights: what its parts are built from
(``isobit.run.parts``), and what a dry run plans with (``isobit.run.plan``).

Each kind of training makes its own outline; from there on all is the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from isobit.config.recipe import Recipe
from isobit.config.training import TrainingConfig
from isobit.errors import DataError
from isobit.memory.frozen import FrozenModel
from isobit.models.device import choose_device
from isobit.models.loaded import DescribedModel
from isobit.rollout.request import Request
from isobit.run.model_source import ModelSource


@dataclass(frozen=True, slots=True)
class Outline:
    """What a training asks of the model and of the machine."""

    config: Recipe
    source: ModelSource
    training: TrainingConfig
    """As the trainer and the memory plan read it."""
    updates: int
    """Of the whole run: the length of the learning rate's schedule."""
    longest: int
    """Tokens of the longest sequence that training can meet."""
    learning: Sequence[str]
    """Lines on the data and the steps."""
    frozen: tuple[FrozenModel, ...] = ()
    """Models that only score: a reference model, reward models."""
    extra_bytes: int = 0
    """Of a checkpoint, beside policy and optimiser."""
    head_rate: float = 1.0
    """How many times as fast as the rest a value head learns."""

    @property
    def model(self) -> DescribedModel:
        """The model that the training starts from, without its weights."""
        return self.source.described

    def choose_device(self) -> torch.device:
        """Where it computes.  Raises ConfigError where that cannot be."""
        return choose_device(self.config.device, self.model.config, self.config.precision)

    @property
    def generates(self) -> bool:
        """Whether there is an engine: completions are wanted where a reward grades them."""
        return self.config.reward is not None


class Material(Protocol):
    """What a kind of training is made from, as far as it is known without the weights."""

    @property
    def inputs(self) -> Mapping[str, str]:
        """Digests of what is read beside the recipe (``isobit.run.inputs``)."""
        ...

    @property
    def outline(self) -> Outline:
        """What it asks of the model and of the machine."""
        ...

    @property
    def requests(self) -> Sequence[Sequence[Request]]:
        """All that its engine may be asked for, in sets of which no two are asked for together."""
        ...


def check_requests(
    requests: Sequence[Sequence[Request]], check: Callable[[Sequence[Request]], None], context: int
) -> None:
    """Refuse prompts that the engine, by its ``check``, or the model's context cannot take."""
    for asked_together in requests:
        check(asked_together)
        check_context(asked_together, context)


def check_context(requests: Sequence[Request], context: int) -> None:
    """Refuse prompts whose longest answer would not fit the model's context: the context, not the
    limit asked for, would cut it.

    Raises DataError naming the first such prompt and the numbers.
    """
    for request in requests:
        tokens, new = len(request.prompt.token_ids), request.sampling.max_new_tokens
        if tokens + new > context:
            raise DataError(
                f"prompt {request.prompt.id} has {tokens} tokens; with max_new_tokens = {new} that "
                f"is {tokens + new}, more than the model's context of {context}: lower "
                f"max_new_tokens to {context - tokens} or shorten the prompt"
            )
