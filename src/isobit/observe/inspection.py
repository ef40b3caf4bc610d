"""What ``isobit inspect`` finds out about a model folder, in one record.

Tensors are read one after the other, and none is kept.  With x a matrix of the checkpoint and q the
numbers that its E4M3 bytes stand for, both [N, K]:

    error           sqrt(sum (q - x)^2 / sum x^2), over the matrix
    worst block     the same over each block of 128x128, the highest
    saturated       share of the bytes that are the largest value, 448: at least one a block where
                    scales are FP32, fewer where they are powers of two, rounded up
    flushed         share of x that are not 0 and whose bytes are
    scales          the smallest and the largest

Of a matrix that is stored in E4M3 already, neither the error nor the flushed numbers can be known.
Sums of several matrices give the figures of a layer.

Beside that: what each preset makes of the model (its share in E4M3, the format of the cache, the
size of its published weights), and the memory that the model takes on a named GPU, to generate
alone and to train with the default settings (``isobit.memory.device``).
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import reduce
from math import prod
from pathlib import Path
from typing import Any, get_args

import torch

from isobit.config.tables import PrecisionConfig, Preset, RolloutConfig, TrainingConfig
from isobit.kernels.backend import support
from isobit.kernels.sizes import Sizes
from isobit.memory.activations import published_bytes
from isobit.memory.cache_size import RESERVE, forward_bytes, num_pages_within
from isobit.memory.device import Bytes, DevicePlan, DevicePlanner, gpu_memory
from isobit.models.checkpoint import Checkpoint
from isobit.models.config import ModelConfig
from isobit.models.decoder import build_decoder, decoder_shape, parameter_count
from isobit.models.folder import read_any_config
from isobit.models.saving import Tensors, e4m3_sites, publish_part
from isobit.precision.flow import Graph, PrecisionFlow, Site, build_flow
from isobit.precision.quant_tensor import BLOCK, QuantTensor, dequantise, num_blocks
from isobit.util.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """Of one model in one flow on one GPU."""

    gpu: str
    total: int
    """Bytes that a process can have."""
    longest: int
    """Tokens of the longest sequence that is trained."""
    generating: Bytes
    """By name; empty where not one page of the cache fits."""
    cached_tokens: int
    """That the cache then holds."""
    training: DevicePlan | None
    problem: str
    """Why training does not fit; empty where it does."""


def gpu_figures(
    config: ModelConfig, flow: PrecisionFlow, sizes: Sizes, gpu: str, longest: int
) -> GpuFigures:
    """Plan both; nothing is allocated.  Raises ConfigError for a GPU that is not known."""
    total = gpu_memory(gpu)
    generating, cached = _generating(config, flow, sizes, total)
    training, problem = None, ""
    try:
        planner = DevicePlanner(config, flow, sizes, total)
        rollout = None if config.score_head else RolloutConfig()
        training = planner.plan(rollout, TrainingConfig(), longest)
    except ConfigError as error:
        problem = str(error)
    return GpuFigures(gpu, total, longest, generating, cached, training, problem)


def _generating(
    config: ModelConfig, flow: PrecisionFlow, sizes: Sizes, total: int
) -> tuple[Bytes, int]:
    """-> bytes by name, and tokens of the cache."""
    weights = published_bytes(config, flow.one_sided("rollout"), sizes)
    if config.score_head:
        return {"published weights": weights}, 0
    rollout = RolloutConfig()
    forward = forward_bytes(config, flow, rollout, sizes)
    page = sizes.page_bytes(config, flow)
    room = total - RESERVE - weights - forward
    if room < page:
        return {}, 0
    pages = num_pages_within(config, rollout, sizes.page_tokens, page, room)
    found = {"published weights": weights, "forward and logits": forward, "KV pages": pages * page}
    return found, pages * sizes.page_tokens


@dataclass(frozen=True, slots=True)
class PresetFigures:
    """One preset without options."""

    preset: str
    rollout_e4m3: float
    """Share of the parameters that the rollout reads in E4M3."""
    training_e4m3: float
    """The same of the training forward."""
    cache: str
    """The format of the KV cache in most layers."""
    published_bytes: int
    """What both sides read, in the memory of the back end."""
    exact: bool
    """Whether both sides are one function."""


def preset_figures(config: ModelConfig, sizes: Sizes) -> list[PresetFigures]:
    """Of every preset, on a back end of those sizes."""
    shape = decoder_shape(config)
    flows = [build_flow(PrecisionConfig(preset=preset), shape) for preset in get_args(Preset)]
    return [_figures(config, flow, sizes) for flow in flows]


def _figures(config: ModelConfig, flow: PrecisionFlow, sizes: Sizes) -> PresetFigures:
    return PresetFigures(
        flow.preset,
        _share_in_e4m3(config, flow.rollout),
        _share_in_e4m3(config, flow.training),
        flow.rollout.attention_format(config.num_layers // 2),
        published_bytes(config, flow, sizes),
        flow.exact,
    )


def _share_in_e4m3(config: ModelConfig, graph: Graph) -> float:
    quantised = sum(
        prod(master.shape)
        for name, master in build_decoder(config).masters().items()
        if master.kind == "matrix" and graph.site(name.rpartition(".")[0]).forward == "e4m3"
    )
    return quantised / parameter_count(config)


_LARGEST_BYTE = 0x7E
_MAGNITUDE = 0x7F


@dataclass(frozen=True, slots=True)
class Fp8Figures:
    """Of one matrix, or of several together."""

    numbers: int
    saturated_numbers: int
    smallest_scale: float
    largest_scale: float
    flushed_numbers: int | None = None
    """None, as the next three, of bytes that lay there."""
    squares: float | None = None
    """Sum of x^2."""
    squared_errors: float | None = None
    worst_block: float | None = None

    @property
    def error(self) -> float | None:
        if self.squares is None or self.squared_errors is None:
            return None
        return _relative(self.squared_errors, self.squares)

    @property
    def saturated(self) -> float:
        return self.saturated_numbers / self.numbers

    @property
    def flushed(self) -> float | None:
        return None if self.flushed_numbers is None else self.flushed_numbers / self.numbers

    def __add__(self, other: "Fp8Figures") -> "Fp8Figures":
        return Fp8Figures(
            self.numbers + other.numbers,
            self.saturated_numbers + other.saturated_numbers,
            min(self.smallest_scale, other.smallest_scale),
            max(self.largest_scale, other.largest_scale),
            _sum(self.flushed_numbers, other.flushed_numbers),
            _sum(self.squares, other.squares),
            _sum(self.squared_errors, other.squared_errors),
            None
            if self.worst_block is None or other.worst_block is None
            else max(self.worst_block, other.worst_block),
        )

    def as_json(self) -> dict[str, Any]:
        """The figures; None where they cannot be known."""
        return {
            "error": self.error,
            "worst_block": self.worst_block,
            "saturated": self.saturated,
            "flushed": self.flushed,
            "scales": [self.smallest_scale, self.largest_scale],
        }


def together(figures: list[Fp8Figures]) -> Fp8Figures:
    return reduce(Fp8Figures.__add__, figures)


def measure_published(x: torch.Tensor, published: QuantTensor) -> Fp8Figures:
    """``x`` [N, K] as the checkpoint has it, and as it is published."""
    x = x.float()
    bare = measure_stored(published)
    magnitudes = published.values.view(torch.uint8) & _MAGNITUDE
    error = dequantise(published).sub_(x).square_()
    errors, squares = _block_sums(error), _block_sums(x.square())
    shares = errors / squares.clamp(min=torch.finfo(torch.float64).tiny)
    return Fp8Figures(
        bare.numbers,
        bare.saturated_numbers,
        bare.smallest_scale,
        bare.largest_scale,
        flushed_numbers=int(((magnitudes == 0) & (x != 0)).sum()),
        squares=float(squares.sum()),
        squared_errors=float(errors.sum()),
        worst_block=float(shares.max().sqrt()),
    )


def measure_stored(matrix: QuantTensor) -> Fp8Figures:
    """A matrix of whose origin nothing is known."""
    magnitudes = matrix.values.view(torch.uint8) & _MAGNITUDE
    return Fp8Figures(
        matrix.values.numel(),
        int((magnitudes == _LARGEST_BYTE).sum()),
        float(matrix.scales.min()),
        float(matrix.scales.max()),
    )


def _block_sums(x: torch.Tensor) -> torch.Tensor:
    """FP32 [N, K], not negative -> FP64 [ceil(N/128), ceil(K/128)]; 128 of a row are added in
    FP32.
    """
    rows, columns = x.shape
    grid = num_blocks(rows), num_blocks(columns)
    missing = (0, grid[1] * BLOCK - columns, 0, grid[0] * BLOCK - rows)
    padded = torch.nn.functional.pad(x, missing) if any(missing) else x
    return padded.view(grid[0], BLOCK, grid[1], BLOCK).sum(3).sum(1, dtype=torch.float64)


def _relative(errors: float, squares: float) -> float:
    return (errors / squares) ** 0.5 if squares else 0.0


def _sum(a: Any, b: Any) -> Any:
    return None if a is None or b is None else a + b


LONGEST = 4096
"""Tokens of a sequence that the plan of training is for, where the context is not shorter."""

OnMatrix = Callable[[int, int], None]
"""Called after each matrix with how many are done, and of how many."""


@dataclass(frozen=True, slots=True)
class FormatFigures:
    """The tensors of one format."""

    format: str
    tensors: int
    numbers: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MatrixFigures:
    """One of the checkpoint's matrices that is E4M3, or that the flow makes so."""

    name: str
    layer: int
    linear: str
    """The linear that it is part of: "qkv_proj", "o_proj" ..."""
    shape: tuple[int, ...]
    figures: Fp8Figures


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found."""

    folder: Path
    config: ModelConfig
    parameters: int
    files: int
    """Of tensors."""
    formats: tuple[FormatFigures, ...]
    stored: bool
    """Whether the matrices lie there in E4M3; else they are measured as ``preset`` publishes
    them.
    """
    preset: str
    scales: str
    """Of the flow: "power_of_two" or "fp32"."""
    matrices: tuple[MatrixFigures, ...]
    """In the order of the forward pass; none where the flow has no E4M3."""
    presets: tuple[PresetFigures, ...]
    back_end: str
    """Whose bytes ``presets`` counts: "cpu" or "cuda"."""
    gpu: GpuFigures | None

    @property
    def num_bytes(self) -> int:
        return sum(found.num_bytes for found in self.formats)

    @property
    def linears(self) -> list[str]:
        """Names of linears that have E4M3 matrices, as they first come."""
        return list(dict.fromkeys(matrix.linear for matrix in self.matrices))

    def by_layer(self) -> dict[int, dict[str, Fp8Figures]]:
        """Figures of each linear of each layer."""
        found: dict[int, dict[str, list[Fp8Figures]]] = {}
        for matrix in self.matrices:
            found.setdefault(matrix.layer, {}).setdefault(matrix.linear, []).append(matrix.figures)
        return {
            layer: {linear: together(figures) for linear, figures in linears.items()}
            for layer, linears in found.items()
        }

    def worst(self, count: int) -> list[MatrixFigures]:
        """The matrices with the highest error, where it is known."""
        known = [matrix for matrix in self.matrices if matrix.figures.error is not None]
        return sorted(known, key=lambda matrix: -(matrix.figures.error or 0.0))[:count]

    def as_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "config": asdict(self.config),
            "parameters": self.parameters,
            "files": self.files,
            "bytes": self.num_bytes,
            "formats": [asdict(found) for found in self.formats],
            "flow": {"preset": self.preset, "scales": self.scales, "stored": self.stored},
            "matrices": [
                {
                    "name": matrix.name,
                    "shape": list(matrix.shape),
                    **matrix.figures.as_json(),
                }
                for matrix in self.matrices
            ],
            "presets": [asdict(preset) for preset in self.presets],
            "gpu": None if self.gpu is None else _gpu_json(self.gpu),
        }


def inspect_folder(
    folder: Path,
    precision: PrecisionConfig,
    gpu: str | None = None,
    longest: int | None = None,
    on_matrix: OnMatrix | None = None,
) -> Inspection:
    """Look at a model folder; matrices are measured as ``precision`` publishes them, or as they lie
    there in E4M3.

    Raises ModelError for a folder that cannot be read, ConfigError for a GPU that is not known and
    for options of the flow that the model does not have.
    """
    config = read_any_config(folder)
    flow = build_flow(precision, decoder_shape(config))
    back_end = "cuda" if gpu is not None else "cpu"
    sizes = support(back_end).sizes
    found = (
        None
        if gpu is None
        else gpu_figures(config, flow, sizes, gpu, longest or min(config.max_positions, LONGEST))
    )
    tensors = Checkpoint.open(folder, config)
    sites = e4m3_sites(config, flow)
    if tensors.in_e4m3:
        sites = {name: site for name, site in _all_sites(config).items() if name in tensors.in_e4m3}
    return Inspection(
        folder,
        config,
        parameter_count(config),
        len({tensor.file.path for tensor in tensors.tensors.values()}),
        _formats(tensors),
        bool(tensors.in_e4m3),
        precision.preset,
        precision.scales,
        tuple(_measure(tensors, sites, on_matrix)),
        tuple(preset_figures(config, sizes)),
        back_end,
        found,
    )


def _measure(
    tensors: Tensors, sites: dict[str, Site], on_matrix: OnMatrix | None
) -> list[MatrixFigures]:
    measured = []
    for name, site in sites.items():
        stored = tensors.quantised(name)
        if stored is None:
            values = tensors.tensor(name)
            figures = measure_published(values, publish_part(site, values))
            shape = tuple(values.shape)
        else:
            figures, shape = measure_stored(stored), tuple(stored.values.shape)
        _, layer, linear = site.name.split(".", 2)
        measured.append(MatrixFigures(name, int(layer), linear, shape, figures))
        if on_matrix is not None:
            on_matrix(len(measured), len(sites))
    return measured


def _all_sites(config: ModelConfig) -> dict[str, Site]:
    """Every matrix that the preset ``fp8`` has in E4M3."""
    return e4m3_sites(config, build_flow(PrecisionConfig(preset="fp8"), decoder_shape(config)))


def _formats(tensors: Checkpoint) -> tuple[FormatFigures, ...]:
    """By format, the one with most numbers first; scales are counted apart."""
    found: dict[str, list[torch.Tensor]] = {}
    for tensor in tensors.tensors.values():
        found.setdefault(tensor.format, []).append(tensor.mapped)
    for scales in tensors.scales.values():
        found.setdefault(f"{scales.format} scales", []).append(scales.mapped)
    made = [
        FormatFigures(
            form, len(each), sum(one.numel() for one in each), sum(one.nbytes for one in each)
        )
        for form, each in found.items()
    ]
    return tuple(sorted(made, key=lambda one: -one.numbers))


def _gpu_json(gpu: GpuFigures) -> dict[str, Any]:
    training = gpu.training
    return {
        "name": gpu.gpu,
        "bytes": gpu.total,
        "longest": gpu.longest,
        "generating": dict(gpu.generating),
        "cached_tokens": gpu.cached_tokens,
        "training": None
        if training is None
        else {"rollout": dict(training.rollout), "training": dict(training.training)},
        "problem": gpu.problem,
    }
