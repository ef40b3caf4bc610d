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

A matrix whose parts are all stored in FP8 stays so, bytes upon bytes and scales upon scales.

Tensors of a file against tensors of a device, some numbers at a time, so that neither side holds
a second copy.
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import torch

from isobit.models.checkpoint_files import CheckpointTensor, open_checkpoint, read_json
from isobit.models.config import ModelConfig
from isobit.models.decoder import NAME as EMBEDDING
from isobit.models.decoder import build_decoder
from isobit.models.fp8_checkpoint import (
    SCALE_FORMATS,
    Fp8Format,
    MasterValues,
    read_fp8_format,
    read_scales,
    scales_shape,
)
from isobit.models.layers import Master
from isobit.models.safetensors import SCALES_SUFFIX
from isobit.precision.quant_tensor import QuantTensor, dequantise
from isobit.util.errors import ModelError, shown

PIECE = 1 << 24
"""Numbers that are on their way to a device at a time."""


def copy_in_pieces(target: torch.Tensor, source: torch.Tensor) -> None:
    """Overwrite contiguous numbers with those of a mapped tensor of as many, which are converted
    where they arrive.
    """
    flat, mapped = target.view(-1), source.view(-1)
    for begin in range(0, len(flat), PIECE):
        piece = mapped[begin : begin + PIECE].to(target.device)
        flat[begin : begin + PIECE].copy_(piece)


def is_equal_in_pieces(held: torch.Tensor, mapped: torch.Tensor) -> bool:
    """Whether both hold the same numbers in the same order."""
    pieces = zip(held.view(-1).split(PIECE), mapped.reshape(-1).split(PIECE), strict=True)
    return all(torch.equal(mine, theirs.to(mine.device)) for mine, theirs in pieces)


def is_finite(values: torch.Tensor) -> bool:
    """Whether all numbers are, without a temporary as large as they are."""
    least, most = torch.aminmax(values)
    return bool(torch.isfinite(torch.stack((least, most))).all())


def holds_nan_byte(values: torch.Tensor) -> bool:
    """Whether E4M3 values hold one of its two NaNs; it has no infinity."""
    pieces = values.view(torch.uint8).view(-1).split(PIECE)
    return bool(torch.stack([piece.bitwise_and(0x7F).amax() for piece in pieces]).amax() == 0x7F)


FORMATS = ("F32", "BF16", "F16", "F64")
"""Of a weight that is not quantised."""
FP8 = "F8_E4M3"
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a folder that fit a configuration; none has been read."""

    config: ModelConfig
    tensors: Mapping[str, CheckpointTensor]
    """By the checkpoint's names: all that the decoder reads."""
    scales: Mapping[str, CheckpointTensor]
    """Of each matrix in FP8, by the matrix's name."""

    @classmethod
    def open(cls, folder: Path, config: ModelConfig) -> "Checkpoint":
        """Raises ModelError for a missing, damaged, misshaped or superfluous tensor, by name and
        file.
        """
        source = folder / "config.json"
        fp8 = read_fp8_format(read_json(source), str(source))
        found = open_checkpoint(folder)
        expected = _expected(config)
        _check_names(folder, config, expected, found)
        scales: dict[str, CheckpointTensor] = {}
        for name, (shape, is_matrix) in expected.items():
            tensor = found[name]
            if tensor.shape != shape:
                raise ModelError(
                    f"{tensor} has the shape {tensor.shape}, but config.json asks for {shape}"
                )
            _check_format(tensor, is_matrix, fp8)
            if tensor.format == FP8:
                scales[name] = found[name + SCALES_SUFFIX]
                _check_scales(tensor, scales[name])
        if config.tied_embeddings and _HEAD in found:
            _check_tied(found[_HEAD], found[f"model.{EMBEDDING}"])
        return cls(config, {name: found[name] for name in expected}, scales)

    def masters(self, device: torch.device | str = "cpu") -> Iterator[tuple[str, MasterValues]]:
        """Each master by name on the device, in the order of the forward pass: FP32, or the
        folder's FP8 as it is.  One at a time is in memory.  What no checkpoint has is zeros.

        Raises ModelError for a tensor with a NaN or an infinity.
        """
        described = build_decoder(self.config).masters()
        order = [*described.values(), Master((), {})]
        for place, (name, master) in enumerate(described.items()):
            for part in order[place + 1].parts:
                self.tensors[part].read_ahead()
            if master.parts and self.scales.keys() >= master.parts.keys():
                yield name, self._read_quantised(master, torch.device(device))
            else:
                yield name, self._read(master, torch.device(device))

    @property
    def in_e4m3(self) -> Set[str]:
        """The matrices that are stored in FP8."""
        return self.scales.keys()

    def tensor(self, name: str) -> torch.Tensor:
        """The numbers of one of the checkpoint's tensors, on the host: mapped as they are stored,
        or what FP8 stands for, in FP32.  Raises ModelError as ``masters`` does.
        """
        quantised = self.quantised(name)
        if quantised is not None:
            return dequantise(quantised)
        values = self.tensors[name].mapped
        if not is_finite(values):
            raise _not_finite(self.tensors[name])
        return values

    def quantised(self, name: str) -> QuantTensor | None:
        """A matrix that is stored in FP8, on the host; None for any other tensor.  Raises
        ModelError as ``masters`` does.
        """
        if name not in self.scales:
            return None
        shape = self.tensors[name].shape
        return self._read_quantised(Master(shape, {name: shape[0]}), torch.device("cpu"))

    def _read(self, master: Master, device: torch.device) -> torch.Tensor:
        make = torch.empty if master.parts else torch.zeros
        values = make(master.shape, dtype=torch.float32, device=device)
        parts = master.of_checkpoint(values)
        for part, rows in parts.items():
            if part in self.scales:  # of a linear whose other parts are not in FP8
                rows.copy_(self.tensor(part))
            else:
                copy_in_pieces(rows, self.tensors[part].mapped)
        if not is_finite(values):
            raise _not_finite(
                next(self.tensors[part] for part, rows in parts.items() if not is_finite(rows))
            )
        return values

    def _read_quantised(self, master: Master, device: torch.device) -> QuantTensor:
        rows, columns = master.shape
        parts = tuple(master.parts.values())
        made = QuantTensor.empty_blocks(rows, columns, device, parts)
        stored = {part: self.tensors[part] for part in master.parts}
        for target, tensor in zip(made.values.split(list(parts)), stored.values(), strict=True):
            copy_in_pieces(target.view(torch.uint8), tensor.mapped.view(torch.uint8))
        scales = [read_scales(tensor, self.scales[part]) for part, tensor in stored.items()]
        made.scales.copy_(torch.cat(scales))
        if holds_nan_byte(made.values):
            raise _not_finite(next(one for one in stored.values() if holds_nan_byte(one.mapped)))
        return made


_Expected = Mapping[str, tuple[tuple[int, ...], bool]]
"""The checkpoint's tensors: their shapes, and whether they are matrices of linears."""


def _expected(config: ModelConfig) -> _Expected:
    return {
        part: ((rows, *master.shape[1:]), master.kind == "matrix")
        for master in build_decoder(config).masters().values()
        for part, rows in master.parts.items()
    }


def _check_names(
    folder: Path,
    config: ModelConfig,
    expected: _Expected,
    found: Mapping[str, CheckpointTensor],
) -> None:
    """Nothing is missing, scales of what is in FP8 included, and nothing else is there."""
    quantised = {name for name in expected if name in found and found[name].format == FP8}
    wanted = {*expected, *(name + SCALES_SUFFIX for name in quantised)}
    if config.tied_embeddings and not config.score_head:
        wanted.add(_HEAD)  # some exporters write the tied matrix twice
    for name, tensor in found.items():
        if name not in wanted:
            raise ModelError(
                f"{tensor.file.path}: holds {shown(name)}, which a {config.family} decoder does "
                f"not read{_about_scales(name, found)}"
            )
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelError(f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]}")
    for name in quantised:
        if name + SCALES_SUFFIX not in found:
            raise ModelError(
                f"{found[name]} is {FP8}, and its scales {name}{SCALES_SUFFIX} are missing; "
                f"expected {_one_of(SCALE_FORMATS)} of the shape {scales_shape(found[name].shape)}"
            )


def _about_scales(name: str, found: Mapping[str, CheckpointTensor]) -> str:
    matrix = found.get(name.removesuffix(SCALES_SUFFIX))
    if matrix is None or matrix.name == name:
        return ""
    return f": {matrix.name} is {matrix.format}, and {FP8} alone has scales"


def _check_scales(matrix: CheckpointTensor, scales: CheckpointTensor) -> None:
    """Of a matrix in FP8."""
    if scales.format not in SCALE_FORMATS:
        raise ModelError(f"{scales} is {scales.format}; expected {_one_of(SCALE_FORMATS)}")
    expected = scales_shape(matrix.shape)
    if scales.shape != expected:
        raise ModelError(
            f"{scales} has the shape {scales.shape}, but a matrix of {matrix.shape} has "
            f"{expected} blocks of 128 x 128"
        )


def _check_format(tensor: CheckpointTensor, is_matrix: bool, fp8: Fp8Format | None) -> None:
    """Of a tensor without scales, or with scales that fit."""
    if tensor.format == FP8:
        _check_fp8(tensor, is_matrix, fp8)
    elif tensor.format not in FORMATS:
        raise ModelError(
            f"{tensor} is {tensor.format}; expected {_one_of(FORMATS)}, or {FP8} with scales"
        )
    elif fp8 is not None and is_matrix and not fp8.keeps(tensor.name.removesuffix(".weight")):
        raise ModelError(
            f"{tensor} is {tensor.format}, but quantization_config in config.json does not name "
            f"its module in modules_to_not_convert; expected {FP8}"
        )


def _check_fp8(tensor: CheckpointTensor, is_matrix: bool, fp8: Fp8Format | None) -> None:
    expected = f"expected {_one_of(FORMATS)}"
    if fp8 is None:
        raise ModelError(
            f"{tensor} is {FP8}, but config.json has no quantization_config; {expected}"
        )
    if not is_matrix:
        raise ModelError(f"{tensor} is {FP8}; {expected}, as it is no linear's matrix")
    if fp8.keeps(tensor.name.removesuffix(".weight")):
        raise ModelError(
            f"{tensor} is {FP8}, but modules_to_not_convert in config.json names its module; "
            f"{expected}"
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


def _not_finite(tensor: CheckpointTensor) -> ModelError:
    return ModelError(f"{tensor} holds a NaN or an infinity; expected finite numbers")


def _one_of(formats: tuple[str, ...]) -> str:
    return f"{', '.join(formats[:-1])} or {formats[-1]}"
