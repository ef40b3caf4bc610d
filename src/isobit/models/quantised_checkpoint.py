"""Checkpoints in 8 bits.

**FP8** in blocks, in the format of DeepSeek-V3, is read and written: E4M3 matrices with a scale for
each 128 x 128 block.

    config.json   quantization_config: {quant_method: "fp8", fmt: "e4m3", activation_scheme:
                  "dynamic", weight_block_size: [128, 128], modules_to_not_convert: [...]}
    X.weight             F8_E4M3 [N, K]
    X.weight_scale_inv   F32, BF16 or F8_E8M0 [ceil(N / 128), ceil(K / 128)]; despite its name a
                         value is byte * scale

The parts of a fused matrix have separate blocks, in checkpoints and in flows, so their scales are
concatenated. Bytes and scales are used as they are where the flow's scales have the same form: with
scales = "fp32" always, with powers of two (the default) if all scales of the matrix are powers of
two. Other matrices are quantised once again, and ``ScaleConversion`` measures the error.

**INT8** is written for vLLM, in the format of compressed-tensors:

    config.json   quantization_config: {quant_method: "compressed-tensors", format: "int-quantized",
                  config_groups: INT8 by channel and by token, transform_config: a Hadamard matrix
                  of n rows in front of the inputs, ignore: [...]}
    X.weight             I8 [N, K], of W H
    X.weight_scale       F32 [N, 1]; integer * scale is a value of W H / sqrt(n)

Such a folder is read where nothing but its integers is needed: by a policy without masters, or with
LoRA, in a flow whose linears are in INT8. Integers are used as they are, and scales divided by
sqrt(n). Where sqrt(n) is no power of two a scale was rounded to FP32 when it was written, so that
it may be one unit in the last place from the run's own.

Read from vLLM 0.25.1 (``quantization/compressed_tensors``, ``csrc/quantization/hadamard``) and
compressed-tensors 0.17: H is Sylvester's, of a power of two of rows up to 2^15, and divided by
sqrt(n). vLLM multiplies by it in BF16, on one GPU, in front of linears of which it asserts that
they have no bias. In front of experts, whose W8A8 it has with a scale a row, it takes none: their
integers are of W H, and would be multiplied by what H has not changed, in silence.

**MXFP4** is read for gpt-oss's experts alone (``isobit.models.stacked``).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from isobit.models.safetensors import INT8_SCALES_SUFFIX, SCALES_SUFFIX, CheckpointTensor
from isobit.precision.quant_tensor import (
    BLOCK,
    E4M3_MAX,
    num_blocks,
    rotation_size,
)
from isobit.util.errors import ConfigError, ModelError, shown

FORMATS = ("F32", "BF16", "F16", "F64")  # formats of weights that are not quantised
FP8, INT8 = "F8_E4M3", "I8"
SUFFIXES = {FP8: SCALES_SUFFIX, INT8: INT8_SCALES_SUFFIX}
"""Suffixes of the names of scales, by the format of their matrices."""
SCALE_FORMATS = {FP8: ("F32", "BF16", "F8_E8M0"), INT8: ("F32",)}
_WANTED: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
_BY_DEFAULT = ("fmt", "activation_scheme")  # keys that older folders leave out
_LISTS = ("modules_to_not_convert", "ignored_layers")
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "scale_fmt": (None, "float", "ue8m0"),
    "dequantize": (None, False, True),
    "modules_to_convert": (None, []),
    "expert_dtype": (None, "fp8"),
}
"""Other keys that transformers writes, with the values that change nothing here."""
_EXPERTS_IN_BF16 = '--precision.modules_bf16 ["gate_up_proj","down_proj"]'


@dataclass(frozen=True, slots=True)
class Fp8Format:
    kept: tuple[str, ...]
    """``modules_to_not_convert``: module paths, or the beginning or end of such paths."""

    def keeps(self, module: str) -> bool:
        """Whether the matrix of a module is not quantised."""
        return any(
            module == name or module.startswith(f"{name}.") or module.endswith(f".{name}")
            for name in self.kept
        )


@dataclass(frozen=True, slots=True)
class Int8Format(Fp8Format):
    """``kept`` is ``ignore``."""

    config: Mapping[str, Any]
    source: str


@dataclass(frozen=True, slots=True)
class Mxfp4Format(Fp8Format):
    """Stacked experts in MXFP4, which are dequantised (``isobit.models.stacked``)."""


def read_quantisation(config: Mapping[str, Any], source: str) -> Fp8Format | None:
    """A config.json's ``quantization_config``, or None. Raises ModelError for other formats."""
    quantisation = config.get("quantization_config")
    if quantisation is None:
        return None
    if not isinstance(quantisation, Mapping):
        raise ModelError(
            f"{source}: quantization_config is {shown(quantisation)}, expected an object"
        )
    if quantisation.get("quant_method") == "compressed-tensors":
        return Int8Format(_modules(quantisation, ("ignore",), source), quantisation, source)
    is_mxfp4 = quantisation.get("quant_method") == "mxfp4"
    for key, expected in ({} if is_mxfp4 else _WANTED).items():
        if quantisation.get(key, expected if key in _BY_DEFAULT else None) != expected:
            raise ModelError(
                f"{source}: quantization_config has {key} = "
                f"{shown(repr(quantisation.get(key)))}, which is not supported; expected "
                f"{expected!r}: E4M3 in blocks of 128 x 128, or no quantisation"
            )
    for key, value in quantisation.items():
        known = key == "quant_method" or key in _LISTS or (key in _WANTED and not is_mxfp4)
        if not known and value not in _HARMLESS.get(key, (None,)):
            raise ModelError(
                f"{source}: quantization_config has {shown(key)} = {shown(repr(value))}, which is "
                "not supported"
            )
    kept = _modules(quantisation, _LISTS, source)
    return Mxfp4Format(kept) if is_mxfp4 else Fp8Format(kept)


def _modules(quantisation: Mapping[str, Any], keys: Sequence[str], source: str) -> tuple[str, ...]:
    kept: list[str] = []
    for key in keys:
        names = quantisation.get(key) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ModelError(f"{source}: {key} is {shown(repr(names))}, expected a list of modules")
        kept += names
    return tuple(kept)


def check_int8(format: Int8Format, rotations: Mapping[str, int]) -> None:
    """Raises ModelError for another layout than ``int8_config`` writes for these matrices, with the
    rows of their Hadamard matrix.
    """
    layout = _int8_layout(rotations, format.kept)
    for key in (*layout, *format.config.keys() - layout.keys()):
        value = format.config.get(key)
        if value != layout.get(key) and (key in layout or value):
            raise ModelError(
                f"{format.source}: the folder is in compressed-tensors' format, of which only what "
                f"`isobit export --format int8` writes is read, and {shown(key)} = "
                f"{shown(repr(value))} is not ({layout.get(key)!r}); name the folder that it was "
                "made from, in BF16 or FP8"
            )


def fp8_config(kept: Sequence[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a folder in FP8, but for the modules ``kept``."""
    return {**_WANTED, "modules_to_not_convert": list(kept)}


def int8_config(
    rotations: Mapping[str, int], names: Collection[str], kept: Sequence[str]
) -> dict[str, Any]:
    """The ``quantization_config`` of a folder in INT8, but for the modules ``kept``: matrices, with
    the rows of their Hadamard matrix, among the ``names`` of all tensors. Raises ConfigError for a
    matrix that vLLM cannot multiply by.

    Only the side of the inputs is named, since compressed-tensors' ``apply_transform_config`` would
    multiply the stored weights once more.
    """
    for matrix in rotations:
        _check_vllm_takes(matrix.removesuffix(".weight"), names)
    return _int8_layout(rotations, kept)


def _int8_layout(rotations: Mapping[str, int], kept: Sequence[str]) -> dict[str, Any]:
    modules: dict[int, dict[str, None]] = {}  # the last part of their names, by rows of H
    for matrix, size in rotations.items():
        modules.setdefault(size, {})[matrix.split(".")[-2]] = None
    transforms = {
        f"hadamard_{size}": {
            "type": "hadamard",
            "head_dim": size,
            "apply": [
                {
                    "location": "input",
                    "targets": [rf"re:.*\.({'|'.join(leaves)})$"],
                    "ignore": list(kept),
                }
            ],
        }
        for size, leaves in sorted(modules.items())
        if size > 1
    }
    integers = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**integers, "strategy": "channel", "dynamic": False},
                "input_activations": {**integers, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": list(kept),
        **({"transform_config": {"config_groups": transforms}} if transforms else {}),
    }


def _check_vllm_takes(module: str, names: Collection[str]) -> None:
    problem, others = None, ""
    if ".experts." in module:
        problem = "is an expert"
        others = " or --format fp8 --precision fp8, or keep experts in BF16, " + _EXPERTS_IN_BF16
    if f"{module}.bias" in names:
        problem, others = "has a bias", ""
    if problem is not None:
        raise ConfigError(
            f"{module} {problem}, and vLLM multiplies inputs by a Hadamard matrix, as INT8 needs "
            "it, only in front of linears that are no experts and have no bias; export with "
            f"--format bf16{others}"
        )


def scales_shape(matrix: tuple[int, ...], format: str = FP8) -> tuple[int, ...]:
    """The shape of the scales of a matrix [N, K]."""
    return (matrix[0], 1) if format == INT8 else tuple(num_blocks(size) for size in matrix)


def read_scales(matrix: CheckpointTensor, scales: CheckpointTensor) -> torch.Tensor:
    """FP32 scales, on the host. Raises ModelError if one is not finite and positive."""
    numbers = scales.mapped.float()
    if not bool(((numbers > 0) & torch.isfinite(numbers * E4M3_MAX)).all()):
        raise ModelError(
            f"{scales} holds a scale that is not positive and finite, so values of {matrix.name} "
            "are none; expected positive numbers"
        )
    return numbers


def read_int8_scales(matrix: CheckpointTensor, scales: CheckpointTensor) -> torch.Tensor:
    """The FP32 scale of each row, as it is published, on the host. Raises ModelError as
    ``read_scales`` does.
    """
    numbers = scales.mapped[:, 0].double() / rotation_size(matrix.shape[1]) ** 0.5
    if not bool(((numbers > 0) & torch.isfinite(numbers)).all()):
        raise ModelError(
            f"{scales} holds a scale that is not positive and finite, so values of {matrix.name} "
            "are none; expected positive numbers"
        )
    return numbers.float()


def check_scales(matrix: CheckpointTensor, scales: CheckpointTensor) -> None:
    """Raises ModelError for scales that cannot be those of a matrix in 8 bits."""
    formats = SCALE_FORMATS[matrix.format]
    if scales.format not in formats:
        raise ModelError(f"{scales} is {scales.format}; expected {one_of(formats)}")
    expected = scales_shape(matrix.shape, matrix.format)
    if scales.shape != expected:
        blocks = " blocks of 128 x 128" if matrix.format == FP8 else ": a scale a row"
        raise ModelError(
            f"{scales} has the shape {scales.shape}, but a matrix of {matrix.shape} has "
            f"{expected}{blocks}"
        )


def check_eight_bits(
    tensor: CheckpointTensor, is_matrix: bool, format: Fp8Format | None, own: str, key: str
) -> None:
    """Raises ModelError for a matrix in 8 bits that ``quantization_config`` does not announce."""
    expected = f"expected {one_of(FORMATS)}"
    if format is None:
        raise ModelError(
            f"{tensor} is {tensor.format}, but config.json has no quantization_config; {expected}"
        )
    if tensor.format != own:
        raise ModelError(
            f"{tensor} is {tensor.format}, but quantization_config in config.json is of {own}; "
            f"{expected}, or {own}"
        )
    if not is_matrix:
        raise ModelError(f"{tensor} is {own}; {expected}, as it is no linear's matrix")
    if format.keeps(tensor.name.removesuffix(".weight")):
        raise ModelError(
            f"{tensor} is {own}, but {key} in config.json names its module; {expected}"
        )


def one_of(formats: tuple[str, ...]) -> str:
    """Names, for a sentence."""
    return " or ".join([*([", ".join(formats[:-1])] if formats[1:] else []), formats[-1]])
