"""A step of reinforcement learning on W GPUs: rollout, rounds of micro-batches, optimiser, gather.

Micro-batches are those that a run packs; rank r computes r, r + W, .. and all wait at the end of
each round.  For each micro-batch a rank sends 4 bytes for every number of the rows that it does not
own, over NVLink to the seven others of its host and over its NIC to the rest, both at once.  With a
slot a host (``training.slots``) micro-batches stay inside a host, whose eight ranks share their
sum, and once a step each rank sends its eighth to the owners on the other hosts.

A layer's slices leave while the layer before it is computed.  What counts is what is longer than
the backward, the embedding, which comes last, and the slowdown of computation beside a transfer.

What a GPU holds is the plan of a run (``isobit.memory.device``) for W processes, and decides
recomputation and samples at a time.  With a slot a host its eight share gradients and their
buffers; masters and moments are split among all W.

GPUs that share an engine gather the matrices of a layer in a forward and in a backward, which
nothing hides, and once more for the checksum of a publication.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import fsum
from typing import get_args

from experiments.scaling import costs
from experiments.scaling import costs as costs_module
from experiments.scaling.costs import GIB, Model
from experiments.scaling.rollout import LONGEST, MEAN, PROMPT, Group, Rolled, roll
from isobit.config.rollout import RolloutConfig
from isobit.config.training import Recompute, TrainingConfig
from isobit.memory.cache_size import RESERVE, forward_bytes
from isobit.memory.device import COPY
from isobit.records.packing import first_fit_decreasing

FP32 = 4


@dataclass(frozen=True)
class Bytes:
    """Bytes that leave or reach one GPU, by link."""

    nvlink: float = 0.0
    nic: float = 0.0

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(self.nvlink + other.nvlink, self.nic + other.nic)

    def __mul__(self, times: float) -> "Bytes":
        return Bytes(self.nvlink * times, self.nic * times)


@dataclass(frozen=True)
class Layout:
    gpus: int
    slots: int = 1
    """Slots: 1, or as many as there are hosts."""

    @property
    def a_host(self) -> int:
        return min(self.gpus, costs.GPUS_A_HOST)

    @property
    def hosts(self) -> int:
        return self.gpus // self.a_host

    @property
    def together(self) -> int:
        """Ranks that compute a round and share its sum."""
        return self.gpus if self.slots == 1 else self.a_host


def sent_a_microbatch(model: Model, layout: Layout) -> Bytes:
    """Bytes that a rank sends for a micro-batch that it computed."""
    row = FP32 * model.parameters / layout.together
    far = layout.together - layout.a_host
    return Bytes(row * (layout.a_host - 1), row * far)


def received_of_a_microbatch(model: Model, layout: Layout, same_host: bool) -> Bytes:
    """Bytes that an owner receives from the rank that computed a micro-batch."""
    row = FP32 * model.parameters / layout.together
    return Bytes(nvlink=row) if same_host else Bytes(nic=row)


def sent_a_step(model: Model, layout: Layout) -> Bytes:
    """Bytes of slots' sums to their owners on other hosts."""
    if layout.slots == 1:
        return Bytes()
    return Bytes(nic=FP32 * model.parameters / layout.a_host * (layout.hosts - 1) / layout.hosts)


def gathered(published: float, layout: Layout) -> Bytes:
    """Into each GPU: a slice of every other host over its NIC, then what its neighbours have."""
    a_slice = published / layout.a_host
    near = published * (layout.a_host - 1) / layout.a_host
    return Bytes(near, a_slice * (layout.hosts - 1) / layout.hosts)


def round_s(model: Model, layout: Layout, backward: float) -> float:
    """What a round takes beside its computation: exposed transfers and the ordered sum."""
    if layout.gpus == 1:
        return 0.0
    sent = sent_a_microbatch(model, layout)
    layers = model.config.num_layers
    near, far = layout.a_host - 1, layout.together - layout.a_host
    lines = (
        sent.nvlink / costs.EXCHANGE + layers * near * costs.MESSAGE["nvlink"],
        sent.nic / costs.NIC + layers * far * costs.MESSAGE["nic"],
    )
    transfer = max(lines)
    last = transfer * model.embedding / model.parameters
    hidden_at_most = backward * (1 - 1 / layers)
    exposed = max(last, transfer - hidden_at_most)
    hidden = (sent.nvlink + sent.nic) * (1 - exposed / transfer)
    layers = 2 * model.of_others / costs.GATHER
    return exposed + hidden * costs.SLOWED + add_s(model) + layers


def add_s(model: Model) -> float:
    """Seconds of the ordered sum of what arrived."""
    return costs.LAYER_ADD * model.parameters / costs.LAYER_NUMBERS


def slots_s(model: Model, layout: Layout) -> float:
    """Seconds of the exchange of slots, once a step, which nothing hides."""
    sent = sent_a_step(model, layout).nic
    if not sent:
        return 0.0
    messages = model.config.num_layers * (layout.hosts - 1) * costs.MESSAGE["nic"]
    # A rank's own rows of all slots: as many numbers as one host's eighth.
    return sent / costs.NIC + messages + add_s(model) / layout.a_host


def gather_s(model: Model, published: float, layout: Layout) -> float:
    """Seconds until the published bytes are on all GPUs."""
    if layout.gpus == 1:
        return 0.0
    got = gathered(published, layout) + Bytes(nvlink=model.of_others)  # again for the checksum
    messages = model.config.num_layers * (
        (layout.a_host - 1) * costs.MESSAGE["nvlink"] + (layout.hosts - 1) * costs.MESSAGE["nic"]
    )
    return got.nvlink / costs.GATHER + got.nic / costs.NIC + messages


MICROBATCH = 16_384
_SEQUENCES = 256
_OWNED = ("masters", "optimiser moments")
_LEVELS: tuple[Recompute, ...] = get_args(Recompute)


@dataclass(frozen=True)
class Room:
    """The memory of one GPU among W, GiB."""

    training: float
    """The peak of the training phase, with the reserve."""
    recompute: Recompute | None
    """The cheapest recomputation that fits; None where none does."""
    places: int
    """Samples of mean length that run at a time, at most 256."""

    @property
    def fits(self) -> bool:
        """Whether any setting fits."""
        return self.recompute is not None and self.places >= 8


def room(model: Model, gpus: int, slots: int) -> Room:
    """The memory plan for micro-batches of ``MICROBATCH`` tokens and BF16 moments."""
    total = int(costs.MEMORY_GIB * GIB)
    together = gpus if slots == 1 else costs.GPUS_A_HOST
    planner = replace(model.planner, processes=together)
    standing = dict(planner.weight_bytes(_training("none")))
    for name in _OWNED:
        standing[name] = standing[name] * together // gpus

    def peak(level: Recompute) -> int:
        parts = planner.training_bytes(_training(level), MICROBATCH, PROMPT + LONGEST)
        return sum((dict(parts) | standing).values()) + RESERVE

    fitting: list[Recompute] = [level for level in _LEVELS if peak(level) <= total]
    level: Recompute | None = fitting[0] if fitting else None
    forward = forward_bytes(model.config, planner.flow, RolloutConfig(), planner.sizes)
    copied = planner.rollout_bytes(RolloutConfig(), _training("none")).get(COPY, 0)
    left = total - sum(standing.values()) - RESERVE - forward - copied
    places = int(max(left, 0) / (model.kv_bytes * (PROMPT + MEAN)))
    return Room(peak(level or _LEVELS[-1]) / GIB, level, min(places // 8 * 8, _SEQUENCES))


def _training(recompute: Recompute) -> TrainingConfig:
    return TrainingConfig(moments="bf16", recompute=recompute, tokens_per_microbatch=MICROBATCH)


RECORD_BYTES = 8
"""A token's number and its log-probability, which every rank gets of all samples."""


@dataclass(frozen=True)
class Setting:
    """What the memory of a GPU allows."""

    recompute: Recompute
    places: int
    microbatch: int = MICROBATCH


@dataclass(frozen=True)
class Phases:
    """Seconds of each phase, which add up to the step."""

    rollout: float
    compute: float
    """Forwards and backwards, in the mean over the ranks."""
    exchange: float
    """The exposed part of the exchange, with the ordered sums."""
    uneven: float
    """Waiting at the ends of rounds, and of hosts for each other: the mean of the ranks."""
    idle_last_round: float
    """Waiting in the last one, which need not have a micro-batch for each."""
    gather: float
    optimiser: float
    """The optimiser, with publication of a rank's own rows."""
    other: float
    """What a step takes anyway, and the records of all samples, which every rank gets and keeps."""

    @property
    def total(self) -> float:
        return fsum(asdict(self).values())


@dataclass(frozen=True)
class Step:
    phases: Phases
    rolled: Rolled
    microbatches: int
    rounds: int
    """Rounds of the host that has most."""
    sent: list[Bytes]
    """Bytes that each rank sends."""
    received: list[Bytes]


def simulate(model: Model, layout: Layout, setting: Setting, groups: tuple[Group, ...]) -> Step:
    rolled = roll(model, groups, layout.gpus // model.rollout_tp, setting.places)
    lengths = [PROMPT + length for group in groups for length in group]
    costs = [
        fsum(model.pass_s(lengths[index], setting.recompute) for index in members)
        for members in first_fit_decreasing(lengths, setting.microbatch)
    ]
    shares = [costs[slot :: layout.slots] for slot in range(layout.slots)]
    times = [_Rounds(model, layout, share) for share in shares]
    slowest = max(times, key=lambda one: one.seconds)
    gpus = len(shares) * layout.together
    compute = fsum(costs) / gpus
    published = model.planner.weight_bytes(TrainingConfig(moments="bf16"))["published weights"]
    published += model.of_others
    size = model.parameters / costs_module.PARAMETERS_8B
    of_others = sum(lengths) * (layout.gpus - 1) / layout.gpus
    records = of_others * (RECORD_BYTES / costs_module.HOST_NETWORK + costs_module.RECORD_TOKEN)
    last = slowest.idle_last
    phases = Phases(
        rollout=rolled.seconds,
        compute=compute,
        exchange=slowest.exchange + slots_s(model, layout),
        uneven=slowest.seconds - slowest.exchange - compute - last,
        idle_last_round=last,
        gather=gather_s(model, published, layout),
        optimiser=(costs_module.OPTIMISER + costs_module.PUBLISH) * size / layout.gpus,
        other=costs_module.OTHER + records,
    )
    rounds = max(len(one.rounds) for one in times)
    return Step(phases, rolled, len(costs), rounds, *_traffic(model, layout, shares, published))


class _Rounds:
    """The rounds of ranks that compute together."""

    def __init__(self, model: Model, layout: Layout, costs: Sequence[float]) -> None:
        width = layout.together
        self.rounds = [costs[first : first + width] for first in range(0, len(costs), width)]
        longest = [max(one) for one in self.rounds]
        self.exchange = fsum(
            round_s(model, layout, costs_module.BACKWARD_SHARE * one) for one in longest
        )
        self.seconds = fsum(longest) + self.exchange
        self.idle_last = longest[-1] - fsum(self.rounds[-1]) / width if self.rounds else 0.0


def _traffic(
    model: Model, layout: Layout, shares: Sequence[Sequence[float]], published: float
) -> tuple[list[Bytes], list[Bytes]]:
    """Bytes out of every rank, and, counted from the other end, into it."""
    width = layout.together
    computed = [
        len(share[rank::width]) for share in shares for rank in range(width)
    ]  # by rank: slots are hosts, in their order
    at_the_end = sent_a_step(model, layout)
    into = gathered(published, layout) + Bytes(nvlink=model.of_others)
    sent = [sent_a_microbatch(model, layout) * number + at_the_end + into for number in computed]
    received = []
    for rank, own in enumerate(computed):
        first = rank // layout.a_host * layout.a_host
        start = rank // width * width
        near = sum(computed[first : first + layout.a_host]) - own
        far = sum(computed[start : start + width]) - near - own
        received.append(
            received_of_a_microbatch(model, layout, same_host=True) * near
            + received_of_a_microbatch(model, layout, same_host=False) * far
            + _from_slots(model, layout)
            + into
            + Bytes(nvlink=2.0 * model.of_others * own)
        )
        first = rank // model.rollout_tp * model.rollout_tp
        read = sum(computed[first : first + model.rollout_tp]) - own
        if read:
            sent[rank] += Bytes(nvlink=2 * model.of_others * read / (model.rollout_tp - 1))
    return sent, received


def _from_slots(model: Model, layout: Layout) -> Bytes:
    """Into an owner, once a step: its rows of every other host's sum."""
    if layout.slots == 1:
        return Bytes()
    return Bytes(nic=4 * model.parameters / layout.gpus * (layout.hosts - 1))
