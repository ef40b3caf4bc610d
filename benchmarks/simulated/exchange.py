"""Gradients and published weights between GPUs: bytes over each link, and the seconds of them that
no computation hides.

A rank sends 4 bytes a number of every row that it does not own, of each micro-batch: to the seven
others of its host over NVLink, to the rest over its NIC; both at the same time.  With a slot a host
(``training.slots``) micro-batches stay inside a host, whose eight ranks share its sum, and once a
step each rank sends its eighth of that sum to the owners on the other hosts.

A layer's slices leave while the layer before it is computed.  Exposed is what is longer than the
backward, the embedding, which comes last, and what computation is slower by beside a transfer.
"""

from dataclasses import dataclass

from benchmarks.simulated import measured
from benchmarks.simulated.model import Model

FP32 = 4


@dataclass(frozen=True)
class Bytes:
    """Out of one GPU, or into it."""

    nvlink: float = 0.0
    nic: float = 0.0

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(self.nvlink + other.nvlink, self.nic + other.nic)

    def __mul__(self, times: float) -> "Bytes":
        return Bytes(self.nvlink * times, self.nic * times)


@dataclass(frozen=True)
class Layout:
    """Where the ranks are."""

    gpus: int
    slots: int = 1
    """1, or as many as there are hosts."""

    @property
    def a_host(self) -> int:
        """GPUs of one."""
        return min(self.gpus, measured.GPUS_A_HOST)

    @property
    def hosts(self) -> int:
        """Machines."""
        return self.gpus // self.a_host

    @property
    def together(self) -> int:
        """Ranks that compute a round and share its sum."""
        return self.gpus if self.slots == 1 else self.a_host


def sent_a_microbatch(model: Model, layout: Layout) -> Bytes:
    """By the rank that has computed one."""
    row = FP32 * model.parameters / layout.together
    far = layout.together - layout.a_host
    return Bytes(row * (layout.a_host - 1), row * far)


def received_of_a_microbatch(model: Model, layout: Layout, same_host: bool) -> Bytes:
    """By an owner, from the rank that has computed one."""
    row = FP32 * model.parameters / layout.together
    return Bytes(nvlink=row) if same_host else Bytes(nic=row)


def sent_a_step(model: Model, layout: Layout) -> Bytes:
    """Sums of slots to their owners on other hosts."""
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
        sent.nvlink / measured.EXCHANGE + layers * near * measured.MESSAGE["nvlink"],
        sent.nic / measured.NIC + layers * far * measured.MESSAGE["nic"],
    )
    transfer = max(lines)
    last = transfer * model.embedding / model.parameters
    hidden_at_most = backward * (1 - 1 / layers)
    exposed = max(last, transfer - hidden_at_most)
    hidden = (sent.nvlink + sent.nic) * (1 - exposed / transfer)
    return exposed + hidden * measured.SLOWED + add_s(model)


def add_s(model: Model) -> float:
    """The ordered sum of what came."""
    return measured.LAYER_ADD * model.parameters / measured.LAYER_NUMBERS


def slots_s(model: Model, layout: Layout) -> float:
    """The exchange of slots, once a step, which nothing hides."""
    sent = sent_a_step(model, layout).nic
    if not sent:
        return 0.0
    messages = model.config.num_layers * (layout.hosts - 1) * measured.MESSAGE["nic"]
    # A rank's own rows of all slots: as many numbers as one host's eighth.
    return sent / measured.NIC + messages + add_s(model) / layout.a_host


def gather_s(model: Model, published: float, layout: Layout) -> float:
    """Published bytes on all GPUs."""
    if layout.gpus == 1:
        return 0.0
    got = gathered(published, layout)
    messages = model.config.num_layers * (
        (layout.a_host - 1) * measured.MESSAGE["nvlink"]
        + (layout.hosts - 1) * measured.MESSAGE["nic"]
    )
    return got.nvlink / measured.GATHER + got.nic / measured.NIC + messages
