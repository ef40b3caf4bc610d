"""A plan of a device's own memory in a run, made before anything is allocated there.

Weights stay; the engine's KV cache and the trainer's gradients and activations alternate
(``isobit.memory.sharing``), so that each phase has the whole device. If both fit together, the
cache stays, with the graphs captured over it. With the sizes of ``isobit.memory.host``,

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

Of processes that share an engine each publishes its rows of the layers' matrices, and gathers those
of one layer; for a rollout it copies its rows of lm_head.

What ``reserve_of`` says is left free for captured graphs, kernels, gaps between torch's blocks, and
the workspaces of libraries. Those of cuBLAS, some 32 MiB for each thread and stream, are in what
torch measures: nearly all of what a tiny model takes.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from isobit.config.rollout import RolloutConfig
from isobit.config.training import TrainingConfig
from isobit.kernels.sizes import Sizes
from isobit.memory.activations import (
    FrozenModel,
    added_up,
    kept_bytes,
    page_locked,
    page_locked_bytes,
    passing_bytes,
    saved_bytes,
    scoring_bytes,
    shared_bytes,
)
from isobit.memory.cache_size import (
    PAGES,
    CacheSize,
    cache_size_for,
    cache_size_within,
    forward_bytes,
    pages_for,
    pages_within,
    reserve_of,
    with_carries,
)
from isobit.memory.cards import GPUS
from isobit.memory.host import KEPT, Share, attended_tokens, microbatch_tokens, share_of
from isobit.memory.refusal import Refusal
from isobit.models.config import ModelConfig
from isobit.models.tensor_parallel import with_heads_of_a_rank
from isobit.parallel.gradient_sum import Slots
from isobit.precision.flow import PrecisionFlow
from isobit.training.optimiser import moment_bytes
from isobit.util.errors import ConfigError
from isobit.util.terminal import gib

_MOST_TOKENS = 1 << 24

Bytes = Mapping[str, int]
MASTERS, MOMENTS, GRADIENTS = "masters", "optimiser moments", "gradients"
OF_A_SLOT, MADE, ARRIVING = "sums of a slot", "gradients as they are made", "arriving gradients"
CACHE = PAGES
_WHEN = {MOMENTS: "during rollout", KEPT: "that come back"}
COPY, GATHERED = "the engine's own weights", "matrices of a layer"


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

    def table(self) -> list[str]:
        """Every part in each phase, with the reserve."""
        phases = self._phases.values()
        names = dict.fromkeys(name for phase in phases for name in phase)
        rows = [(name, [phase.get(name, 0) for phase in phases]) for name in names]
        reserve = reserve_of(self.total)
        rows.append(("reserve", [reserve for _ in phases]))
        rows.append(("together", [peak + reserve for peak in self.peaks.values()]))
        whose = "device memory" if self.processes == 1 else "each process's device"
        title = f"{whose}, of {gib(self.total)}:"
        lines = [f"{title:<32}" + "".join(f"{name:>13}" for name in self._phases)]
        for name, sizes in rows:
            cells = (gib(size) if size else "-" for size in sizes)
            lines.append(f"  {name:<30}" + "".join(f"{cell:>13}" for cell in cells))
        return lines

    def describe(self) -> list[str]:
        lines = self.table()
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
            when = _WHEN.get(name, "except while they score")
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
    rollout_tp: int = 1  # processes that share an engine
    can_share: bool = True  # whether the recipe lets them
    drawn: int | None = None
    """Tokens of the longest sequence that an engine can be asked for; by default the model's
    context.
    """
    replayed: int = 0
    """Sequences that a step learns from beside those that it samples, at most."""
    keeps: bool = False
    """Whether the processes are trainers that keep weights for rollouters that come back."""

    @property
    def planned(self) -> int:
        """Bytes that can be planned with."""
        return max(0, self.total - reserve_of(self.total))

    def plan(
        self, rollout: RolloutConfig | None, training: TrainingConfig, longest: int
    ) -> DevicePlan:
        """The plan for sequences of at most ``longest`` tokens; ``rollout`` is None if nothing is
        ever generated here. Raises ConfigError if it does not fit, with the largest setting that
        would.
        """
        tokens = microbatch_tokens(training, longest, self.replayed)
        needed = self.training_bytes(training, tokens, longest)
        refusal = Refusal(self, rollout, training, longest, GPUS)
        if sum(needed.values()) > self.planned:
            raise ConfigError(refusal.of_training())
        page_tokens = self.sizes.page_tokens
        host = page_locked_bytes(self.frozen, self.sizes)
        if self.learns and training.offload_moments:
            host[MOMENTS] = page_locked(self.weight_bytes(training)[MOMENTS])
        if self.keeps:
            kept = kept_bytes(self.shape, self.flow, self.sizes, self.processes)
            host[KEPT] = page_locked(max(kept))
        if rollout is None:
            return DevicePlan({}, needed, self.total, 0, page_tokens, tokens, host, self.processes)
        standing = self.rollout_bytes(rollout, training)
        available = self.planned - sum(standing.values())
        wanted = self.wanted_cache(rollout, longest)
        if wanted > available:
            raise ConfigError(refusal.of_the_cache(wanted, available))
        size = self._cache_size(rollout, wanted, available)
        cache = size.parts(self._cached, self.flow, self.sizes)
        standing |= cache
        both = needed | self._copy | cache
        # several processes capture the same steps at the same time, or wait for each other
        if self.processes == 1 and sum(both.values()) <= self.planned:
            needed = both
        return DevicePlan(
            standing, needed, self.total, size.pages, page_tokens, tokens, host, self.processes
        )

    def unfitting(
        self, rollout: RolloutConfig | None, training: TrainingConfig, longest: int
    ) -> DevicePlan:
        """The plan of what does not fit, with a cache of the least size, to be shown."""
        tokens = microbatch_tokens(training, longest, self.replayed)
        phase, pages = dict[str, int](), 0
        if rollout is not None:
            wanted = self.wanted_cache(rollout, longest)
            phase, pages = self.rollout_bytes(rollout, training) | {CACHE: wanted}, 1
        needed = self.training_bytes(training, tokens, longest)
        sizes = (self.total, pages, self.sizes.page_tokens, tokens)
        return DevicePlan(phase, needed, *sizes, {}, self.processes)

    def whole(
        self, training: TrainingConfig, tokens: int, longest: int, with_sums: bool = False
    ) -> dict[str, int]:
        """The part of ``training_bytes`` that each of any number of processes has, without that of
        which it has its rows; ``with_sums`` also what several take to add up their gradients.
        """
        needed = self.training_bytes(training, tokens, longest)
        rows = {MASTERS, MOMENTS, GRADIENTS, OF_A_SLOT}
        left_out = rows if with_sums else rows | {MADE, ARRIVING}
        return {name: size for name, size in needed.items() if name not in left_out}

    def rollout_bytes(self, rollout: RolloutConfig, training: TrainingConfig) -> dict[str, int]:
        """The rollout phase without its cache."""
        standing = self.standing_bytes(training)
        if training.offload_moments:
            standing.pop(MOMENTS, None)
        forward = forward_bytes(self.shape, self.flow, rollout, self.sizes)
        return standing | self._copy | {"forward and logits": forward}

    def wanted_cache(self, rollout: RolloutConfig, longest: int) -> int:
        """Bytes of the cache that is set, or else of the least that the longest sequence needs."""
        if rollout.kv_pages is None and rollout.kv_memory_gib is not None:
            return int(rollout.kv_memory_gib * (1 << 30))
        cached = self._cached, self.flow
        pages = rollout.kv_pages or pages_for(longest, self.sizes.page_tokens)
        size = with_carries(*cached, rollout, self.sizes, pages, self.drawn)
        return size.bytes(*cached, self.sizes)

    @property
    def _cached(self) -> ModelConfig:
        return with_heads_of_a_rank(self.shape, self.rollout_tp)

    def most_pages(self, rollout: RolloutConfig, memory: int) -> int:
        """The most pages of a cache that fit into so many bytes, with what sequences carry."""
        return pages_within(self._cached, self.flow, rollout, self.sizes, memory, self.drawn)

    @property
    def _copy(self) -> dict[str, int]:
        copied = self.copied + self._shared[2]
        return {COPY: copied} if copied else {}

    @property
    def _shared(self) -> tuple[int, int, int]:
        return shared_bytes(self.shape, self.flow, self.sizes, self.rollout_tp)

    def weight_bytes(self, training: TrainingConfig) -> dict[str, int]:
        published, layer, _ = self._shared
        if not self.learns:
            return {"published weights": published}
        share = self._share(training)
        return {
            MASTERS: 4 * share.numbers,
            "published weights": published,
            **({GATHERED: layer} if layer else {}),
            MOMENTS: moment_bytes(share.masters, training.moments),
            **({ARRIVING: share.arriving} if share.arriving else {}),
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
        """Bytes by name while a frozen model scores, before a backward."""
        own = {} if model.stays else added_up([model], self.sizes)
        attended = attended_tokens(training, tokens, longest, self.replayed)
        passing = model.scoring_bytes(self.sizes, tokens, longest, attended)
        return self.standing_bytes(training) | own | {"a forward that scores": passing}

    def _backward(self, training: TrainingConfig, tokens: int, longest: int) -> dict[str, int]:
        """Bytes by name in the backward of a micro-batch."""
        weights = self.standing_bytes(training)
        model, share = (self.shape, self.flow, self.sizes), self._share(training)
        attended = attended_tokens(training, tokens, longest, self.replayed)
        passing = passing_bytes(
            *model, training.recompute, tokens, longest, share.made_by_head, attended
        )
        largest = max(passing, key=lambda name: passing[name])
        compared = sum(one.comparing_bytes(self.sizes, tokens) for one in self.frozen)
        return {
            **weights,
            GRADIENTS: weights[MASTERS],
            **({OF_A_SLOT: share.of_a_slot} if share.of_a_slot else {}),
            **({MADE: share.made} if share.made else {}),
            "saved activations": saved_bytes(*model, training.recompute, tokens, attended),
            largest: passing[largest],
            **({"beside the teacher": compared} if compared else {}),
        }

    def _share(self, training: TrainingConfig) -> Share:
        return share_of(self.shape, self.processes, Slots(training.slots, self.hosts))

    def largest_microbatch(self, training: TrainingConfig, longest: int) -> int:
        """The most tokens whose training fits; 0 if none do."""

        def needed(tokens: int) -> int:
            return sum(self.training_bytes(training, tokens, longest).values())

        return bisect_right(range(1, _MOST_TOKENS), self.planned, key=needed)

    def _cache_size(self, rollout: RolloutConfig, wanted: int, available: int) -> CacheSize:
        if rollout.kv_pages is not None:
            return cache_size_for(self._cached, self.flow, rollout, self.sizes, self.drawn)
        memory = wanted if rollout.kv_memory_gib is not None else available
        return cache_size_within(self._cached, self.flow, rollout, self.sizes, memory, self.drawn)
