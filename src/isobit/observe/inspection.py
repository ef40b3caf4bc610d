"""What ``isobit inspect`` finds out about a model folder.

Tensors are read one after the other, and none is kept. What the figures of a matrix mean is said in
``isobit.precision.quant_tensor``.

It also lists what each preset quantises, and the memory to generate and to train on a named GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, get_args

from isobit.config.commands import InspectConfig
from isobit.config.precision import PrecisionConfig, Preset
from isobit.kernels.backend import Support
from isobit.memory.activations import published_bytes
from isobit.memory.cache_size import cache_size_within, forward_bytes, reserve_of, with_carries
from isobit.memory.cards import Card, read_card, support_for
from isobit.memory.device import Bytes, DevicePlan, DevicePlanner
from isobit.memory.speed import SpeedShape, StepTime, StepWork, estimate_step, rows_of_a_token
from isobit.models.checkpoint import FolderCheckpoint
from isobit.models.config import ModelConfig
from isobit.models.decoder import build_decoder, decoder_shape, parameter_count
from isobit.models.folder import model_needs, read_any_config
from isobit.models.safetensors import CheckpointTensor
from isobit.models.saving import Tensors, publish_part, quantised_sites
from isobit.precision.flow import DecoderShape, Graph, PrecisionFlow, Site, build_flow
from isobit.precision.quant_tensor import (
    EIGHT_BITS,
    EightBitFigures,
    Format,
    measure_published,
    measure_stored,
)
from isobit.util.errors import ConfigError

_DEFAULTS = InspectConfig()


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """The memory that a model takes on a GPU."""

    card: Card
    longest: int
    """Tokens of the longest sequence that is trained."""
    generating: Bytes
    """Bytes by name; empty where not one page of the cache fits."""
    cached_tokens: int
    """The capacity of the cache in ``generating``."""
    training: DevicePlan | None
    problem: str
    """Why training does not fit; empty where it does."""
    gpus: int = 1
    """GPUs that train together."""
    time: StepTime | None = None
    """The time of a step, where training fits."""

    def as_json(self) -> dict[str, Any]:
        plan = self.training
        phases = plan and {"rollout": dict(plan.rollout), "training": dict(plan.training)}
        work = self.time and self.time.work
        names = ("prompts", "prompt_tokens", "samples", "new_tokens")
        return {
            "name": self.card.name.lower(),
            "bytes": self.card.total,
            "longest": self.longest,
            "generating": dict(self.generating),
            "cached_tokens": self.cached_tokens,
            "training": phases,
            "problem": self.problem,
            "gpus": self.gpus,
            "time": self.time and self.time.as_json(),
            "step": work and {name: getattr(work, name) for name in names},
        }


def gpu_figures(
    config: ModelConfig,
    flow: PrecisionFlow,
    card: Card,
    longest: int,
    settings: InspectConfig = _DEFAULTS,
    gpus: int = 1,
) -> GpuFigures:
    """Plan both phases on so many GPUs without allocating anything.  Raises ConfigError for a
    model that it does not compute.
    """
    total, training_config = card.total, settings.training
    found = support_for("cuda", card)
    sizes = found.sizes
    if (problem := found.model_problem(model_needs(config, flow.preset))) is not None:
        raise ConfigError(f"--gpu {card.name.lower()} cannot run this: {problem}; leave --gpu out")
    weights = published_bytes(config, flow.one_sided("rollout"), sizes)
    rollout, generating, cached = None, {"published weights": weights}, 0
    if not config.score_head:
        rollout = settings.rollout
        forward = forward_bytes(config, flow, rollout, sizes)
        free = total - reserve_of(total) - weights - forward
        least = with_carries(config, flow, rollout, sizes, 1).bytes(config, flow, sizes)
        if free < least:
            generating = {}
        else:
            size = cache_size_within(config, flow, rollout, sizes, free)
            generating |= {"forward and logits": forward, **size.parts(config, flow, sizes)}
            cached = size.pages * sizes.page_tokens
    training, time, problem = None, None, ""
    try:
        planner = DevicePlanner(config, flow, sizes, total, processes=gpus, drawn=longest)
        training = planner.plan(rollout, training_config, longest)
        time = estimate_step(_step_work(config, flow, settings, training, longest), card)
    except ConfigError as error:
        problem = str(error)
    return GpuFigures(card, longest, generating, cached, training, problem, gpus, time)


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
    shape = SpeedShape(config, flow)
    scores = not flow.exact and training.old_log_probs != "recorded" and not config.score_head
    return StepWork(
        shape=shape,
        sequences=sequences,
        length=longest,
        rows=rows_of_a_token(training, plan.tokens, longest - new, new),
        scored=(shape,) if scores else (),
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


def _preset_figures(config: ModelConfig, support: Support) -> tuple[PresetFigures, ...]:
    """The figures of every preset in which a back end computes the model."""
    matrices = {
        name.rpartition(".")[0]: prod(master.shape)
        for name, master in build_decoder(config).masters().items()
        if master.kind == "matrix"
    }

    def share(graph: Graph) -> float:
        found = (size for name, size in matrices.items() if graph.site(name).forward in EIGHT_BITS)
        return sum(found) / parameter_count(config)

    shape, presets = decoder_shape(config), get_args(Preset)
    run = [one for one in presets if support.model_problem(model_needs(config, one)) is None]
    attention = [layer for layer in range(config.num_layers) if layer not in config.delta_layers]
    return tuple(
        PresetFigures(
            flow.preset,
            share(flow.rollout),
            share(flow.training),
            flow.rollout.attention_format(attention[len(attention) // 2]),
            published_bytes(config, flow, support.sizes),
            flow.exact,
        )
        for flow in (_flow(one, shape) for one in run)
        if flow is not None
    )


def _flow(preset: Preset, shape: DecoderShape) -> PrecisionFlow | None:
    """The flow of a preset; None where it does not fit the model."""
    with suppress(ConfigError):
        return build_flow(PrecisionConfig(preset=preset), shape)
    return None


HIGH_CREST = 11.0
"""The crest from which a row in INT8 has no smaller error than in E4M3: crest / (127 sqrt(12)),
2.5%.
"""
LONGEST = 4096
"""Tokens of the longest sequence by default, where the context is not shorter."""

OnMatrix = Callable[[int, int], None]
"""Called after each matrix with the number that are done, and of all."""


@dataclass(frozen=True, slots=True)
class FormatFigures:
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
    """Whether the matrices are stored in E4M3; otherwise they are measured as ``flow`` publishes
    them.
    """
    flow: str
    """The preset with its options, as a recipe names them."""
    matrices: tuple[MatrixFigures, ...]
    """The 8-bit matrices in the order of the forward pass; none where the flow has no 8 bits."""
    format: Format
    """The format of the matrices, "e4m3" or "int8"."""
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
            "flow": {"precision": self.flow, "stored": self.stored, "format": self.format},
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
    card = None if gpu is None else read_card(gpu)
    memory = None
    if card is not None:
        longest = longest or min(config.max_positions, LONGEST)
        memory = gpu_figures(config, flow, card, longest, settings, gpus)
    parameters = parameter_count(config)
    presets = _preset_figures(config, support_for(back_end, card))
    name = flow.name
    if not weights:
        return Inspection(
            folder, config, parameters, 0, (), False, name, (), "e4m3", presets, back_end, memory
        )
    tensors = FolderCheckpoint.open(folder, config)
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
        name,
        tuple(_measure(tensors, sites, on_matrix)),
        _format_of(sites),
        presets,
        back_end,
        memory,
    )


def _format_of(sites: dict[str, Site]) -> Format:
    """A flow has its matrices in one format of 8 bits."""
    formats: list[Format] = [site.forward for site in sites.values()]
    return formats[0] if formats else "e4m3"


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


def _formats(tensors: FolderCheckpoint) -> tuple[FormatFigures, ...]:
    """Sizes by format, that with most numbers first; scales are counted separately."""
    found: dict[str, list[CheckpointTensor]] = {}
    for tensor in tensors.tensors.values():
        found.setdefault(tensor.format, []).append(tensor)
    for scales in tensors.scales.values():
        found.setdefault(f"{scales.format} scales", []).append(scales)
    made = [
        FormatFigures(
            form, len(each), sum(prod(one.shape) for one in each), sum(x.num_bytes for x in each)
        )
        for form, each in found.items()
    ]
    return tuple(sorted(made, key=lambda one: -one.numbers))
