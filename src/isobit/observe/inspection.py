"""What ``isobit inspect`` finds out about a model folder.

Tensors are read one after the other, and none is kept.  With x a matrix of the checkpoint and q the
numbers that its E4M3 bytes stand for, both [N, K]:

    error           sqrt(sum (q - x)^2 / sum x^2), over the matrix
    worst block     the highest error of a block of 128x128
    saturated       share of the bytes that are the largest value, 448: at least one a block where
                    scales are FP32, fewer where they are powers of two, rounded up
    flushed         share of x that are not 0 and whose bytes are
    scales          the smallest and the largest

Error and flushed numbers of a matrix that is stored in E4M3 are not known. Of a matrix in INT8,
which is multiplied by a Hadamard matrix H before, q are the numbers behind H and its inverse, and

    worst block     the highest error of a row
    saturated       share of the values that are 127 or -127: at least one a row
    flushed         share of the numbers of x H that are not 0 and whose values are
    crest           the highest of a row of x H: its largest number over its root mean square

It also lists what each preset quantises, and the memory to generate and to train on a named GPU.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import reduce
from math import prod
from operator import add
from pathlib import Path
from typing import Any, get_args

import torch

from isobit.config.recipes import InspectConfig
from isobit.config.tables import PrecisionConfig, Preset
from isobit.kernels.backend import support
from isobit.kernels.sizes import Sizes
from isobit.memory.activations import published_bytes
from isobit.memory.cache_size import RESERVE, forward_bytes, num_pages_within
from isobit.memory.device import Bytes, DevicePlan, DevicePlanner, read_card
from isobit.memory.speed import SpeedShape, StepTime, StepWork, estimate_step
from isobit.models.checkpoint import Checkpoint
from isobit.models.config import ModelConfig
from isobit.models.decoder import build_decoder, decoder_shape, parameter_count
from isobit.models.folder import model_needs, read_any_config
from isobit.models.saving import Tensors, publish_part, quantised_sites
from isobit.precision.flow import Graph, PrecisionFlow, Site, build_flow
from isobit.precision.quant_tensor import (
    BLOCK,
    EIGHT_BITS,
    Format,
    Int8Rows,
    QuantisedWeight,
    QuantTensor,
    dequantise,
    hadamard_matrix,
    num_blocks,
    rotation_size,
)
from isobit.util.errors import ConfigError

_DEFAULTS = InspectConfig()


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """The memory that a model takes on a GPU."""

    gpu: str
    total: int
    """Bytes that a process can use."""
    longest: int
    """Tokens of the longest sequence that is trained."""
    generating: Bytes
    """By name; empty where not one page of the cache fits."""
    cached_tokens: int
    """The capacity of the cache in ``generating``."""
    training: DevicePlan | None
    problem: str
    """Why training does not fit; empty where it does."""
    gpus: int = 1
    """That train together."""
    time: StepTime | None = None
    """Of a step, where training fits."""

    def as_json(self) -> dict[str, Any]:
        plan = self.training
        phases = plan and {"rollout": dict(plan.rollout), "training": dict(plan.training)}
        return {
            "name": self.gpu.lower(),
            "bytes": self.total,
            "longest": self.longest,
            "generating": dict(self.generating),
            "cached_tokens": self.cached_tokens,
            "training": phases,
            "problem": self.problem,
            "gpus": self.gpus,
            "time": self.time and self.time.as_json(),
        }


def gpu_figures(
    config: ModelConfig,
    flow: PrecisionFlow,
    sizes: Sizes,
    gpu: str,
    longest: int,
    settings: InspectConfig = _DEFAULTS,
    gpus: int = 1,
) -> GpuFigures:
    """Plan both phases on so many GPUs without allocating anything.  Raises ConfigError for an
    unknown GPU, and for a model that it does not compute.
    """
    card = read_card(gpu)
    total, training_config = card.total, settings.training
    if (problem := support("cuda").model_problem(model_needs(config, flow.preset))) is not None:
        raise ConfigError(f"--gpu {gpu} cannot run this: {problem}; leave --gpu out")
    weights = published_bytes(config, flow.one_sided("rollout"), sizes)
    rollout, generating, cached = None, {"published weights": weights}, 0
    if not config.score_head:
        rollout = settings.rollout
        forward = forward_bytes(config, flow, rollout, sizes)
        page = sizes.page_bytes(config, flow)
        free = total - RESERVE - weights - forward
        if free < page:
            generating = {}
        else:
            pages = num_pages_within(config, rollout, sizes.page_tokens, page, free)
            generating |= {"forward and logits": forward, "KV pages": pages * page}
            cached = pages * sizes.page_tokens
    training, time, problem = None, None, ""
    try:
        planner = DevicePlanner(config, flow, sizes, total, processes=gpus)
        training = planner.plan(rollout, training_config, longest)
        time = estimate_step(_step_work(config, flow, settings, training, longest))
    except ConfigError as error:
        problem = str(error)
    return GpuFigures(card.name, total, longest, generating, cached, training, problem, gpus, time)


def _step_work(
    config: ModelConfig,
    flow: PrecisionFlow,
    settings: InspectConfig,
    plan: DevicePlan,
    longest: int,
) -> StepWork:
    """A step in which every sequence is as long as the longest."""
    training, new = settings.training, min(settings.rollout.max_new_tokens, longest - 1)
    samples = 1 if config.score_head else training.samples_per_prompt
    sequences = training.prompts_per_step * samples
    batches = -(-sequences // max(1, plan.tokens // longest))
    return StepWork(
        shape=SpeedShape(config, flow),
        sequences=sequences,
        length=longest,
        recompute=training.recompute,
        epochs=training.epochs,
        trainers=plan.processes,
        idle=1 - batches / (-(-batches // plan.processes) * plan.processes),
        prompts=0 if config.score_head else training.prompts_per_step,
        prompt_tokens=longest - new,
        samples=samples,
        new_tokens=new,
        most_at_once=settings.rollout.max_sequences,
        cached_tokens=plan.pages * plan.page_tokens,
        samplers=plan.processes,
    )


@dataclass(frozen=True, slots=True)
class PresetFigures:
    """What a preset, without options, makes of a model."""

    preset: str
    rollout_8bit: float
    """Share of the parameters that the rollout reads in E4M3 or INT8."""
    training_8bit: float
    """Share that the training forward reads in E4M3 or INT8."""
    cache: str
    """The format of the KV cache in most layers."""
    published_bytes: int
    """Size of the weights that both sides read, on the back end."""
    exact: bool
    """Whether both sides are one function."""


def _preset_figures(config: ModelConfig, sizes: Sizes) -> tuple[PresetFigures, ...]:
    """The figures of every preset, on a back end of those sizes."""
    matrices = {
        name.rpartition(".")[0]: prod(master.shape)
        for name, master in build_decoder(config).masters().items()
        if master.kind == "matrix"
    }

    def share(graph: Graph) -> float:
        found = (size for name, size in matrices.items() if graph.site(name).forward in EIGHT_BITS)
        return sum(found) / parameter_count(config)

    shape = decoder_shape(config)
    return tuple(
        PresetFigures(
            flow.preset,
            share(flow.rollout),
            share(flow.training),
            flow.rollout.attention_format(config.num_layers // 2),
            published_bytes(config, flow, sizes),
            flow.exact,
        )
        for flow in (build_flow(PrecisionConfig(preset=one), shape) for one in get_args(Preset))
    )


@dataclass(frozen=True, slots=True)
class EightBitFigures:
    """The figures of a matrix, or of several."""

    numbers: int
    saturated_numbers: int
    smallest_scale: float
    largest_scale: float
    flushed_numbers: int | None = None
    """None, like the next three, for matrices that were stored in E4M3."""
    squares: float | None = None
    """Sum of x^2."""
    squared_errors: float | None = None
    worst_block: float | None = None
    crest: float | None = None
    """None for E4M3."""

    @property
    def error(self) -> float | None:
        if self.squares is None or self.squared_errors is None:
            return None
        return (self.squared_errors / self.squares) ** 0.5 if self.squares else 0.0

    @property
    def snr(self) -> float | None:
        """The ratio of signal to noise in decibels; None where there is no noise or it is not
        known.
        """
        return -20 * math.log10(self.error) if self.error else None

    @property
    def saturated(self) -> float:
        return self.saturated_numbers / self.numbers

    @property
    def flushed(self) -> float | None:
        return None if self.flushed_numbers is None else self.flushed_numbers / self.numbers

    def __add__(self, other: "EightBitFigures") -> "EightBitFigures":
        def both(take: Callable[[Any, Any], Any], name: str) -> Any:
            a, b = getattr(self, name), getattr(other, name)
            return None if a is None or b is None else take(a, b)

        takes = {"smallest_scale": min, "largest_scale": max, "worst_block": max, "crest": max}
        return EightBitFigures(*(both(takes.get(one.name, add), one.name) for one in fields(self)))

    def as_json(self) -> dict[str, Any]:
        """The figures; None where they are not known."""
        return {
            "error": self.error,
            "snr_db": self.snr,
            "worst_block": self.worst_block,
            "crest": self.crest,
            "saturated": self.saturated,
            "flushed": self.flushed,
            "scales": [self.smallest_scale, self.largest_scale],
        }


def together(figures: list[EightBitFigures]) -> EightBitFigures:
    return reduce(EightBitFigures.__add__, figures)


def measure_published(x: torch.Tensor, published: QuantisedWeight) -> EightBitFigures:
    """The figures of ``x`` [N, K] of the checkpoint, as it is published."""
    if isinstance(published, Int8Rows):
        return _measure_int8(x.float(), published)
    return _measure_e4m3(x.float(), published)


def _measure_int8(x: torch.Tensor, published: Int8Rows) -> EightBitFigures:
    """Behind H, which multiplies every error and every number's square by n on average."""
    size = rotation_size(x.shape[1])
    turned = (x.view(-1, size) @ hadamard_matrix(size)).view(x.shape)
    read = published.values.float().mul_(size * published.scales[:, None])
    errors = read.sub_(turned).square_().sum(1, dtype=torch.float64) / size
    squares = x.square().sum(1, dtype=torch.float64)
    tiny = torch.finfo(torch.float64).tiny
    largest = turned.abs().amax(1).double()
    crests = largest / (squares * size / x.shape[1]).clamp(min=tiny).sqrt()
    return EightBitFigures(
        x.numel(),
        int((published.values.abs() == 127).sum()),
        float(published.scales.min()),
        float(published.scales.max()),
        int(((published.values == 0) & (turned != 0)).sum()),
        float(squares.sum()),
        float(errors.sum()),
        float((errors / squares.clamp(min=tiny)).max().sqrt()),
        float(crests.max()),
    )


def _measure_e4m3(x: torch.Tensor, published: QuantTensor) -> EightBitFigures:
    error = dequantise(published).sub_(x).square_()
    errors, squares = _block_sums(error), _block_sums(x.square())
    shares = errors / squares.clamp(min=torch.finfo(torch.float64).tiny)
    return replace(
        measure_stored(published),
        flushed_numbers=int(((_magnitudes(published) == 0) & (x != 0)).sum()),
        squares=float(squares.sum()),
        squared_errors=float(errors.sum()),
        worst_block=float(shares.max().sqrt()),
    )


def measure_stored(matrix: QuantTensor) -> EightBitFigures:
    """The figures of a matrix that is stored in E4M3."""
    return EightBitFigures(
        matrix.values.numel(),
        int((_magnitudes(matrix) == 0x7E).sum()),  # 448
        float(matrix.scales.min()),
        float(matrix.scales.max()),
    )


def _magnitudes(matrix: QuantTensor) -> torch.Tensor:
    """The bytes without their signs."""
    return matrix.values.view(torch.uint8) & 0x7F


def _block_sums(x: torch.Tensor) -> torch.Tensor:
    """FP32 [N, K], not negative -> FP64 [ceil(N/128), ceil(K/128)]; rows are added in FP32."""
    rows, columns = x.shape
    grid = num_blocks(rows), num_blocks(columns)
    missing = (0, grid[1] * BLOCK - columns, 0, grid[0] * BLOCK - rows)
    padded = torch.nn.functional.pad(x, missing) if any(missing) else x
    return padded.view(grid[0], BLOCK, grid[1], BLOCK).sum(3).sum(1, dtype=torch.float64)


HIGH_CREST = 11.0
"""From here on a row in INT8 has no smaller error than in E4M3: crest / (127 sqrt(12)), 2.5%."""
LONGEST = 4096
"""Tokens of the longest sequence by default, where the context is not shorter."""

OnMatrix = Callable[[int, int], None]
"""Called after each matrix with the number that are done, and of all."""


@dataclass(frozen=True, slots=True)
class FormatFigures:
    """The tensors of one format."""

    format: str
    tensors: int
    numbers: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MatrixFigures:
    """A matrix of the checkpoint that is E4M3, or that the flow publishes in 8 bits."""

    name: str
    layer: int
    linear: str
    """The linear that it belongs to: "qkv_proj", "o_proj" ..."""
    shape: tuple[int, ...]
    figures: EightBitFigures


@dataclass(frozen=True, slots=True)
class Inspection:
    folder: Path
    config: ModelConfig
    parameters: int
    files: int
    """The number of files with tensors."""
    formats: tuple[FormatFigures, ...]
    stored: bool
    """Whether the matrices are stored in E4M3; otherwise they are measured as ``preset`` publishes
    them.
    """
    preset: str
    scales: str
    """"power_of_two" or "fp32"."""
    matrices: tuple[MatrixFigures, ...]
    """In the order of the forward pass; none where the flow has no 8 bits."""
    format: Format
    """That of the matrices, "e4m3" or "int8"."""
    presets: tuple[PresetFigures, ...]
    back_end: str
    """What ``presets`` counts bytes for: "cpu" or "cuda"."""
    gpu: GpuFigures | None

    @property
    def num_bytes(self) -> int:
        return sum(found.num_bytes for found in self.formats)

    @property
    def linears(self) -> list[str]:
        """Names of linears that have 8-bit matrices, in the order of the forward pass."""
        return list(dict.fromkeys(matrix.linear for matrix in self.matrices))

    def by_layer(self) -> dict[int, dict[str, EightBitFigures]]:
        """Figures of each linear of each layer."""
        found: dict[int, dict[str, EightBitFigures]] = {}
        for one in self.matrices:
            layer = found.setdefault(one.layer, {})
            before = layer.get(one.linear)
            layer[one.linear] = one.figures if before is None else before + one.figures
        return found

    def worst(self, count: int) -> list[MatrixFigures]:
        """The matrices with the highest error, where it is known."""
        known = [matrix for matrix in self.matrices if matrix.figures.error is not None]
        return sorted(known, key=lambda matrix: -(matrix.figures.error or 0.0))[:count]

    def with_high_crest(self) -> list[MatrixFigures]:
        """The matrices with a crest above ``HIGH_CREST``, the highest first."""
        high = [one for one in self.matrices if (one.figures.crest or 0.0) > HIGH_CREST]
        return sorted(high, key=lambda one: -(one.figures.crest or 0.0))

    def as_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "config": asdict(self.config),
            "parameters": self.parameters,
            "files": self.files,
            "bytes": self.num_bytes,
            "formats": [asdict(found) for found in self.formats],
            "flow": {
                "preset": self.preset,
                "scales": self.scales,
                "stored": self.stored,
                "format": self.format,
            },
            "matrices": [
                {"name": one.name, "shape": list(one.shape), **one.figures.as_json()}
                for one in self.matrices
            ],
            "presets": [asdict(preset) for preset in self.presets],
            "gpu": self.gpu and self.gpu.as_json(),
        }


def inspect_folder(
    folder: Path,
    precision: PrecisionConfig,
    gpu: str | None = None,
    longest: int | None = None,
    on_matrix: OnMatrix | None = None,
    settings: InspectConfig = _DEFAULTS,
    gpus: int = 1,
    weights: bool = True,
) -> Inspection:
    """Inspect a model folder; matrices are measured as ``precision`` publishes them, or as they are
    stored in E4M3.  Without ``weights`` only its config.json is read.

    Raises ModelError for a folder that cannot be read, ConfigError for an unknown GPU and for
    options of the flow that the model does not have.
    """
    config = read_any_config(folder)
    shape = decoder_shape(config)
    flow = build_flow(precision, shape)
    back_end = "cuda" if gpu is not None else "cpu"
    sizes = support(back_end).sizes
    memory = None
    if gpu is not None:
        longest = longest or min(config.max_positions, LONGEST)
        memory = gpu_figures(config, flow, sizes, gpu, longest, settings, gpus)
    parameters, presets = parameter_count(config), _preset_figures(config, sizes)
    about = precision.preset, precision.scales
    if not weights:
        return Inspection(
            folder, config, parameters, 0, (), False, *about, (), "e4m3", presets, back_end, memory
        )
    tensors = Checkpoint.open(folder, config)
    sites = quantised_sites(config, flow)
    if tensors.in_e4m3:
        everywhere = quantised_sites(config, build_flow(PrecisionConfig(preset="fp8"), shape))
        sites = {name: site for name, site in everywhere.items() if name in tensors.in_e4m3}
    return Inspection(
        folder,
        config,
        parameters,
        len({tensor.file.path for tensor in tensors.tensors.values()}),
        _formats(tensors),
        bool(tensors.in_e4m3),
        *about,
        tuple(_measure(tensors, sites, on_matrix)),
        next((site.forward for site in sites.values()), "e4m3"),
        presets,
        back_end,
        memory,
    )


def _measure(
    tensors: Tensors, sites: dict[str, Site], on_matrix: OnMatrix | None
) -> Iterator[MatrixFigures]:
    for done, (name, site) in enumerate(sites.items(), 1):
        stored = tensors.quantised(name)
        if stored is None:
            values = tensors.tensor(name)
            figures = measure_published(values, publish_part(site, values))
        else:
            values, figures = stored.values, measure_stored(stored)
        _, layer, linear = site.name.split(".", 2)
        yield MatrixFigures(name, int(layer), linear, tuple(values.shape), figures)
        if on_matrix is not None:
            on_matrix(done, len(sites))


def _formats(tensors: Checkpoint) -> tuple[FormatFigures, ...]:
    """By format, the one with most numbers first; scales are counted separately."""
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
