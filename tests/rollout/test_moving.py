"""Half-done samples that move between engines draw what they draw in one engine."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.config.precision import PrecisionConfig
from isobit.config.rollout import RolloutConfig
from isobit.memory.cache_size import CacheSize
from isobit.models.config import Experts
from isobit.models.policy import Policy, random_policy
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Handle, Request
from isobit.rollout.runner import PolicyRunner
from isobit.util.errors import RequestError
from tests.rollout.delayed_runner import DelayedRunner
from tests.rollout.history_model import make_engine, request
from tests.rollout.test_exactness import TINY, policy_of, requests
from tests.rollout.test_native import batches
from tests.rollout.test_open_engine import both_executors, check_empty, ended, open_engine
from tests.rollout.test_sequence import BYTES
from tests.suites import examples

SIZES: Sequence[dict[str, Any]] = (
    {"kv_pages": 40, "max_sequences": 8, "max_batched_tokens": 100},
    {"kv_pages": 5, "max_sequences": 3, "max_batched_tokens": 7},
    {"kv_pages": 9, "max_sequences": 5, "max_batched_tokens": 31},
)


def play(
    engines: Sequence[NativeEngine],
    wanted: Sequence[Request],
    choose: random.Random,
    rounds: int = 1000,
) -> tuple[list[list[Completion]], int]:
    """Hand whole requests to any engine, and samples, a few at a time, from any to any; the
    completions, and how many samples moved with some of their tokens drawn.  After so many
    rounds they stay where they are.
    """
    found: dict[Handle, Completion] = {}
    waiting, moves = list(wanted), 0
    while waiting or any(engine.num_live for engine in engines):
        if waiting and choose.random() < 0.5:
            choose.choice(engines).submit([waiting.pop(0)])
        for engine in engines:
            for _ in range(choose.randrange(4)):
                found |= ended(engine.step())
        rounds -= 1
        if rounds < 0:
            continue
        source, target = choose.sample(engines, 2)
        some = [handle for handle in source._live if choose.random() < 0.2]
        half_done = source.withdraw(some)
        assert list(half_done) == some
        target.admit(wanted, half_done)
        assert set(some) <= set(target._live)
        moves += sum(bool(one.length) for one in half_done.values())
    by_name = {(handle.prompt_id, handle.sample): one for handle, one in found.items()}
    groups = [[by_name[one.prompt.id, index] for index in range(one.samples)] for one in wanted]
    return groups, moves


@pytest.mark.exhaustive
@both_executors
def test_samples_that_move_at_will_draw_what_they_draw_in_one_engine(pipelined: bool) -> None:
    """Split groups, temperatures, filters, stop tokens and stop strings that begin before a move
    and end behind it.
    """
    kinds: Sequence[dict[str, Any]] = (
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 4, "top_p": 0.9},
        {"stop_token_ids": (3,), "top_k": 3},
        {"stop_strings": ('"%', "#$%")},
        {"stop_strings": ("$", "%#'"), "temperature": 0.8},
    )
    wanted = [
        request(i, 7 + 23 * (i % 7), 1 + i % 5, max_new_tokens=40 + i, **kinds[i % len(kinds)])
        for i in range(24)
    ]
    engines = [open_engine(pipelined, tokenizer=BYTES, **sizes)[0] for sizes in SIZES]
    groups, moves = play(engines, wanted, random.Random(5))
    assert moves >= 100
    assert groups == generate(make_engine(tokenizer=BYTES)[0], wanted)
    stopped = [one for group in groups for one in group if one.finish_reason == "stop"]
    assert len(stopped) > 10
    drawn = sum(len(one.token_ids) for group in groups for one in group)
    assert drawn > 1000
    for engine in engines:
        check_empty(engine)


@pytest.mark.few(1)
@both_executors
@settings(max_examples=examples(25), deadline=None)
@given(batch=batches(), seed=st.integers(0, 1000))
def test_any_batch_draws_the_same_in_two_engines(
    pipelined: bool, batch: tuple[list[Request], dict[str, Any]], seed: int
) -> None:
    wanted, sizes = batch
    engines = [open_engine(pipelined, **sizes)[0] for _ in range(2)]
    groups, _ = play(engines, wanted, random.Random(seed), rounds=30)
    assert groups == generate(make_engine(**sizes)[0], wanted)
    for engine in engines:
        check_empty(engine)


def mixture() -> Policy:
    config = replace(TINY, family="qwen3_moe", experts=Experts(4, 2, 128, renormalise=True))
    return random_policy(config, PrecisionConfig(preset="fp8"), 3)


@pytest.mark.exhaustive
@both_executors
@pytest.mark.parametrize("make_policy", [lambda: policy_of("fp8"), mixture], ids=["dense", "moe"])
def test_a_policys_samples_move_with_log_probabilities_versions_and_routings(
    pipelined: bool, make_policy: Callable[[], Policy]
) -> None:
    policy, wanted = make_policy(), requests()

    def make(policy: Any, size: CacheSize) -> Any:
        runner = PolicyRunner(policy, size)
        return DelayedRunner(runner) if pipelined else runner

    engines = [NativeEngine(policy, RolloutConfig(**one), None, 0, make) for one in SIZES]
    expected = generate(NativeEngine(policy, RolloutConfig(), None, 0), wanted)
    groups, moves = play(engines, wanted, random.Random(1))
    assert moves >= 6
    assert groups == expected
    assert (groups[0][0].routings is None) == (make_policy is not mixture)


@both_executors
def test_tokens_are_counted_once_by_whoever_has_drawn_them(pipelined: bool) -> None:
    first, second = (open_engine(pipelined)[0] for _ in range(2))
    wanted = [request(0, 70, 3, max_new_tokens=12)]
    (handles,) = first.submit(wanted)
    for _ in range(6):
        first.step()
    half_done = first.withdraw(handles)
    check_empty(first)
    drawn = first.stats.generated_tokens
    assert sum(one.length for one in half_done.values()) == drawn > 0
    second.admit(wanted, half_done)
    while second.num_live:
        second.step()
    assert second.stats.generated_tokens == 3 * 12 - drawn
    assert second.stats.prompt_tokens == 70


def test_samples_that_come_share_the_pages_of_those_who_wait() -> None:
    first, second = make_engine()[0], make_engine(max_sequences=2)[0]
    wanted, other = request(0, 130, 6, max_new_tokens=4), request(1, 9, max_new_tokens=4)
    (handles,) = first.submit([wanted])
    second.admit([other, wanted], first.withdraw(handles[:3]))
    second.submit([other])
    second.step()
    second.step()
    assert second.num_running == 2
    second.admit([other, wanted], first.withdraw(handles[3:]))
    order = [event.handle.prompt_id for _ in range(40) for event in second.step()]
    assert order == ["p/0", "p/1"] + ["p/0"] * 5
    assert second.stats.prompt_tokens == 130 + 9


@pytest.mark.few(1)
@both_executors
def test_what_came_is_still_there_after_a_release(pipelined: bool) -> None:
    first, second = (open_engine(pipelined, kv_pages=6)[0] for _ in range(2))
    wanted = [request(i, 60, 3, max_new_tokens=30) for i in range(3)]
    handles = first.submit(wanted)
    second.admit(wanted, first.withdraw(handles[0][1:] + handles[1][1:]))
    found: dict[Handle, Completion] = {}
    for _ in range(4):
        found |= ended(second.step())
    second.release()
    second.admit(wanted, first.withdraw(handles[0][:1] + handles[1][:1]))
    while first.num_live or second.num_live:
        found |= ended(first.step()) | ended(second.step())
    expected = generate(make_engine()[0], wanted)
    assert [[found[handle] for handle in group] for group in handles] == expected


@both_executors
@pytest.mark.parametrize("limit", [3, 6, 7])
def test_a_sample_at_its_limit_is_refused_and_others_go_on(limit: int, pipelined: bool) -> None:
    """A further token used to be drawn for it, from the prompt's last state."""
    first, second = (open_engine(pipelined)[0] for _ in range(2))
    wanted, other = request(0, 5, max_new_tokens=30), request(1, 9, max_new_tokens=8)
    handles = first.submit([wanted, other])
    while first.num_drawn(handles[0][0]) < 6:
        first.step()
    half_done = first.withdraw([one for group in handles for one in group])
    drawn = half_done[handles[0][0]].length
    shorter = replace(wanted, sampling=replace(wanted.sampling, max_new_tokens=limit))
    if limit <= drawn:
        with pytest.raises(RequestError, match=rf"has {5 + drawn} tokens .* may have {5 + limit}"):
            second.admit([other, shorter], half_done)
        assert second.num_live == 0
        del half_done[handles[0][0]]
    second.admit([other, shorter], half_done)
    found: dict[Handle, Completion] = {}
    while second.num_live:
        found |= ended(second.step())
    expected = generate(make_engine()[0], [shorter, other])
    given = [group for group in handles if group[0] in found]
    assert [[found[handle] for handle in group] for group in given] == expected[-len(given) :]


def test_what_has_ended_or_moved_is_passed_over_and_what_is_there_is_refused() -> None:
    engine, other = make_engine()[0], make_engine()[0]
    short, wanted = request(0, 5, max_new_tokens=1), request(1, 5, 2)
    (gone,), handles = engine.submit([short, wanted])
    engine.step()
    assert engine.num_live == 2
    half_done = engine.withdraw([gone, handles[0]])
    assert list(half_done) == handles[:1]
    assert engine.withdraw(handles[:1]) == {} and engine.abort(handles[:1]) == []
    other.admit([wanted], half_done)
    second, empty = request(2, 5), request(3, 0)
    begun = Completion(TokenSequence.of_answer([], []), "", "aborted")
    with pytest.raises(
        RequestError,
        match=r"sample 0 of prompt 'p/1', visit 0, is here already.* withdraw it first",
    ):
        other.admit([wanted, second], {Handle("p/2", 0, 0): begun, **half_done})
    with pytest.raises(RequestError, match="requested twice for visit 0"):
        other.submit([wanted])
    with pytest.raises(RequestError, match="has no tokens"):
        other.admit([empty], {Handle("p/3", 0, 0): begun})
    assert other.num_live == 1


def test_a_followed_sample_that_leaves_is_not_told_of_any_more() -> None:
    engine = make_engine()[0]
    ((one, two),) = engine.submit([request(0, 5, 2, max_new_tokens=6)], follow="tokens")
    assert len(engine.step()) == 2
    engine.withdraw([one])
    assert {event.handle for _ in range(8) for event in engine.step()} == {two}


def test_room_is_for_samples_that_would_start() -> None:
    engine = make_engine(kv_pages=5, max_sequences=4)[0]
    assert engine.has_room
    engine.submit([request(0, 130, 2)])  # three pages, and one more for each sample
    assert not engine.has_room
    engine.step()
    engine.step()
    engine.step()
    assert engine.num_running == 2 and engine.has_room
    engine.submit([request(1, 5, 2)])
    assert not engine.has_room, "all places are taken"
    engine.release()
    assert not engine.has_room
