"""Weights on their way to other ranks: what arrives stale, in part, or in another order is found
before anybody samples with it, on all ranks.
"""

from collections.abc import Callable

import pytest
import torch

from isobit.models.config import ModelConfig
from isobit.models.policy import random_policy
from isobit.models.published import PublishedWeights
from isobit.parallel.world import World, is_raised_on_all
from isobit.precision.quant_tensor import QuantTensor
from isobit.util.errors import MismatchError
from tests.worlds import in_world

TINY = ModelConfig("qwen3", 64, 128, 128, 2, 4, 2, 64, 128, 1e-6, 1e4, True)
Arrived = dict[str, torch.Tensor]
"""Bytes of what is read, by name."""


def stale(before: Arrived, now: Arrived) -> None:
    """Nothing of this publication came."""
    for name, held in now.items():
        held.copy_(before[name])


def stale_scales(before: Arrived, now: Arrived) -> None:
    """The values of one matrix are new, and its scales those before."""
    now["scales"].copy_(before["scales"])


def partial(before: Arrived, now: Arrived) -> None:
    """The last rows of one matrix did not come."""
    now["values"][-8:].copy_(before["values"][-8:])


def permuted_rows(before: Arrived, now: Arrived) -> None:
    """Rows of one matrix have come in another order."""
    now["values"].copy_(now["values"].flip(0))


def permuted_words(before: Arrived, now: Arrived) -> None:
    """Two words of 64 bits of one norm have changed places."""
    words = now["norm"].view(torch.int64)
    words[[0, 1]] = words[[1, 0]]


def permuted_tensors(before: Arrived, now: Arrived) -> None:
    """Two tensors of one size have changed places."""
    one, other = now["norm"].clone(), now["other norm"].clone()
    now["norm"].copy_(other)
    now["other norm"].copy_(one)


FAULTS: dict[str, Callable[[Arrived, Arrived], None]] = {
    made.__name__: made
    for made in (stale, stale_scales, partial, permuted_rows, permuted_words, permuted_tensors)
}


def arrived(published: PublishedWeights) -> Arrived:
    """Views of some of what is read."""
    read = published.sides["rollout"]
    matrix = read.linears["layers.1.gate_up_proj"].matrix
    assert isinstance(matrix, QuantTensor)
    plain = {"norm": "norm.weight", "other norm": "layers.0.input_norm.weight"}
    return {
        "values": matrix.values.view(torch.uint8),
        "scales": matrix.scales,
        **{name: read.plain[of].view(torch.uint8) for name, of in plain.items()},
    }


def hand_over(world: World, way: str) -> dict[str, list[object]]:
    """Each fault at the last rank in a publication of its own; -> what all ranks raised."""
    part = world.split([0, world.size - 1, world.size]) if way == "to rollouters" else world
    policy = random_policy(TINY, "fp8", seed=0, world=part)
    found: dict[str, list[object]] = {}

    def move() -> None:
        with torch.no_grad():
            for place, master in enumerate(policy.parameters()):
                noise = torch.manual_seed(place)
                master.add_(torch.randn(master.shape, generator=noise)).mul_(2)  # other scales

    def pass_on() -> None:
        if way == "to rollouters":
            if world.rank < world.size - 1:
                policy.publish()
            policy.pass_on(world, world.size - 1)
        else:
            policy.publish()

    gather = PublishedWeights.gather
    for name in ("nothing", *FAULTS):
        held = {key: one.clone() for key, one in arrived(policy._published).items()}
        move()

        def faulty(
            self: PublishedWeights,
            on: World,
            *rest: object,
            fault: str = name,
            before: Arrived = held,
        ) -> None:
            gather(self, on, *rest)  # pyright: ignore[reportArgumentType]
            if on is world and fault != "nothing" and world.rank == world.size - 1:
                FAULTS[fault](before, arrived(self))

        raised: list[object] = ["nothing", True]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PublishedWeights, "gather", faulty)
            try:
                pass_on()
            except MismatchError as error:
                raised = [str(error), is_raised_on_all(error)]
        pass_on()  # again, and whole
        found[name] = raised
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(("way", "size"), [("to rollouters", 3), ("between ranks", 2)])
def test_weights_that_arrive_otherwise_end_all_ranks_before_they_are_read(
    way: str, size: int
) -> None:
    every = in_world(size, f"{__name__}:hand_over", way)
    assert every == [every[0]] * size, "all say the same"
    assert every[0].pop("nothing") == ["nothing", True]
    assert every[0].keys() == FAULTS.keys()
    for fault, (said, all_know) in every[0].items():
        expected = f"the published weights of rank {size - 1} are not those of rank 0"
        assert str(said).startswith(expected), (fault, said)
        assert all_know
