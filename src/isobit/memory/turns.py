"""Engine and trainer alternate in a device's own memory, and the peak of each turn is measured.

    rollout, evaluation     the engine has its KV cache and graphs; moments may be on the host
    training                the engine has released them; moments are on the device, then gradients
                            and activations

A turn of the trainer is a ``with`` block around everything that needs its memory. Memory that torch
keeps of freed blocks is released between turns, which requires ``allocate_in_pages``. If both fit
together (``DevicePlan.engine_stays``) nothing is released, and the engine captures its steps once
per run instead of once per step.

What runs out of memory in training is done again in smaller micro-batches.

    out of memory in a forward or backward      gradients dropped, memory given back, the budget
                                                halved
    then                                        all samples of the update packed again, and the
                                                update done from its beginning

Up to the optimiser's first change of a weight nothing of an attempt remains, so the result is that
of the smaller budget from the start. Of several processes all do the same: what one of them has no
memory for, none has (``isobit.parallel.world``). A measurement without gradients does not depend on
the cut: it lowers the budget for itself alone.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from isobit.config.training import OptimisationConfig
from isobit.kernels.backend import backend_of
from isobit.memory.device import DevicePlan
from isobit.parallel.world import raised_on_all
from isobit.training.optimiser import advise_smaller_moments
from isobit.training.trainer import Trainer, halved
from isobit.util.errors import IsobitError, OutOfMemoryError
from isobit.util.terminal import GIB, Timing


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """The most that a phase of a run took of a device's own memory."""

    planned_gib: float
    peak_gib: float


class HoldsMemory(Protocol):
    def release(self) -> None:
        """Release what can be made again at the next request."""
        ...


class Turns:
    """Who has a device's memory when, and what each turn took; here for main memory, as on a CPU,
    which engine and trainer share, and where nothing is planned or measured.
    """

    def training(self, clock: Timing, engine_is_next: bool = True) -> AbstractContextManager[None]:
        """The trainer's turn, in which the engine must not be used."""
        return nullcontext()

    def release_engine(self) -> None:
        """Release the engine's memory for a measurement of the trainer outside of its turns."""

    def figures(self) -> Mapping[str, float]:
        """The peaks of the latest turn of each kind, GiB, as metrics."""
        return {}

    def summary(self) -> Mapping[str, PhaseMemory] | None:
        """Planned and measured peaks so far by phase; None if nothing is planned."""
        return None

    def describe(self) -> Sequence[str]:
        """The plan as lines of text."""
        return ()


def allocate_in_pages(device: torch.device) -> None:
    """Have the allocator of a device's own memory map single pages, so that what one turn freed can
    be released before the next. Must be called before anything is allocated.
    """
    memory = backend_of(device).memory
    if memory is not None:
        memory.allocate_in_pages()


class HostMoments:
    """Moves the moments of a trainer from the device of its policy into one page-locked buffer of
    the host, which is kept, and back. The tensors of the optimiser's state stay the same objects
    with the same bits, so that a checkpoint can be written on either side. Step counts stay where
    they are.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._backend = trainer, trainer.policy.backend
        self._buffer: torch.Tensor | None = None
        self._on_host = False

    def to_host(self) -> None:
        """Leave none of them on the device; nothing happens before the first update has made
        them.
        """
        moments = self._moments()
        if self._on_host or not moments:
            return
        if self._buffer is None:
            size = sum(tensor.nbytes for tensor in moments)
            memory = self._backend.memory
            if memory is None:
                self._buffer = torch.empty(size, dtype=torch.uint8)
            else:
                self._buffer = memory.host_buffer(size)
        parts = self._buffer.split([tensor.nbytes for tensor in moments])
        places = [
            part.view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(parts, moments, strict=True)
        ]
        for place, tensor in zip(places, moments, strict=True):
            place.copy_(tensor, non_blocking=True)
        self._replace(moments, places)
        self._on_host = True

    def to_device(self) -> None:
        """Bring them back, if they were away."""
        if not self._on_host:
            return
        moments = self._moments()
        copies = [
            torch.empty_like(tensor, device=self._backend.device).copy_(tensor, non_blocking=True)
            for tensor in moments
        ]
        self._replace(moments, copies)
        self._on_host = False

    def _moments(self) -> list[torch.Tensor]:
        return [
            tensor for name, tensor in self._trainer.moments().items() if not name.endswith(".step")
        ]

    def _replace(self, moments: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        """Give the tensors the storage of others, once these are written."""
        self._backend.synchronize()
        for tensor, value in zip(moments, values, strict=True):
            tensor.data = value


class DeviceTurns(Turns):
    """The turns of one run, and the peak of each kind of them in bytes."""

    def __init__(self, plan: DevicePlan, engine: HoldsMemory | None, trainer: Trainer) -> None:
        """Moments go to the host for the engine's turns if the trainer's configuration says so."""
        memory = trainer.policy.backend.memory
        assert memory is not None, "turns are taken in memory that a device has for itself"
        self.plan, self._memory = plan, memory
        self._engine = engine
        self._moments = HostMoments(trainer) if trainer.config.offload_moments else None
        self._peaks = dict.fromkeys(plan.peaks, 0)
        self._latest = dict(self._peaks)
        self._engine_is_next = True

    @contextmanager
    def training(self, clock: Timing, engine_is_next: bool = True) -> Iterator[None]:
        """The trainer's turn; ``clock`` counts the seconds of moving moments as ``offload``. If the
        trainer has the next turn as well, nothing is released in between.
        """
        if self._engine_is_next:
            self._end("rollout")
        self._engine_is_next = engine_is_next
        self.release_engine()
        if self._moments is not None:
            with clock("offload"):
                self._moments.to_device()
        self._memory.reset_peak()
        yield
        self._end("training")
        if engine_is_next:
            if self._moments is not None:
                with clock("offload"):
                    self._moments.to_host()
            if not self.plan.engine_stays:
                self._memory.release_cached()
        self._memory.reset_peak()

    def release_engine(self) -> None:
        """Release KV cache and graphs if their memory is needed; the engine makes them again."""
        if self._engine is not None and not self.plan.engine_stays:
            self._engine.release()

    def describe(self) -> Sequence[str]:
        return self.plan.describe()

    def figures(self) -> dict[str, float]:
        return {f"memory/{phase}_peak_gib": size / GIB for phase, size in self._latest.items()}

    def summary(self) -> dict[str, PhaseMemory]:
        if self._engine_is_next:
            self._end("rollout")
        return {
            phase: PhaseMemory(self.plan.peaks[phase] / GIB, peak / GIB)
            for phase, peak in self._peaks.items()
        }

    def _end(self, phase: str) -> None:
        """Record a phase's peak; of a run that generates nothing every phase is training."""
        phase = phase if phase in self._peaks else "training"
        self._latest[phase] = self._memory.peak()
        self._peaks[phase] = max(self._peaks[phase], self._latest[phase])


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
) -> Result:
    """``attempt`` with the tokens a micro-batch of the trainer's next update, lowered for it and
    for all later ones until the memory suffices.

    ``lengths`` are those of the sequences it packs, and ``shorter`` says how they get shorter.
    Raises OutOfMemoryError where the longest alone is too much, and where the memory ran out after
    the optimiser had begun to change weights.
    """
    budget, update = trainer.budget, trainer.updates
    before = budget.at(update)
    while isinstance(found := _try(trainer, attempt, budget.at(update)), _Failure):
        if not trainer.is_whole:
            middle = "it was in the middle of an update, of which nothing is kept"
            raise found.error("training", f"{middle}: {_advice(trainer.config, shorter)}")
        tokens = halved(budget.at(update), lengths)
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
) -> Result:
    """``attempt``, which takes no gradients and whose result does not depend on the cut, with
    ``tokens`` a micro-batch, or as many fewer as there is memory for.

    Raises OutOfMemoryError, naming ``phase``, where the longest sequence alone is too much.
    """
    while isinstance(found := _try(trainer, attempt, tokens), _Failure):
        lowered = halved(tokens, lengths)
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
        failure = _Failure(str(error), None if memory is None else memory.free())
    gc.collect()
    if memory is not None:
        memory.release_cached()
    return failure


def _indivisible(config: OptimisationConfig, lengths: Sequence[int]) -> str:
    return (
        f"one sequence of {max(lengths):,} tokens is a micro-batch, and smaller ones "
        f"(training.tokens_per_microbatch = {config.tokens_per_microbatch:,}) cannot be made"
    )


def _advice(config: OptimisationConfig, shorter: str) -> str:
    ways = [shorter]
    if config.recompute != "full":
        ways.append(f"set training.recompute = 'full' (now {config.recompute!r}; the same bits)")
    if smaller := advise_smaller_moments(config.moments):
        ways.append(f"{smaller} (now {config.moments!r})")
    return ", or ".join(ways)
