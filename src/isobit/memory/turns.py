"""Engine and trainer take turns in a GPU's memory, and each turn's peak is measured.

    rollout, evaluation     the engine has its KV cache and graphs; moments may be on the host
    training                the engine has given them back; moments are on the GPU, then gradients
                            and activations

A turn of the trainer is a ``with`` block around everything that needs its memory.  What torch keeps
of freed blocks is given back between turns.  For that its blocks must not be held by a small tensor
in each of them, moments among activations for example, so they are made of pages that come and go
by themselves (``allocate_in_pages``).
"""

from collections.abc import Iterator
from contextlib import contextmanager

from isobit.clock import Timing
from isobit.memory.device import DevicePlan
from isobit.observe.summary import PhaseMemory
from isobit.rollout.engine import RolloutEngine
from isobit.training.host_moments import HostMoments
from isobit.training.trainer import Trainer

_GIB = 1 << 30


class GpuTurns:
    """The turns of one run, and the most that torch held in each kind of them."""

    def __init__(self, plan: DevicePlan, engine: RolloutEngine | None, trainer: Trainer) -> None:
        """The moments go to the host for the engine's turns if the trainer's configuration says
        so.
        """
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
        """The trainer's turn; ``clock`` counts the seconds in which moments travel as ``offload``.

        Where the trainer has the next turn as well, nothing goes in between.
        """
        if self._engine_is_next:
            self._end("rollout")
        self._engine_is_next = engine_is_next
        if self._engine is not None:
            self._engine.release()
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
            self._memory.release_cached()
        self._memory.reset_peak()

    def figures(self) -> dict[str, float]:
        """The peaks of the latest turn of each kind, GiB, as metrics."""
        return {f"memory/{phase}_peak_gib": size / _GIB for phase, size in self._latest.items()}

    def summary(self) -> dict[str, PhaseMemory]:
        """Planned beside measured, by phase, up to now."""
        if self._engine_is_next:
            self._end("rollout")
        return {
            phase: PhaseMemory(self.plan.peaks[phase] / _GIB, peak / _GIB)
            for phase, peak in self._peaks.items()
        }

    def _end(self, phase: str) -> None:
        """Take a phase's peak; where nothing is generated, and losses alone are measured between
        trainings, that is training too.
        """
        phase = phase if phase in self._peaks else "training"
        self._latest[phase] = self._memory.peak()
        self._peaks[phase] = max(self._peaks[phase], self._latest[phase])
