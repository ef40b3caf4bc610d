"""What travels between the ranks of an 8B policy, alone on the links.

    exchange    the FP32 gradient of one layer: each rank sends every other the rows that it owns
    add         the owner's ordered sum of what arrived
    gather      published bytes, of which each rank has its rows

Seconds by CUDA events on rank 0, medians over repeats behind a barrier.
"""

from collections.abc import Callable
from statistics import median

import torch

from benchmarks.passes.phases import Phases
from benchmarks.ranks.writing import Sitting
from isobit.config.tables import PrecisionConfig
from isobit.memory.activations import published_bytes
from isobit.models.config import model_shape
from isobit.models.policy import Policy, random_policy
from isobit.parallel.world import World

REPEATS = 7


def run_links(sitting: Sitting) -> None:
    """Rows ``exchange``, ``add`` and ``gather``."""
    rows, world = sitting.rows(), sitting.world
    own, shape = world.own_device(torch.device(sitting.device)), model_shape(sitting.shape)
    precision = PrecisionConfig.model_validate(sitting.mode)
    policy = random_policy(shape, precision, 0, own, trainable=False, world=world)
    for kind, numbers, work in (
        ("exchange", *layer_exchange(policy, world)),
        ("add", *ordered_add(policy, world)),
        ("gather", *published_gather(policy, world)),
    ):
        seconds = [timed(world, work, own) for _ in range(REPEATS)][1:]
        middle = median(seconds)
        rows.write(kind=kind, bytes=numbers, seconds=middle, gb_per_s=numbers / middle / 1e9)


def timed(world: World, work: Callable[[], None], device: torch.device) -> float:
    """Seconds of one call that all ranks begin together."""
    phases = Phases(on_gpu=device.type == "cuda")
    world.barrier("the others")
    phases.start()
    work()
    return sum(phases.stop().values())


def layer_exchange(policy: Policy, world: World) -> tuple[int, Callable[[], None]]:
    """-> the bytes that one rank sends, and the exchange."""
    names = policy.decoder.backward_groups()[1]
    owned = [[policy.ownership.rows(name, rank) for name in names] for rank in range(world.size)]
    made = {name: torch.randn(policy.shapes[name], device=policy.device) for name in names}
    by_name = [policy.ownership.numbers(policy.shapes, [name]) for name in names]
    sizes = [list(of_rank) for of_rank in zip(*by_name, strict=True)]
    series = world.exchanges(max(map(sum, sizes)), policy.device)
    send = [
        [made[name][rows] for name, rows in zip(names, owned[rank], strict=True)]
        for rank in range(world.size)
    ]
    comes = [[] if rank == world.rank else sizes[world.rank] for rank in range(world.size)]
    sent = 4 * sum(sum(sizes[rank]) for rank in range(world.size) if rank != world.rank)

    def exchange() -> None:
        series.start(send, comes).wait()

    return sent, exchange


def ordered_add(policy: Policy, world: World) -> tuple[int, Callable[[], None]]:
    """-> the bytes that the sum of a layer's own rows reads and writes, and the sum."""
    names = policy.decoder.backward_groups()[1]
    totals, addends = [], []
    for name in names:
        rows = policy.rows(name)
        shape = (rows.stop - rows.start, *policy.shapes[name][1:])
        totals.append(torch.zeros(shape, device=policy.device))
        addends.append([torch.randn(shape, device=policy.device) for _ in range(world.size)])

    def add() -> None:
        for total, slices in zip(totals, addends, strict=True):
            policy.backend.add_in_order(total, slices)

    return 4 * (world.size + 2) * sum(total.numel() for total in totals), add


def published_gather(policy: Policy, world: World) -> tuple[int, Callable[[], None]]:
    """-> the bytes that arrive at a rank, and the gather."""
    whole = published_bytes(policy.config, policy.flow, policy.backend.sizes)
    return whole * (world.size - 1) // world.size, lambda: policy._published.gather(
        world, policy.ownership.cuts
    )
