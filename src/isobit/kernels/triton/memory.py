"""The GPU's memory, transfers between it and the host, and steps captured as CUDA graphs.

Several runs may share a process, each in a thread with its own stream (``torch.cuda.stream``), so
that their kernels run at once.  While one captures, no thread may wait for the whole device or free
memory, which would end the capture: hence ``_DEVICE``.  Nor may another thread launch on the
captured stream.  torch reuses 32 streams, so a new one may be another thread's, and each thread
captures on its own.
"""

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache

import torch

_DEVICE = threading.Lock()
"""Held by the thread that captures, and by one that does something to the whole device."""
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class GpuMemory:
    """``DeviceMemory`` of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def available(self) -> int:
        return self.free() + torch.cuda.memory_reserved(self._device)

    def free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def release_cached(self) -> None:
        with _DEVICE:
            torch.cuda.empty_cache()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def allocate_in_pages(self) -> None:
        """Make the allocator's blocks of pages, so that a small tensor does not keep a whole block
        from being freed between turns, unless torch's environment variable configures the
        allocator.
        """
        if not any(os.environ.get(name) for name in _ALLOCATOR_VARIABLES):
            _set_allocator("expandable_segments:True")

    def host_buffer(self, size: int) -> torch.Tensor:
        """Page-locked."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _set_allocator(settings: str) -> None:
    """torch has no public function for it; the one for every accelerator is newer."""
    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (newer or torch.cuda.memory._set_allocator_settings)(settings)


def synchronize(device: torch.device) -> None:
    """Wait for all that any thread has launched on a GPU."""
    with _DEVICE:
        torch.cuda.synchronize(device)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the GPU, through page-locked memory and in the order of the stream; the host does
    not wait, and torch keeps the source until it is copied.  On a CPU, in tests, the tensor itself.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopies:
    """Copies in page-locked memory, and an event behind them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._copies = [
            torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
            for x in tensors
        ]
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def wait(self) -> Sequence[torch.Tensor]:
        """Wait for the copies and for all that was launched before them."""
        self._arrived.synchronize()
        return self._copies


@contextmanager
def _no_collection() -> Iterator[None]:
    """A garbage collection could free GPU memory in the middle of a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _stream_to_capture() -> torch.cuda.Stream:
    """The thread's stream, or a shared one for the default stream, which cannot be captured."""
    own = torch.cuda.current_stream()
    return _beside_default(own.device) if own == torch.cuda.default_stream() else own


@cache
def _beside_default(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class CapturedGraph:
    """A CUDA graph of a step, and the tensors that it writes."""

    def __init__(
        self, step: Callable[[], tuple[torch.Tensor, ...]], beside: "CapturedGraph | None"
    ) -> None:
        """Run the step once, which compiles and loads its kernels, then capture it.

        ``torch.cuda.graph`` would also collect garbage and free all cached memory, and the next
        prompts would wait for gigabytes of it to be allocated again.
        """
        step()
        self._graph = torch.cuda.CUDAGraph()
        with _DEVICE, _no_collection():
            torch.cuda.synchronize()
            with torch.cuda.stream(_stream_to_capture()):
                pool = None if beside is None else beside._graph.pool()
                # other threads may go on to launch and to allocate
                self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    self._outputs = step()
                except BaseException:
                    with suppress(RuntimeError):  # of the capture, which ends all the same
                        self._graph.capture_end()
                    raise
                self._graph.capture_end()

    def replay(self) -> tuple[torch.Tensor, ...]:
        self._graph.replay()
        return self._outputs
