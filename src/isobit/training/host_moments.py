"""AdamW's moments on the host while a GPU has something better to do with their memory.

    to_host      GPU -> one page-locked buffer, which is kept; the GPU's memory is free afterwards
    to_device    buffer -> new tensors on the GPU

The tensors of the optimiser's state stay the same objects with the same bits, so that a checkpoint
can be written on either side. Step counts stay where they are.
"""

import torch

from isobit.training.trainer import Trainer


class HostMoments:
    """Moves the moments of a trainer from the device of its policy and back."""

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
