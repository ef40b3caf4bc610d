"""Engine and trainer alternate in a device's own memory, and the peak of each phase is measured.

    rollout, evaluation     the engine has its KV cache and graphs; moments may be on the host
    training                the engine has released them; moments are on the device, then gradients
                            and activations

A phase of the trainer is a ``with`` block around everything that needs its memory. Memory that
torch keeps of freed blocks is released between phases, which requires ``allocate_in_pages``. If
both fit together (``DevicePlan.engine_stays``) nothing is released, and the engine captures its
steps once per run instead of once per step.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from isobit.kernels.backend import backend_of
from isobit.memory.device import DevicePlan
from isobit.training.trainer import Trainer
from isobit.util.clock import Timing
from isobit.util.terminal import GIB


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """The most that a phase of a run took of a device's own memory."""

    planned_gib: float
    peak_gib: float


class HoldsMemory(Protocol):
    def release(self) -> None:
        """Release what can be made again at the next request."""
        ...


class MemorySharing:
    """The phases of engine and trainer in main memory, as on a CPU: nothing is planned, measured or
    released.
    """

    def training(self, clock: Timing, engine_is_next: bool = True) -> AbstractContextManager[None]:
        """A phase of the trainer, in which the engine must not be used."""
        return nullcontext()

    def release_engine(self) -> None:
        """Release the engine's memory for a measurement of the trainer outside of its phases."""

    def figures(self) -> Mapping[str, float]:
        """The peaks of the latest phase of each kind, GiB, as metrics."""
        return {}

    def summary(self) -> Mapping[str, PhaseMemory] | None:
        """Planned and measured peaks so far by phase; None if nothing is planned."""
        return None

    def describe(self) -> Sequence[str]:
        """The plan as lines of text."""
        return ()


def allocate_in_pages(device: torch.device) -> None:
    """Have the allocator of a device's own memory map single pages, so that what one phase freed
    can be released before the next. Must be called before anything is allocated.
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
        """Move the moments to the host, once the first update has made them."""
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
        """Move the moments back, if they are on the host."""
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


class DeviceSharing(MemorySharing):
    """The phases of one run in a device's own memory, and the peak of each kind in bytes."""

    def __init__(self, plan: DevicePlan, engine: HoldsMemory | None, trainer: Trainer) -> None:
        """Moments go to the host for the engine's phases if the trainer's configuration says so."""
        memory = trainer.policy.backend.memory
        assert memory is not None, "phases alternate in memory that a device has for itself"
        self.plan, self._memory = plan, memory
        self._engine = engine
        self._moments = HostMoments(trainer) if trainer.config.offload_moments else None
        self._peaks = dict.fromkeys(plan.peaks, 0)
        self._latest = dict(self._peaks)
        self._engine_is_next = True

    @contextmanager
    def training(self, clock: Timing, engine_is_next: bool = True) -> Iterator[None]:
        """A phase of the trainer; ``clock`` counts the seconds of moving moments as ``offload``. If
        the next phase is the trainer's as well, nothing is released in between.
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
