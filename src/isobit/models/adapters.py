"""Adapters of low rank of a policy: at the start of a run, from and for PEFT's folders
(``isobit.models.adapter_folder``), and beside a model that is sampled.

``isobit.models.layers.Adapter`` has the arithmetic.

In INT8 what stands out of a norm is moved behind it (``fold_norms``), so that A reads other numbers
than PEFT's. Files have PEFT's A: it is multiplied by the norm's powers of two when it is read, and
divided by them when it is written, both exactly.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from isobit.config.precision import PrecisionConfig
from isobit.kernels.operands import LinearWeight
from isobit.models.adapter_folder import CONFIG_FILE, AdapterTensors, read_adapter_config
from isobit.models.checkpoint import FolderCheckpoint
from isobit.models.config import ModelConfig
from isobit.models.decoder import Decoder, build_decoder
from isobit.models.layers import Master, Weights
from isobit.models.master_values import MasterValues
from isobit.models.outliers import fold_norms, norm_offset
from isobit.precision.flow import PrecisionFlow, build_flow
from isobit.util.errors import ModelError, shown

if TYPE_CHECKING:
    from isobit.models.policy import Policy


def adapter_masters(config: ModelConfig) -> dict[str, Master]:
    """A and B of every linear with an adapter, in the order of the forward."""
    masters = build_decoder(config).masters()
    return {name: master for name, master in masters.items() if master.adapter}


def drawn_adapters(
    masters: Iterator[tuple[str, MasterValues]], config: ModelConfig, seed: int
) -> Iterator[tuple[str, MasterValues]]:
    """A policy's masters in which each A is drawn as PEFT draws it, uniformly within 1 / sqrt(K)
    (Kaiming, a = sqrt(5)), by ``seed`` and its name; B is zeros.
    """
    adapters = adapter_masters(config)
    for name, values in masters:
        if name in adapters and name.endswith(".lora_A.weight"):
            assert isinstance(values, torch.Tensor), "no adapter is quantised"
            key = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key[:7]))
            drawn = torch.rand(values.shape, generator=generator, dtype=torch.float32)
            bound = values.shape[1] ** -0.5
            yield name, drawn.mul_(2 * bound).sub_(bound).to(values.device)
        else:
            yield name, values


def read_adapters(
    masters: Iterator[tuple[str, MasterValues]], config: ModelConfig, folder: Path
) -> Iterator[tuple[str, MasterValues]]:
    """A policy's masters with the A and B of PEFT's folder. Raises ModelError for tensors that are
    not those of ``config``.
    """
    adapters, stored = adapter_masters(config), open_adapters(folder, config)
    for name, values in masters:
        if name not in adapters:
            yield name, values
            continue
        assert isinstance(values, torch.Tensor), "no adapter is quantised"
        yield name, torch.cat([stored[part] for part in adapters[name].adapter]).to(values.device)


@dataclass(frozen=True, slots=True)
class Adapted:
    """The rollout side of a policy with adapters of its own: all other tensors are the policy's."""

    decoder: Decoder
    weights: Weights


@torch.no_grad()
def add_adapter(
    policy: "Policy", precision: PrecisionConfig, name: str, folder: Path, base: Path
) -> None:
    """Let a policy without adapters also sample with those of PEFT's ``folder``, in its precision
    and under a name. What is sampled has the bits of a policy loaded from the folder alone.

    Raises ModelError for adapters of another model than the folder ``base``, which the policy was
    loaded from, and as ``read_adapter_config`` and ``open_adapters`` do.
    """
    described = read_adapter_config(folder)
    assert policy.config.lora is None, "adapters of adapters"
    config = replace(policy.config, lora=described.lora.within(policy.config))
    decoder, stored = build_decoder(config), open_adapters(folder, config)
    flow = build_flow(precision, decoder.shape)
    graph, own = flow.rollout, policy.weights("rollout")
    folded = folded_columns(config, flow, FolderCheckpoint.open(base, policy.config).tensor)
    linears = {path: replace(held, site=graph.site(path)) for path, held in own.linears.items()}
    for master_name, master in adapter_masters(config).items():
        values = torch.cat([stored[part] for part in master.adapter])
        if master_name in folded:
            values = values * folded[master_name]
        site = graph.site(master_name.removesuffix(".weight"))
        matrix = policy.backend.publish(site, values.to(policy.device))
        linears[site.name] = LinearWeight(site, matrix)
    policy.adapters[name] = Adapted(decoder, replace(own, graph=graph, linears=linears))


def open_adapters(folder: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """A and B in PEFT's folder by their names, FP32, for every linear that is a target of
    ``config``: zeros, which compute nothing and learn nothing, where a folder chooses single
    layers. Raises ModelError for tensors that are not those of ``config``, and for numbers that
    none can compute with.
    """
    described, stored = read_adapter_config(folder), AdapterTensors.open(folder)
    expected = {
        part: (rows, *master.shape[1:])
        for master in adapter_masters(config).values()
        for part, rows in master.adapter.items()
    }
    names = expected.keys() if described.is_whole else stored.shapes.keys()
    for name in sorted(names | stored.shapes.keys()):
        if expected.get(name) != stored.shapes.get(name):
            raise ModelError(
                f"{stored.path}: {shown(name)} has the shape {stored.shapes.get(name, '(none)')}, "
                f"and {CONFIG_FILE} and the model ask for {expected.get(name, '(none)')}: they do "
                "not belong together"
            )
    return {
        name: stored.values(name)
        if name in stored.shapes
        else torch.zeros(shape, dtype=torch.float32)
        for name, shape in expected.items()
    }


def folded_columns(
    config: ModelConfig, flow: PrecisionFlow, norm: Callable[[str], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The powers of two [1, K] that a policy in ``flow`` has multiplied each A by (``fold_norms``),
    by A's name; an A that equals PEFT's is left out. ``norm`` gives the base's tensors.
    """
    sites = [*flow.rollout.sites, *flow.training.sites]
    int8 = {site.name for site in sites if site.kind == "linear" and site.forward == "int8"}
    described = build_decoder(config).masters()

    def rows() -> Iterator[tuple[str, torch.Tensor]]:
        for name, master in described.items():
            if len(master.shape) == 2:
                yield name, torch.ones(1, master.shape[1], dtype=torch.float32)
            elif len(master.parts) == 1:
                yield name, norm(next(iter(master.parts))).float()

    offset = norm_offset(config)
    folded = fold_norms(rows(), int8.__contains__, lambda channels: None, offset)
    return {
        name: row
        for name, row in folded
        if described[name].adapter and isinstance(row, torch.Tensor) and bool((row != 1).any())
    }


def peft_tensors(
    config: ModelConfig,
    masters: Mapping[str, torch.Tensor],
    folded: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """A policy's adapters, FP32 and whole, by the names of PEFT's files; ``folded`` are
    ``folded_columns``.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, master in adapter_masters(config).items():
        values = masters[name].detach().cpu()
        values = values / folded[name] if name in folded else values
        parts = values.split(list(master.adapter.values()))
        tensors |= dict(zip(master.adapter, (part.contiguous() for part in parts), strict=True))
    return tensors


def without_adapters(config: ModelConfig) -> ModelConfig:
    """The configuration of the base."""
    return replace(config, lora=None)
