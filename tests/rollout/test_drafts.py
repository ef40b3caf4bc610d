"""Guessed tokens change the number of steps and nothing that is drawn."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import inf
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from experiments.guess_bits import OtherRows
from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import RunConfig
from isobit.config.rollout import RolloutConfig
from isobit.config.rules import check_engine
from isobit.kernels.sizes import Sizes
from isobit.memory.cache_size import SPECULATED_ROWS, CacheSize, forward_bytes
from isobit.models.function import SampledPolicy
from isobit.models.policy import Policy, random_policy
from isobit.records.text import Completion, Prompt, SamplingParams
from isobit.rollout import drafts
from isobit.rollout.drafts import BUDGET, LONGEST_REST, REFILL, Drafter, StepTimes
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Handle, Request
from isobit.rollout.runner import ForwardBatch, PolicyRunner
from isobit.rollout.sequence import Sample, SharedPrompt, States
from isobit.run.loop import train
from isobit.util.errors import ConfigError
from tests.models.test_adapters import base
from tests.rollout import test_adapters, test_moving, test_parked
from tests.rollout.delayed_runner import DelayedRunner
from tests.rollout.history_model import VOCAB, HistoryModel, make_engine, plain_samples, request
from tests.rollout.test_adapters import folders
from tests.rollout.test_exactness import (
    TIGHT,
    TINY,
    policy_of,
    recorded_log_probs,
    requests,
    trainer_log_probs,
)
from tests.rollout.test_native import batches, tokens_and_log_probs
from tests.rollout.test_open_engine import both_executors, check_empty, ended, open_engine
from tests.rollout.test_sequence import BYTES
from tests.suites import examples
from tests.tiny import json_lines, save_tiny, small_run

__all__ = ["base", "folders"]  # fixtures


@dataclass
class Times:
    """Of a device whose further rows take this share of the time of the first one."""

    share: float = 0.0
    wait_s: float = 0.0
    host_s: float = 0.0
    captures: int = 0

    def step_seconds(self, rows: int, length: int) -> float:
        return 1 + self.share * (rows - 1)

    def now(self) -> float:
        return 0.0


class Knowing(Drafter):
    """Guesses from whole sequences that it knows, each token right with a chance, and goes on for
    as many as it may behind their end.
    """

    def __init__(
        self, known: Mapping[Handle, Sequence[int]], right: float, vocab: int, most: int = 7
    ) -> None:
        super().__init__(most, Times(), slots=64)
        self._known, self._right, self._vocab = known, right, vocab
        self._chance = random.Random(1)

    def is_worth_waiting(self, running: Sequence[Sample], rooms: Any) -> bool:
        return self._chance.random() < 0.7

    def drafts(
        self, samples: Sequence[Sample], rooms: Sequence[int], decoding: Sequence[Sample]
    ) -> list[Sequence[int]]:
        """Now and then none, so that there are steps behind which tokens are in flight."""
        if self._chance.random() < 0.1:
            return [()] * len(samples)
        return super().drafts(samples, rooms, decoding)

    def draft(self, sample: Sample, most: int) -> list[int]:
        if sample.acceptance == -inf:
            return []
        chance, vocab = self._chance, self._vocab
        tokens = [*self._known[sample.handle][sample.length :][:most]]
        tokens += [chance.randrange(vocab) for _ in range(most - len(tokens))]
        return [
            token if chance.random() < self._right else chance.randrange(vocab) for token in tokens
        ]


def guess(engine: NativeEngine, drafter: Drafter) -> NativeEngine:
    engine._drafter = engine._scheduler._drafter = drafter
    return engine


def handle_of(request: Request, index: int) -> Handle:
    return Handle(request.prompt.id, request.visit, index)


def known_of(wanted: Sequence[Request], groups: list[list[Completion]]) -> dict[Handle, list[int]]:
    return {
        handle_of(one, index): completion.sequence.token_ids.tolist()
        for one, group in zip(wanted, groups, strict=True)
        for index, completion in enumerate(group)
    }


def endless(wanted: Sequence[Request]) -> dict[Handle, list[int]]:
    """The sequences of the history model, as they go on behind a stop token."""
    free = [replace(one, sampling=replace(one.sampling, stop_token_ids=())) for one in wanted]
    return {
        handle_of(one, index): [*one.prompt.token_ids, *tokens]
        for one in free
        for index, (tokens, _) in enumerate(plain_samples(one))
    }


def holds_alone(engine: NativeEngine, model: HistoryModel) -> None:
    """Whatever is written goes to pages that have one holder: none is shared."""
    forward = model.forward

    def checked(batch: ForwardBatch) -> States:
        pages = set((batch.paged.slots // model.page_tokens).tolist())
        assert all(engine._allocator.holders(page) == 1 for page in pages)
        return forward(batch)

    model.forward = checked


@settings(max_examples=examples(100), deadline=None)
@given(
    batch=batches(),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    most=st.sampled_from([1, 3, 20, 64]),
    pipelined=st.booleans(),
)
def test_any_batch_draws_what_a_plain_loop_draws_whatever_is_guessed(
    batch: tuple[list[Request], dict[str, Any]], right: float, most: int, pipelined: bool
) -> None:
    wanted, sizes = batch
    engine, model = open_engine(pipelined, **sizes)
    holds_alone(engine, model)
    guess(engine, Knowing(endless(wanted), right, VOCAB, most))
    assert tokens_and_log_probs(generate(engine, wanted)) == [plain_samples(one) for one in wanted]
    check_empty(engine)
    rows = [len(one.token_ids) for one in model.batches]
    assert max(rows) <= engine._batched_tokens
    stats = engine.stats
    assert stats.generated_tokens == sum(len(one) for r in wanted for one, _ in plain_samples(r))
    assert stats.accepted_tokens == stats.drafted_tokens or right < 1 or _has_stops(wanted)


class Standing(Knowing):
    """Guesses that stand in the plan as they were chosen."""

    chosen: Sequence[int] = ()
    checked = 0

    def drafts(
        self, samples: Sequence[Sample], rooms: Sequence[int], decoding: Sequence[Sample]
    ) -> list[Sequence[int]]:
        drafts = super().drafts(samples, rooms, decoding)
        self.chosen = sorted(len(draft) for draft in drafts if draft)
        return drafts

    def end_plan(self, decoding: Sequence[Sample]) -> None:
        super().end_plan(decoding)
        made, self.chosen = self.chosen, ()
        assert list(made) == sorted(len(sample.draft) for sample in decoding if sample.draft)
        self.checked += bool(made)


@both_executors
@pytest.mark.parametrize("pages", [7, 9])
def test_guesses_are_chosen_by_the_pages_that_there_are(pages: int, pipelined: bool) -> None:
    """A choice of which little stands looks as if guesses were bad, or is waited for in vain."""
    wanted = [request(n, length, 3) for n, length in enumerate((5, 62, 64, 130))]
    engine, _ = open_engine(pipelined, kv_pages=pages, max_batched_tokens=400)
    drafter = Standing(endless(wanted), 0.8, VOCAB, 40)
    generate(guess(engine, drafter), wanted)
    assert drafter.checked > 5


def test_nothing_has_room_behind_a_last_token_that_is_in_flight() -> None:
    seen = list[int]()

    class Unguessed(Knowing):
        def is_worth_waiting(self, running: Sequence[Sample], rooms: Any) -> bool:
            seen.extend(rooms(running))
            return False

    drafter, wanted = Unguessed({}, 1.0, VOCAB), [request(0, 5, 3)]
    generate(guess(open_engine(True)[0], drafter), wanted)
    assert min(seen) == 0 < max(seen) == drafter.most


def _has_stops(wanted: Sequence[Request]) -> bool:
    return any(one.sampling.stop_token_ids for one in wanted)


# ------------------------------------------------------------------------- with real arithmetic


@cache
def policy_named(name: str) -> Policy:
    if name == "moe":
        return test_moving.mixture()
    if name == "windows":
        config = replace(TINY, family="mistral", sliding_window=24)
        return random_policy(config, PrecisionConfig(preset="fp8"), 3)
    return policy_of(name)  # type: ignore[arg-type]


SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.6, "stop_token_ids": tuple(range(0, TINY.vocab_size, 9))},
)
SIZES: tuple[dict[str, Any], ...] = (
    {},
    TIGHT,
    {"max_sequences": 2, "kv_pages": 6},
    {"max_batched_tokens": 16},
)


def short_requests(sampling: Mapping[str, Any]) -> list[Request]:
    """Of three lengths around the bounds of pages."""
    return requests(**sampling)[1:4]


@cache
def without(name: str, sampling: int) -> list[list[Completion]]:
    engine = NativeEngine(policy_named(name), RolloutConfig(), None, 0)
    return generate(engine, short_requests(SAMPLINGS[sampling]))


def check_equal(made: list[list[Completion]], expected: list[list[Completion]]) -> None:
    assert torch.equal(recorded_log_probs(made), recorded_log_probs(expected))
    assert made == expected, "and what else was recorded, routings among it"


@settings(max_examples=examples(50), deadline=None)
@given(
    name=st.sampled_from(["bf16", "fp8", "int8", "moe", "windows"]),
    sampling=st.integers(0, len(SAMPLINGS) - 1),
    sizes=st.sampled_from(SIZES),
    right=st.sampled_from([None, 0.7, 1.0]),
    most=st.sampled_from([2, 5, 16]),
)
def test_completions_do_not_depend_on_what_is_guessed(
    name: str, sampling: int, sizes: dict[str, Any], right: float | None, most: int
) -> None:
    check_policy(name, sampling, sizes, right, most)


@pytest.mark.parametrize("name", ["bf16", "fp8", "int8", "moe", "windows"])
def test_every_flow_accepts_what_is_guessed_right(name: str) -> None:
    stats = check_policy(name, 0, TIGHT, 0.9, 5).stats
    assert stats.drafted_tokens > stats.accepted_tokens > stats.generated_tokens // 2
    assert stats.preemptions > 0 and stats.chunks > 0


def check_policy(
    name: str, sampling: int, sizes: dict[str, Any], right: float | None, most: int
) -> NativeEngine:
    """By the engine's own guesses, or where ``right`` is given by some of that share."""
    policy, wanted = policy_named(name), short_requests(SAMPLINGS[sampling])
    expected = without(name, sampling)
    engine = NativeEngine(policy, RolloutConfig(speculation=most, **sizes), None, 0)
    if right is not None:
        known = known_of(wanted, expected)
        guess(engine, Knowing(known, right, policy.config.vocab_size, most))
    check_equal(generate(engine, wanted), expected)
    check_empty(engine)
    if name == "moe":
        assert all(one.routings is not None for group in expected for one in group)
    return engine


def test_recorded_log_probabilities_are_those_of_the_training_forward() -> None:
    policy, wanted = policy_of("fp8"), short_requests({})
    engine = NativeEngine(policy, RolloutConfig(**TIGHT), None, 0)
    guess(engine, Knowing(known_of(wanted, without("fp8", 0)), 0.9, TINY.vocab_size))
    groups = generate(engine, wanted)
    assert engine.stats.accepted_tokens > 30
    assert torch.equal(recorded_log_probs(groups), trainer_log_probs(policy, wanted, groups))


def delayed(policy: SampledPolicy, size: CacheSize) -> DelayedRunner:
    return DelayedRunner(PolicyRunner(policy, size))


class CoarseRows(OtherRows):
    """Five bits, so that some of few tokens are others."""

    turned = 31


def test_rows_that_differ_in_the_last_bit_are_found() -> None:
    """The comparison above can fail, and guesses that were right are rejected."""
    policy, wanted = policy_of("fp8"), requests(temperature=1.3)
    expected = generate(NativeEngine(policy, RolloutConfig(), None, 0), wanted)
    known = known_of(wanted, expected)
    rates: dict[type, float] = {}
    for runner in (PolicyRunner, OtherRows, CoarseRows):
        engine = NativeEngine(policy, RolloutConfig(), None, 0, runner)
        made = generate(guess(engine, Knowing(known, 1.0, TINY.vocab_size)), wanted)
        rates[runner] = engine.stats.accepted_tokens / engine.stats.drafted_tokens
        is_equal = runner is PolicyRunner
        assert (made == expected) == is_equal
        assert torch.equal(recorded_log_probs(made), recorded_log_probs(expected)) == is_equal
    assert rates[PolicyRunner] == 1.0 > rates[CoarseRows]


@pytest.mark.few(1)
@both_executors
def test_a_guess_that_makes_a_nan_leaves_none_to_those_who_read_its_tile(pipelined: bool) -> None:
    """The embedding of one token is a NaN; no sample draws it, and many are guessed to."""
    config = replace(TINY, tied_embeddings=False)
    policy, wanted = random_policy(config, PrecisionConfig(preset="fp8"), 5), short_requests({})
    groups = generate(NativeEngine(policy, RolloutConfig(), None, 0), wanted)
    known = known_of(wanted, groups)
    bad = next(token for token in range(96) if all(token not in one for one in known.values()))
    with torch.no_grad():
        policy.masters["embed_tokens.weight"][bad] = torch.nan
    policy.publish()
    guesses = {
        handle: [bad if place % 7 == 3 else token for place, token in enumerate(tokens)]
        for handle, tokens in known.items()
    }
    config = RolloutConfig(kv_pages=6, max_sequences=3)
    engine = NativeEngine(policy, config, None, 0, delayed if pipelined else None)
    made = generate(guess(engine, Knowing(guesses, 1.0, 96)), wanted)
    assert torch.equal(recorded_log_probs(made), recorded_log_probs(groups))
    assert engine.stats.recomputed_tokens > 0
    check_empty(engine)
    engine._drafter = engine._scheduler._drafter = None
    again = generate(engine, wanted)
    assert torch.equal(recorded_log_probs(again), recorded_log_probs(groups))


@pytest.mark.exhaustive
@both_executors
@pytest.mark.parametrize("name", ["first"])
def test_adapters_beside_the_base_draw_what_they_draw(
    name: str, pipelined: bool, base: Path, folders: Mapping[str, Path]
) -> None:
    policy = test_adapters.served(base, folders, "fp8").policy
    columns = [test_adapters.asked(one)[1:4] for one in (None, name)]
    wanted = [one for row in zip(*columns, strict=True) for one in row]
    expected = test_adapters.drawn(policy, wanted, "direct", **test_adapters.ROOMY)
    config = RolloutConfig(max_sequences=8, kv_pages=9)
    engine = NativeEngine(policy, config, None, 0, delayed if pipelined else None)
    known = known_of(wanted, expected)
    check_equal(
        generate(guess(engine, Knowing(known, 0.9, policy.config.vocab_size)), wanted), expected
    )
    assert engine.stats.accepted_tokens > 20


# ------------------------------------------------------------------- what comes and goes between


@pytest.mark.few(1)
@both_executors
@pytest.mark.parametrize("sizes", [test_parked.ROOMY, test_parked.FEW], ids=["roomy", "few"])
def test_turns_with_parked_pages_draw_the_same(sizes: dict[str, Any], pipelined: bool) -> None:
    wanted = test_parked.several()
    expected, _ = test_parked.play(open_engine(False)[0], wanted, parks=False)
    known = {handle: one.sequence.token_ids.tolist() for handle, one in expected.items()}
    engine, model = open_engine(pipelined, **sizes)
    holds_alone(engine, model)
    made, stats = test_parked.play(guess(engine, Knowing(known, 0.8, VOCAB)), wanted)
    test_parked.check_equal(made, expected)
    assert stats.kept_tokens > 0 and stats.accepted_tokens > 50
    check_empty(engine)


@both_executors
def test_samples_that_move_between_engines_draw_the_same(pipelined: bool) -> None:
    wanted = [request(n, length, 3) for n, length in enumerate((5, 63, 64, 130))]
    expected = generate(make_engine()[0], wanted)
    known = known_of(wanted, expected)
    engines = [
        guess(open_engine(pipelined, kv_pages=pages)[0], Knowing(known, 0.8, VOCAB, 3))
        for pages in (9, 40)
    ]
    groups, moves = test_moving.play(engines, wanted, random.Random(2))
    assert groups == expected and moves > 1


@both_executors
def test_weights_that_change_during_a_forward_leave_no_guess_behind(pipelined: bool) -> None:
    wanted = [request(0, 20, 2), request(1, 70, 2)]
    engine, model = open_engine(pipelined)
    known = endless(wanted)
    guess(engine, Knowing(known, 0.9, VOCAB))
    forward = model.forward

    def forward_and_publish(batch: ForwardBatch) -> States:
        states = forward(batch)
        if len(model.batches) > 2 and model.version == 0 and 1 < max(batch.paged.counts) < 9:
            model.version += 1
        return states

    model.forward = forward_and_publish
    made = generate(engine, wanted)
    for one, group in zip(wanted, made, strict=True):
        for completion, (tokens, _) in zip(group, plain_samples(one), strict=True):
            drawn = completion.weights_versions.count(0)
            assert 0 < drawn < 20 and list(completion.token_ids[:drawn]) == tokens[:drawn]
    check_empty(engine)


@both_executors
def test_tokens_behind_a_stop_string_are_dropped_and_text_is_told_as_it_grows(
    pipelined: bool,
) -> None:
    """Both the events that a server sends on and the completions."""
    free = request(3, 8, 4, max_new_tokens=60)
    known = endless([free])
    text = generate(make_engine(tokenizer=BYTES)[0], [free])[0][0].text
    stopped = replace(free, sampling=replace(free.sampling, stop_strings=(text[30:33],)))
    expected = generate(make_engine(tokenizer=BYTES)[0], [stopped])
    assert expected[0][0].finish_reason == "stop"
    engine = guess(open_engine(pipelined, tokenizer=BYTES)[0], Knowing(known, 0.95, VOCAB, 20))
    (handles,) = engine.submit([stopped], follow="text")
    told: dict[Handle, tuple[list[int], str]] = {handle: ([], "") for handle in handles}
    made: dict[Handle, Completion] = {}
    most = 0
    while engine.num_live:
        events = engine.step()
        made |= ended(events)
        for event in events:
            most = max(most, len(event.token_ids))
            tokens, shown = told[event.handle]
            told[event.handle] = [*tokens, *event.token_ids], shown + event.text
    assert [made[handle] for handle in handles] == expected[0]
    assert most > 5
    for handle in handles:
        assert told[handle] == (list(made[handle].token_ids), made[handle].text)


# -------------------------------------------------------------------------------------- guessing


def sample_of(tokens: Sequence[int], prompt_id: str = "p", index: int = 0) -> Sample:
    prompt = SharedPrompt(
        Request(Prompt(prompt_id, "", (1, 2, 3)), 0, 4, SamplingParams(100)), max_pages=4
    )
    sample = Sample(prompt, index, 0, 200, 4, None)
    sample.tokens += tokens
    sample.acceptance = 0.99
    return sample


def test_guesses_come_from_the_prompt_the_answer_its_siblings_and_nobody_else() -> None:
    drafter = Drafter(16, Times())
    assert drafter.draft(sample_of([7, 8, 9, 1, 2]), 2) == [3, 7], "its prompt, and what is behind"
    drafter.note(sample_of([20, 21, 22, 23, 24, 25, 26]))
    assert drafter.draft(sample_of([20, 21, 22]), 3) == [23, 24, 25]
    assert drafter.draft(sample_of([20, 21, 22], "another prompt"), 3) == []
    for _ in range(3):
        drafter.note(sample_of([21, 22, 50]))
    assert drafter.draft(sample_of([9, 9, 9, 9, 21, 22]), 1) == [50], "by majority"


def test_the_table_does_not_grow() -> None:
    drafter = Drafter(8, Times(), slots=256)
    chance = random.Random(0)
    for _ in range(40):
        drafter.note(sample_of([chance.randrange(50) for _ in range(150)]))
    entries = drafter._table.entries
    assert len(entries) == 256 and sum(map(bool, entries)) > 200


def decoding(*rates: float) -> list[Sample]:
    """Samples whose tokens were foretold rightly at such rates."""
    samples = [sample_of([1, 2, 3, 1, 2], index=index) for index in range(len(rates))]
    for sample, rate in zip(samples, rates, strict=True):
        sample.acceptance = rate
    return samples


def roomy(samples: Sequence[Sample]) -> list[int]:
    return [100] * len(samples)


def drafted(times: StepTimes, *rates: float, most: int = 7) -> list[int]:
    """The guesses behind each of several samples whose table has as many as may be made."""
    samples, drafter = decoding(*rates), Drafter(most, times)
    drafter.note, drafter.draft = lambda *samples: None, lambda sample, most: [1] * most
    return [len(one) for one in drafter.drafts(samples, [100] * len(samples), samples)]


def speed(times: StepTimes, rates: Sequence[float], counts: Sequence[int]) -> float:
    """The reciprocal of the mean time of a sample's token, with so many guesses."""
    tokens = [
        1 + sum(rate**place for place in range(1, count + 1))
        for rate, count in zip(rates, counts, strict=True)
    ]
    return harmonic_mean(tokens) / times.step_seconds(len(rates) + sum(counts), 0)


@settings(max_examples=examples(100), deadline=None)
@given(
    rates=st.lists(st.floats(0.05, 0.97), min_size=1, max_size=3),
    seconds=st.lists(st.floats(0.0, 1.0), min_size=15, max_size=15),
)
def test_samples_go_on_faster_with_no_other_guesses(
    rates: list[float], seconds: list[float]
) -> None:
    """Whatever further rows take."""
    times = Times()
    times.step_seconds = lambda rows, length: 1 + sum(seconds[:rows])
    made = speed(times, rates, drafted(times, *rates, most=3))
    best = max(speed(times, rates, counts) for counts in product(range(4), repeat=len(rates)))
    assert made == pytest.approx(best, rel=1e-12)


def test_guesses_are_made_only_where_they_gain() -> None:
    assert drafted(Times(0.03), 0.9, 0.5, 0.02) == [4, 2, 0]
    assert drafted(Times(0.3), 0.9, 0.5, 0.05) == [1, 0, 0]
    assert drafted(Times(1.0), 0.9, 0.5, 0.05) == [0, 0, 0], "a row takes as long as a token"
    assert drafted(Times(), -inf, 0.9) == [0, 7], "none of a sample that a guess has spoilt"
    many = drafted(Times(), *[0.9] * 100)
    assert sum(many) == SPECULATED_ROWS - 100, "as many as a step has rows for"
    assert not any(drafted(Times(), *[0.9] * SPECULATED_ROWS))


def test_tokens_in_flight_are_waited_for_where_guesses_are_likely_to_gain() -> None:
    for wait_s, host_s, foretold, waits in (
        (0.0, 0.0, 1.0, True),
        (0.0, 0.0, 0.0, False),
        (3.0, 0.0, 1.0, False),
        (0.0, 0.3, 1.0, True),
        (0.0, 1.0, 1.0, False),
    ):
        samples = decoding(0.6, 0.6)
        drafter = Drafter(7, Times(0.05, wait_s, host_s))
        drafter.note = lambda *samples: None
        for sample in samples:
            sample.foretold = foretold
        assert drafter.is_worth_waiting(samples, roomy) == waits
    assert not drafter.is_worth_waiting([], roomy)
    for room in (7, 0):
        drafter = Drafter(7, Times(0.05))
        drafter.note = lambda *samples: None
        rooms = [room, room]
        assert drafter.is_worth_waiting(decoding(0.6, 0.6), lambda _, its=rooms: its) == bool(room)
    many = decoding(*[0.9] * SPECULATED_ROWS)
    assert not Drafter(7, Times()).is_worth_waiting(many, roomy)


def test_the_rate_of_a_sample_is_learnt_from_tokens_that_were_not_guessed() -> None:
    drafter = Drafter(8, Times())
    known = [*range(20, 60)]
    drafter.note(sample_of(known))
    right, wrong, unknown = (sample_of(known[:4]) for _ in range(3))
    for sample, more in ((right, known[4:]), (wrong, [19, *known[5:9]]), (unknown, range(60, 90))):
        drafter.note(sample)
        before = sample.acceptance
        sample.tokens += more
        drafter.note(sample)
        assert (sample.acceptance > before) == (sample is right) or sample is unknown
    assert right.foretold > 0.9 > 0.1 > unknown.foretold
    spoilt = sample_of(known[:4])
    spoilt.spoil()
    drafter.note(spoilt)
    assert spoilt.acceptance == -inf


def test_nothing_is_looked_up_for_a_while_where_guesses_were_not_worth_it() -> None:
    """For longer and longer, and again once they are."""
    drafter, samples = Drafter(7, Times(0.05, wait_s=3.0)), decoding(0.6)
    looked: list[int] = []
    note = drafter.note
    for step in range(200):
        drafter.note = lambda *samples, step=step: looked.append(step) or note(*samples)
        assert not drafter.is_worth_waiting(samples, roomy)
    assert looked == [0, 2, 6, 14, 30, 62, 94, 126, 158, 190]
    drafter._times = Times(0.05)
    waits = [drafter.is_worth_waiting(samples, roomy) for _ in range(200)]
    assert waits == [False] * 22 + [True] * 178


@dataclass
class Clocked(Times):
    """Its clock says what a step of such a device and host takes; the estimate may be wrong."""

    seconds: float = 0.0
    plain: float = 1.0
    """Of what a step without guesses is taken to take."""
    right: float = 1.0
    """Of the guesses that are expected to be accepted."""
    slow: float = 1.0
    """Multiples that the device takes for every step."""
    accepted: float = 0.0

    def now(self) -> float:
        return 1.0 + self.seconds

    def steps(self, drafter: Drafter, samples: Sequence[Sample], count: int, cost: float) -> int:
        """Let ``count`` steps pass, whose guesses cost so much.  -> Those with guesses."""
        guessed, drafts = 0, list[Sequence[int]]()
        for _ in range(count):
            waits = any(drafts) or drafter.is_worth_waiting(samples, roomy)
            drafter.begin_plan()
            drafts = drafter.drafts(samples, [7] * len(samples), samples) if waits else []
            made = self.step(drafter, samples, drafts)
            guessed += bool(made)
            device_s = self.slow * self.step_seconds(len(samples) + made, 0)
            self.seconds += device_s + cost if made else device_s * self.plain + cost * waits
        return guessed

    def steps_at_once(
        self, drafter: Drafter, samples: Sequence[Sample], count: int, fit: int
    ) -> int:
        """The same without a clock, where nothing is waited for, and only so many guesses of all
        fit in a plan, which nobody foresees.
        """
        guessed = 0
        for _ in range(count):
            drafter.begin_plan()
            left, standing = fit, list[Sequence[int]]()
            for draft in drafter.drafts(samples, [7] * len(samples), samples):
                standing.append(draft[:left])
                left -= len(standing[-1])
            guessed += bool(self.step(drafter, samples, standing))
        return guessed

    def step(
        self, drafter: Drafter, samples: Sequence[Sample], drafts: Sequence[Sequence[int]]
    ) -> int:
        """End the plan of a step, and draw its tokens.  -> Its guesses."""
        for sample, draft in zip(samples, drafts or [()] * len(samples), strict=True):
            sample.draft = draft
        drafter.end_plan(samples)
        for sample in samples:
            come = 1
            places = range(1, len(sample.draft) + 1)
            self.accepted += self.right * sum(sample.acceptance**place for place in places)
            while self.accepted >= 1:
                come += 1
                self.accepted -= 1
            sample.tokens += [1] * come
            sample.drawn += come
        return sum(len(sample.draft) for sample in samples)


def clocked(times: Clocked) -> Drafter:
    """Guesses 7 tokens behind every sample; rates are left as they are."""
    drafter = Drafter(7, times, slots=1 << 10)  # many are kept where a property fails
    drafter.note = lambda *samples: None
    drafter.draft = lambda sample, most: [1] * most
    return drafter


def test_what_guesses_cost_is_learnt_from_steps_that_have_them() -> None:
    """By powers of two of the samples, whose costs a sample are not the same."""
    samples = decoding(*[0.8] * 8)
    cheap, dear = (Clocked(0.01, wait_s=0.5, host_s=0.05) for _ in range(2))
    assert cheap.steps(clocked(cheap), samples, 200, 0.9) >= 190, "as estimated"
    drafter = clocked(dear)
    assert dear.steps(drafter, samples, 200, 9.0) < 30
    few = decoding(0.6, 0.6)
    assert dear.steps(drafter, few, LONGEST_REST + 50, 0.6) >= 50, "few cost what they did"
    assert dear.steps(drafter, samples, 4000, 0.9) > 2000, "tried again after a while"
    free = Clocked(0.01)
    assert free.steps(clocked(free), samples, 20, 9.0) == 20, "none is estimated, and none learnt"
    short = Clocked(-0.001, wait_s=0.5, host_s=0.05)
    drafter = clocked(short)
    assert short.steps(drafter, samples, 4000, 0.0) > 3940
    assert short.steps(drafter, samples, 200, 9.0) < 60, "what cost nothing can become dear"


@pytest.mark.few(4)
@pytest.mark.parametrize("plain", [0.6, 1.0, 1.5])
@pytest.mark.parametrize("right", [0.2, 0.6, 1.0])
@pytest.mark.parametrize("cost", [0.1, 0.6, 2.0])
def test_guesses_never_cost_much_whatever_was_estimated(
    plain: float, right: float, cost: float
) -> None:
    """Seconds a token, of 16 samples over 2,000 steps, beside those without guesses."""
    samples = decoding(*[0.6] * 16)
    times = Clocked(0.005, wait_s=0.1, host_s=0.005, plain=plain, right=right)
    times.steps(clocked(times), samples, 2000, cost)
    a_token = 16 * times.seconds / sum(len(sample.tokens) for sample in samples)
    without = plain * times.step_seconds(16, 0)
    assert a_token < 1.02 * without
    if plain >= 1 and right == 1 and cost < 0.5:
        assert a_token < 0.9 * without


@settings(max_examples=examples(60), deadline=None)
@example(phases=[(40, 1.0, 2.0, 0)] * 5, lacking=0)  # waited for, with nothing to guess
@example(phases=[(40, 1.0, 0.5, 7)] * 5, lacking=1)  # one goes on more slowly, all others faster
@given(
    phases=st.lists(
        st.tuples(st.integers(1, 40), st.floats(0, 1), st.floats(0, 1), st.integers(0, 7)),
        min_size=5,
        max_size=30,
    ),
    lacking=st.integers(0, 15),
)
def test_guesses_cost_no_more_than_their_budget(
    phases: list[tuple[int, float, float, int]], lacking: int
) -> None:
    """However what they bring, what they cost and how many are found changes, and however many
    samples have none: no more to any of them than the budget, and what can be taken from it before
    that is known: a step with guesses, and a wait that is decided on while it is computed. No step
    takes more than twice what is known, beyond which a pause is not taken for what guesses cost.
    """
    samples = decoding(*[0.7] * 16)
    times = Clocked(0.005, wait_s=0.5)
    drafter = clocked(times)
    for steps, times.right, cost, found in phases:
        drafter.draft = lambda sample, most, found=found: (
            [] if sample in samples[:lacking] else [1] * min(found, most)
        )
        times.steps(drafter, samples, steps, cost)
    tokens, plain = min(sample.drawn for sample in samples), times.step_seconds(16, 0)
    assert times.seconds * (1 - REFILL) <= (tokens + BUDGET) * plain + 2.5


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("rows", "rate", "cost", "slow", "steps"),
    [
        (16, 0.2, 0.4, 1.5, 10),
        (16, 0.2, 0.6, 2.0, 10),
        (16, 0.3, 0.6, 1.5, 10),
        (4, 0.2, 0.6, 2.0, 8),
        (2, 0.3, 0.8, 2.0, 8),
    ],
)
def test_a_slow_start_does_not_keep_guesses_that_are_worse(
    rows: int, rate: float, cost: float, slow: float, steps: int
) -> None:
    """Steps without guesses are timed again, though none would come."""
    samples = decoding(*[rate] * rows)
    times = Clocked(0.005, wait_s=0.04, host_s=0.005, slow=slow)
    drafter = clocked(times)
    times.steps(drafter, samples, steps, cost)
    times.slow = 1.0
    began, tokens = times.seconds, sum(len(sample.tokens) for sample in samples)
    times.steps(drafter, samples, 20_000, cost)
    drawn = sum(len(sample.tokens) for sample in samples) - tokens
    a_token = rows * (times.seconds - began) / drawn
    assert a_token < 1.02 * times.step_seconds(rows, 0)


def test_timing_other_steps_again_costs_little_where_guesses_are_worth_it() -> None:
    """Five steps in a time in which some 260 with guesses are made."""
    samples = decoding(*[0.7] * 16)
    times = Clocked(0.005, wait_s=0.04, host_s=0.005)
    drafter = clocked(times)
    assert 3900 < times.steps(drafter, samples, 4000, 0.2) < 3980


@pytest.mark.few(6)
@pytest.mark.parametrize("steps", [20, 60, 300])
@pytest.mark.parametrize("rows", [4, 8, 16])
@pytest.mark.parametrize("rate", [0.5, 0.7])
def test_guesses_that_do_not_fit_are_not_taken_for_bad_ones(
    rate: float, rows: int, steps: int
) -> None:
    samples, times = decoding(*[rate] * rows), Clocked(1 / 41)
    drafter = clocked(times)
    times.steps_at_once(drafter, samples, steps, 1)
    assert times.steps_at_once(drafter, samples, 400, 1000) > 380


def test_guesses_that_were_bad_are_tried_again_where_nothing_is_waited_for() -> None:
    samples, times = decoding(*[0.7] * 8), Clocked(1 / 41, right=0.1)
    drafter = clocked(times)
    assert times.steps_at_once(drafter, samples, 4000, 1000) < 150
    times.right = 1.0
    times.steps_at_once(drafter, samples, 400, 1000)
    assert times.steps_at_once(drafter, samples, 1000, 1000) > 990


class Ticking(DelayedRunner):
    """Its clock says what steps take, and that those with guesses cost so much more."""

    seconds, cost = 1.0, 0.0

    def decode(self, samples: Sequence[Sample]) -> None:
        super().decode(samples)
        self.seconds += 1.0 + self.cost * any(sample.draft for sample in samples)

    def now(self) -> float:
        return self.seconds


def test_an_engine_makes_fewer_guesses_where_they_have_cost_more_than_they_gain() -> None:
    first, drafted = replace(request(0, 9, 2, max_new_tokens=120), seed=5), list[int]()
    for cost in (0.1, 20.0):
        engine, _ = make_engine(wrap=Ticking, speculation=8)
        runner = engine._executor.runner
        assert isinstance(runner, Ticking)
        runner.cost, engine._executor.wait_s = cost, 0.1
        generate(engine, [first])
        drafted.append(engine.stats.drafted_tokens)
    assert drafted[1] < drafted[0] / 2, drafted


def test_a_pause_is_not_taken_for_what_guesses_cost() -> None:
    samples, times = decoding(*[0.8] * 8), Clocked(0.01, wait_s=0.5, host_s=0.05)
    drafter = clocked(times)
    assert times.steps(drafter, samples, 20, 0.9) >= 14
    times.seconds += 1e6  # a tool, a trainer
    assert times.steps(drafter, samples, 100, 0.9) == 100


@pytest.mark.parametrize("every", [1, 3, 5])
def test_a_capture_is_not_taken_for_what_guesses_cost(every: int) -> None:
    """Sizes of steps come up one after the other, and each is captured and measured once."""
    samples, times = decoding(*[0.8] * 8), Clocked(0.01, wait_s=0.5, host_s=0.05)
    drafter = clocked(times)
    assert times.steps(drafter, samples, 20, 0.9) >= 14
    known = drafter.over_device(len(samples))
    for _ in range(8):
        times.seconds += 30.0
        times.captures += 1
        assert times.steps(drafter, samples, every, 0.9) == every
    assert times.steps(drafter, samples, 50, 0.9) == 50
    assert drafter.over_device(len(samples)) == known


def test_a_capture_is_not_taken_for_a_slow_step() -> None:
    """Without guesses: steps that then seem to take twice as long would make guesses cheap."""
    samples, times = decoding(*[0.01] * 8), Clocked(0.3, wait_s=0.5, host_s=0.05)
    drafter = clocked(times)
    for _ in range(30):
        assert not times.steps(drafter, samples, 3, 0.9)
        times.seconds += 30.0
        times.captures += 1
    assert drafter.over_device(len(samples)) == pytest.approx(1.0)


def test_unlikely_guesses_are_not_looked_up() -> None:
    """By what was worth it in the step before, and they are once this is less."""
    times, asked = Times(0.2), list[int]()
    drafter = Drafter(7, times)
    drafter.note = lambda *samples: None
    drafter.draft = lambda sample, most: asked.append(most) or [1] * most
    samples = decoding(0.9, 0.3, 0.01)
    steps: list[tuple[list[int], list[int]]] = []
    for _ in range(3):
        made = drafter.drafts(samples, [100, 100, 100], samples)
        steps.append((asked[-3:], list(map(len, made))))
    assert steps[0] == ([7, 7, 7], steps[1][1]), "what is made is the same"
    assert steps[1] == steps[2]
    assert steps[1][0][0] == 7 > steps[1][0][1] > steps[1][0][2] == 0
    drafter._seconds, times.share = [0.0] * (SPECULATED_ROWS + 1), 0.0
    for _ in range(30):
        made = drafter.drafts(samples, [100, 100, 100], samples)
        assert list(map(len, made)) == asked[-3:], "further ones cost nothing"
    assert asked[-3:] == [7, 7, 7]


@both_executors
def test_a_later_visit_with_the_same_answers_takes_fewer_steps(pipelined: bool) -> None:
    engine, _ = open_engine(pipelined, speculation=8)
    first = replace(request(0, 9, 2, max_new_tokens=60), seed=5)
    generate(engine, [first])
    before = engine.stats
    made = generate(engine, [replace(first, visit=1)])
    assert tokens_and_log_probs(made) == tokens_and_log_probs(
        generate(make_engine()[0], [replace(first, visit=1)])
    )
    assert engine.stats.forwards < before.forwards / 3
    assert engine.stats.accepted_tokens > 0.9 * engine.stats.drafted_tokens


def test_guesses_are_on_by_default_where_what_they_cost_is_learnt() -> None:
    """By an executor with a clock of its own, as on a GPU that no other shares, and planned for."""
    assert make_engine(wrap=Ticking)[0]._drafter is not None
    for engine in (
        make_engine()[0],
        open_engine(True)[0],
        make_engine(wrap=Ticking, speculation=0)[0],
    ):
        assert engine._drafter is None
    policy = policy_of("fp8")
    by_default, off = (
        forward_bytes(TINY, policy.flow, config, policy.backend.sizes)
        for config in (RolloutConfig(), RolloutConfig(speculation=0))
    )
    assert by_default > off
    servers = {"engine": "http", "servers": ["http://a:1"]}
    check_engine(RunConfig.model_validate(small_run(Path("a"), Path("b"), rollout=servers)))


@pytest.mark.parametrize("speculation", [None, 7])
@pytest.mark.parametrize("shortest", [1.0, 1.1])
def test_nothing_is_done_for_guesses_by_default_where_steps_are_short(
    shortest: float, speculation: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their table stays empty, and whoever asks for guesses gets them."""
    monkeypatch.setattr(drafts, "SHORTEST_S", shortest)
    engine, _ = make_engine(wrap=Ticking, speculation=speculation)
    engine._executor.wait_s, drafter = 0.1, engine._drafter
    assert drafter is not None
    first = replace(request(0, 9, 2, max_new_tokens=60), seed=5)
    for visit in range(2):
        generate(engine, [replace(first, visit=visit)])
    assert drafter.is_off == (shortest > 1 and speculation is None)
    assert (engine.stats.accepted_tokens == 0) == drafter.is_off
    assert any(drafter._table.entries) != drafter.is_off


@both_executors
def test_samples_that_end_last_are_noted_in_the_next_rollout(pipelined: bool) -> None:
    """While its first steps are computed; they are known when these can have guesses."""
    engine, _ = open_engine(pipelined, speculation=8)
    drafter = engine._drafter
    assert drafter is not None
    first = replace(request(0, 9, max_new_tokens=20), seed=5)
    generate(engine, [first])
    (ended,) = drafter._ended
    assert 0 < len(ended.tokens) - ended.noted <= 20
    generate(engine, [request(1, 9, max_new_tokens=4)])
    assert ended not in drafter._ended and ended.noted == len(ended.tokens)


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [SPECULATED_ROWS - 1, SPECULATED_ROWS, 255, 256, 300])
def test_more_samples_than_can_have_guesses_end(count: int) -> None:
    """All at once, and one by one."""
    sizes = {"max_sequences": 512, "kv_pages": 600, "max_batched_tokens": 600}
    wanted = [
        request(0, 9, count, max_new_tokens=3),
        *(request(1 + i, 5, max_new_tokens=4 + i) for i in range(12)),
    ]
    engine, plain = (make_engine(wrap=wrap, **sizes)[0] for wrap in (Ticking, None))
    assert engine._drafter is not None and plain._drafter is None
    assert tokens_and_log_probs(generate(engine, wanted)) == tokens_and_log_probs(
        generate(plain, wanted)
    )
    assert engine._drafter.over_device(count) == 1.0


def test_other_engines_refuse_it_and_the_memory_plan_counts_its_rows(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "rollout": {"speculation": 4, "engine": "http", "servers": ["http://a:1"]}
    }
    with pytest.raises(ConfigError, match=r"rollout\.speculation is the native engine's"):
        check_engine(RunConfig.model_validate(small_run(tmp_path, tmp_path, **sections)))
    policy = policy_of("fp8")
    sizes: Sizes = policy.backend.sizes
    plain, more = (
        forward_bytes(TINY, policy.flow, RolloutConfig(speculation=depth), sizes)
        for depth in (0, 4)
    )
    of_a_token = 8 * TINY.hidden_size + 12 * TINY.num_drawn
    assert more - plain > of_a_token * SPECULATED_ROWS, "logits and what leads to them"


@pytest.mark.exhaustive
def test_a_run_leaves_the_same_bytes(tmp_path: Path) -> None:
    """Of its completions and its weights, after visits of the same prompts."""
    folder = save_tiny(tmp_path / "model")
    left: dict[int, list[bytes]] = {}
    for most in (0, 6):
        sections: dict[str, Any] = {
            "rollout": {"max_new_tokens": 24, "temperature": 0.2, "speculation": most},
            "data": {"train": {"type": "jsonl", "path": "starter:train.jsonl", "limit": 2}},
        }
        run = tmp_path / str(most)
        train(small_run(folder, run, **sections))
        files = ("completions.jsonl", "model/model.safetensors")
        left[most] = [(run / file).read_bytes() for file in files]
        accepted = [
            one.get("rollout/accepted_tokens", 0) for one in json_lines(run / "metrics.jsonl")
        ]
        assert bool(sum(accepted)) == bool(most)
    assert left[0] == left[6]
