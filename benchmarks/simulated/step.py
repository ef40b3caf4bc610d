"""A step of reinforcement learning on W GPUs: rollout, rounds of micro-batches, optimiser, gather.

Micro-batches are those that a run packs (``isobit.records.batch``); rank r computes r, r + W, ..,
and all wait at the end of each round.  With a slot a host, slot s has the micro-batches s, s + S,
and so on, computed by one host's eight.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import fsum

from benchmarks.simulated import measured
from benchmarks.simulated.exchange import (
    Bytes,
    Layout,
    gather_s,
    gathered,
    received_of_a_microbatch,
    round_s,
    sent_a_microbatch,
    sent_a_step,
    slots_s,
)
from benchmarks.simulated.memory import MICROBATCH
from benchmarks.simulated.model import Model
from benchmarks.simulated.rollout import PROMPT, Group, Rolled, roll
from isobit.config.tables import Recompute, TrainingConfig
from isobit.records.batch import first_fit_decreasing

RECORD_BYTES = 8
"""A token's number and its log-probability, which every rank gets of all samples."""


@dataclass(frozen=True)
class Setting:
    """What memory leaves to a GPU."""

    recompute: Recompute
    places: int
    microbatch: int = MICROBATCH


@dataclass(frozen=True)
class Phases:
    """Seconds; together they are the step."""

    rollout: float
    compute: float
    """Forwards and backwards, the mean of the ranks."""
    exchange: float
    """Exposed, with the ordered sums."""
    uneven: float
    """Waiting at the ends of rounds, and of hosts for each other: the mean of the ranks."""
    idle_last_round: float
    """Waiting in the last one, which need not have a micro-batch for each."""
    gather: float
    optimiser: float
    """With publication of the own rows."""
    other: float
    """What a step takes anyway, and the records of all samples, which every rank gets and keeps."""

    @property
    def total(self) -> float:
        """The step."""
        return fsum(asdict(self).values())


@dataclass(frozen=True)
class Step:
    """What came of it."""

    phases: Phases
    rolled: Rolled
    microbatches: int
    rounds: int
    """Of the host with most."""
    sent: list[Bytes]
    """By rank."""
    received: list[Bytes]


def simulate(model: Model, layout: Layout, setting: Setting, groups: tuple[Group, ...]) -> Step:
    """One step."""
    rolled = roll(model, groups, layout.gpus, setting.places)
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
    size = model.parameters / measured.PARAMETERS_8B
    of_others = sum(lengths) * (layout.gpus - 1) / layout.gpus
    records = of_others * (RECORD_BYTES / measured.HOST_NETWORK + measured.RECORD_TOKEN)
    last = slowest.idle_last
    phases = Phases(
        rollout=rolled.seconds,
        compute=compute,
        exchange=slowest.exchange + slots_s(model, layout),
        uneven=slowest.seconds - slowest.exchange - compute - last,
        idle_last_round=last,
        gather=gather_s(model, published, layout),
        optimiser=(measured.OPTIMISER + measured.PUBLISH) * size / layout.gpus,
        other=measured.OTHER + records,
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
            round_s(model, layout, measured.BACKWARD_SHARE * one) for one in longest
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
    into = gathered(published, layout)
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
        )
    return sent, received


def _from_slots(model: Model, layout: Layout) -> Bytes:
    """Into an owner, once a step: its rows of every other host's sum."""
    if layout.slots == 1:
        return Bytes()
    return Bytes(nic=4 * model.parameters / layout.gpus * (layout.hosts - 1))
