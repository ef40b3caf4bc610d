"""The tensors of a model folder by the checkpoint's names, each read when it is asked for."""

from dataclasses import dataclass
from pathlib import Path

import torch

from isobit.errors import ModelError
from isobit.models.checkpoint import Checkpoint, is_finite
from isobit.models.config import ModelConfig
from isobit.precision.quant_tensor import QuantTensor


@dataclass(frozen=True, slots=True)
class FolderTensors:
    """See above (``isobit.models.contents.Tensors``)."""

    checkpoint: Checkpoint

    @classmethod
    def open(cls, folder: Path, config: ModelConfig) -> "FolderTensors":
        """Raises ModelError as ``Checkpoint.open`` does."""
        return cls(Checkpoint.open(folder, config))

    @property
    def num_files(self) -> int:
        """Files that hold them."""
        return len({tensor.file.path for tensor in self.checkpoint.tensors.values()})

    @property
    def in_e4m3(self) -> frozenset[str]:
        """None."""
        return frozenset()

    def tensor(self, name: str) -> torch.Tensor:
        """As it is stored.  Raises ModelError for one that is not finite."""
        tensor = self.checkpoint.tensors[name]
        values = tensor.mapped
        if not is_finite(values.float()):
            raise ModelError(f"{tensor} holds a NaN or an infinity")
        return values

    def quantised(self, name: str) -> QuantTensor | None:
        """None."""
        return None
