"""The tensors of a model folder by the checkpoint's names, each read when it is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from isobit.errors import ModelError
from isobit.models.config import ModelConfig
from isobit.models.folder import checkpoint_shapes, weight_files
from isobit.models.tensor_file import TensorFile
from isobit.precision.quant_tensor import QuantTensor


@dataclass(frozen=True, slots=True)
class FolderTensors:
    """See above (``isobit.models.contents.Tensors``)."""

    files: Mapping[str, TensorFile]
    """Of each tensor."""

    @classmethod
    def open(cls, folder: Path, config: ModelConfig) -> "FolderTensors":
        """Raises ModelError for a tensor that is missing or misshaped, by name."""
        opened = [TensorFile(path) for path in weight_files(folder)]
        files = {name: file for file in opened for name in file}
        shapes = {name: shape for file in opened for name, shape in file.shapes().items()}
        for name, shape in checkpoint_shapes(config).items():
            if shapes.get(name) != shape:
                raise ModelError(f"{folder}: {name} has the shape {shapes.get(name)}, not {shape}")
        return cls(files)

    @property
    def in_e4m3(self) -> frozenset[str]:
        """None."""
        return frozenset()

    @property
    def num_files(self) -> int:
        """Files that hold them."""
        return len({id(file) for file in self.files.values()})

    def stored_format(self, name: str) -> tuple[str, int]:
        """The format's name, as the file has it, and bytes of a number."""
        dtype = self.tensor(name).dtype
        return str(dtype).removeprefix("torch."), dtype.itemsize

    def tensor(self, name: str) -> torch.Tensor:
        """As it is stored."""
        return self.files[name][name]

    def quantised(self, name: str) -> QuantTensor | None:
        """None."""
        return None
