"""Ranks that draw samples together give what one engine gives, whoever draws what."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from isobit.config.rollout import RolloutConfig
from isobit.memory.cache_size import CacheSize
from isobit.parallel.world import Alone, World
from isobit.records.text import Completion
from isobit.records.wire import completions_of, completions_value
from isobit.rollout.engine import generate
from isobit.rollout.engine_stats import Progress
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Handle, Request
from isobit.rollout.runner import PolicyRunner
from isobit.rollout.shared import generate_shared
from isobit.util.errors import Interrupted
from tests.rollout.delayed_runner import DelayedRunner
from tests.rollout.history_model import HistoryModel, make_engine, request
from tests.rollout.test_exactness import requests as policy_requests
from tests.rollout.test_moving import mixture
from tests.rollout.test_open_engine import check_empty
from tests.rollout.test_sequence import BYTES
from tests.worlds import in_world

SIZES: Sequence[dict[str, Any]] = (
    {"kv_pages": 12, "max_sequences": 6, "max_batched_tokens": 60},
    {"kv_pages": 20, "max_sequences": 15, "max_batched_tokens": 40},
    {"kv_pages": 40, "max_sequences": 2, "max_batched_tokens": 13},
)
KINDS: Sequence[dict[str, Any]] = (
    {},
    {"temperature": 0.7, "top_k": 4},
    {"stop_strings": ('"%', "#$%")},
    {"stop_token_ids": (3,)},
)


def wanted() -> list[Request]:
    return [
        request(i, 7 + 13 * i, 1 + i % 4, max_new_tokens=40 + i, **KINDS[i % len(KINDS)])
        for i in range(12)
    ]


class Mover:
    """Notes what moves between a rank's engine and others."""

    def __init__(self, engine: NativeEngine) -> None:
        self.given = self.taken = self.half_done = 0
        withdraw, admit = engine.withdraw, engine.admit

        def noted_withdraw(handles: Iterable[Handle]) -> dict[Handle, Completion]:
            half_done = withdraw(handles)
            self.given += len(half_done)
            self.half_done += sum(bool(one.length) for one in half_done.values())
            return half_done

        def noted_admit(
            requests: Sequence[Request], half_done: Mapping[Handle, Completion]
        ) -> None:
            self.taken += len(half_done)
            admit(requests, half_done)

        engine.withdraw, engine.admit = noted_withdraw, noted_admit  # pyright: ignore


def slow(world: World, rank: int, seconds: float = 0.01) -> Callable[[Progress], None]:
    def wait(_: Progress) -> None:
        if world.rank == rank:
            time.sleep(seconds)

    return wait


def flat(groups: Sequence[Sequence[Completion]]) -> list[Completion]:
    return [one for group in groups for one in group]


def raised(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except (Exception, Interrupted) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def own_engine(world: World, **sizes: Any) -> tuple[NativeEngine, HistoryModel]:
    """Of other sizes on every rank, and with a step behind on rank 1."""
    wrap = DelayedRunner if world.rank == 1 else None
    return make_engine(tokenizer=BYTES, wrap=wrap, **(SIZES[world.rank] | sizes))


def draw_and_move(world: World, _: Any) -> dict[str, Any]:
    engine, _ = own_engine(world)
    mover = Mover(engine)
    seen: list[Progress] = []
    whole: dict[int, list[Completion]] = {}

    def progress(moment: Progress) -> None:
        seen.append(moment)
        slow(world, 1)(moment)

    def complete(place: int, completions: list[Completion]) -> None:
        assert place not in whole
        whole[place] = completions

    world.barrier("all are here")
    made, homes, stats = generate_shared(world, engine, wanted(), progress, complete)
    assert {place: made[place] for place in whole} == whole
    assert sorted(whole) == [place for place, home in enumerate(homes) if home == world.rank]
    check_empty(engine)
    again, *_ = generate_shared(world, engine, wanted()[:3])
    assert again == made[:3]
    nothing, _, unused = generate_shared(world, engine, [])
    assert nothing == [] and unused.forwards == 0
    finished = [moment.finished for moment in seen]
    assert finished == sorted(finished) and finished[-1] == seen[-1].total == 30
    return {
        "whole": list(whole),
        "completions": completions_value(flat(made)),
        "tokens": stats.generated_tokens,
        "forwards": stats.forwards,
        "progress": seen[-1].generated_tokens,
        "moved": [mover.given, mover.half_done, mover.taken],
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_draw_what_one_engine_draws_and_move_samples_from_a_slow_one(size: int) -> None:
    found = in_world(size, "tests.rollout.test_shared:draw_and_move")
    expected = flat(generate(make_engine(tokenizer=BYTES)[0], wanted()))
    tokens = sum(len(one.token_ids) for one in expected)
    for one in found:
        assert completions_of(one["completions"]) == expected
        assert one["tokens"] == tokens >= one["progress"] > 0
        assert one["forwards"] == found[0]["forwards"] > 0
    assert sorted(place for one in found for place in one["whole"]) == list(range(12))
    given, half_done, taken = (sum(one["moved"][i] for one in found) for i in range(3))
    assert given == taken > 0 and half_done > 0
    assert found[1]["moved"][1] > 0, "the slow one gave some away that it had begun"


def draw_by_a_policy(world: World, _: Any) -> dict[str, Any]:
    """A mixture of experts, engines of both kinds."""

    def make(policy: Any, size: CacheSize) -> Any:
        runner = PolicyRunner(policy, size)
        return DelayedRunner(runner) if world.rank else runner

    engine = NativeEngine(mixture(), RolloutConfig(**SIZES[world.rank]), None, 0, make)
    mover = Mover(engine)
    world.barrier("all are here")
    made, *_ = generate_shared(world, engine, policy_requests(), slow(world, 0, 0.1))
    return {"completions": completions_value(flat(made)), "moved": mover.half_done}


@pytest.mark.exhaustive
def test_a_mixture_keeps_its_routings_wherever_it_is_drawn() -> None:
    found = in_world(2, "tests.rollout.test_shared:draw_by_a_policy")
    expected = flat(generate(NativeEngine(mixture(), RolloutConfig(), None, 0), policy_requests()))
    assert expected[0].routings
    assert all(completions_of(one["completions"]) == expected for one in found)
    assert sum(one["moved"] for one in found) > 0


def fail_in_many_ways(world: World, _: Any) -> dict[str, str]:
    """Each time all ranks end, and can begin anew."""
    engine, model = own_engine(world, kv_pages=12 - 7 * world.rank)
    said: dict[str, str] = {}

    def stop(moment: Progress) -> None:
        if world.rank == 1:
            raise Interrupted("SIGTERM", 15)
        slow(world, 0)(moment)

    def refuse(place: int, completions: list[Completion]) -> None:
        if place == 5:
            raise ValueError("no group 5")

    def attempt(requests: list[Request], **how: Any) -> str:
        world.barrier("all are here")
        how = {"progress": slow(world, 0), **how}
        text = raised(lambda: generate_shared(world, engine, requests, **how))
        check_empty(engine)
        return text

    said["signal"] = attempt(wanted(), progress=stop)
    said["group"] = attempt(wanted(), complete=refuse)
    bad = request(0, 1, max_new_tokens=9)
    model.poisoned = bad.prompt.token_ids[0] if world.rank == 1 else None
    said["weights"] = attempt([replace(bad, visit=visit, samples=2) for visit in range(20)])
    model.poisoned = None
    said["too long"] = attempt([request(4, 300, max_new_tokens=60)])
    handles = engine.submit([request(3, 5)])[0] if world.rank == 0 else []
    said["live"] = raised(lambda: generate_shared(world, engine, wanted()))
    engine.abort(handles)
    made, *_ = generate_shared(world, engine, wanted()[:4])
    assert made == generate(make_engine(tokenizer=BYTES)[0], wanted()[:4])
    return said


@pytest.mark.exhaustive
def test_what_ends_one_rank_ends_all_and_names_the_one() -> None:
    first, second = in_world(2, "tests.rollout.test_shared:fail_in_many_ways")
    assert first["signal"] == second["signal"] == "Interrupted: stopped by SIGTERM"
    groups = {first["group"], second["group"]}
    assert "ValueError: no group 5" in groups and len(groups) == 2
    assert any("failed: ValueError: no group 5" in text for text in groups)
    assert second["weights"].startswith("NonFiniteError: prompt 'p/0' at position 0")
    assert first["weights"].startswith("PeerError: rank 1 failed: NonFiniteError: prompt")
    assert second["too long"].startswith("RequestError: prompt 'p/4' can grow to 360 tokens")
    assert first["too long"].startswith("PeerError: rank 1 failed: RequestError: prompt 'p/4'")
    assert first["live"].startswith("RequestError: generate needs the engine for itself, and 1 ")
    assert second["live"].startswith("PeerError: rank 0 failed: RequestError: generate needs")


def test_alone_it_is_generate() -> None:
    engine, _ = make_engine(tokenizer=BYTES)
    told: list[int] = []
    made, _, stats = generate_shared(
        Alone(), engine, wanted(), None, lambda place, _: told.append(place)
    )
    assert made == generate(make_engine(tokenizer=BYTES)[0], wanted())
    assert stats is engine.stats and sorted(told) == list(range(12))
