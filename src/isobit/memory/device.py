"""A plan of a device's own memory in a run, made before anything is allocated there.

Weights stay; the engine's KV cache and the trainer's gradients and activations alternate
(``isobit.memory.turns``), so that each phase has the whole device. If both fit together, the cache
stays, with the graphs captured over it. With the sizes of ``isobit.memory.host``,

    rollout     masters + published weights + moments + KV pages + forward
    training    masters + published weights + moments + gradients + saved activations + what passes
                (+ KV pages that stay)

where of several processes the one that owns most counts, moments are only in training with
``training.offload_moments``, the forward is ``isobit.memory.cache_size.forward_bytes``, and KV
pages get what is left, up to what ``rollout.max_sequences`` can need.

Reference models and reward models stay in both phases. With ``offload`` one is on the device only
while it scores, before the first backward; a shadow exists only then, between two updates. Training
is then the larger of two moments,

    scoring     masters + published weights + moments + the frozen weights + a forward
    backward    as above

``RESERVE`` is left free for captured graphs, kernels, gaps between torch's blocks, and the
workspaces of libraries. Those of cuBLAS, some 32 MiB for each thread and stream, are in what torch
measures: nearly all of what a tiny model takes.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import get_args

from isobit.config.tables import Recompute, RolloutConfig, TrainingConfig
from isobit.kernels.sizes import Sizes
from isobit.memory.activations import (
    FrozenModel,
    added_up,
    page_locked,
    page_locked_bytes,
    passing_bytes,
    published_bytes,
    saved_bytes,
    scoring_bytes,
)
from isobit.memory.cache_size import RESERVE, forward_bytes, num_pages_within, pages_for
from isobit.memory.host import Share, microbatch_tokens, share_of
from isobit.models.config import ModelConfig
from isobit.parallel.gradient_sum import Slots
from isobit.precision.flow import PrecisionFlow
from isobit.training.optimiser import moment_bytes, smaller_moments
from isobit.util.errors import ConfigError
from isobit.util.terminal import gib

_MOST_TOKENS = 1 << 24
_ROUND = 128  # tokens: the step of what is advised
_DOUBLINGS = 6  # of the number of GPUs, at most, in what is advised

Bytes = Mapping[str, int]
MOMENTS = "optimiser moments"
CACHE = "KV pages"
COPY = "the engine's own weights"


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Bytes by name in both phases, at their peaks, without the reserve."""

    rollout: Bytes  # empty if nothing is generated here
    training: Bytes
    total: int
    pages: int  # of the KV cache
    page_tokens: int
    tokens: int  # of the largest micro-batch
    host: Bytes
    """Bytes of page-locked main memory by content; torch rounds each block up to a power of two."""
    processes: int  # each has a device of its own, and takes at most this of it

    @property
    def peaks(self) -> dict[str, int]:
        return {name: sum(phase.values()) for name, phase in self._phases.items()}

    @property
    def engine_stays(self) -> bool:
        return CACHE in self.training

    @property
    def _phases(self) -> dict[str, Bytes]:
        rollout = {"rollout": self.rollout} if self.rollout else {}
        return {**rollout, "training": self.training}

    def describe(self) -> list[str]:
        phases = self._phases.values()
        names = dict.fromkeys(name for phase in phases for name in phase)
        rows = [(name, [phase.get(name, 0) for phase in phases]) for name in names]
        rows.append(("reserve", [RESERVE for _ in phases]))
        rows.append(("together", [peak + RESERVE for peak in self.peaks.values()]))
        whose = "device memory" if self.processes == 1 else "each process's device"
        title = f"{whose}, of {gib(self.total)}:"
        lines = [f"{title:<32}" + "".join(f"{name:>13}" for name in self._phases)]
        for name, sizes in rows:
            cells = (gib(size) if size else "-" for size in sizes)
            lines.append(f"  {name:<30}" + "".join(f"{cell:>13}" for cell in cells))
        cache = f"{self.pages:,} pages of {self.page_tokens} tokens in rollout; "
        lines.append(
            f"  {cache if self.rollout else ''}micro-batches of up to {self.tokens:,} tokens in "
            "training"
        )
        if self.engine_stays:
            lines.append(
                "  both fit: the engine keeps its cache, and what it has captured, in training"
            )
        for name, size in self.host.items():
            when = "during rollout" if name == MOMENTS else "except while they score"
            lines.append(f"  {gib(size)} of main memory hold the {name} {when}")
        return lines


@dataclass(frozen=True, slots=True)
class DevicePlanner:
    """Plans for one model in one flow, on a device with ``total`` bytes for the process."""

    shape: ModelConfig
    flow: PrecisionFlow
    sizes: Sizes
    total: int
    frozen: tuple[FrozenModel, ...] = ()
    processes: int = 1  # that train the model together, each on a device like this one
    learns: bool = True
    """False for a process that only samples, and scores a little of what it has sampled."""
    hosts: int = 1  # that compute slots of an update side by side
    copied: int = 0  # bytes of the weights that another engine has for itself

    def plan(
        self, rollout: RolloutConfig | None, training: TrainingConfig, longest: int
    ) -> DevicePlan:
        """For sequences of at most ``longest`` tokens; ``rollout`` is None if nothing is ever
        generated here. Raises ConfigError if it does not fit, with the largest setting that would.
        """
        tokens = microbatch_tokens(training, longest)
        needed = self.training_bytes(training, tokens, longest)
        if sum(needed.values()) + RESERVE > self.total:
            raise ConfigError(self._too_much_training(training, longest, sum(needed.values())))
        page_tokens = self.sizes.page_tokens
        host = page_locked_bytes(self.frozen, self.sizes)
        if rollout is None:
            if training.offload_moments:
                host[MOMENTS] = page_locked(self.weight_bytes(training)[MOMENTS])
            return DevicePlan({}, needed, self.total, 0, page_tokens, tokens, host, self.processes)
        standing = self.standing_bytes(training)
        if MOMENTS in standing and training.offload_moments:
            host[MOMENTS] = page_locked(standing.pop(MOMENTS))
        other = {COPY: self.copied} if self.copied else {}
        standing |= other
        standing["forward and logits"] = forward_bytes(self.shape, self.flow, rollout, self.sizes)
        available = self.total - RESERVE - sum(standing.values())
        pages = self._num_pages(rollout, training, longest, available)
        standing[CACHE] = pages * self.sizes.page_bytes(self.shape, self.flow)
        both = needed | other | {CACHE: standing[CACHE]}
        # several processes capture the same steps at the same time, or wait for each other
        if self.processes == 1 and sum(both.values()) + RESERVE <= self.total:
            needed = both
        return DevicePlan(
            standing, needed, self.total, pages, page_tokens, tokens, host, self.processes
        )

    def weight_bytes(self, training: TrainingConfig) -> dict[str, int]:
        if not self.learns:
            return {"published weights": published_bytes(self.shape, self.flow, self.sizes)}
        share = self._share(training)
        return {
            "masters": 4 * share.numbers,
            "published weights": published_bytes(self.shape, self.flow, self.sizes),
            MOMENTS: moment_bytes(share.masters, training.moments),
            **({"arriving gradients": share.arriving} if share.arriving else {}),
        }

    def standing_bytes(self, training: TrainingConfig) -> dict[str, int]:
        """What the policy, its optimiser and the frozen models that stay on the device hold."""
        stay = [model for model in self.frozen if model.stays]
        return self.weight_bytes(training) | added_up(stay, self.sizes)

    def training_bytes(self, training: TrainingConfig, tokens: int, longest: int) -> dict[str, int]:
        """The training phase at its peak, with ``tokens`` in the largest micro-batch."""
        if not self.learns:
            passing = scoring_bytes(self.shape, self.flow, self.sizes, tokens, longest)
            return self.standing_bytes(training) | {"a forward that scores": passing}
        moments = [self._backward(training, tokens, longest)]
        moments += (self._scoring(model, training, tokens, longest) for model in self.frozen)
        return max(moments, key=lambda moment: sum(moment.values()))

    def _scoring(
        self, model: FrozenModel, training: TrainingConfig, tokens: int, longest: int
    ) -> dict[str, int]:
        """While a frozen model scores, before a backward."""
        own = {} if model.stays else added_up([model], self.sizes)
        passing = model.scoring_bytes(self.sizes, tokens, longest)
        return self.standing_bytes(training) | own | {"a forward that scores": passing}

    def _backward(self, training: TrainingConfig, tokens: int, longest: int) -> dict[str, int]:
        """In the backward of a micro-batch."""
        weights = self.standing_bytes(training)
        model, share = (self.shape, self.flow, self.sizes), self._share(training)
        passing = passing_bytes(*model, training.recompute, tokens, longest, share.made_by_head)
        largest = max(passing, key=lambda name: passing[name])
        compared = sum(one.comparing_bytes(self.sizes, tokens) for one in self.frozen)
        return {
            **weights,
            "gradients": weights["masters"],
            **({"sums of a slot": share.of_a_slot} if share.of_a_slot else {}),
            **({"gradients as they are made": share.made} if share.made else {}),
            "saved activations": saved_bytes(*model, training.recompute, tokens),
            largest: passing[largest],
            **({"beside the teacher": compared} if compared else {}),
        }

    def _share(self, training: TrainingConfig) -> Share:
        return share_of(self.shape, self.processes, Slots(training.slots, self.hosts))

    def largest_microbatch(self, training: TrainingConfig, longest: int) -> int:
        """The most tokens whose training fits; 0 if none do."""

        def needed(tokens: int) -> int:
            return sum(self.training_bytes(training, tokens, longest).values()) + RESERVE

        return bisect_right(range(1, _MOST_TOKENS), self.total, key=needed)

    def _num_pages(
        self, rollout: RolloutConfig, training: TrainingConfig, longest: int, available: int
    ) -> int:
        size, page_tokens = self.sizes.page_bytes(self.shape, self.flow), self.sizes.page_tokens
        wanted = size * (rollout.kv_pages or pages_for(longest, page_tokens))
        if rollout.kv_pages is None and rollout.kv_memory_gib is not None:
            wanted = int(rollout.kv_memory_gib * (1 << 30))
        if wanted > available:
            advice = _cache_advice(training, self.frozen)
            raise ConfigError(
                _too_large_a_cache(rollout, longest, wanted, available, size) + advice
            )
        if rollout.kv_pages is not None:
            return rollout.kv_pages
        memory = wanted if rollout.kv_memory_gib is not None else available
        return num_pages_within(self.shape, rollout, page_tokens, size, memory)

    def _too_much_training(self, training: TrainingConfig, longest: int, needed: int) -> str:
        tokens = microbatch_tokens(training, longest)
        most = self.largest_microbatch(training, longest)
        settings = (
            f"training.recompute = {training.recompute!r} and "
            f"training.moments = {training.moments!r}"
        )
        if most >= longest:
            largest = (
                f"the largest training.tokens_per_microbatch that fits with {settings} is "
                f"{max(most // _ROUND * _ROUND, longest):,}"
            )
        elif most > 0:
            largest = (
                f"with {settings} at most {most:,} fit, and a sequence, here of up to {longest:,} "
                "tokens, is never cut"
            )
        else:
            largest = f"with {settings} not one token fits beside weights and gradients"
        return (
            f"training a micro-batch of {tokens:,} tokens would take {gib(needed)} of the device's "
            f"memory, and {gib(max(self.total - RESERVE, 0))} can be planned with; {largest}; "
            f"{self._alternative(training, tokens, longest)}"
            f"{self._more_gpus(training, tokens, longest)}"
        )

    def _more_gpus(self, training: TrainingConfig, tokens: int, longest: int) -> str:
        """The least number of GPUs, doubled, that holds so many tokens with the settings as they
        are, or else with the least change of them; empty if no number does.
        """
        counts = [self.processes << n for n in range(1, _DOUBLINGS + 1)]
        changes = _smaller_settings(training)
        for change, count in [
            *((changes[0], count) for count in counts),
            *((change, count) for count in counts for change in changes[1:]),
        ]:
            changed = training.model_copy(update=change)
            most = replace(self, processes=count).largest_microbatch(changed, longest)
            if most >= tokens:
                also = _settings(change, training)
                return (
                    f"; or set cluster.processes = {count}{f' and {also}' if also else ''}: on so "
                    f"many GPUs micro-batches of up to {max(most // _ROUND * _ROUND, tokens):,} fit"
                )
        return ""

    def _alternative(self, training: TrainingConfig, tokens: int, longest: int) -> str:
        """The least change of recompute, moments or offload that makes so many tokens fit, or how
        many fit with the greatest.
        """
        away = replace(self, frozen=tuple(model.with_offload() for model in self.frozen))
        offload = _offload_keys(self.frozen)
        if offload and away.largest_microbatch(training, longest) >= tokens:
            return f"{tokens:,} fit with {offload}"
        changes, most = _smaller_settings(training), 0
        for change in changes[1:]:
            most = self.largest_microbatch(training.model_copy(update=change), longest)
            if most >= tokens:
                return f"{tokens:,} fit with {_settings(change, training)}"
        if offload:
            return f"with {offload}, {away._alternative(training, tokens, longest)}"
        if most > 0:
            return (
                f"the most that any setting holds are {most:,}, with "
                f"{_settings(changes[-1], training)}; or take shorter sequences"
            )
        beside = "this GPU" if self.processes == 1 else f"{self.processes} GPUs"
        return (
            f"no setting makes this model's training fit on {beside}: take a smaller model or a "
            "larger device"
        )


def _too_large_a_cache(
    rollout: RolloutConfig, longest: int, wanted: int, available: int, page: int
) -> str:
    left = max(available, 0)
    if rollout.kv_pages is None:
        key, most = "rollout.kv_memory_gib", f"{left / (1 << 30):.3g} GiB"
    else:
        key, most = "rollout.kv_pages", f"{left // page:,} pages"
    return (
        f"the KV cache would take {gib(wanted)} of the device's memory, and beside the weights, a "
        f"forward and {gib(RESERVE)} of reserve there is room for {gib(left)} (of sequences of up "
        f"to {longest:,} tokens): the largest {key} that fits is {most}"
    )


def _cache_advice(training: TrainingConfig, frozen: Sequence[FrozenModel]) -> str:
    advice = ""
    if not training.offload_moments:
        advice += "; training.offload_moments = true leaves the moments' part to it as well"
    if offload := _offload_keys(frozen):
        advice += f"; {offload} leaves it that of the frozen weights"
    return f"{advice}; or lower rollout.max_batched_tokens"


def _offload_keys(frozen: Sequence[FrozenModel]) -> str:
    """The settings that offload the frozen models on the device; empty if there are none."""
    away = (model for model in frozen if model.stays and model.with_offload().offload)
    tables = dict.fromkeys(model.table for model in away)
    return " and ".join(f"{table}.offload = true" for table in tables)


def _smaller_settings(training: TrainingConfig) -> list[dict[str, str]]:
    """The settings of recompute and moments that take no more memory: first those that are set."""
    levels: Sequence[Recompute] = get_args(Recompute)
    return [
        {"recompute": level, "moments": moments}
        for moments, level in product(
            (training.moments, *smaller_moments(training.moments)),
            levels[levels.index(training.recompute) :],
        )
    ]


def _settings(change: Mapping[str, str], training: TrainingConfig) -> str:
    return " and ".join(
        f"training.{key} = {value!r}"
        for key, value in change.items()
        if value != getattr(training, key)
    )


_GIB = 1 << 30
GPUS: dict[str, int] = {"h100": 78 * _GIB, "h200": 139 * _GIB}
"""Bytes that a process finds free on a GPU that nobody else uses, for plans on a machine without
one. That of an H200 is measured (docs/memory.md: 138.7 to 139.3 of 139.8 GiB); an H100 has 79.2
GiB, and the driver keeps about as much.
"""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU that is planned for, and need not be there."""

    name: str
    total: int  # bytes that a process can have


def read_card(text: str) -> Card:
    """``h100``, ``h200``, or the GiB that a process has. Raises ConfigError for another word."""
    if (total := GPUS.get(text.lower())) is not None:
        return Card(text.upper(), total)
    try:
        gib_of_it = float(text)
    except ValueError:
        gib_of_it = 0.0
    if not 0 < gib_of_it < 1 << 20:
        raise ConfigError(
            f"the GPU {text!r} is not known; known are {', '.join(GPUS)}, or name the GiB that a "
            "process has of it, for example 79.2"
        )
    return Card(f"{gib_of_it:g}-GiB GPU", int(gib_of_it * _GIB))
