"""What one of several processes holds, against the tensors and by arithmetic."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from isobit.config.precision import PrecisionConfig
from isobit.config.rollout import RolloutConfig
from isobit.config.training import TrainingConfig
from isobit.kernels.hopper import sizes
from isobit.memory.device import DevicePlanner
from isobit.memory.host import estimate_memory, share_of
from isobit.models.config import ModelConfig
from isobit.models.decoder import build_decoder, decoder_shape, master_shapes
from isobit.models.shapes import model_shape
from isobit.parallel.exchanges import PostedExchanges
from isobit.parallel.gradient_sum import ExchangedSum, Slots, SlotSum, Targets
from isobit.precision.flow import build_flow

UNTIED = ModelConfig("qwen3", 1000, 256, 384, 3, 4, 2, 64, 256, 1e-6, 1e4, tied_embeddings=False)
TIED = ModelConfig("qwen3", 1000, 256, 384, 3, 4, 2, 64, 256, 1e-6, 1e4, tied_embeddings=True)
QWEN3_8B = model_shape("qwen3-8b")
LAYER = 6144 * 4096 + 4096 * 4096 + 3 * 12288 * 4096 + 2 * 4096 + 2 * 128
TABLE = 151936 * 4096
FLOW = build_flow(PrecisionConfig(preset="fp8"), decoder_shape(QWEN3_8B))


class OneOfMany:
    """A rank of a world whose others are not there."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.arriving = rank, size, 0
        self.parts: list[OneOfMany] = []

    def exchanges(self, numbers: int, device: torch.device, buffers: int = 2) -> PostedExchanges:
        made: Any = PostedExchanges(None, self.rank, self.size, numbers, device, buffers)  # pyright: ignore[reportArgumentType]
        self.arriving += sum(one.nbytes for regions in made._regions for one in regions)
        return made

    def split(self, cuts: Sequence[int]) -> "OneOfMany":
        return self._among(self.rank % cuts[1], cuts[1])

    def split_groups(self, groups: Sequence[Sequence[int]]) -> "OneOfMany":
        mine = next(group for group in groups if self.rank in group)
        return self._among(mine.index(self.rank), len(mine))

    def _among(self, rank: int, size: int) -> "OneOfMany":
        made = OneOfMany(rank, size)
        self.parts.append(made)
        return made


def targets_of(shape: ModelConfig) -> Targets:
    decoder, cpu = build_decoder(shape), torch.device("cpu")
    groups, in_parts = decoder.backward_groups(), decoder.added_in_parts
    return Targets(master_shapes(shape), groups, in_parts, cpu, lambda total, addends: None)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("shape", [UNTIED, TIED], ids=["untied", "tied"])
def test_the_tensors_of_every_rank(shape: ModelConfig, size: int) -> None:
    share, shapes, owned = share_of(shape, size), master_shapes(shape), []
    ownership = build_decoder(shape).ownership(size)
    for rank in range(size):
        world: Any = OneOfMany(rank, size)
        own = {
            name: torch.nn.Parameter(torch.zeros(shape)[ownership.rows(name, rank)])
            for name, shape in shapes.items()
        }
        one = ExchangedSum(targets_of(shape), own.__getitem__, ownership, world)
        one.begin_round(size)
        assert share.made == sum(buffer.nbytes for buffer in one._made.values())
        assert share.arriving == world.arriving
        owned.append([master.numel() for master in own.values()])
    assert list(share.masters) == max(owned, key=sum)


@pytest.mark.parametrize(("size", "hosts"), [(1, 1), (3, 1), (2, 2), (4, 2)])
def test_the_sums_of_a_slot(size: int, hosts: int) -> None:
    slots, shapes, targets = Slots(4, hosts), master_shapes(UNTIED), targets_of(UNTIED)
    share = share_of(UNTIED, size, slots)
    ownership = build_decoder(UNTIED).ownership(size, hosts)
    held, arriving = list[int](), list[int]()
    for rank in range(size):
        world: Any = OneOfMany(rank, size)
        gradient = {
            name: torch.zeros(shape)[ownership.rows(name, rank)] for name, shape in shapes.items()
        }
        one = SlotSum(slots, targets, gradient.__getitem__, ownership, world)
        one.begin_slot()
        held.append(sum(one._slot(name).nbytes for name in shapes))
        arriving.append(world.arriving + sum(made.arriving for made in world.parts))
    assert max(held) == share.of_a_slot
    assert share_of(UNTIED, size).of_a_slot == 0
    assert set(arriving) == {share.arriving}


def test_an_8b_policy_of_two_and_eight_processes() -> None:
    parameters = 36 * LAYER + 2 * TABLE + 4096
    alone, two, eight = (share_of(QWEN3_8B, processes) for processes in (1, 2, 8))
    assert (alone.numbers, alone.made, alone.made_by_head) == (parameters, 0, 4 * TABLE)
    assert two.made == eight.made == 4 * (2 * LAYER + TABLE + 4096)
    assert two.made_by_head == eight.made_by_head == alone.arriving == 0
    half_of_a_table = 151936 // 128 // 2 * 128 + 128  # 1,187 blocks
    assert abs(two.numbers - parameters / 2) <= 128 * 12288
    assert two.arriving == pytest.approx(4 * (half_of_a_table * 4096 + 2 * LAYER / 2), rel=4e-3)
    assert eight.numbers == pytest.approx(parameters / 8, rel=1e-3)
    assert eight.arriving == pytest.approx(7 / 8 * 4 * (TABLE + 2 * LAYER), rel=4e-3)


@pytest.mark.parametrize("processes", [1, 2, 8])
def test_the_plan_of_a_device(processes: int) -> None:
    share, training = share_of(QWEN3_8B, processes), TrainingConfig(moments="bf16")
    planner = DevicePlanner(QWEN3_8B, FLOW, sizes, 139 << 30, processes=processes)
    plan = planner.plan(RolloutConfig(), training, 2304)
    assert plan.training["masters"] == plan.training["gradients"] == 4 * share.numbers
    assert plan.training["optimiser moments"] == 4 * share.numbers
    assert plan.training.get("gradients as they are made", 0) == share.made
    for phase in (plan.training, plan.rollout):
        assert phase.get("arriving gradients", 0) == share.arriving
        assert phase["published weights"] == pytest.approx(8.8 * (1 << 30), rel=0.01)
    title = "device memory" if processes == 1 else "each process's device"
    assert plan.describe()[0].startswith(f"{title}, of 139 GiB:")


def test_main_memory_holds_all_processes() -> None:
    """Masters, gradients and moments once; the rest as often as there are processes."""
    flow = build_flow(PrecisionConfig(preset="fp8"), decoder_shape(UNTIED))
    training = TrainingConfig(moments="fp8")
    one, two, three = (
        estimate_memory(UNTIED, flow, RolloutConfig(), training, 64, sizes, processes=processes)
        for processes in (1, 2, 3)
    )
    for many, processes in ((two, 2), (three, 3)):
        for name in ("masters", "gradients", "optimiser moments"):
            assert many.size(name) == one.size(name)
        for name in ("published weights", "KV pages", "activations"):
            assert many.size(name) == processes * one.size(name)
        share = share_of(UNTIED, processes)
        assert many.size("gradients on their way") == processes * (share.made + share.arriving)
    assert one.size("gradients on their way") == 4 * 1000 * 256
