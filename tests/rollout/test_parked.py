"""Samples that come back for another turn draw the same bits, whether their K and V stayed or are
computed again.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.config.precision import PrecisionConfig
from isobit.config.rollout import RolloutConfig
from isobit.memory.cache_size import CacheSize, Parked
from isobit.models.kv_calibration import calibrate_kv_scales
from isobit.models.policy import Policy, random_policy
from isobit.records.text import Completion
from isobit.rollout.engine_stats import EngineStats
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Handle, Request
from isobit.rollout.runner import PolicyRunner
from isobit.rollout.sequence import Sample
from tests.rollout.delayed_runner import DelayedRunner
from tests.rollout.history_model import VOCAB, request
from tests.rollout.test_exactness import TINY, policy_of, requests
from tests.rollout.test_moving import mixture
from tests.rollout.test_native import batches
from tests.rollout.test_open_engine import both_executors, check_empty, ended, open_engine
from tests.suites import examples

ROOMY: dict[str, Any] = {"kv_pages": 80, "max_sequences": 8, "max_batched_tokens": 100}
FEW: dict[str, Any] = {"kv_pages": 6, "max_sequences": 3, "max_batched_tokens": 37}
TURNS = 4
WITH_STOPS = [
    replace(one, sampling=replace(one.sampling, max_new_tokens=90))
    for one in requests(stop_token_ids=tuple(range(0, TINY.vocab_size, 4)))
]
"""Requests to a policy whose turns have some four tokens."""


def play(
    engine: NativeEngine,
    wanted: Sequence[Request],
    seed: int = 0,
    parks: bool = True,
    vocab: int = VOCAB,
    between: Callable[[int], None] = lambda _: None,
    turns: int = TURNS,
) -> tuple[dict[Handle, Completion], EngineStats]:
    """Up to so many turns of each sample, with some tokens behind each that stops, after some steps
    in which others run; the last completions, and what the engine did.
    """
    choose, asked = random.Random(seed), [replace(one, comes_back=parks) for one in wanted]
    by_name = {(one.prompt.id, one.visit): one for one in asked}
    handles = [handle for group in engine.submit(asked) for handle in group]
    taken, found, away = dict.fromkeys(handles, 1), dict[Handle, Completion](), []
    stats, last = EngineStats(), engine.stats
    for step in range(100_000):
        if last is not engine.stats:
            stats, last = stats + last, engine.stats
        for handle, one in ended(engine.step()).items():
            given = random.Random(repr((handle, taken[handle])))
            more = [given.randrange(vocab) for _ in range(given.randint(1, 40))]
            limit = by_name[handle.prompt_id, handle.visit].max_length(engine.limits.context)
            sequence = one.sequence.with_given(more)
            if one.finish_reason != "stop" or taken[handle] == turns or sequence.length >= limit:
                found[handle] = one
                engine.abort([handle])
            else:
                taken[handle] += 1
                away.append((step + choose.randrange(12), handle, sequence))
        back = [one for one in away if one[0] <= step]
        away = [one for one in away if one[0] > step]
        for _, handle, sequence in back:
            name = handle.prompt_id, handle.visit
            engine.admit([by_name[name]], {handle: Completion(sequence, "", "aborted")})
        between(step)
        if len(found) == len(handles):
            return {handle: found[handle] for handle in handles}, stats + last
    raise AssertionError("the samples do not end")


def check_equal(made: dict[Handle, Completion], expected: dict[Handle, Completion]) -> None:
    assert list(made) == list(expected)
    for handle, one in made.items():
        ours, theirs = one.sequence, expected[handle].sequence
        assert torch.equal(torch.tensor(ours.token_ids), torch.tensor(theirs.token_ids))
        assert torch.equal(torch.tensor(ours.log_probs), torch.tensor(theirs.log_probs))
        assert ours == theirs, "and what else was recorded"


def several(samples: int = 3) -> list[Request]:
    """Prompts around the bounds of pages, with turns that stop after some four tokens."""
    return [
        request(n, length, samples, max_new_tokens=200, stop_token_ids=(1, 4, 7))
        for n, length in enumerate((5, 63, 64, 66, 127, 130))
    ]


@pytest.mark.few(1)
@both_executors
def test_kept_and_recomputed_turns_draw_the_same(pipelined: bool) -> None:
    made = dict[str, tuple[dict[Handle, Completion], EngineStats]]()
    for name, sizes, parks in (
        ("kept", ROOMY, True),
        ("short of pages", FEW, True),
        ("computed again", ROOMY, False),
    ):
        engine, _ = open_engine(pipelined, **sizes)
        made[name] = play(engine, several(), parks=parks)
        check_empty(engine)
    for found, _ in made.values():
        check_equal(found, made["computed again"][0])
    turns = [len(one.sequence.given_from(1)) for one in made["kept"][0].values()]
    assert max(turns) == TURNS
    kept, short, off = (stats for _, stats in made.values())
    assert kept.kept_tokens > 2 * short.kept_tokens
    assert off.kept_tokens == 0
    assert kept.generated_tokens == short.generated_tokens == off.generated_tokens
    assert kept.prompt_tokens == sum(len(one.prompt.token_ids) for one in several())
    assert off.prompt_tokens > 3 * kept.prompt_tokens


@pytest.mark.few(1)
@both_executors
@settings(max_examples=examples(60), deadline=None)
@given(batch=batches(), seed=st.integers(0, 1000), stops=st.integers(1, 6))
def test_any_batch_with_turns_draws_the_same_with_and_without_parked_pages(
    pipelined: bool, batch: tuple[list[Request], dict[str, Any]], seed: int, stops: int
) -> None:
    wanted, sizes = batch
    wanted = [
        replace(one, sampling=replace(one.sampling, stop_token_ids=tuple(range(stops))))
        for one in wanted
    ]
    engine, _ = open_engine(pipelined, **sizes)
    made, _ = play(engine, wanted, seed)
    check_empty(engine)
    expected, _ = play(open_engine(False)[0], wanted, parks=False)
    check_equal(made, expected)


@pytest.mark.few(1)
@both_executors
@pytest.mark.parametrize("change", ["publish", "release"])
def test_new_weights_and_a_release_leave_nothing_parked(pipelined: bool, change: str) -> None:
    """The model refuses K and V of other weights."""
    engine, model = open_engine(pipelined, **ROOMY)
    dropped = list[int]()

    def parked() -> int:
        return len(engine._allocator._parked)

    def between(step: int) -> None:
        if step % 25 == 24:
            dropped.append(parked())
            if change == "publish":
                model.version += 1
                engine.take_weights()
            else:
                engine.release()
            assert not parked()

    made, stats = play(engine, several(), between=between)
    assert sum(dropped) > 4 and stats.kept_tokens > 0
    if change == "release":
        check_equal(made, play(open_engine(pipelined)[0], several(), parks=False)[0])


def come_back(
    engine: NativeEngine, changed: int | None = None, between: Callable[[], None] = lambda: None
) -> EngineStats:
    """One sample of 70 tokens, whose first token stops it, comes back with two more, and with one
    of its tokens ``changed``, by its place; what the engine did then.
    """
    wanted = replace(request(0, 70, stop_token_ids=tuple(range(VOCAB))), comes_back=True)
    ((handle,),) = engine.submit([wanted])
    found = ended(engine.step())
    while engine.num_live:
        found |= ended(engine.step())
    sequence = found[handle].sequence.with_given([3, 5])
    if changed is not None:
        ids = sequence.token_ids.copy()
        ids[changed] = (ids[changed] + 1) % VOCAB
        sequence = replace(sequence, token_ids=ids)
        wanted = replace(wanted, prompt=replace(wanted.prompt, token_ids=tuple(ids[:70].tolist())))
    between()
    engine.admit([wanted], {handle: Completion(sequence, "", "aborted")})
    while engine.num_live:
        engine.step()
    check_empty(engine)
    return engine.stats


@both_executors
def test_k_and_v_are_kept_of_the_same_tokens_and_weights_alone(pipelined: bool) -> None:
    """Those of a drawn token are there if the device had gone on from it."""
    engine, model = open_engine(pipelined)
    stats = come_back(engine)
    assert (stats.kept_tokens, stats.prompt_tokens) == (70 + pipelined, 0)
    assert engine._allocator._parked
    stats = come_back(engine, changed=20)
    assert (stats.kept_tokens, stats.prompt_tokens) == (0, 70)

    def publish() -> None:
        model.version += 1

    stats = come_back(engine, between=publish)
    assert (stats.kept_tokens, stats.prompt_tokens) == (0, 70)


@both_executors
def test_a_sample_that_is_aborted_or_does_not_stop_leaves_nothing_parked(pipelined: bool) -> None:
    engine, _ = open_engine(pipelined)
    come_back(engine)
    parked = engine._allocator._parked
    engine.abort(list(parked))  # type: ignore[arg-type]  the names are handles
    assert not parked
    ((handle,),) = engine.submit([replace(request(0, 5, max_new_tokens=4), comes_back=True)])
    while engine.num_live:
        engine.step()
    assert not parked, "it had come to its length"
    engine.submit([replace(request(0, 5), comes_back=True)])
    engine.step()
    engine.withdraw([handle])
    assert not parked
    check_empty(engine)


def per_tensor() -> Policy:
    precision = PrecisionConfig(preset="fp8", kv_scales="per_tensor")
    policy = random_policy(TINY, precision, 0)
    calibrate_kv_scales(policy, [list(one.prompt.token_ids) for one in requests()], 1000)
    return policy


POLICIES: dict[str, Callable[[], Policy]] = {
    **{name: partial(policy_of, name) for name in ("fp8", "fp8-rollout", "int8", "bf16", "fp32")},
    "per_tensor": per_tensor,
    "mixture": mixture,
}


@pytest.mark.exhaustive
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("pipelined", "name"), [*((False, name) for name in POLICIES), (True, "fp8")]
)
def test_a_policys_turns_have_the_same_bits(pipelined: bool, name: str) -> None:
    policy = POLICIES[name]()

    def make(policy: Any, size: CacheSize) -> Any:
        runner = PolicyRunner(policy, size)
        return DelayedRunner(runner) if pipelined else runner

    made = dict[str, tuple[dict[Handle, Completion], EngineStats]]()
    for way, sizes, parks in (
        ("kept", ROOMY, True),
        ("short of pages", FEW, True),
        ("computed again", ROOMY, False),
    ):
        engine = NativeEngine(policy, RolloutConfig(**sizes), None, 0, make)
        made[way] = play(engine, WITH_STOPS, parks=parks, vocab=TINY.vocab_size, turns=3)
    kept, short, off = (stats for _, stats in made.values())
    assert kept.kept_tokens > 1000 > short.kept_tokens >= off.kept_tokens == 0
    for found, _ in made.values():
        check_equal(found, made["computed again"][0])


def test_k_and_v_that_are_only_said_to_be_there_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: a sample goes on as if the pages held the tokens behind the turn, too."""

    def resume(self: Sample, parked: Parked) -> None:
        exact(self, parked)
        held = len(self.pages) * 64
        self.cached = min(held, len(self.tokens) - 1)

    exact = Sample.resume
    monkeypatch.setattr(Sample, "resume", resume)
    made, _ = play(NativeEngine(policy_of("fp8"), RolloutConfig(**ROOMY), None, 0), WITH_STOPS)
    monkeypatch.setattr(Sample, "resume", exact)
    expected, _ = play(NativeEngine(policy_of("fp8"), RolloutConfig(**ROOMY), None, 0), WITH_STOPS)
    assert made != expected


def test_those_who_wait_for_one_prompt_stay_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that goes in front with its pages does not part them, or the prompt would be put through
    the model twice.
    """
    stop = replace(request(0, 70, 2).sampling, stop_token_ids=tuple(range(VOCAB)))
    pair, other = (
        replace(request(n, 70, samples, max_new_tokens=20), sampling=stop, comes_back=True)
        for n, samples in ((0, 2), (1, 1))
    )
    engine, _ = open_engine(False, max_sequences=1)
    handles = [handle for group in engine.submit([pair, other]) for handle in group]
    begun = dict[Handle, Completion]()
    while engine.num_live:
        for handle, one in ended(engine.step()).items():
            begun[handle] = Completion(one.sequence.with_given([1]), "", "aborted")
    engine.submit([request(2, 5)])
    engine.step()
    scheduler = engine._scheduler
    monkeypatch.setattr(scheduler, "_line_takes_parked_pages", lambda: True)
    first, second, third = handles
    engine._allocator.drop_parked([second])
    for handle, wanted in ((first, pair), (second, pair), (third, other)):
        engine.admit([wanted], {handle: begun[handle]})
    assert [one.handle for one in scheduler.waiting] == [third, first, second]
    engine._allocator.drop_parked([first])
    while engine.num_live:
        engine.step()
    assert engine.stats.prompt_tokens == 5 + 70
