"""An update that runs out of memory is done again in smaller micro-batches.

    out of memory in a forward or backward      gradients dropped, memory given back, the budget
                                                halved
    then                                        all samples of the update packed again, and the
                                                update done from its beginning

Up to the optimiser's first change of a weight nothing of an attempt remains, so the result is that
of the smaller budget from the start.
"""

import gc
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from isobit.config.schema import OptimisationConfig
from isobit.errors import ConfigError
from isobit.training.budget import halved
from isobit.training.optimiser import advise_smaller_moments
from isobit.training.trainer import Trainer

Result = TypeVar("Result")


_SHORTER_SAMPLES = "lower rollout.max_new_tokens or data.max_prompt_tokens"


def within_memory(
    trainer: Trainer,
    lengths: Sequence[int],
    attempt: Callable[[int], Result],
    shorter: str = _SHORTER_SAMPLES,
) -> Result:
    """``attempt`` with the tokens a micro-batch of the trainer's next update, lowered until the
    memory suffices.

    ``lengths`` are those of the sequences it packs, and ``shorter`` says how they get shorter.
    Raises ConfigError where the longest alone is too much, and where the memory ran out after the
    optimiser had begun to change weights.
    """
    budget, update, advice = trainer.budget, trainer.updates, _advice(trainer.config, shorter)
    before = budget.at(update)
    while True:
        try:
            return attempt(budget.at(update))
        except torch.OutOfMemoryError as error:
            reason = str(error).partition(". ")[
                0
            ]  # the error itself would hold, by its traceback, the activations of the attempt
        gc.collect()
        if (memory := trainer.policy.backend.memory) is not None:
            memory.release_cached()
        if not trainer.is_whole:
            raise ConfigError(
                f"{reason}, in the middle of an optimiser step, of which nothing is kept; {advice}"
            )
        tokens = halved(budget.at(update), lengths)
        if tokens is None:
            if budget.at(update) != before:
                budget.set(
                    update, before
                )  # nothing was learnt with less, and whoever goes on here does so with more memory
            raise ConfigError(
                f"{reason}, with one sequence of {max(lengths):,} tokens in a micro-batch: smaller "
                "ones "
                f"(training.tokens_per_microbatch = {trainer.config.tokens_per_microbatch:,}) "
                f"cannot be made; {advice}"
            )
        budget.set(update, tokens)


def _advice(config: OptimisationConfig, shorter: str) -> str:
    ways = [shorter]
    if config.recompute != "full":
        ways.append(f"set training.recompute = 'full' (now {config.recompute!r}; the same bits)")
    if smaller := advise_smaller_moments(config.moments):
        ways.append(f"{smaller} (now {config.moments!r})")
    return ", or ".join(ways)
