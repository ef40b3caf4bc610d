"""An estimate, before anything is allocated, of the main memory that all processes of a CPU run on
one machine take together.

P parameters, C hidden size, D head size, a bytes of an activation, T tokens of the largest
micro-batch.

    masters             4 P                            FP32; each process has its rows
    gradients           4 P                            during the training of a step
    sums of a slot      4 P                            with several slots (``training.slots``)
    gradients on their  see ``Share``
    way
    optimiser moments   8 P, 4 P, or 2 P + P / 64      AdamW's two: FP32, BF16, or 8 bits with a
                                                       byte of scale for 128
    published weights   the matrices in each side's format, once if the sides agree; the rest, and
                        lm_head on its grid once more, in the activations' format; the rotary table
    weights for         with rollouters that can come back, what trainers pass on of the published
    rollouters          weights, once for all of them (``isobit.models.kept_weights``)
    frozen models       the published weights of one side (``isobit.memory.activations``); a shadow
                        counts only if nothing else that passes is larger
    KV pages            pages * bytes of a page        ``isobit.kernels.sizes``
    states of delta     carries * bytes of a carry
    nets
    activations         what the layers save (``isobit.memory.activations``), and T (2 a C + 4 D)
                        once: last residual stream, hidden states, rows of the rotary table
    workspace           the largest of what passes, which follow one another

Each process has all but masters, gradients and moments for itself.

Masters, gradients, moments, published and frozen weights and pages are exact (the tests compare
them with the tensors), activations within a few per cent; workspaces are upper estimates. Python,
torch, the data, the allocator's gaps and the copies made while a model is loaded (less than
training takes) are not counted. A step of 27 million parameters with 4096 tokens peaked at 1.2
times the estimate, since malloc keeps pages of freed workspaces; the warning includes that margin.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import get_args

from isobit.config.rollout import RolloutConfig
from isobit.config.training import Moments, TrainingConfig
from isobit.kernels.sizes import Sizes
from isobit.memory.activations import (
    FrozenModel,
    added_up,
    kept_bytes,
    passing_bytes,
    saved_bytes,
    shared_bytes,
)
from isobit.memory.cache_size import batched_tokens, cache_size_for
from isobit.models.config import ModelConfig
from isobit.models.decoder import build_decoder, master_shapes
from isobit.models.tensor_parallel import with_heads_of_a_rank
from isobit.parallel.exchanges import buffer_bytes
from isobit.parallel.gradient_sum import BUFFERS, ONE_SLOT, Slots, SumSizes, numbers_to_one
from isobit.parallel.ownership import Ownership
from isobit.precision.flow import PrecisionFlow
from isobit.precision.quant_tensor import DTYPES
from isobit.records.packing import TOKENS_A_ROW
from isobit.training.optimiser import moment_bytes
from isobit.util.terminal import gib

_FP32 = 4


@dataclass(frozen=True, slots=True)
class Share:
    """What the process that owns most parameters holds in training: its rows of every master, with
    their moments and gradients, and gradients on their way to their sum (``isobit.parallel``).
    """

    masters: tuple[int, ...]  # numbers that it owns of each master
    made: int
    """Bytes, throughout a forward and backward, of a micro-batch's gradients before they are added:
    those of two layers and of the tables at both ends; with one process only lm_head's, which is
    added to in parts.
    """
    made_by_head: int  # bytes, while lm_head's gradient is made
    arriving: int  # bytes of other processes' slices of such gradients, throughout training
    of_a_slot: int = 0
    """Bytes of one slot's sums, with several slots, of the rows owned on its host."""

    @property
    def numbers(self) -> int:
        return sum(self.masters)


@cache
def share_of(shape: ModelConfig, processes: int, slots: Slots = ONE_SLOT) -> Share:
    """The share of a process where ``processes`` train a model."""
    decoder = build_decoder(shape)
    shapes, in_parts = master_shapes(shape), decoder.added_in_parts
    groups, ownership = decoder.backward_groups(), decoder.ownership(processes, slots.hosts)
    of_host, owned = ownership.of_host(), _of_largest(ownership, shapes)
    of_a_slot = _FP32 * sum(_of_largest(of_host, shapes)) if slots.count > 1 else 0
    across = 0
    if slots.hosts > 1:
        across = buffer_bytes(slots.hosts, numbers_to_one(shapes, groups, ownership), BUFFERS)
    if of_host.size == 1:
        sums = _FP32 * sum(prod(shapes[name]) for name in in_parts)
        is_tied = bool(in_parts & set(groups[-1]))
        return Share(owned, sums if is_tied else 0, 0 if is_tied else sums, across, of_a_slot)
    sizes = SumSizes.of(shapes, groups, in_parts, of_host)
    made, arriving = _FP32 * sum(sizes.made.values()), sizes.arriving_bytes(of_host.size)
    return Share(owned, made, 0, arriving + across, of_a_slot)


def _of_largest(ownership: Ownership, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    owned = [ownership.numbers(shapes, [name]) for name in shapes]
    by_rank = list(zip(*owned, strict=True))
    return max(by_rank, key=sum)


MARGIN = 1.2  # what a process may take beyond the estimate, as a factor (see above)

KEPT = "weights for rollouters"
"""The name of what trainers keep for rollouters that come back."""
_MODEL = "model"
_MICROBATCH = "training.tokens_per_microbatch"
_LOWERED_BY = {"attention workspace": "rollout.max_new_tokens", "logits chunk": _MODEL}


@dataclass(frozen=True, slots=True)
class MemoryItem:
    name: str
    size: int  # bytes
    lowered_by: str  # the key that lowers it
    passing: bool = False  # workspace, of which only the largest counts


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """What training takes, the most demanding part of a step."""

    items: tuple[MemoryItem, ...]

    @property
    def total(self) -> int:
        """Bytes: everything that stays, and the largest workspace."""
        return sum(item.size for item in self.items if not item.passing) + max(
            item.size for item in self.items if item.passing
        )

    @property
    def largest(self) -> MemoryItem:
        return max(self.items, key=lambda item: item.size)

    def size(self, name: str) -> int:
        return next(item.size for item in self.items if item.name == name)

    def warning(self, available: int) -> str | None:
        """A line if the run may take more than is available, with the keys that lower it."""
        if MARGIN * self.total <= available:
            return None
        key = self.largest.lowered_by
        advice = f"{self.largest.name} is the largest item ({gib(self.largest.size)})"
        advice += (
            f", and {key} sets it; {self._next_advice()}" if _sets(key) else f": {_advice(key)}"
        )
        needed, free = gib(MARGIN * self.total), gib(available)
        return (
            f"warning: the run may take {needed} ({gib(self.total)} planned, times {MARGIN:g} for "
            f"what the allocator keeps), but {free} are free; {advice}"
        )

    def _next_advice(self) -> str:
        item = max(
            (item for item in self.items if not _sets(item.lowered_by)), key=lambda item: item.size
        )
        largest = f"{item.name} ({gib(item.size)}): {_advice(item.lowered_by)}"
        return f"the largest that another key lowers is {largest}"


def estimate_memory(
    shape: ModelConfig,
    flow: PrecisionFlow,
    rollout: RolloutConfig,
    training: TrainingConfig,
    longest: int,
    sizes: Sizes,
    frozen: Sequence[FrozenModel] = (),
    processes: int = 1,
    rollout_tp: int = 1,
    drawn: int | None = None,
    replayed: int = 0,
    keeps: bool = False,
) -> MemoryEstimate:
    """The estimate for sequences of at most ``longest`` tokens on a back end of those sizes, beside
    ``frozen`` models, for so many processes on this machine, of which ``rollout_tp`` share an
    engine. That can be asked for sequences of ``drawn`` tokens, by default the model's context. A
    step replays as many as ``replayed``. With ``keeps`` they are trainers that keep weights for
    rollouters. Raises ConfigError if the cache is given no page.
    """
    masters = [prod(sizes) for sizes in master_shapes(shape).values()]
    tokens = microbatch_tokens(training, longest, replayed)
    largest_forward = max(tokens, batched_tokens(rollout, sizes))
    attended = attended_tokens(training, tokens, longest, replayed)
    limits = training.recompute, largest_forward, longest
    passing = passing_bytes(shape, flow, sizes, *limits, attended=attended)
    share = share_of(shape, processes)
    on_their_way = share.made + share.made_by_head + share.arriving
    stays = (
        *_of_masters(masters, training),
        *_kept(keeps, shape, flow, sizes, processes),
        *_each(
            processes,
            MemoryItem("gradients on their way", on_their_way, _MODEL),
            *_of_the_engine(shape, flow, rollout, sizes, rollout_tp, drawn),
            MemoryItem(
                "activations",
                saved_bytes(shape, flow, sizes, training.recompute, tokens, attended)
                + _hidden_bytes(shape, flow) * tokens,
                _MICROBATCH,
            ),
        ),
    )
    passes = (
        MemoryItem(name, size, _LOWERED_BY.get(name, _MICROBATCH), passing=True)
        for name, size in passing.items()
    )
    by_name = {model.name: model for model in frozen}
    scores = (
        MemoryItem(name, size, f"{by_name[name].table}.model")
        if by_name[name].lasting
        else MemoryItem(name, size, _MODEL, passing=True)
        for name, size in added_up(frozen, sizes).items()
    )
    return MemoryEstimate((*stays, *_each(processes, *scores, *passes)))


def _of_masters(masters: Sequence[int], training: TrainingConfig) -> list[MemoryItem]:
    """What all processes have of masters of so many numbers, each of its rows."""
    size, by_format = _FP32 * sum(masters), moment_bytes(masters, training.moments)
    several = [MemoryItem("sums of a slot", size, "training.slots")] if training.slots > 1 else []
    lowered_by = _MODEL if training.moments == "fp8" else "training.moments"
    return [
        MemoryItem("masters", size, _MODEL),
        MemoryItem("gradients", size, _MODEL),
        *several,
        MemoryItem("optimiser moments", by_format, lowered_by),
    ]


def _kept(
    keeps: bool, shape: ModelConfig, flow: PrecisionFlow, sizes: Sizes, processes: int
) -> list[MemoryItem]:
    """What trainers keep for rollouters that come back, all together."""
    kept = sum(kept_bytes(shape, flow, sizes, processes))
    return [MemoryItem(KEPT, kept, _MODEL)] if keeps else []


def _of_the_engine(
    shape: ModelConfig,
    flow: PrecisionFlow,
    rollout: RolloutConfig,
    sizes: Sizes,
    rollout_tp: int,
    drawn: int | None,
) -> list[MemoryItem]:
    """What each of so many processes has of the weights and of the engine that they share."""
    cached = with_heads_of_a_rank(shape, rollout_tp)
    size = cache_size_for(cached, flow, rollout, sizes, drawn)
    key = "rollout.kv_memory_gib" if rollout.kv_pages is None else "rollout.kv_pages"
    names = ("published weights", "matrices of a layer", "the engine's own weights")
    weights = zip(names, shared_bytes(shape, flow, sizes, rollout_tp), strict=True)
    items = [MemoryItem(name, part, _MODEL) for name, part in weights if part]
    parts = size.parts(cached, flow, sizes)
    return items + [MemoryItem(name, part, key) for name, part in parts.items()]


def microbatch_tokens(training: TrainingConfig, longest: int, replayed: int = 0) -> int:
    """Tokens of the largest micro-batch: a sequence is never cut, and a step has only so many, of
    which ``replayed`` come again from earlier steps.
    """
    most = _step_tokens(training, longest, replayed)
    return min(max(training.tokens_per_microbatch, longest), most)


def attended_tokens(training: TrainingConfig, tokens: int, longest: int, replayed: int = 0) -> int:
    """Tokens of attention in a micro-batch of ``tokens`` rows; 0 where each has its own row."""
    if not training.shared_prefix:
        return 0
    return min(TOKENS_A_ROW * tokens, _step_tokens(training, longest, replayed))


def _step_tokens(training: TrainingConfig, longest: int, replayed: int) -> int:
    return (training.prompts_per_step * training.samples_per_prompt + replayed) * longest


def _each(processes: int, *items: MemoryItem) -> tuple[MemoryItem, ...]:
    """What every process has for itself, without items of no bytes."""
    return tuple(replace(item, size=processes * item.size) for item in items if item.size)


def _sets(key: str) -> bool:
    """Whether a key names a model: it has no lower value."""
    return key.rpartition(".")[2] == _MODEL


def _advice(key: str) -> str:
    """How a key is changed to save memory."""
    smaller = " or ".join(f'"{name}"' for name in get_args(Moments)[1:])
    return f"set {key} to {smaller}" if key == "training.moments" else f"lower {key}"


def _hidden_bytes(shape: ModelConfig, flow: PrecisionFlow) -> int:
    """Per token: the last residual stream, the hidden states, and a row of the rotary table."""
    width = DTYPES[flow.training.activations].itemsize
    return 2 * width * shape.hidden_size + 4 * shape.head_dim
