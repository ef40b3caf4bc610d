"""A model folder's tensors, checked against its configuration, and put together to masters.

Every tensor that the decoder needs must be there, with its shape and a format of numbers, and every
tensor that is there must be one that the decoder reads: silence here is the worst fault of the
field.  What the headers show is checked before the first byte of a weight is read; that values are
finite, as they are read.

A master is made where it will be, in pieces: the file's pages -> the device -> FP32 rows there.  So
the host holds no tensor at all, and the device no more than a master and a piece.

    q_proj [Hq, C] |
    k_proj [Hk, C] |-> rows of layers.N.qkv_proj.weight [Hq + 2 Hk, C]
    v_proj [Hk, C] |
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from isobit.errors import ModelError
from isobit.models.checkpoint_files import CheckpointTensor, open_checkpoint
from isobit.models.config import ModelConfig
from isobit.models.decoder import build_decoder
from isobit.models.layers.embedding import NAME as EMBEDDING
from isobit.models.layers.unit import Master
from isobit.models.tensor_header import shown

FORMATS = ("F32", "BF16", "F16", "F64")
"""Of a weight that is not quantised."""
PIECE = 1 << 24
"""Numbers that are on their way to the device at a time."""
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a folder that fit a configuration; none has been read."""

    config: ModelConfig
    tensors: Mapping[str, CheckpointTensor]
    """By the checkpoint's names: all that the decoder reads."""

    @classmethod
    def open(cls, folder: Path, config: ModelConfig) -> "Checkpoint":
        """Raises ModelError for a missing, damaged, misshaped or superfluous tensor, by name and
        file.
        """
        found = open_checkpoint(folder)
        masters = build_decoder(config).masters()
        expected = {
            part: (rows, *master.shape[1:])
            for master in masters.values()
            for part, rows in master.parts.items()
        }
        for name, tensor in found.items():
            if name not in expected and not _is_tied_head(config, name):
                raise ModelError(
                    f"{tensor.file.path}: holds {shown(name)}, which a {config.family} decoder "
                    "does not read"
                )
        missing = [name for name in expected if name not in found]
        if missing:
            raise ModelError(
                f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]}"
            )
        for name, shape in expected.items():
            _check_header(found[name], shape)
        if config.tied_embeddings and _HEAD in found:
            _check_tied(found[_HEAD], found[f"model.{EMBEDDING}"])
        return cls(config, {name: found[name] for name in expected})

    def masters(self, device: torch.device | str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        """Each master by name, FP32 on the device, in the order of the forward pass; one at a time
        is in memory.  What no checkpoint has is zeros.

        Raises ModelError for a tensor with a NaN or an infinity.
        """
        described = build_decoder(self.config).masters()
        order = list(described.values())
        for (name, master), following in zip(described.items(), [*order[1:], None], strict=True):
            if following is not None:
                for part in following.parts:
                    self.tensors[part].read_ahead()
            yield name, self._read(master, torch.device(device))

    def _read(self, master: Master, device: torch.device) -> torch.Tensor:
        make = torch.empty if master.parts else torch.zeros
        values = make(master.shape, dtype=torch.float32, device=device)
        parts = master.of_checkpoint(values)
        for part, rows in parts.items():
            copy_in_pieces(rows, self.tensors[part].mapped)
        if not is_finite(values):
            bad = next(part for part, rows in parts.items() if not is_finite(rows))
            raise ModelError(f"{self.tensors[bad]} holds a NaN or an infinity")
        return values


def copy_in_pieces(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy mapped numbers to contiguous ones on a device, which converts them to its own format."""
    flat, mapped = target.view(-1), source.view(-1)
    for begin in range(0, len(flat), PIECE):
        piece = mapped[begin : begin + PIECE].to(target.device)
        flat[begin : begin + PIECE].copy_(piece)


def is_finite(values: torch.Tensor) -> bool:
    """Whether all numbers are, without a temporary as large as they are."""
    least, most = torch.aminmax(values)
    return bool(torch.isfinite(torch.stack((least, most))).all())


def _is_tied_head(config: ModelConfig, name: str) -> bool:
    """Some exporters write the tied matrix twice."""
    return name == _HEAD and config.tied_embeddings and not config.score_head


def _check_header(tensor: CheckpointTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ModelError(f"{tensor} has the shape {tensor.shape}, but config.json asks for {shape}")
    if tensor.format not in FORMATS:
        raise ModelError(
            f"{tensor} is {tensor.format}; expected {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, or "
            "F8_E4M3 with scales"
        )


def _check_tied(head: CheckpointTensor, embedding: CheckpointTensor) -> None:
    """A head that is stored beside the embedding that it is tied to is the same matrix."""
    if (head.format, head.shape) != (embedding.format, embedding.shape) or not torch.equal(
        head.mapped.view(torch.uint8), embedding.mapped.view(torch.uint8)
    ):
        raise ModelError(
            f"{head} is another matrix than {embedding.name}, but config.json ties the two; "
            "expected the same bits, or tie_word_embeddings = false"
        )
