"""Everything that ``isobit inspect`` finds out about a model folder, in one record; tensors are
read one after the other, and none is kept.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from isobit.config.precision import PrecisionConfig
from isobit.kernels.backend import support
from isobit.models.checkpoint import Checkpoint
from isobit.models.config import ModelConfig
from isobit.models.contents import Tensors, e4m3_sites, publish_part
from isobit.models.decoder import decoder_shape, parameter_count
from isobit.models.folder import read_any_config
from isobit.observe.inspection.gpu import GpuFigures, gpu_figures
from isobit.observe.inspection.presets import PresetFigures, preset_figures
from isobit.observe.inspection.quantised import (
    Fp8Figures,
    measure_published,
    measure_stored,
    together,
)
from isobit.precision.flow import Site, build_flow

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
        """Of all tensors."""
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
        """Everything, ready for JSON."""
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
