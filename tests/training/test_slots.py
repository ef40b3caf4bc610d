"""An update in several slots has the same bits for any number of processes and hosts, and others
than in one.
"""

from functools import cache
from typing import Any

import pytest
import torch

from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import GrpoConfig
from isobit.config.training import TrainingConfig
from isobit.parallel.gradient_sum import Slots
from isobit.parallel.world import ALONE, World
from isobit.records.packing import pack
from isobit.training.trainer import Trainer
from tests.training.test_ranks import (
    CASES,
    Spoilt,
    make_trainer,
    sequences,
    starved_update,
    state,
    train,
)
from tests.worlds import in_world

ALL = [
    {**CASES[1], "slots": 2},
    {**CASES[2], "slots": 3},
    {**CASES[4], "slots": 16},  # more than there are micro-batches
]


@cache
def one_process() -> list[Any]:
    return train(ALONE, ALL)


def differing(found: list[Any], expected: list[Any]) -> list[str]:
    (ours, figures), (theirs, their_figures) = found, expected
    names = [name for name in theirs if ours[name] != theirs[name]]
    return [*names, *(["figures"] if figures != their_figures else [])]


def on_hosts(hosts: int) -> dict[int, dict[str, Any]]:
    """The cases, by number, whose slots so many hosts can compute side by side."""
    found = {number: case for number, case in enumerate(ALL) if case["slots"] % hosts == 0}
    return {number: {**case, "hosts": hosts} for number, case in found.items()}


def two(world: World, _: Any) -> Any:
    return [train(world, list(on_hosts(hosts).values())) for hosts in (1, 2)]


def four(world: World, _: Any) -> dict[str, Any]:
    return {"trained": train(world, list(on_hosts(2).values())), "failed": fail(world, 2)}


@cache
def four_ranks() -> list[dict[str, Any]]:
    return in_world(4, "tests.training.test_slots:four")


def check_bits(of_rank: list[Any], hosts: int) -> None:
    for number, made in zip(on_hosts(hosts), of_rank, strict=True):
        assert not differing(made, one_process()[number]), (ALL[number], hosts)


@pytest.mark.exhaustive
def test_two_processes_have_the_bits_of_one_together_and_on_two_hosts():
    for of_rank in in_world(2, "tests.training.test_slots:two"):
        for hosts, trained in zip((1, 2), of_rank, strict=True):
            check_bits(trained, hosts)


@pytest.mark.exhaustive
def test_two_hosts_of_two_processes_have_the_bits_of_one_process():
    for of_rank in four_ranks():
        check_bits(of_rank["trained"], 2)


@pytest.mark.exhaustive
def test_the_number_of_slots_is_part_of_the_result():
    one_slot = train(ALONE, [{**case, "slots": 1} for case in ALL])
    for case, ours, expected in zip(ALL[:2], one_slot, one_process(), strict=False):
        assert any(name.endswith(".weight") for name in differing(ours, expected)), case
    assert not differing(one_slot[2], one_process()[2]), "a slot for each is the plain fold"


@pytest.mark.parametrize(
    ("hosts", "count", "expected"),
    [
        ("a", 1, 1),
        ("aabb", 2, 2),
        ("aabb", 6, 2),
        ("abcd", 4, 4),
        ("aabb", 1, 1),
        ("aabb", 3, 1),
        ("aaab", 2, 1),
        ("abab", 2, 1),
        ("abba", 2, 1),
    ],
)
def test_hosts_compute_side_by_side_where_they_are_equal(hosts: str, count: int, expected: int):
    class Hosts:
        host = "a"

        def all_gather(self, mine: Any) -> list[str]:
            return list(hosts)

    world: Any = Hosts()
    assert Slots.of(count, world) == Slots(count, expected)


def fail(world: World, hosts: int) -> list[Any]:
    """The last rank runs out of memory in a backward; then a loss is not finite."""
    torch.set_num_threads(1)
    trainer = make_trainer({**CASES[0], "slots": 2, "hosts": hosts}, world)
    log = starved_update(trainer, world, at_call=2)
    skipped = trainer.update(pack(sequences(9, 1), 32), Spoilt())
    log.append([skipped.skipped, skipped.tokens, skipped.metrics["entropy"]])
    log.append(state(trainer))
    return log


@pytest.mark.exhaustive
def test_what_one_rank_cannot_do_none_does():
    expected = fail(ALONE, 1)
    assert expected[1], "the budget was lowered"
    assert expected[2][0] == "the loss is nan"
    for of_rank in four_ranks():
        assert of_rank["failed"] == expected


def break_down(world: World, _: Any) -> str:
    """The last rank fails in a forward of its own host."""
    trainer = make_trainer({**CASES[0], "slots": 2, "hosts": 2}, world)
    if world.rank == world.size - 1:
        trainer.policy.decoder = None  # pyright: ignore[reportAttributeAccessIssue]
    try:
        trainer.update(pack(sequences(9, 0), 64), build_algorithm(GrpoConfig()))
    except Exception as error:  # whatever it is
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_all_hear_of_the_rank_that_failed():
    first, last = in_world(2, "tests.training.test_slots:break_down")
    assert last.startswith("AttributeError")
    assert first.startswith("PeerError: rank 1 failed: AttributeError")


def test_no_memory_is_held_between_updates():
    trainer = make_trainer({**CASES[0], "slots": 2}, ALONE)
    trainer.update(pack(sequences(9, 0), 64), build_algorithm(GrpoConfig()))
    gradient: Any = trainer.policy.gradient
    assert not gradient._slot._sums
    assert all(master.grad is None for master in trainer.policy.masters.values())


def test_policy_and_trainer_have_the_same_slots():
    policy = make_trainer({**CASES[0], "slots": 2}, ALONE).policy
    with pytest.raises(AssertionError, match="other slots"):
        Trainer(policy, TrainingConfig(slots=3), total_updates=1)
