"""The tensors of a model folder: found in its files, checked against the configuration, and
assembled into masters.

Every tensor that the decoder needs must be there, with the right shape and format, and the decoder
must read every tensor that is there, since silently ignoring one is the worst fault; only rotary
buffers of old checkpoints are left aside, where they hold what the configuration gives, and the
vision tower of a larger model (``isobit.models.larger_model``). Headers are
checked before the first byte of a weight is read; values are checked to be finite while they are
read.

An index is untrusted: only files of the folder itself are read, even if symbolic links lead
elsewhere, and index and headers must agree on the one file of each tensor. The hub's cache keeps a
snapshot's files as links to ``blobs`` beside ``snapshots``; these count as the folder's own.

A master is assembled on its device in pieces (mapped file -> device -> FP32 rows), so that the host
holds no tensor, and the device only a master and a piece.

    q_proj [Hq, C] |
    k_proj [Hk, C] |-> rows of layers.N.qkv_proj.weight [Hq + 2 Hk, C]
    v_proj [Hk, C] |

A matrix whose parts are all stored in FP8 stays in FP8, with bytes and scales concatenated.
"""

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from isobit.models.adapter_folder import is_adapter_folder
from isobit.models.config import ModelConfig, rotary_buffer
from isobit.models.decoder import NAME as EMBEDDING
from isobit.models.decoder import build_decoder
from isobit.models.families import FAMILIES
from isobit.models.larger_model import LargerModel, decoder_tensors, is_larger
from isobit.models.layers import Master
from isobit.models.master_values import MasterValues
from isobit.models.quantised_checkpoint import (
    FORMATS,
    FP8,
    INT8,
    SCALE_FORMATS,
    SUFFIXES,
    Fp8Format,
    Int8Format,
    Mxfp4Format,
    check_eight_bits,
    check_int8,
    check_scales,
    one_of,
    read_int8_scales,
    read_quantisation,
    read_scales,
    scales_shape,
)
from isobit.models.safetensors import (
    INDEX_FILE,
    WEIGHTS_FILE,
    CheckpointTensor,
    TensorFile,
    parse_json,
)
from isobit.models.stacked import MXFP4, expert_tensors
from isobit.precision.quant_tensor import (
    Int8Rows,
    QuantisedWeight,
    QuantTensor,
    dequantise,
    rotation_size,
)
from isobit.util.errors import ModelError, shown
from isobit.util.files import lies_within
from isobit.util.plain_files import read_plain


def open_checkpoint(folder: Path) -> dict[str, CheckpointTensor]:
    """Every tensor of a folder by name. Raises ModelError for files that are missing, damaged or
    outside of the folder, and if index and headers disagree.
    """
    files = [TensorFile(path) for path in weight_files(folder)]
    tensors: dict[str, CheckpointTensor] = {}
    for file in files:
        for name in file:
            if name in tensors:
                raise ModelError(
                    f"{shown(name)} is in both {tensors[name].file.path} and {file.path}; expected "
                    "once"
                )
            tensors[name] = CheckpointTensor(name, file)
    if (folder / INDEX_FILE).is_file():
        _check_index(folder, tensors)
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder. Raises ModelError if there are none, if one that the index
    names is missing or outside of the folder, and if there are two models.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        if not (folder / WEIGHTS_FILE).is_file():
            raise ModelError(
                f"{folder}: neither {WEIGHTS_FILE} nor {INDEX_FILE} is there; pickled weights "
                "(.bin, .pt) are not read"
            )
        return [_inside(folder, WEIGHTS_FILE, folder / WEIGHTS_FILE)]
    names = shard_names(folder)
    if WEIGHTS_FILE not in names and (folder / WEIGHTS_FILE).is_file():
        raise ModelError(
            f"{folder} holds both {WEIGHTS_FILE} and {INDEX_FILE}, which names other files; remove "
            "what belongs to another model"
        )
    return [_inside(folder, name, index) for name in names]


def shard_names(folder: Path) -> tuple[str, ...]:
    """The file names in the index, or the single file's name if there is no index. Raises
    ModelError for an index that is damaged or names a file outside of the folder.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        return (WEIGHTS_FILE,)
    names = tuple(sorted(set(_weight_map(folder).values())))
    for name in names:
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\0" in name:
            raise ModelError(
                f"{index} names {shown(name)}, which is outside of the folder; expected a file in "
                "it"
            )
    return names


def _where_a_run_has_it(path: Path) -> str:
    """A run directory is no model folder but contains one; say where. Adapters lie beside none."""
    if is_adapter_folder(path.parent):
        return (
            f", as {path.parent} holds adapters of LoRA alone; name the model that they change, or "
            f"make one of both: `isobit export {path.parent} --to FOLDER --merge`"
        )
    if not (path.parent / "run.json").is_file():
        return ""
    model = path.parent / "model"
    is_there = (model / path.name).is_file() or is_adapter_folder(model)
    return f"; {path.parent} is the directory of a run: " + (
        f"its model is {model}"
        if is_there
        else f"`isobit export {path.parent} --to FOLDER` makes a model of its newest checkpoint"
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a folder. Raises ModelError for a file that is missing or holds none."""
    try:
        content = read_plain(path)
    except FileNotFoundError:
        raise ModelError(f"{path} is missing{_where_a_run_has_it(path)}") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    return parse_json(content, str(path))


def _weight_map(folder: Path) -> dict[str, str]:
    index = folder / INDEX_FILE
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map; expected one from tensors to files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise ModelError(
                f"{index}: {shown(name)} is said to be in {shown(file)}, expected the name of a "
                ".safetensors file"
            )
    return weight_map


def _inside(folder: Path, name: str, named_by: Path) -> Path:
    """The path of a file that must be in the folder."""
    path = folder / name
    if not _is_file(path):
        raise ModelError(f"{named_by} names {shown(name)}, which is not there")
    if not lies_within(path, folder):
        raise ModelError(
            f"{path} is a link that leads out of the folder, to {path.resolve()}; put the file "
            "itself there"
        )
    return path


def _is_file(path: Path) -> bool:
    """False for a name that no file can have."""
    try:
        return path.is_file()
    except OSError:
        return False


def _check_index(folder: Path, tensors: dict[str, CheckpointTensor]) -> None:
    """Raise ModelError unless the index names all tensors, each in the file that holds it."""
    index, weight_map = folder / INDEX_FILE, _weight_map(folder)
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.path != folder / file:
            where = f"in {tensors[name].file.path.name}" if name in tensors else "in none of them"
            raise ModelError(
                f"{index} says that {shown(name)} is in {shown(file)}, but it is {where}"
            )
    for name, tensor in tensors.items():
        if name not in weight_map:
            raise ModelError(f"{tensor} is not in {INDEX_FILE}; expected every tensor there")


PIECE = 1 << 24  # numbers that are copied to a device at a time


def copy_in_pieces(target: torch.Tensor, source: torch.Tensor) -> None:
    """Overwrite contiguous numbers with a mapped tensor's, converted on the target's device."""
    flat, mapped = target.view(-1), source.view(-1)
    for begin in range(0, len(flat), PIECE):
        piece = mapped[begin : begin + PIECE].to(target.device)
        flat[begin : begin + PIECE].copy_(piece)


def is_equal_in_pieces(held: torch.Tensor, mapped: torch.Tensor) -> bool:
    """Whether both hold the same numbers in the same order."""
    pieces = zip(held.view(-1).split(PIECE), mapped.reshape(-1).split(PIECE), strict=True)
    return all(torch.equal(mine, theirs.to(mine.device)) for mine, theirs in pieces)


def is_finite(values: torch.Tensor) -> bool:
    """Whether all numbers are finite, without a temporary of their size."""
    least, most = torch.aminmax(values)
    return bool(torch.isfinite(torch.stack((least, most))).all())


def holds_nan_byte(values: torch.Tensor) -> bool:
    """Whether E4M3 values hold one of its two NaNs; it has no infinity."""
    pieces = values.view(torch.uint8).view(-1).split(PIECE)
    return bool(torch.stack([piece.bitwise_and(0x7F).amax() for piece in pieces]).amax() == 0x7F)


_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class FolderCheckpoint:
    """The tensors of a folder that fit a configuration; none has been read."""

    config: ModelConfig
    tensors: Mapping[str, CheckpointTensor]  # all that the decoder reads, by the checkpoint's names
    scales: Mapping[str, CheckpointTensor]  # of each matrix in 8 bits, by the matrix's name

    @classmethod
    def open(cls, folder: Path, config: ModelConfig) -> "FolderCheckpoint":
        """Raises ModelError for a missing, damaged, misshaped or superfluous tensor."""
        source = folder / "config.json"
        described = read_json(source)
        format = read_quantisation(described, str(source))
        stored = open_checkpoint(folder)
        if is_larger(described):
            for tensor in LargerModel.of(described, stored).rest.values():
                _check_kept(tensor)
            stored = decoder_tensors(stored)
        ignored = FAMILIES[config.family].ignored
        stored = {name: one for name, one in stored.items() if not name.startswith(ignored)}
        in_mxfp4 = isinstance(format, Mxfp4Format)
        if in_mxfp4 and not config.stacks_experts:
            raise ModelError(f"{source}: MXFP4 is read for experts of gpt-oss alone")
        if config.may_stack_experts:
            stored, format = expert_tensors(config, stored, in_mxfp4), None if in_mxfp4 else format
        expected = _expected(config)
        _check_names(folder, config, expected, stored)
        scales: dict[str, CheckpointTensor] = {}
        for name, (shape, is_matrix) in expected.items():
            tensor = stored[name]
            if tensor.shape != shape:
                raise ModelError(
                    f"{tensor} has the shape {tensor.shape}, but config.json asks for {shape}"
                )
            _check_format(tensor, is_matrix, format)
            if tensor.format in SUFFIXES:
                scales[name] = _scales_of(name, tensor, stored)
        if isinstance(format, Int8Format):
            matrices = [stored[name] for name in scales]
            check_int8(format, {one.name: rotation_size(one.shape[1]) for one in matrices})
        if config.tied_embeddings and _HEAD in stored:
            _check_tied(stored[_HEAD], stored[f"model.{EMBEDDING}"])
        return cls(config, {name: stored[name] for name in expected}, scales)

    def masters(self, device: torch.device | str = "cpu") -> Iterator[tuple[str, MasterValues]]:
        """Each master by name on the device, in the order of the forward: FP32, or the folder's FP8
        or INT8 unchanged. One at a time is in memory. Masters that checkpoints do not have are
        zeros.
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
        return {name for name in self.scales if self.tensors[name].format == FP8}

    @property
    def in_int8(self) -> Set[str]:
        """The matrices that are stored in INT8."""
        return self.scales.keys() - self.in_e4m3

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor on the host: mapped as stored, or dequantised to FP32. Raises as ``masters``
        does, and for a matrix in INT8.
        """
        if name in self.in_int8:
            raise ModelError(
                f"{self.tensors[name]} is in INT8, behind a Hadamard matrix; name the run or "
                "folder that it was exported from, which has the numbers"
            )
        quantised = self.quantised(name)
        if quantised is not None:
            return dequantise(quantised)
        values = self.tensors[name].mapped
        if not is_finite(values):
            raise _not_finite(self.tensors[name])
        return values

    def quantised(self, name: str) -> QuantTensor | None:
        """A matrix that is stored in FP8, on the host, else None. Raises as ``masters`` does."""
        if name not in self.in_e4m3:
            return None
        shape = self.tensors[name].shape
        return self._read_fp8(Master(shape, {name: shape[0]}), torch.device("cpu"))

    def int8_rows(self, name: str) -> Int8Rows | None:
        """A matrix that is stored in INT8, on the host, else None."""
        if name not in self.in_int8:
            return None
        tensor = self.tensors[name]
        return Int8Rows(tensor.mapped, read_int8_scales(tensor, self.scales[name]))

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

    def _read_quantised(self, master: Master, device: torch.device) -> QuantisedWeight:
        if self.tensors[next(iter(master.parts))].format == FP8:
            return self._read_fp8(master, device)
        (n, k), parts = master.shape, list(master.parts.values())
        matrix = Int8Rows.empty(n, k, device)
        rows = zip(matrix.values.split(parts), matrix.scales.split(parts), strict=True)
        for part, (values, scales) in zip(master.parts, rows, strict=True):
            copy_in_pieces(values, self.tensors[part].mapped)
            scales.copy_(read_int8_scales(self.tensors[part], self.scales[part]))
        return matrix

    def _read_fp8(self, master: Master, device: torch.device) -> QuantTensor:
        rows, columns = master.shape
        parts = tuple(master.parts.values())
        matrix = QuantTensor.empty_blocks(rows, columns, device, parts)
        stored = {part: self.tensors[part] for part in master.parts}
        for target, tensor in zip(matrix.values.split(list(parts)), stored.values(), strict=True):
            copy_in_pieces(target.view(torch.uint8), tensor.mapped.view(torch.uint8))
        scales = [read_scales(tensor, self.scales[part]) for part, tensor in stored.items()]
        matrix.scales.copy_(torch.cat(scales))
        if holds_nan_byte(matrix.values):
            raise _not_finite(next(one for one in stored.values() if holds_nan_byte(one.mapped)))
        return matrix


_Expected = Mapping[str, tuple[tuple[int, ...], bool]]
"""The checkpoint's tensors: their shapes, and whether they are matrices of linears."""


def _expected(config: ModelConfig) -> _Expected:
    return {
        part: ((rows, *master.shape[1:]), master.kind == "matrix")
        for master in build_decoder(config).masters().values()
        for part, rows in master.parts.items()
    }


def _check_kept(tensor: CheckpointTensor) -> None:
    """Raise ModelError for a tensor beside the decoder that cannot be written as it is: a folder
    that is written has the decoder's own ``quantization_config``.
    """
    if tensor.format in SUFFIXES:
        raise ModelError(
            f"{tensor} is {tensor.format}, and what stands beside the decoder is kept in 16 or 32 "
            "bits alone; take the folder in BF16"
        )
    _check_format(tensor, False, None)


def _check_names(
    folder: Path, config: ModelConfig, expected: _Expected, stored: Mapping[str, CheckpointTensor]
) -> None:
    """Raise ModelError if a tensor, or the scales of a matrix in 8 bits, is missing or not read."""
    formats = {name: stored[name].format for name in expected if name in stored}
    quantised = {name: SUFFIXES[kind] for name, kind in formats.items() if kind in SUFFIXES}
    read = {*expected, *(name + suffix for name, suffix in quantised.items())}
    if config.tied_embeddings and not config.score_head:
        read.add(_HEAD)  # some exporters write the tied matrix twice
    for name, tensor in stored.items():
        if name not in read and not _is_buffer(tensor, config):
            raise ModelError(
                f"{tensor.file.path}: holds {shown(name)}, which a {config.family} decoder does "
                f"not read{_about_scales(name, stored)}"
            )
    missing = [name for name in expected if name not in stored]
    if missing:
        raise ModelError(f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]}")


def _scales_of(
    matrix: str, tensor: CheckpointTensor, stored: Mapping[str, CheckpointTensor]
) -> CheckpointTensor:
    name, kind = matrix + SUFFIXES[tensor.format], tensor.format
    if name not in stored:
        raise ModelError(
            f"{tensor} is {kind}, and its scales {name} are missing; expected "
            f"{one_of(SCALE_FORMATS[kind])} of the shape {scales_shape(tensor.shape, kind)}"
        )
    check_scales(tensor, stored[name])
    return stored[name]


_ROTARY = re.compile(
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\."
    r"(?P<kind>inv_freq|original_inv_freq|cos_cached|sin_cached)"
)
"""Buffers that transformers before 4.32 and tools of that time stored. They follow from the
configuration, so that nothing is lost without them.
"""


def _is_buffer(tensor: CheckpointTensor, config: ModelConfig) -> bool:
    """Whether it is a rotary buffer. Raises ModelError if its numbers are not those that the
    configuration gives.
    """
    match = _ROTARY.fullmatch(tensor.name)
    if match is None or tensor.format not in FORMATS:
        return False
    values = tensor.mapped.double()
    expected, error = rotary_buffer(config, match["kind"], values.numel() // config.head_dim)
    if values.numel() != expected.numel():
        raise ModelError(
            f"{tensor} has the shape {tensor.shape}, but config.json asks for {expected.numel()} "
            "numbers; remove the buffer, or correct config.json"
        )
    values, limits = values.view_as(expected), torch.finfo(tensor.mapped.dtype)
    error = error + expected.abs() * limits.eps + limits.smallest_normal
    wrong = ~((values - expected).abs() <= error)  # of NaN, too
    if bool(wrong.any()):
        place = int(wrong.flatten().nonzero()[0])
        raise ModelError(
            f"{tensor} is {values.flatten()[place]:.8g} in place {place}, but config.json "
            f"(rope_theta = {config.rope_theta:g}, head_dim = {config.head_dim}) gives "
            f"{expected.flatten()[place]:.8g}; the model was trained with other rotary positions: "
            "correct config.json, or remove the buffer if that is wrong"
        )
    return True


def _about_scales(name: str, stored: Mapping[str, CheckpointTensor]) -> str:
    for kind, suffix in SUFFIXES.items():
        matrix = stored.get(name.removesuffix(suffix))
        if matrix is not None and name.endswith(suffix):
            return f": {matrix.name} is {matrix.format}, and {kind} alone has scales"
    return ""


def _check_format(tensor: CheckpointTensor, is_matrix: bool, format: Fp8Format | None) -> None:
    own, key = (
        (INT8, "ignore") if isinstance(format, Int8Format) else (FP8, "modules_to_not_convert")
    )
    if tensor.format in ((FP8,) if format is None else SUFFIXES):
        check_eight_bits(tensor, is_matrix, format, own, key)
    elif tensor.format not in (*FORMATS, MXFP4):
        raise ModelError(
            f"{tensor} is {tensor.format}; expected {one_of(FORMATS)}, or {FP8} with scales"
        )
    elif format is not None and is_matrix and not format.keeps(tensor.name.removesuffix(".weight")):
        raise ModelError(
            f"{tensor} is {tensor.format}, but quantization_config in config.json does not name "
            f"its module in {key}; expected {own}"
        )


def _check_tied(head: CheckpointTensor, embedding: CheckpointTensor) -> None:
    """A stored head must equal the embedding that it is tied to."""
    if (head.format, head.shape) != (embedding.format, embedding.shape) or not torch.equal(
        head.mapped.view(torch.uint8), embedding.mapped.view(torch.uint8)
    ):
        raise ModelError(
            f"{head} is another matrix than {embedding.name}, but config.json ties the two; "
            "expected the same bits, or tie_word_embeddings = false"
        )


def _not_finite(tensor: CheckpointTensor) -> ModelError:
    return ModelError(f"{tensor} holds a NaN or an infinity; expected finite numbers")
