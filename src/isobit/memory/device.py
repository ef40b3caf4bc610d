"""What a run takes of a GPU's memory, planned before anything is allocated there.

Weights stay; the engine's KV cache and the trainer's gradients and activations take turns
(``isobit.memory.turns``), so that each phase has the whole card:

    rollout     masters + published weights + moments + KV pages + forward
    training    masters + published weights + moments + gradients + saved activations + what passes

P parameters, N x K the sizes of a matrix, G KV heads of D numbers, f bytes of a number in the cache
(1 or 2).  A sequence is never cut, so the largest micro-batch holds at least the longest.

    masters, gradients  4 P each                                    FP32; gradients from the first backward of a step to its end
    moments             8 P in FP32, 4 P in BF16, P (2 + 1/64) in 8 bits; in training alone with
                        ``training.offload_moments``
    published weights   N K + N K / 4096 a matrix in E4M3, else 2 N K; 2 bytes a number of the rest;
                        the rotary table
    KV pages            pages * 2 * 128 G (D f + 1 if f = 1)        what is left, as far as ``rollout.max_sequences`` can need it
    forward             ``isobit.memory.cache_size.forward_bytes``
    activations         ``isobit.memory.activations``              what the layers save, and the most that passes beside it

``RESERVE`` is left free for what is not planned: captured graphs, kernels, gaps between torch's
blocks, and the workspaces of libraries. Those of cuBLAS are among what torch measures, some 32 MiB
for each thread and stream: nearly all of what a tiny model takes.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import get_args

import torch

from isobit.config.schema import Recompute, RolloutConfig, TrainingConfig
from isobit.errors import ConfigError
from isobit.kernels.hopper.pages import PAGE_TOKENS, page_bytes
from isobit.memory.activations import passing_bytes, saved_bytes
from isobit.memory.cache_size import GPU_RESERVE as RESERVE
from isobit.memory.cache_size import forward_bytes, num_pages_within
from isobit.memory.host import microbatch_tokens, published_bytes
from isobit.memory.machine import gib
from isobit.models.config import ModelConfig
from isobit.models.policy import master_shapes
from isobit.precision.flow import PrecisionFlow
from isobit.rollout.native.pages import pages_for
from isobit.training.optimiser import moment_bytes, smaller_moments

_MOST_TOKENS = 1 << 24
_ROUND = 128  # tokens: the step of what is advised

Bytes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """Bytes by name in both phases, at their most demanding moment; the reserve is not among
    them.
    """

    rollout: Bytes
    """Empty where nothing is generated."""
    training: Bytes
    total: int
    """What the process can have."""
    pages: int
    """Of the KV cache."""
    tokens: int
    """Of the largest micro-batch."""
    host: int
    """Bytes of page-locked main memory; torch rounds a block of it up to a power of two."""

    @property
    def peaks(self) -> dict[str, int]:
        """What each phase takes at most."""
        return {name: sum(phase.values()) for name, phase in self._phases.items()}

    @property
    def _phases(self) -> dict[str, Bytes]:
        return {**({"rollout": self.rollout} if self.rollout else {}), "training": self.training}

    def describe(self) -> list[str]:
        """A table of the phases."""
        phases = self._phases.values()
        rows = [
            (name, [phase.get(name, 0) for phase in phases])
            for name in dict.fromkeys(name for phase in phases for name in phase)
        ]
        rows += [
            ("reserve", [RESERVE for _ in phases]),
            ("together", [peak + RESERVE for peak in self.peaks.values()]),
        ]
        lines = [
            f"{f'GPU memory, of {gib(self.total)}:':<32}"
            + "".join(f"{name:>13}" for name in self._phases)
        ]
        lines += [
            f"  {name:<30}" + "".join(f"{gib(size) if size else '-':>13}" for size in sizes)
            for name, sizes in rows
        ]
        cache = f"{self.pages:,} pages of {PAGE_TOKENS} tokens in rollout; " if self.rollout else ""
        lines.append(f"  {cache}micro-batches of up to {self.tokens:,} tokens in training")
        return [
            *lines,
            *(
                [f"  {gib(self.host)} of main memory hold the moments during rollout"]
                if self.host
                else []
            ),
        ]


def plan_gpu(
    shape: ModelConfig,
    flow: PrecisionFlow,
    rollout: RolloutConfig | None,
    training: TrainingConfig,
    longest: int,
    total: int,
) -> GpuPlan:
    """The plan for sequences of at most ``longest`` tokens on a GPU of which the process can have
    ``total`` bytes.

    Without ``rollout`` nothing is ever generated: the trainer has the GPU to itself.  Raises
    ConfigError where it does not fit, with the largest setting that would.
    """
    tokens = microbatch_tokens(training, longest)
    needed = training_bytes(shape, flow, training, tokens)
    if sum(needed.values()) + RESERVE > total:
        raise ConfigError(
            _too_much_training(shape, flow, training, longest, total, sum(needed.values()))
        )
    if rollout is None:
        return GpuPlan({}, needed, total, pages=0, tokens=tokens, host=0)
    weights = weight_bytes(shape, flow, training)
    host = 1 << (weights["optimiser moments"] - 1).bit_length() if training.offload_moments else 0
    standing = {
        name: size for name, size in weights.items() if not (host and name == "optimiser moments")
    }
    standing["forward and logits"] = forward_bytes(shape, rollout)
    pages = _num_pages(
        shape, flow, rollout, training, longest, total - RESERVE - sum(standing.values())
    )
    return GpuPlan(
        {**standing, "KV pages": pages * page_bytes(shape, flow)},
        needed,
        total,
        pages,
        tokens,
        host,
    )


def weight_bytes(
    shape: ModelConfig, flow: PrecisionFlow, training: TrainingConfig
) -> dict[str, int]:
    """What the policy and its optimiser hold."""
    masters = [prod(sizes) for sizes in master_shapes(shape).values()]
    return {
        "masters": 4 * sum(masters),
        "published weights": published_bytes(shape, flow, on_gpu=True),
        "optimiser moments": moment_bytes(masters, training.moments),
    }


def training_bytes(
    shape: ModelConfig, flow: PrecisionFlow, training: TrainingConfig, tokens: int
) -> dict[str, int]:
    """The training phase at its peak."""
    weights = weight_bytes(shape, flow, training)
    passing = passing_bytes(shape, flow, training.recompute, tokens)
    largest = max(passing, key=lambda name: passing[name])
    return {
        **weights,
        "gradients": weights["masters"],
        "saved activations": saved_bytes(shape, flow, training.recompute, tokens),
        largest: passing[largest],
    }


def device_memory() -> int:
    """Bytes of the GPU that this process has or could have now: what is free, and what torch
    holds.
    """
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved()


def _num_pages(
    shape: ModelConfig,
    flow: PrecisionFlow,
    rollout: RolloutConfig,
    training: TrainingConfig,
    longest: int,
    room: int,
) -> int:
    """Pages of the KV cache, in ``room`` bytes."""
    size, key = (
        page_bytes(shape, flow),
        "rollout.kv_memory_gib" if rollout.kv_pages is None else "rollout.kv_pages",
    )
    wanted = size * (rollout.kv_pages or pages_for(longest, PAGE_TOKENS))
    if rollout.kv_pages is None and rollout.kv_memory_gib is not None:
        wanted = int(rollout.kv_memory_gib * (1 << 30))
    if wanted > room:
        advice = (
            ""
            if training.offload_moments
            else "; training.offload_moments = true leaves the moments' part to it as well"
        )
        most = (
            f"{max(room, 0) / (1 << 30):.3g} GiB"
            if rollout.kv_pages is None
            else f"{max(room, 0) // size:,} pages"
        )
        raise ConfigError(
            f"the KV cache would take {gib(wanted)} of the GPU's memory, and beside the weights, a "
            f"forward and {gib(RESERVE)} of reserve "
            f"there is room for {gib(max(room, 0))} (of sequences of up to {longest:,} tokens): "
            f"the largest {key} that fits is {most}"
            f"{advice}; or lower rollout.max_batched_tokens"
        )
    if rollout.kv_pages is not None:
        return rollout.kv_pages
    return num_pages_within(
        shape, rollout, PAGE_TOKENS, size, wanted if rollout.kv_memory_gib is not None else room
    )


def largest_microbatch(
    shape: ModelConfig, flow: PrecisionFlow, training: TrainingConfig, total: int
) -> int:
    """The most tokens whose training fits; 0 where none do."""

    def needed(tokens: int) -> int:
        return sum(training_bytes(shape, flow, training, tokens).values()) + RESERVE

    return bisect_right(range(1, _MOST_TOKENS), total, key=needed)


def _too_much_training(
    shape: ModelConfig,
    flow: PrecisionFlow,
    training: TrainingConfig,
    longest: int,
    total: int,
    needed: int,
) -> str:
    tokens, most = (
        microbatch_tokens(training, longest),
        largest_microbatch(shape, flow, training, total),
    )
    settings = (
        f"training.recompute = {training.recompute!r} and training.moments = {training.moments!r}"
    )
    if most >= longest:
        largest = f"the largest training.tokens_per_microbatch that fits with {settings} is {max(most // _ROUND * _ROUND, longest):,}"
    elif most > 0:
        largest = f"with {settings} at most {most:,} fit, and a sequence, here of up to {longest:,} tokens, is never cut"
    else:
        largest = f"with {settings} not one token fits beside weights and gradients"
    return (
        f"training a micro-batch of {tokens:,} tokens would take {gib(needed)} of the GPU's "
        f"memory, and {gib(max(total - RESERVE, 0))} "
        f"can be planned with; {largest}; {_alternative(shape, flow, training, tokens, total)}"
    )


def _alternative(
    shape: ModelConfig, flow: PrecisionFlow, training: TrainingConfig, tokens: int, total: int
) -> str:
    """The least change of recompute or moments that makes so many tokens fit, or what the greatest
    one would hold.
    """
    levels: Sequence[Recompute] = get_args(Recompute)
    changes = [
        {"recompute": level, "moments": moments}
        for moments, level in product(
            (training.moments, *smaller_moments(training.moments)),
            levels[levels.index(training.recompute) :],
        )
    ]
    most = 0
    for change in changes[1:]:
        most = largest_microbatch(shape, flow, training.model_copy(update=change), total)
        if most >= tokens:
            return f"{tokens:,} fit with {_settings(change, training)}"
    if most > 0:
        return f"the most that any setting holds are {most:,}, with {_settings(changes[-1], training)}; or take shorter sequences"
    return "no setting makes this model's training fit: take a smaller model or a larger GPU"


def _settings(change: Mapping[str, str], training: TrainingConfig) -> str:
    return " and ".join(
        f"training.{key} = {value!r}"
        for key, value in change.items()
        if value != getattr(training, key)
    )
