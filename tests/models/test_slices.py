"""Matrices of which each rank holds its rows are those of a whole policy while they are asked
for.
"""

import weakref
from itertools import chain

import pytest
import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.kernels.operands import Operand
from isobit.models.config import ModelConfig
from isobit.models.frozen import FrozenPolicy
from isobit.models.policy import Policy
from isobit.models.published import PublishedWeights
from isobit.models.slices import GatheredLinears, Slices
from isobit.parallel.world import World
from isobit.precision.quant_tensor import QuantTensor
from tests.models.policies import storage_bytes
from tests.models.test_tensor_parallel import FUSED, SMALL, TIED, masters
from tests.ranks import in_ranks


def tensors(matrix: object) -> list[torch.Tensor]:
    if isinstance(matrix, torch.Tensor):
        return [matrix]
    return [matrix.values, matrix.scales]  # pyright: ignore


def check_equal(sliced: Policy, whole: Policy) -> None:
    for side in ("rollout", "training"):
        own, expected = sliced.weights(side).linears, whole.weights(side).linears
        assert list(own) == list(expected)
        for path, linear in expected.items():
            found = own[path]
            assert found.site == linear.site
            pairs = zip(tensors(found.matrix), tensors(linear.matrix), strict=True)
            assert all(torch.equal(mine, theirs) for mine, theirs in pairs), path
            if isinstance(linear.matrix, QuantTensor):
                assert isinstance(found.matrix, QuantTensor)
                assert found.matrix.parts == linear.matrix.parts
            assert (found.bias is None) == (linear.bias is None)
    assert sliced.checksum() == whole.checksum()


def changed(policy: Policy) -> Policy:
    for place, master in enumerate(policy.parameters()):
        master.data.mul_(1 + place % 3)
    policy.publish()
    return policy


@pytest.mark.few(2)
@pytest.mark.parametrize("preset", ["int8", "fp8-rollout", "bf16", "fp8"])
@pytest.mark.parametrize(("config", "ranks"), [(SMALL, 2), (TIED, 4), (FUSED, 4), (SMALL, 4)])
def test_they_are_those_of_a_whole_policy_before_and_after_a_publication(
    config: ModelConfig, ranks: int, preset: Preset
) -> None:
    precision = PrecisionConfig(preset=preset)
    first = Policy(config, precision, masters(config))
    second = changed(Policy(config, precision, masters(config)))
    assert first.checksum() != second.checksum()

    def compare(world: World) -> float:
        sliced = Policy(config, precision, masters(config), sharing=world)
        check_equal(sliced, first)
        world.barrier("all have compared")
        check_equal(changed(sliced), second)
        assert sliced.change.share == second.change.share
        return sliced.change.share

    assert min(in_ranks(ranks, compare)) > 0


def test_a_rank_holds_its_rows_and_the_matrices_of_one_layer() -> None:
    precision = PrecisionConfig(preset="fp8")
    whole = Policy(SMALL, precision, masters(SMALL), trainable=False)
    matrices = [tensors(one.matrix) for one in whole.weights("training").linears.values()]
    size = storage_bytes(chain.from_iterable(matrices))
    assert SMALL.num_layers > 1

    def held(world: World) -> tuple[int, int]:
        sliced = Policy(SMALL, precision, masters(SMALL), trainable=False, sharing=world)
        own = list(chain.from_iterable(map(tensors, sliced.slices._own.values())))
        for side in ("rollout", "training"):
            linears = sliced.weights(side).linears
            assert isinstance(linears, GatheredLinears)
            own += chain.from_iterable(tensors(one.matrix) for _, one in linears.held.values())
        assert storage_bytes(own) < 0.65 * size, "some have two blocks of three"
        gathered: list[int] = []
        linears = sliced.weights("training").linears
        for path in [*linears, *reversed(list(linears))]:
            assert linears[path].matrix is linears[path].matrix
            gathered.append(len(sliced.slices._whole))
        own = chain.from_iterable(map(tensors, sliced.slices._own.values()))
        return sum(tensor.nbytes for tensor in own), max(gathered)

    found = in_ranks(2, held)
    assert sum(own for own, _ in found) == size
    assert [most for _, most in found] == [4, 4]


@pytest.mark.parametrize("preset", ["int8", "bf16", "fp8"])
def test_a_reference_is_copied_and_compared_a_layer_at_a_time(
    preset: Preset, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision = PrecisionConfig(preset=preset)
    whole, gathered = Policy(SMALL, precision, masters(SMALL)), Slices.whole
    made: dict[Slices, list[weakref.ref[torch.Tensor]]] = {}
    most = 0

    def counted(slices: Slices, key: tuple[str, int]) -> Operand:
        nonlocal most
        matrix = gathered(slices, key)
        of_rank = made.setdefault(slices, [])
        of_rank.extend(map(weakref.ref, tensors(matrix)))
        alive = {id(one): one.nbytes for ref in of_rank if (one := ref()) is not None}
        most = max(most, sum(alive.values()))
        return matrix

    def work(world: World) -> None:
        sliced = Policy(SMALL, precision, masters(SMALL), sharing=world)
        reference = FrozenPolicy.of(sliced)
        assert reference.digest() == FrozenPolicy.of(whole).digest()
        reference._compared = None
        assert reference.is_equal_to(sliced) and reference.is_equal_to(whole)
        world.barrier("all have compared")
        assert not reference.is_equal_to(changed(sliced))
        reference.take(sliced)
        reference._compared = None
        assert reference.is_equal_to(sliced)

    matrices = [tensors(one.matrix) for one in whole.weights("training").linears.values()]
    monkeypatch.setattr(Slices, "whole", counted)
    in_ranks(2, work)
    size = sum(tensor.nbytes for tensor in chain.from_iterable(matrices))
    assert 0 < most < 0.75 * size, "one layer of two, and a matrix that was just read"


@pytest.mark.parametrize("config", [SMALL, TIED])
def test_a_publication_derives_the_head_once(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    derive, derived = PublishedWeights._derive_head, list[PublishedWeights]()

    def noted(published: PublishedWeights) -> None:
        derived.append(published)
        derive(published)

    def publish(world: World) -> None:
        sliced = Policy(config, PrecisionConfig(preset="fp8"), masters(config), sharing=world)
        world.barrier("all are made")
        derived.clear()
        world.barrier("all begin")
        sliced.publish()

    monkeypatch.setattr(PublishedWeights, "_derive_head", noted)
    in_ranks(2, publish)
    assert len(derived) == len(set(derived)) == 2
