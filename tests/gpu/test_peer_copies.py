"""Between two GPUs: exchanges by copy engines bring what NCCL brings, beside other work, with
torch's allocator in pages; and a gather completes tensors.
"""

from typing import Any

import pytest
import torch

from isobit.kernels.backend import backend_of
from isobit.parallel.exchanges import Exchanges, PeerCopies, PostedExchanges
from isobit.parallel.processes import Processes
from isobit.parallel.world import World
from tests.parallel.test_world import _tables
from tests.worlds import in_world

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
NUMBERS, EXCHANGES = 20_000_000, 24


def travel(world: World, _: Any) -> dict[str, Any]:
    """Both forms of a series over the same numbers, and a gather."""
    device = torch.device("cuda", torch.cuda.current_device())
    memory = backend_of(device).memory
    assert memory is not None
    memory.allocate_in_pages()
    copies = world.exchanges(NUMBERS, device)
    more = world.exchanges(1000, device, buffers=1)  # beside it, and of another size
    assert isinstance(world, Processes)
    posted = PostedExchanges(world.exchange, world.rank, world.size, NUMBERS, device, 2)
    sums = {
        name: run(world, one, more, device)
        for name, one in (("copies", copies), ("posted", posted))
    }
    cuts = _tables(world.rank)[1]
    halves = [[0, (cut[1] + cut[2]) // 2 // 128 * 128, cut[-1]] for cut in cuts]
    whole = [table.to(device) for table in _tables(None)[0]]
    mine = [table.clone() for table in whole]
    for table, (_, middle, _) in zip(mine, halves, strict=True):
        (table[middle:] if world.rank == 0 else table[:middle]).zero_()
    world.all_gather_rows(mine, halves)
    return {
        "by": type(copies).__name__,
        "sums": sums,
        "whole": all(torch.equal(a, b) for a, b in zip(mine, whole, strict=True)),
    }


def run(
    world: World, series: Exchanges, more: Exchanges, device: torch.device
) -> list[torch.Tensor]:
    """A fold of all that comes, which depends on its order: as a backward does it, two on their way
    and products beside them.  Ranks take turns in being late.
    """
    other = 1 - world.rank
    matrix = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    scratch = [torch.empty(NUMBERS, device=device) for _ in range(2)]
    total, small = torch.zeros(NUMBERS, device=device), torch.zeros(1000, device=device)
    generator = torch.Generator(device).manual_seed(world.rank)
    pending: list[Any] = []
    for number in range(EXCHANGES):
        for _ in range(12 if number % 4 == 2 * world.rank else 2):
            matrix = (matrix @ matrix).clamp(-1, 1)
        made = scratch[number % 2].normal_(generator=generator)
        cut = 1_000_000 * (number % 7)
        send: list[list[torch.Tensor]] = [[], []]
        send[other] = [made[:cut], made[cut:]]
        sizes = [[cut, NUMBERS - cut] if rank == other else [] for rank in range(2)]
        pending.append(series.start(send, sizes))
        if number % 5 == 0:
            send[other] = [made[:1000]]
            (one,) = more.start(send, [[1000]] * 2).wait()[other]
            small.mul_(0.5).add_(one)
        if len(pending) == 2:
            fold(total, pending.pop(0).wait()[other])
    for arrival in pending:
        fold(total, arrival.wait()[other])
    torch.cuda.synchronize()
    return [total[::1000].cpu(), small.cpu(), total.double().sum()[None].cpu()]


def fold(total: torch.Tensor, slices: list[torch.Tensor]) -> None:
    total.mul_(0.5).add_(torch.cat(slices))


def test_copy_engines_bring_what_nccl_brings():
    found = in_world(2, "tests.gpu.test_peer_copies:travel", gpus=True)
    for rank, one in enumerate(found):
        assert one["by"] == PeerCopies.__name__, "the copies were not taken: see the rank's output"
        assert one["whole"]
        for copied, posted in zip(one["sums"]["copies"], one["sums"]["posted"], strict=True):
            assert torch.equal(copied, posted), rank
            assert copied.abs().sum() > 0
