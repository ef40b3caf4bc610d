"""Adapters of low rank of a policy: at the start of a run, from and for PEFT's folders
(``isobit.models.adapter_folder``), beside a model that is sampled, and their delivery.

``isobit.models.layers.Adapter`` has the arithmetic.

In INT8 what stands out of a norm is moved behind it (``fold_norms``), so that A reads other numbers
than PEFT's. Files have PEFT's A: it is multiplied by the norm's powers of two when it is read, and
divided by them when it is written, both exactly.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from isobit.config.precision import PrecisionConfig
from isobit.kernels.operands import LinearWeight
from isobit.models.adapter_folder import CONFIG_FILE, AdapterTensors, read_adapter_config
from isobit.models.checkpoint import Checkpoint
from isobit.models.config import ModelConfig
from isobit.models.decoder import Decoder, build_decoder, fold_norms
from isobit.models.layers import Master, Weights
from isobit.models.quantised_checkpoint import MasterValues
from isobit.parallel.world import raised_on_all
from isobit.precision.flow import PrecisionFlow, build_flow
from isobit.precision.quant_tensor import DTYPES, QuantTensor
from isobit.util.errors import MismatchError, ModelError, shown

if TYPE_CHECKING:
    from isobit.models.policy import Policy
    from isobit.models.saving import Tensors


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
    config = replace(policy.config, lora=described.lora)
    decoder, stored = build_decoder(config), open_adapters(folder, config)
    flow = build_flow(precision, decoder.shape)
    graph, own = flow.rollout, policy.weights("rollout")
    folded = folded_columns(config, flow, Checkpoint.open(base, policy.config).tensor)
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


_ALIGNED = 64
"""Numbers: each adapter begins at a multiple of them."""


@dataclass(frozen=True, slots=True)
class JoinedAdapters:
    """The adapters of a policy that is alone in its world as two tensors, of which masters and what
    both sides read are views: a publication is one rounding, however many there are.
    """

    masters: torch.Tensor  # FP32 [n]
    published: torch.Tensor  # [n], in the format between operators
    places: Mapping[str, int]  # where each master begins

    @classmethod
    def of(cls, policy: "Policy") -> "JoinedAdapters | None":
        """Put them into two tensors; None where several processes own them, the sides do not read
        the same, or the back end looks at more than one number to round it.
        """
        if policy.world.size > 1 or not policy.backend.rounds_alone:
            return None
        places, size, adapters = dict[str, int](), 0, adapter_masters(policy.config)
        sides = [policy.weights(side).linears for side in ("rollout", "training")]
        for name, master in policy.masters.items():
            if name not in adapters:
                continue
            held = [linears[name.removesuffix(".weight")].matrix for linears in sides]
            if held[0] is not held[1]:
                return None
            places[name] = size
            size += -(-master.numel() // _ALIGNED) * _ALIGNED
        if not places:
            return None
        dtype = DTYPES[policy.flow.training.activations]
        made = cls(
            torch.zeros(size, dtype=torch.float32, device=policy.device),
            torch.zeros(size, dtype=dtype, device=policy.device),
            places,
        )
        for name in places:
            path, master = name.removesuffix(".weight"), made.view(made.masters, policy, name)
            master.copy_(policy.masters[name].detach())
            policy.masters[name] = torch.nn.Parameter(master)
            matrix = made.view(made.published, policy, name)
            held = {id(linears[path]): linears[path] for linears in sides}
            own = {key: replace(one, matrix=matrix) for key, one in held.items()}
            for linears in sides:
                linears[path] = own[id(linears[path])]
        made.publish()
        return made

    def view(self, tensor: torch.Tensor, policy: "Policy", name: str) -> torch.Tensor:
        begin, shape = self.places[name], policy.shapes[name]
        return tensor[begin : begin + shape[0] * shape[1]].view(shape)

    @torch.no_grad()
    def publish(self) -> torch.Tensor:
        """Round all masters; -> how many numbers have changed, int64."""
        made = self.masters.to(self.published.dtype)
        changed = (made != self.published).sum()
        self.published.copy_(made)
        return changed

    def are_read(self, policy: "Policy") -> bool:
        """Whether both sides read these tensors where they are."""
        begin, size = self.published.data_ptr(), self.published.element_size()
        for side in ("rollout", "training"):
            linears = policy.weights(side).linears
            for name, place in self.places.items():
                matrix = linears[name.removesuffix(".weight")].matrix
                if (
                    not isinstance(matrix, torch.Tensor)
                    or matrix.data_ptr() != begin + place * size
                    or matrix.shape != policy.shapes[name]
                    or not matrix.is_contiguous()
                ):
                    return False
        return True


@torch.no_grad()
def check_delivered(policy: "Policy") -> None:
    """Compare what both sides read of the adapters with a new publication of their masters, after
    each publication; collective. Raises MismatchError, on all ranks, where they differ: sampler and
    trainer would agree on what they both have not got, so that no log-probability shows it.
    """

    def look() -> str | None:
        joined = policy.joined
        if joined is not None and joined.are_read(policy):
            made = joined.masters.to(joined.published.dtype)
            if torch.equal(made, joined.published):
                return None
        checks, differing = list[str](), list[torch.Tensor]()
        for name, master in policy.masters.items():
            path, rows = name.rpartition(".")[0], policy.rows(name)
            for side in ("rollout", "training"):
                held = policy.weights(side).linears.get(path)
                if held is None or rows.start == rows.stop:
                    continue
                own = held.rows(rows.start, rows.stop)
                made = policy.backend.publish(own.site, master)
                assert isinstance(own.matrix, torch.Tensor), "an adapter is not quantised"
                assert isinstance(made, torch.Tensor)
                checks.append(f"{side} reads another {path} than the one that was trained")
                differing.append((own.matrix != made).any())
        found = torch.stack(differing).tolist() if differing else []  # waits for a device once
        return next((check for check, differs in zip(checks, found, strict=True) if differs), None)

    problems = [found for found in policy.world.all_gather(look()) if found is not None]
    if problems:
        raise raised_on_all(
            MismatchError(
                f"{problems[0]}: the publication has not delivered it; a memory is faulty, or "
                "something else holds a copy of published weights; go on with --resume"
            )
        )


@contextmanager
def filled(policy: "Policy", size: float = 0.05) -> Iterator[None]:
    """A block in which each B of a policy has small numbers, drawn by its name, in place of its
    own: at a run's start it is zeros, and says nothing on whether anybody reads it. All ranks enter
    it. Two publications are made.
    """
    before = {name: master.detach().clone() for name, master in policy.masters.items()}
    with torch.no_grad():
        for name, master in policy.masters.items():
            if name.endswith(".lora_B.weight"):
                key = hashlib.sha256(name.encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(key[:7]))
                drawn = torch.randn(policy.shapes[name], generator=generator, dtype=torch.float32)
                master.copy_(drawn[policy.rows(name)].mul_(size))
    policy.publish()
    try:
        yield
    finally:
        with torch.no_grad():
            for name, master in policy.masters.items():
                master.copy_(before[name])
        policy.publish()


def folded_columns(
    config: ModelConfig, flow: PrecisionFlow, norm: Callable[[str], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """By the name of an A, the powers of two [1, K] that a policy in ``flow`` has multiplied it by
    (``fold_norms``); A's that are PEFT's are left out. ``norm`` gives the base's tensors.
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

    folded = fold_norms(rows(), int8.__contains__, lambda channels: None)
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
    made: dict[str, torch.Tensor] = {}
    for name, master in adapter_masters(config).items():
        values = masters[name].detach().cpu()
        values = values / folded[name] if name in folded else values
        parts = values.split(list(master.adapter.values()))
        made |= dict(zip(master.adapter, (part.contiguous() for part in parts), strict=True))
    return made


@dataclass(frozen=True, slots=True)
class MergedTensors:
    """A base's tensors with its adapters added, W + scale B A in FP64, rounded to FP32 once
    (``isobit.models.saving.Tensors``).
    """

    base: "Tensors"
    adapters: Mapping[str, torch.Tensor]  # by PEFT's names
    scale: float

    def tensor(self, name: str) -> torch.Tensor:
        values, change = self.base.tensor(name), self.change(name)
        return values if change is None else (values.double() + change).float()

    def change(self, name: str) -> torch.Tensor | None:
        """What is added to a tensor, FP64; None where there is no adapter."""
        path = f"base_model.model.{name.removesuffix('.weight')}"
        down = self.adapters.get(f"{path}.lora_A.weight")
        if down is None:
            return None
        up = self.adapters[f"{path}.lora_B.weight"]
        return (up.double() @ down.double()).mul_(self.scale)

    @property
    def in_e4m3(self) -> frozenset[str]:
        """None: a merged matrix is in FP32."""
        return frozenset()

    def quantised(self, name: str) -> QuantTensor | None:
        return None


def without_adapters(config: ModelConfig) -> ModelConfig:
    """The base."""
    return replace(config, lora=None)
