"""What the files of a folder hold: a checkpoint's tensors by name, in BF16, or with its matrices in
FP8 as a policy multiplies with them.

    BF16    every tensor is rounded to BF16
    FP8     a matrix that the rollout of a flow has in E4M3:
                X.weight               E4M3 [N, K], the policy's bytes
                X.weight_scale_inv     FP32 [N/128, K/128]; despite its name a value is
                                       byte * scale
            every other tensor in BF16, and its module in ``modules_to_not_convert``

Stock loaders read whole blocks only, and engines fuse q with k and v, gate with up, and all
experts: where one part of a fused matrix does not fill its blocks, all of its parts are written in
BF16, as the numbers that their bytes stand for.  E4M3 times a power of two is a BF16, so nothing is
lost.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from isobit.errors import ConfigError
from isobit.kernels.backend import backend_of
from isobit.models.config import ModelConfig
from isobit.models.decoder import build_decoder, checkpoint_shapes
from isobit.models.shards import SCALES_SUFFIX, Layout
from isobit.precision.dequantise import dequantise
from isobit.precision.flow import PrecisionFlow, Site
from isobit.precision.formats import BLOCK, E4M3
from isobit.precision.quant_tensor import QuantTensor, num_blocks


class Tensors(Protocol):
    """A checkpoint's tensors by name, wherever they lie; each is read when it is asked for."""

    @property
    def in_e4m3(self) -> Set[str]:
        """The matrices that lie there in E4M3."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """The numbers, in any format but E4M3; dequantised where they lie there in that."""
        ...

    def quantised(self, name: str) -> QuantTensor | None:
        """A matrix that lies there in E4M3, with its scales; None for any other tensor."""
        ...


@dataclass(frozen=True, slots=True)
class Contents:
    """The tensors of a folder that is to be written."""

    layout: Layout
    value: Callable[[str], torch.Tensor]
    quantization: dict[str, Any] | None = None
    """``quantization_config`` of config.json; None where no matrix is in FP8."""
    not_whole: tuple[str, ...] = ()
    """Matrices in E4M3 whose sizes are no multiples of 128, and which are BF16 here."""

    @property
    def num_quantised(self) -> int:
        """Matrices in E4M3."""
        return sum(tensor.dtype == E4M3 for tensor in self.layout.values())


def bf16_contents(config: ModelConfig, tensors: Tensors) -> Contents:
    """Every tensor of the checkpoint, rounded to BF16."""
    layout = {
        name: _meta(shape, torch.bfloat16) for name, shape in checkpoint_shapes(config).items()
    }
    return Contents(layout, lambda name: tensors.tensor(name).bfloat16())


def fp8_contents(config: ModelConfig, flow: PrecisionFlow, tensors: Tensors) -> Contents:
    """The matrices that the flow's rollout has in E4M3 with their scales, published from the
    tensors' numbers, and the rest in BF16.

    Raises ConfigError for a flow that has none.
    """
    sites = e4m3_sites(config, flow)
    if not sites:
        raise ConfigError(
            f"the flow {flow.preset} samples with no matrix in FP8, so there is nothing to write "
            "in it; export with --format bf16, or name another flow, for example --precision fp8"
        )

    def made(matrix: str) -> QuantTensor:
        return publish_part(sites[matrix], tensors.tensor(matrix))

    return _in_fp8(config, sites.keys(), made, tensors)


def stored_contents(config: ModelConfig, tensors: Tensors) -> Contents:
    """The matrices that lie there in E4M3, byte for byte, and the rest in BF16."""

    def stored(matrix: str) -> QuantTensor:
        found = tensors.quantised(matrix)
        assert found is not None, f"{matrix} is in E4M3"
        return found

    return _in_fp8(config, tensors.in_e4m3, stored, tensors)


def _in_fp8(
    config: ModelConfig,
    matrices: Set[str],
    made: Callable[[str], QuantTensor],
    tensors: Tensors,
) -> Contents:
    whole = _whole_blocks(config, matrices)
    layout: dict[str, torch.Tensor] = {}
    for name, tensor in bf16_contents(config, tensors).layout.items():
        if name not in whole:
            layout[name] = tensor
            continue
        rows, columns = tensor.shape
        layout[name] = _meta((rows, columns), E4M3)
        grid = num_blocks(rows), num_blocks(columns)
        layout[name + SCALES_SUFFIX] = _meta(grid, torch.float32)

    def value(name: str) -> torch.Tensor:
        matrix = name.removesuffix(SCALES_SUFFIX)
        if matrix not in matrices:
            return tensors.tensor(name).bfloat16()
        quantised = made(matrix)
        if matrix not in whole:
            return dequantise(quantised).bfloat16()
        return quantised.values if name == matrix else quantised.scales

    not_whole = tuple(name for name in layout if name in matrices and name not in whole)
    quantization = _quantization_config(layout, whole) if whole else None
    return Contents(layout, value, quantization, not_whole)


def e4m3_sites(config: ModelConfig, flow: PrecisionFlow) -> dict[str, Site]:
    """The site of each of the checkpoint's matrices that the rollout has in E4M3, as if it were a
    linear of its own: blocks begin anew at each part, so its bytes are those that it has there.
    """
    sites: dict[str, Site] = {}
    for name, master in build_decoder(config).masters().items():
        if master.kind != "matrix":
            continue
        site = flow.rollout.site(name.rpartition(".")[0])
        if site.forward == "e4m3":
            sites |= {part: replace(site, parts=(rows,)) for part, rows in master.parts.items()}
    return sites


def publish_part(site: Site, values: torch.Tensor) -> QuantTensor:
    """A matrix [N, K] of the checkpoint as its policy multiplies with it."""
    made = backend_of(values.device).publish(site, values.float())
    assert isinstance(made, QuantTensor), "the site is in E4M3"
    return made


def _whole_blocks(config: ModelConfig, matrices: Set[str]) -> set[str]:
    """Those of the matrices whose masters have parts of whole blocks alone."""
    return {
        part
        for master in build_decoder(config).masters().values()
        if len(master.shape) == 2
        and all(size % BLOCK == 0 for size in (*master.parts.values(), master.shape[1]))
        for part in master.parts
        if part in matrices
    }


def _quantization_config(layout: Layout, whole: set[str]) -> dict[str, Any]:
    """What stock loaders read.  Every matrix without scales is in the skip list, by the full path
    of its module, and so is lm_head where it is tied, which has no tensor.
    """
    matrices = [name for name, tensor in layout.items() if tensor.ndim == 2 and name not in whole]
    modules = [
        name.removesuffix(".weight") for name in matrices if not name.endswith(SCALES_SUFFIX)
    ]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": list(dict.fromkeys([*modules, "lm_head"])),
    }


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
