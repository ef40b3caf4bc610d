"""Delivery of a policy's adapters: one publication of all of them, and checks that both sides read
what was trained.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from isobit.models.adapters import adapter_masters
from isobit.parallel.world import raised_on_all
from isobit.precision.quant_tensor import DTYPES
from isobit.util.errors import MismatchError

if TYPE_CHECKING:
    from isobit.models.policy import Policy

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
        places = dict[str, int]()
        size = 0
        adapters = adapter_masters(policy.config)
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
        joined = cls(
            torch.zeros(size, dtype=torch.float32, device=policy.device),
            torch.zeros(size, dtype=dtype, device=policy.device),
            places,
        )
        for name in places:
            path, master = name.removesuffix(".weight"), joined.view(joined.masters, policy, name)
            master.copy_(policy.masters[name].detach())
            policy.masters[name] = torch.nn.Parameter(master)
            matrix = joined.view(joined.published, policy, name)
            held = {id(linears[path]): linears[path] for linears in sides}
            own = {key: replace(one, matrix=matrix) for key, one in held.items()}
            for linears in sides:
                linears[path] = own[id(linears[path])]
        joined.publish()
        return joined

    def view(self, tensor: torch.Tensor, policy: "Policy", name: str) -> torch.Tensor:
        begin, shape = self.places[name], policy.shapes[name]
        return tensor[begin : begin + shape[0] * shape[1]].view(shape)

    @torch.no_grad()
    def publish(self) -> torch.Tensor:
        """Round all masters; -> how many numbers have changed, int64."""
        rounded = self.masters.to(self.published.dtype)
        changed = (rounded != self.published).sum()
        self.published.copy_(rounded)
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
            expected = joined.masters.to(joined.published.dtype)
            if torch.equal(expected, joined.published):
                return None
        checks, differing = list[str](), list[torch.Tensor]()
        for name, master in policy.masters.items():
            path, rows = name.rpartition(".")[0], policy.rows(name)
            for side in ("rollout", "training"):
                held = policy.weights(side).linears.get(path)
                if held is None or rows.start == rows.stop:
                    continue
                own = held.rows(rows.start, rows.stop)
                expected = policy.backend.publish(own.site, master)
                assert isinstance(own.matrix, torch.Tensor), "an adapter is not quantised"
                assert isinstance(expected, torch.Tensor)
                checks.append(f"{side} reads another {path} than the one that was trained")
                differing.append((own.matrix != expected).any())
        outcomes = torch.stack(differing).tolist() if differing else []  # waits for a device once
        return next(
            (check for check, differs in zip(checks, outcomes, strict=True) if differs), None
        )

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
    own, which is zeros at a run's start and would not show whether an engine reads it. All ranks
    enter the block. Two publications are made.
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
