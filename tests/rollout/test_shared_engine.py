"""An engine that ranks share gives what the engine of one rank gives, and ends with all of them."""

import re
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from isobit.config.precision import PrecisionConfig
from isobit.config.rollout import RolloutConfig
from isobit.models.function import function_of, is_one_function
from isobit.models.policy import Policy
from isobit.models.policy_share import PublishedShare
from isobit.parallel.world import ALONE, Alone, World, is_raised_on_all
from isobit.records.wire import completions_of, completions_value
from isobit.rollout.engine import SampleEvent, generate
from isobit.rollout.engine_stats import Progress
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.rollout.shared import WorkQueue, generate_shared
from isobit.rollout.shared_engine import SharedEngine
from isobit.util.errors import Interrupted, MismatchError, OutOfMemoryError, PeerError
from tests.ranks import in_ranks
from tests.rollout.test_shared import Mover, flat, raised, slow
from tests.rollout.test_tensor_parallel import MODEL, masters, requests
from tests.worlds import in_world

SIZES = RolloutConfig(kv_pages=6, max_batched_tokens=37)


def make_policy(sharing: World = ALONE) -> Policy:
    precision = PrecisionConfig(preset="fp8")
    return Policy(MODEL, precision, masters(), sharing=sharing)


def engine_of(policy: Policy, world: World, peers: World) -> tuple[SharedEngine, NativeEngine]:
    share = PublishedShare(policy)
    own = NativeEngine(share, SIZES, None, seed=0)
    return SharedEngine(share, own, world, peers), own


@cache
def expected() -> list[Any]:
    return flat(generate(NativeEngine(make_policy(), SIZES, None, 0), requests()))


def draw_twice(world: World) -> int:
    """Also by other weights, and where one rank alone has given its memory back."""
    policy = make_policy(world)
    engine, own = engine_of(policy, world, Alone())
    made, homes, stats = generate_shared(world, engine, requests())
    assert flat(made) == expected() and homes == [0] * len(made)
    assert is_one_function(engine.function, function_of(policy, "training"))
    if world.rank == 0:
        engine.release()
    assert generate_shared(world, engine, requests())[0] == made
    for master in policy.parameters():
        master.data.mul_(1.5)
    policy.publish()
    others, *_ = generate_shared(world, engine, requests())
    scaled = ((name, values.mul(1.5)) for name, values in masters())
    alone = Policy(MODEL, PrecisionConfig(preset="fp8"), scaled)
    assert policy.checksum() == alone.checksum()
    drawn = [[one.token_ids, one.log_probs] for one in flat(others)]
    engine_of_one = NativeEngine(alone, SIZES, None, 0)
    assert drawn == [
        [one.token_ids, one.log_probs] for one in flat(generate(engine_of_one, requests()))
    ]
    assert flat(others) != expected() and own.num_live == 0
    return stats.generated_tokens


def test_completions_are_those_of_one_rank_by_the_newest_weights() -> None:
    tokens = sum(one.length for one in expected())
    assert in_ranks(2, draw_twice) == [tokens, tokens]


def draw_and_move(world: World, _: Any) -> dict[str, Any]:
    """By two engines of two ranks each, of which the first is slow."""
    group, peers = world.split([0, 2, 4]), world.split_groups([[0, 2], [1, 3]])
    engine, own = engine_of(make_policy(group), group, peers)
    mover = Mover(own)
    world.barrier("all are here")
    made, homes, stats = generate_shared(world, engine, requests(), slow(world, 0, 0.2))
    assert set(homes) <= {0, 2}
    return {
        "completions": completions_value(flat(made)),
        "tokens": stats.generated_tokens,
        "moved": [mover.given, mover.taken],
    }


@pytest.mark.exhaustive
def test_a_sample_moves_with_all_ranks_of_an_engine() -> None:
    found = in_world(4, "tests.rollout.test_shared_engine:draw_and_move")
    tokens = sum(one.length for one in expected())
    for one in found:
        assert completions_of(one["completions"]) == expected()
        assert one["tokens"] == tokens
    moved = [one["moved"] for one in found]
    assert moved[:1] * 2 + moved[2:3] * 2 == moved
    assert moved[0][0] == moved[2][1] > 0


def fail_in_many_ways(world: World) -> dict[str, str]:
    """Each time all ranks end, and begin anew."""
    engine, own = engine_of(make_policy(world), world, Alone())
    said: dict[str, str] = {}

    def attempt(asked: list[Request], **how: Any) -> str:
        text = raised(lambda: generate_shared(world, engine, asked, **how))
        assert own.num_live == 0
        return text

    def stop(_: Progress) -> None:
        raise Interrupted("SIGTERM", 15)

    said["signal"] = attempt(requests(), progress=stop)
    said["twice"] = attempt(requests()[:1] * 2)
    table = engine._share.weights("rollout").lm_head.table
    kept = table.clone()
    table.fill_(torch.nan)
    said["weights"] = attempt(requests())
    table.copy_(kept)
    assert flat(generate_shared(world, engine, requests())[0]) == expected()
    return said


def test_what_ends_one_rank_ends_all() -> None:
    first, second = in_ranks(2, fail_in_many_ways)
    assert first["signal"] == second["signal"] == "Interrupted: stopped by SIGTERM"
    assert first["twice"].startswith("RequestError: prompt 'p/0' is requested twice")
    assert second["twice"].startswith("PeerError: rank 0 failed: RequestError: prompt 'p/0'")
    assert first["weights"].startswith("NonFiniteError: logits of prompt 'p/")
    assert second["weights"].startswith("PeerError: rank 0 failed: NonFiniteError: logits of")


def break_one(world: World, failing: int) -> None:
    engine, own = engine_of(make_policy(world), world, Alone())

    def step() -> Any:
        raise OutOfMemoryError("rollout", "2 GiB", None, "lower rollout.max_sequences")

    if world.rank == failing:
        own.step = step  # pyright: ignore[reportAttributeAccessIssue]
    generate_shared(world, engine, requests())


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_alone_does_not_wait_for_the_others(failing: int) -> None:
    with pytest.raises(OutOfMemoryError, match="2 GiB") as raised:
        in_ranks(2, lambda world: break_one(world, failing))
    assert not is_raised_on_all(raised.value)


def lose_the_others(world: World, stopped: list[int]) -> None:
    engine, own = engine_of(make_policy(world), world, Alone())
    step = own.step

    def lost(_: torch.Tensor) -> torch.Tensor:
        raise PeerError(None, "the connection is closed")

    def step_and_lose() -> list[SampleEvent]:
        events = step()
        if world.rank == 0:
            engine._world = cast("World", SimpleNamespace(rank=0, all_gather_stack=lost))
        return events

    own.step = step_and_lose  # pyright: ignore[reportAttributeAccessIssue]
    try:
        generate_shared(world, engine, requests())
    finally:
        stopped.append(own.num_live)


def test_one_that_cannot_tell_the_others_ends_by_itself_and_stops_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stops, live = list[int](), list[int]()
    monkeypatch.setattr(WorkQueue, "stop", lambda queue: stops.append(queue._rank))
    with pytest.raises(PeerError, match="the connection is closed") as raised:
        in_ranks(2, lambda world: lose_the_others(world, live))
    assert getattr(raised.value, "isobit_alone", False)
    assert stops == [0] and live[0] == 0


def come_apart(world: World) -> None:
    engine, own = engine_of(make_policy(world), world, Alone())
    generate_shared(world, engine, requests()[:1])
    own.stats.forwards += world.rank
    generate_shared(world, engine, [])


def test_ranks_that_have_come_apart_are_found() -> None:
    with pytest.raises(MismatchError, match="which share an engine, have come apart") as raised:
        in_ranks(2, come_apart)
    state = r"(\d+) tokens in (\d+) forwards and has 0 samples left"
    numbers = re.search(rf"this one has drawn {state}, and the first {state};", str(raised.value))
    assert numbers is not None
    tokens, forwards, *of_first = map(int, numbers.groups())
    assert [tokens, forwards - 1] == of_first
