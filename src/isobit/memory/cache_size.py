"""How many pages the KV cache gets: what the configuration says, or what its memory holds and its
sequences can need; and how many carries, of a model with delta rules.

On a CPU the default is 2 GiB. On a GPU it is what is free when the engine starts, with the weights
loaded, less what a forward and the loss of a packed batch take. A run that trains on the GPU sets
``kv_pages`` from its plan instead (``isobit.memory.device``), since less is free between its steps.

Who holds which page: a free list and a count of holders for each page. Pure bookkeeping, without
tensors.

A page is held by every sequence whose block table names it. The samples of one prompt hold its
pages together; a page goes back to the free list when its last holder releases it. The most
recently freed page is handed out first: it is the one still in the CPU's caches, and memory that no
run ever needed is never touched.

Pages may be parked: nobody holds them, so that they count as free, but what is in them may be asked
for again. They are handed out when no others are left, those that were parked first before the
others.

Of a model with delta rules a sequence also holds a carry (``isobit.kernels.spec.delta_rule``), and
a second one while it goes on to a further chunk. Samples share that of their prompt until they
write it, and it is parked with the pages.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from isobit.config.rollout import RolloutConfig
from isobit.kernels.backend import DeviceMemory
from isobit.kernels.sizes import AttentionShape, Sizes
from isobit.models.config import ModelConfig
from isobit.models.decoder import build_decoder
from isobit.models.function import SampledPolicy
from isobit.precision.flow import PrecisionFlow
from isobit.util.errors import ConfigError, OutOfMemoryError
from isobit.util.machine import read_memory
from isobit.util.terminal import gib

_GIB = 1 << 30
_HOST_GIB = 2.0
PAGES, CARRIES = "KV pages", "states of delta nets"
LEAST_RESERVE, RESERVE = 2 * _GIB, 4 * _GIB


def reserve_of(total: int) -> int:
    """Bytes of a device with ``total`` that are kept free for captured graphs, kernels, workspaces
    of libraries and the allocator's gaps, which grow with the batches that it holds: a tenth, but
    from 2 to 4 GiB.  Of H200s the allocator took at most 2.6 GiB more than was planned.
    """
    return min(RESERVE, max(LEAST_RESERVE, total // 10))


SPECULATED_ROWS = 128
"""Rows of a forward up to which guesses stand behind decoding sequences: a decode step waits for
weights, so that a further row of few costs little (``isobit.rollout.drafts`` has how little).
"""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What a cache has of each kind; no carries for a model without delta rules."""

    pages: int
    carries: int = 0

    def parts(self, shape: ModelConfig, flow: PrecisionFlow, sizes: Sizes) -> dict[str, int]:
        """Bytes by name."""
        carries = self.carries * sizes.carry_bytes(shape, flow)
        pages = self.pages * sizes.page_bytes(shape, flow)
        return {PAGES: pages} | ({CARRIES: carries} if carries else {})

    def bytes(self, shape: ModelConfig, flow: PrecisionFlow, sizes: Sizes) -> int:
        return sum(self.parts(shape, flow, sizes).values())


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Pages of ``page_tokens`` tokens for a sequence of ``num_tokens``."""
    return -(-num_tokens // page_tokens)


@dataclass(frozen=True, slots=True)
class Parked:
    """Tokens and the pages that hold their K and V."""

    tokens: Sequence[int]
    pages: Sequence[int]
    adapter: str | None = None
    """The adapter that K and V were computed with, if any."""
    carry: int = -1
    """What they carry of delta rules, where there are any, and of which chunk."""
    carry_chunk: int = -1


class Pool:
    """Things of one kind, ``0 .. count - 1``, with the number of their holders."""

    def __init__(self, kind: str, count: int) -> None:
        self._kind = kind
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count
        self._parks = [0] * count
        """How many of those that are parked have each one."""
        self._idle = 0
        """Those that nobody holds and some of them have."""

    @property
    def count(self) -> int:
        """All of them, held or not."""
        return len(self._holders)

    @property
    def num_free(self) -> int:
        """Those that nobody holds, parked or not."""
        return len(self._free) + self._idle

    @property
    def num_unused(self) -> int:
        """Those that nobody holds and that are not parked."""
        return len(self._free)

    def holders(self, one: int) -> int:
        """How many sequences hold it."""
        return self._holders[one]

    def take(self) -> int:
        """One that is not used, now held once."""
        one = self._free.pop()
        assert self._holders[one] == 0, f"{self._kind} {one} was free and held"
        self._holders[one] = 1
        return one

    def share(self, one: int) -> None:
        """One more holder of what is held already."""
        assert self._holders[one] > 0, f"{self._kind} {one} is shared but not held"
        self._holders[one] += 1

    def release(self, one: int) -> None:
        """One holder less; the last one frees it."""
        assert self._holders[one] > 0, f"{self._kind} {one} is released but not held"
        self._holders[one] -= 1
        if self._holders[one] == 0:
            if self._parks[one]:
                self._idle += 1
            else:
                self._free.append(one)

    def park(self, one: int) -> None:
        """Keep it when its holder releases it."""
        assert self._holders[one] > 0, f"{self._kind} {one} is parked but not held"
        self._parks[one] += 1

    def take_parked(self, one: int) -> None:
        """Hold what was parked."""
        self._idle -= self._holders[one] == 0
        self._holders[one] += 1
        self._parks[one] -= 1

    def drop_parked(self, one: int) -> None:
        """Free what was parked, unless somebody has it otherwise."""
        self._parks[one] -= 1
        if self._parks[one] == 0 and self._holders[one] == 0:
            self._idle -= 1
            self._free.append(one)


class PageAllocator:
    """Hands out the pages ``0 .. num_pages - 1``, of ``page_tokens`` tokens each, and the carries
    ``0 .. num_carries - 1`` of a model with delta rules, and counts their holders.
    """

    def __init__(self, num_pages: int, page_tokens: int, num_carries: int = 0) -> None:
        self.page_tokens = page_tokens
        self._pages = Pool("page", num_pages)
        self.carries = Pool("carry", num_carries)
        self._parked: dict[Hashable, Parked] = {}
        """What is parked, by name, the oldest first."""
        self._unsound: set[int] = set()
        """Pages that may hold a NaN of an earlier holder."""
        self._to_clear: list[int] = []
        """Those of them that somebody holds now."""

    @property
    def num_free(self) -> int:
        """Pages that nobody holds, parked or not."""
        return self._pages.num_free

    @property
    def num_unused(self) -> int:
        """Pages that nobody holds and that are not parked."""
        return self._pages.num_unused

    @property
    def num_pages(self) -> int:
        """All pages, held or not."""
        return self._pages.count

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens of one sequence occupy."""
        return pages_for(num_tokens, self.page_tokens)

    def holders(self, page: int) -> int:
        """How many sequences hold ``page``."""
        return self._pages.holders(page)

    def allocate(self) -> int:
        """A free page, now held once; what was parked first goes where no other page is left.  The
        caller has checked ``num_free``.
        """
        page = self._take(self._pages)
        if page in self._unsound:
            self._unsound.remove(page)
            self._to_clear.append(page)
        return page

    def allocate_carry(self) -> int:
        """The same of carries.  What is in one does not matter: it is written as a whole."""
        return self._take(self.carries)

    def _take(self, pool: Pool) -> int:
        while not pool.num_unused:
            self.drop_parked([next(iter(self._parked))])
        return pool.take()

    def share(self, page: int) -> None:
        """One more holder of a page that is held already."""
        self._pages.share(page)

    def take_pages_to_clear(self) -> list[int]:
        """Pages handed out since the last call that may hold a NaN, which would poison whoever
        reads the rest of the page as zeros: they are to be cleared before anything is written.
        """
        pages, self._to_clear = self._to_clear, []
        return pages

    def release(self, page: int, is_sound: bool = True) -> None:
        """One holder less; the last one frees the page. ``is_sound``: all that it has written is
        known to be finite.
        """
        if not is_sound:
            self._unsound.add(page)
        self._pages.release(page)

    def park(
        self,
        name: Hashable,
        tokens: Sequence[int],
        pages: Sequence[int],
        adapter: str | None = None,
        carry: int = -1,
        carry_chunk: int = -1,
    ) -> None:
        """Keep the K and V of ``tokens``, computed with ``adapter``, in the first of ``pages``,
        which are held, when their holder releases them; and what they carry.
        """
        self.drop_parked([name])
        kept = list(pages[: self.pages_for(len(tokens))])
        for page in kept:
            self._pages.park(page)
        if carry >= 0:
            self.carries.park(carry)
        self._parked[name] = Parked(tokens, kept, adapter, carry, carry_chunk)

    def parked(self, name: Hashable) -> Parked | None:
        """What was parked under ``name``, if it is still there."""
        return self._parked.get(name)

    def num_idle(self, parked: Parked) -> int:
        """Those of its pages that nobody holds: they are no longer free once it is taken."""
        return sum(self._pages.holders(page) == 0 for page in parked.pages)

    def is_carry_idle(self, parked: Parked) -> bool:
        """The same of its carry."""
        return parked.carry >= 0 and self.carries.holders(parked.carry) == 0

    def keep_parked(self, name: Hashable) -> None:
        """Let everything else that is parked go first."""
        self._parked[name] = self._parked.pop(name)

    def take_parked(self, name: Hashable) -> Parked:
        """What is parked under ``name``; its pages have one more holder each, and so has its
        carry.
        """
        parked = self._parked.pop(name)
        for page in parked.pages:
            self._pages.take_parked(page)
        if parked.carry >= 0:
            self.carries.take_parked(parked.carry)
        return parked

    def drop_parked(self, names: Iterable[Hashable] | None = None) -> None:
        """Forget what was parked under ``names``, if anything; by default all."""
        for name in list(self._parked if names is None else names):
            parked = self._parked.pop(name, None)
            if parked is None:
                continue
            for page in parked.pages:
                self._pages.drop_parked(page)
            if parked.carry >= 0:
                self.carries.drop_parked(parked.carry)


def batched_tokens(config: RolloutConfig, sizes: Sizes) -> int:
    """Tokens of one forward: ``max_batched_tokens``, or what keeps the device busy."""
    return config.max_batched_tokens or sizes.batched_tokens


LEAST_CARRIES = 2
"""What one sequence needs alone: the carry that a forward reads, and another that it writes."""
CARRIED = 2
"""The most bytes of carries for each of pages: as many as sequences of some 2,000 tokens have where
a token of K and V takes 32 KiB and a carry 121 MiB, as in Qwen3.5-9B in BF16.
"""
_BESIDE = 8  # so many running sequences have one more carry beside theirs


def with_carries(
    shape: ModelConfig,
    flow: PrecisionFlow,
    config: RolloutConfig,
    sizes: Sizes,
    pages: int,
    longest: int | None = None,
) -> CacheSize:
    """A cache of so many pages, with carries for ``max_sequences``, or for fewer where these would
    take more than ``CARRIED`` times the memory of the pages; but for as many of the longest
    sequences as the pages hold in any case. ``longest``: tokens of the longest sequence that can be
    asked for, by default the model's context. Where the pages hold one of these, what it needs is
    enough, so that no memory that suffices for a longer one is too little.
    """
    carry = sizes.carry_bytes(shape, flow)
    if not carry:
        return CacheSize(pages)
    held = pages // pages_for(longest or shape.max_positions, sizes.page_tokens)
    least = carries_for(held) if held > 1 else LEAST_CARRIES
    most = CARRIED * pages * sizes.page_bytes(shape, flow) // carry
    wanted = carries_for(config.max_sequences)
    return CacheSize(pages, min(wanted, max(least, most)))


def carries_for(sequences: int) -> int:
    """Carries for so many sequences: one for each that runs, and some beside for those that go on
    to a further chunk, prompts that are held and what is parked.
    """
    return sequences + sequences // _BESIDE + LEAST_CARRIES


def choose_cache_size(
    policy: SampledPolicy, config: RolloutConfig, longest: int | None = None
) -> CacheSize:
    """The size of a policy's cache on its device: ``kv_pages`` if it is set, with carries as of
    ``with_carries``. Raises ConfigError if the memory does not hold one page, or main memory not as
    many as were asked for.

    Ranks that share a policy all have as many pages as the one with the least free memory. What
    they gather is small beside the activations of a whole forward.
    """
    device, sizes = policy.backend.memory, policy.backend.sizes
    cut = policy.weights("rollout").tensor_parallel
    shape = cut.share(policy.config)
    if device is None or config.kv_pages is not None or config.kv_memory_gib is not None:
        size = cache_size_for(shape, policy.flow, config, sizes, longest)
        if device is None:
            _check_host(size.bytes(shape, policy.flow, sizes), config)
        return size
    device.release_cached()
    of_ranks = cut.world.all_gather((device.free(), reserve_of(device.available())))
    free, reserve = min(free for free, _ in of_ranks), max(reserve for _, reserve in of_ranks)
    forward = forward_bytes(policy.config, policy.flow, config, sizes)
    available = free - forward - reserve
    page = with_carries(shape, policy.flow, config, sizes, 1).bytes(shape, policy.flow, sizes)
    if available < page:
        raise ConfigError(
            f"{gib(free)} of the device's memory are free, and not a page of the KV cache "
            f"({gib(page)}) fits beside a forward ({gib(forward)}) and what is kept for graphs and "
            f"kernels ({gib(reserve)}): end what else runs on the device, lower "
            "rollout.max_batched_tokens or rollout.max_sequences, or set rollout.kv_memory_gib"
        )
    return cache_size_within(shape, policy.flow, config, sizes, available, longest)


def _check_host(cache_bytes: int, config: RolloutConfig) -> None:
    """Raises ConfigError for a cache that exceeds main memory."""
    memory = read_memory()
    if memory is not None and cache_bytes > memory.total:
        key = "kv_memory_gib" if config.kv_pages is None else "kv_pages"
        raise ConfigError(
            f"rollout.{key} = {getattr(config, key)} asks for a KV cache of {gib(cache_bytes)}, "
            f"and this machine has {gib(memory.total)}; lower it, or leave it out"
        )


def cache_size_for(
    shape: ModelConfig,
    flow: PrecisionFlow,
    config: RolloutConfig,
    sizes: Sizes,
    longest: int | None = None,
) -> CacheSize:
    """The size in main memory, or as configured. Raises ConfigError as ``choose_cache_size``
    does.
    """
    if config.kv_pages is not None:
        return with_carries(shape, flow, config, sizes, config.kv_pages, longest)
    memory = int((config.kv_memory_gib or _HOST_GIB) * _GIB)
    return cache_size_within(shape, flow, config, sizes, memory, longest)


def pages_within(
    shape: ModelConfig,
    flow: PrecisionFlow,
    config: RolloutConfig,
    sizes: Sizes,
    memory: int,
    longest: int | None = None,
) -> int:
    """The most pages that fit into ``memory`` bytes with their carries."""

    def taken(pages: int) -> int:
        return with_carries(shape, flow, config, sizes, pages, longest).bytes(shape, flow, sizes)

    most = max(0, memory) // sizes.page_bytes(shape, flow)
    return bisect_right(range(1, most + 1), memory, key=taken)


def cache_size_within(
    shape: ModelConfig,
    flow: PrecisionFlow,
    config: RolloutConfig,
    sizes: Sizes,
    memory: int,
    longest: int | None = None,
) -> CacheSize:
    """Pages for ``max_sequences`` of the longest sequences that fit into ``memory`` bytes, with
    their carries. Raises ConfigError if not one page does.
    """
    affordable = pages_within(shape, flow, config, sizes, memory, longest)
    if not affordable:
        page = sizes.page_bytes(shape, flow)
        beside = with_carries(shape, flow, config, sizes, 1).bytes(shape, flow, sizes) - page
        carries = f", and the two states of a sequence {beside / _GIB:.3g} GiB" if beside else ""
        raise ConfigError(
            f"rollout.kv_memory_gib = {max(memory, 0) / _GIB:.3g} holds no page of the KV cache: a "
            f"page of {sizes.page_tokens} tokens "
            f"takes {page / _GIB:.3g} GiB in this model{carries}"
        )
    most = config.max_sequences * pages_for(shape.max_positions, sizes.page_tokens)
    return with_carries(shape, flow, config, sizes, min(affordable, most), longest)


@contextmanager
def out_of_memory_named(memory: DeviceMemory | None) -> Iterator[None]:
    """Raise a device's out-of-memory error as Isobit's, with the free memory and keys to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            "rollout",
            str(error),
            None if memory is None else memory.free(),
            "lower rollout.kv_memory_gib, rollout.max_batched_tokens or rollout.max_sequences, or "
            "end what else runs on the device",
        ) from error


def forward_bytes(
    shape: ModelConfig, flow: PrecisionFlow, config: RolloutConfig, sizes: Sizes
) -> int:
    """What the largest forward of the engine takes on a GPU, beside weights and cache.

    Per token: the residual stream twice, a norm and an output of a linear in BF16, what the MLP
    makes, Q, K and V before and after, or what a delta net makes, and what is noted of its experts.
    In total: what experts or a delta rule take, the concatenated keys of a prompt chunk, parts of
    keys that decoding joins, and logits with what sampling keeps of them.

    Captured steps share one memory, as large as the largest takes; those that verify guesses add
    their rows. Guesses need no page that the plan does not have: none stands behind the length that
    a sequence may have, and pages that others wait for are not taken for them.
    """
    qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    layers = build_decoder(shape).layers
    halves = [layer.mlp.bytes(sizes, flow.rollout) for layer in layers]
    nets = [layers[layer].attention.bytes(sizes, flow.rollout) for layer in shape.delta_layers]
    made, once = max(half.made for half in halves), max(one.made_once for one in (*halves, *nets))
    attended = max([12 * qkv, *(net.made for net in nets)])
    token = 8 * shape.hidden_size + attended + made + sum(half.noted for half in halves)
    tokens = batched_tokens(config, sizes)
    keys = 4 * shape.num_kv_heads * shape.head_dim * (tokens + shape.max_positions)
    heads = AttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim)
    verified = 0 if config.speculation == 0 else SPECULATED_ROWS
    keys += sizes.joined_parts(heads, max(config.max_sequences, verified), shape.max_positions)
    logits = 3 * 4 * shape.num_drawn * (config.max_sequences + verified)
    return token * (tokens + verified) + once + keys + logits
