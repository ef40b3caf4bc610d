"""What runs out of memory in training is done again in smaller micro-batches.

    out of memory in a forward or backward      gradients dropped, memory given back, the budget
                                                halved, until each sequence is alone
    then                                        all samples of the update packed again, and the
                                                update done from its beginning

Up to the optimiser's first change of a weight nothing of an attempt remains, so the result is that
of the smaller budget from the start. Of several processes all do the same: what one of them has no
memory for, none has (``isobit.parallel.world``). A rank that runs out of memory in the middle of an
exchange ends, as with any error of its own. A measurement without gradients does not depend on the
cut: it lowers the budget for itself alone.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from isobit.config.training import OptimisationConfig
from isobit.parallel.world import is_raised_on_all, raised_on_all
from isobit.records.packing import first_fit_decreasing
from isobit.training.budget import Cut, halved
from isobit.training.optimiser import advise_smaller_moments
from isobit.training.trainer import Trainer
from isobit.util.errors import IsobitError, OutOfMemoryError

# What runs out of memory in training.
Result = TypeVar("Result")
_SHORTER_SAMPLES = "lower rollout.max_new_tokens or data.max_prompt_tokens"


@dataclass(frozen=True, slots=True)
class _Failure:
    """An attempt for which there was no memory: what torch said, and the bytes that were free.
    The error itself would hold, by its traceback, the activations of the attempt.
    """

    reason: str
    free: int | None

    def error(self, phase: str, advice: str) -> IsobitError:
        """All ranks have agreed on the failure, and end alike."""
        return raised_on_all(OutOfMemoryError(phase, self.reason, self.free, advice))


def within_memory(
    trainer: Trainer,
    lengths: Sequence[int],
    attempt: Callable[[int], Result],
    shorter: str = _SHORTER_SAMPLES,
    cut: Cut | None = None,
) -> Result:
    """``attempt`` with the tokens a micro-batch of the trainer's next update, lowered for it and
    for all later ones until the memory suffices.

    ``lengths`` are those of the sequences it packs, ``cut`` says how (by default first-fit
    decreasing), and ``shorter`` how they get shorter.  Raises OutOfMemoryError where one sequence
    alone is too much, and where the memory ran out after the optimiser had begun to change weights.
    """
    budget, update = trainer.budget, trainer.updates
    cut = cut or partial(first_fit_decreasing, lengths)
    before = budget.at(update)
    while isinstance(found := _try(trainer, attempt, budget.at(update)), _Failure):
        if not trainer.is_whole:
            middle = "it was in the middle of an update, of which nothing is kept"
            raise found.error("training", f"{middle}: {_advice(trainer.config, shorter)}")
        tokens = halved(budget.at(update), lengths, cut)
        if tokens is None:
            if budget.at(update) != before:
                budget.set(
                    update, before
                )  # nothing was learnt with less, and whoever goes on here does so with more memory
            raise found.error(
                "training",
                f"{_indivisible(trainer.config, lengths)}: {_advice(trainer.config, shorter)}",
            )
        budget.set(update, tokens)
    return found


def measured_within_memory(
    trainer: Trainer,
    lengths: Sequence[int],
    tokens: int,
    attempt: Callable[[int], Result],
    phase: str,
    shorter: str = _SHORTER_SAMPLES,
    cut: Cut | None = None,
) -> Result:
    """``attempt``, which takes no gradients and whose result does not depend on the cut, with
    ``tokens`` a micro-batch, or as many fewer as there is memory for.

    Raises OutOfMemoryError, naming ``phase``, where one sequence alone is too much.
    """
    cut = cut or partial(first_fit_decreasing, lengths)
    while isinstance(found := _try(trainer, attempt, tokens), _Failure):
        lowered = halved(tokens, lengths, cut)
        if lowered is None:
            raise found.error(phase, f"{_indivisible(trainer.config, lengths)}: {shorter}")
        tokens = lowered
    return found


def _try(trainer: Trainer, attempt: Callable[[int], Result], tokens: int) -> Result | _Failure:
    """An attempt, after whose failure the memory that it took has been given back."""
    memory = trainer.policy.backend.memory
    try:
        return attempt(tokens)
    except torch.OutOfMemoryError as error:
        if trainer.policy.world.size > 1 and not is_raised_on_all(error):
            raise
        failure = _Failure(str(error), None if memory is None else memory.free())
    gc.collect()
    if memory is not None:
        memory.release_cached()
    return failure


def _indivisible(config: OptimisationConfig, lengths: Sequence[int]) -> str:
    return (
        f"each micro-batch is one sequence, of at most {max(lengths):,} tokens, and smaller ones "
        f"(training.tokens_per_microbatch = {config.tokens_per_microbatch:,}) cannot be made"
    )


def _advice(config: OptimisationConfig, shorter: str) -> str:
    ways = [shorter]
    if config.recompute != "full":
        ways.append(f"set training.recompute = 'full' (now {config.recompute!r}; the same bits)")
    if smaller := advise_smaller_moments(config.moments):
        ways.append(f"{smaller} (now {config.moments!r})")
    return ", or ".join(ways)
