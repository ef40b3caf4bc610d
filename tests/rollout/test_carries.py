"""What sequences of a model with delta rules carry, in few carries: whatever is shared, copied,
parked, given up and guessed, samples draw what they draw alone.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.rollout import RolloutConfig
from isobit.models.policy import Policy, random_policy
from isobit.records.text import Completion, Prompt, SamplingParams
from isobit.rollout.engine import generate
from isobit.rollout.engine_stats import EngineStats
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.rollout.scoring import Scored, Scoring, TokenScorer
from tests.models.policies import delta_nets
from tests.rollout.history_model import VOCAB, having_carries, plain_samples, request
from tests.rollout.test_drafts import Knowing, delayed, endless, guess, known_of
from tests.rollout.test_exactness import TINY, recorded_log_probs, trainer_log_probs
from tests.rollout.test_native import batches, tokens_and_log_probs
from tests.rollout.test_open_engine import both_executors, check_empty, open_engine
from tests.rollout.test_parked import check_equal, play
from tests.suites import examples

FEW = st.sampled_from([2, 2, 3, 4, 6, 20])


# ----------------------------------------------------------------------- over a model of histories


@both_executors
@settings(max_examples=examples(60), deadline=None)
@given(batch=batches(), carries=FEW)
def test_any_batch_draws_what_a_plain_loop_draws(
    pipelined: bool, batch: tuple[list[Request], dict[str, Any]], carries: int
) -> None:
    wanted, sizes = batch
    engine, _ = open_engine(pipelined, carries=carries, **sizes)
    assert tokens_and_log_probs(generate(engine, wanted)) == [plain_samples(r) for r in wanted]
    check_empty(engine)


@both_executors
@settings(max_examples=examples(60), deadline=None)
@given(
    batch=batches(),
    carries=FEW,
    most=st.sampled_from([1, 7, 64]),
    right=st.sampled_from([0.0, 0.7, 0.95, 1.0]),
)
def test_any_batch_with_guesses_draws_what_a_plain_loop_draws(
    pipelined: bool,
    batch: tuple[list[Request], dict[str, Any]],
    carries: int,
    most: int,
    right: float,
) -> None:
    wanted, sizes = batch
    plain = [plain_samples(r) for r in wanted]
    engine, _ = open_engine(pipelined, carries=carries, **sizes)
    guess(engine, Knowing(endless(wanted), right, VOCAB, most))
    assert tokens_and_log_probs(generate(engine, wanted)) == plain
    check_empty(engine)


@both_executors
@settings(max_examples=examples(60), deadline=None)
@given(batch=batches(), carries=FEW, seed=st.integers(0, 1000), stops=st.integers(1, 6))
def test_any_batch_with_turns_draws_what_it_draws_without_parking(
    pipelined: bool,
    batch: tuple[list[Request], dict[str, Any]],
    carries: int,
    seed: int,
    stops: int,
) -> None:
    wanted, sizes = batch
    wanted = [
        replace(one, sampling=replace(one.sampling, stop_token_ids=tuple(range(stops))))
        for one in wanted
    ]
    made, _ = play(open_engine(pipelined, carries=carries, **sizes)[0], wanted, seed)
    expected, _ = play(open_engine(False)[0], wanted, parks=False)
    check_equal(made, expected)


def three_at_the_end_of_a_chunk(pipelined: bool, carries: int) -> EngineStats:
    """Samples of three prompts of 60 tokens, which go on to the next chunk in one step."""
    engine, _ = open_engine(pipelined, carries=carries, max_batched_tokens=300)
    wanted = [request(n, 60, max_new_tokens=20) for n in range(3)]
    assert tokens_and_log_probs(generate(engine, wanted)) == [plain_samples(r) for r in wanted]
    check_empty(engine)
    return engine.stats


@both_executors
def test_a_sample_waits_a_step_for_the_carry_of_one_that_goes_on(pipelined: bool) -> None:
    """With one carry beside theirs two of the three are left out of a step, or one of two."""
    roomy, short = (three_at_the_end_of_a_chunk(pipelined, carries) for carries in (6, 4))
    assert roomy.preemptions == short.preemptions == 0
    assert roomy.forwards < short.forwards <= roomy.forwards + 2


@both_executors
def test_a_sample_without_a_carry_to_go_on_with_takes_those_of_the_last(pipelined: bool) -> None:
    """Others have taken the last one to begin a chunk with, behind it in the order of starting."""
    engine, _ = open_engine(pipelined, carries=4, max_sequences=4, max_batched_tokens=300)
    wanted = [request(0, 62, 2, max_new_tokens=10), request(1, 128, 3, max_new_tokens=3)]
    assert tokens_and_log_probs(generate(engine, wanted)) == [plain_samples(r) for r in wanted]
    assert engine.stats.preemptions > 0 and engine._allocator.num_free == 40
    check_empty(engine)


@both_executors
def test_guesses_give_their_carries_to_those_who_need_one(pipelined: bool) -> None:
    """Wrong ones, over the end of a chunk, so that a sample would keep what it has got for them."""
    engine, _ = open_engine(pipelined, carries=5, max_sequences=6, max_batched_tokens=300)
    sizes = [(50, 2, 20), (64, 2, 3), (65, 1, 10)]
    wanted = [request(n, *one, max_new_tokens=new) for n, (*one, new) in enumerate(sizes)]
    guess(engine, Knowing(endless(wanted), 0.0, VOCAB, 12))
    given, take_back = list[bool](), engine._scheduler._take_carries_back

    def taking_back() -> bool:
        given.append(take_back())
        return given[-1]

    engine._scheduler._take_carries_back = taking_back
    assert tokens_and_log_probs(generate(engine, wanted)) == [plain_samples(r) for r in wanted]
    assert any(given)
    check_empty(engine)


# ------------------------------------------------------------------------------ over a tiny hybrid

VOCABULARY = TINY.vocab_size
ROOMY: dict[str, Any] = {"kv_pages": 60, "max_sequences": 12}
SIZES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("few pages", 20, {"kv_pages": 4, "max_batched_tokens": 37}),
    ("few carries", 3, {"kv_pages": 40, "max_batched_tokens": 37}),
    ("two carries", 2, {"kv_pages": 40, "max_batched_tokens": 37}),
    ("a carry beside", 4, {"kv_pages": 40, "max_batched_tokens": 90, "max_sequences": 3}),
    ("many chunks at once", 20, {"kv_pages": 40, "max_batched_tokens": 800}),
)


@cache
def hybrid(preset: Preset) -> Policy:
    """Sharper than a fresh model, of two layers with a delta rule and one with attention."""
    config = replace(TINY, family="qwen3_5_text", num_layers=3, **delta_nets("qwen3_5_text", 3))
    policy = random_policy(config, PrecisionConfig(preset=preset), 0)
    with torch.no_grad():
        for name, master in policy.masters.items():
            if name.endswith("proj.weight") or name == "embed_tokens.weight":
                master.mul_(6)
    policy.publish()
    return policy


def around_chunks() -> list[Request]:
    """Samples of prompts that end before, on and after the bounds of chunks, and go over them."""
    generator = torch.Generator().manual_seed(3)
    sizes = [(60, 3, 9), (64, 3, 5), (63, 2, 4), (3, 1, 70), (128, 2, 5), (140, 2, 6), (1, 1, 3)]
    return [
        Request(
            Prompt(f"p/{n}", "", tuple(torch.randint(96, (length,), generator=generator).tolist())),
            0,
            samples,
            SamplingParams(new),
        )
        for n, (length, samples, new) in enumerate(sizes)
    ]


def hybrid_engine(
    preset: Preset, carries: int, sizes: dict[str, Any], pipelined: bool = False
) -> NativeEngine:
    with having_carries(carries):
        made = delayed if pipelined else None
        return NativeEngine(hybrid(preset), RolloutConfig(**sizes), None, 0, made)


@cache
def plainly(preset: Preset) -> list[list[Completion]]:
    """Each sample alone, a prompt in one forward and then a token a forward."""
    engine = hybrid_engine(preset, 20, {**ROOMY, "max_sequences": 1})
    return generate(engine, around_chunks())


def check_same(made: list[list[Completion]], expected: list[list[Completion]]) -> None:
    assert torch.equal(recorded_log_probs(made), recorded_log_probs(expected))
    assert made == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("preset", ["bf16", "int8"])
def test_what_is_drawn_alone_is_what_the_training_forward_computes(preset: Preset) -> None:
    recorded = recorded_log_probs(plainly(preset))
    assert recorded.std() > 0.5
    expected = trainer_log_probs(hybrid(preset), around_chunks(), plainly(preset))
    assert torch.equal(recorded, expected)


@pytest.mark.exhaustive
@both_executors
@pytest.mark.parametrize("preset", ["bf16", "int8"])
@pytest.mark.parametrize(("name", "carries", "sizes"), SIZES, ids=[name for name, *_ in SIZES])
def test_samples_in_company_draw_what_they_draw_alone(
    name: str, carries: int, sizes: dict[str, Any], preset: Preset, pipelined: bool
) -> None:
    """Their prompts come in several chunks, or several chunks of a prompt at once, are shared, and
    copied where they end within a chunk; samples lose what they carry.
    """
    engine = hybrid_engine(preset, carries, sizes, pipelined)
    check_same(generate(engine, around_chunks()), plainly(preset))
    stats = engine.stats
    assert (stats.preemptions > 0) == (name == "few pages")
    assert (stats.chunks > 0) == (sizes["max_batched_tokens"] < 99)
    assert stats.shared_pages > 0
    check_empty(engine)


@pytest.mark.exhaustive
@both_executors
@pytest.mark.parametrize("preset", ["bf16", "int8"])
@pytest.mark.parametrize("right", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("carries", [3, 30])
def test_guesses_over_the_end_of_a_chunk_draw_what_is_drawn_without(
    carries: int, right: float, preset: Preset, pipelined: bool
) -> None:
    """Accepted on both sides of it, on one, and nowhere."""
    expected = plainly(preset)
    engine = hybrid_engine(preset, carries, ROOMY, pipelined)
    known = known_of(around_chunks(), expected)
    crossed = list[int]()

    class Counting(Knowing):
        def drafts(self, samples: Any, rooms: Any, decoding: Any) -> Any:
            made = super().drafts(samples, rooms, decoding)
            for sample, draft in zip(samples, made, strict=True):
                crossed.append(sample.cached // 64 != (sample.cached + len(draft)) // 64)
            return made

    guess(engine, Counting(known, right, VOCABULARY))
    check_same(generate(engine, around_chunks()), expected)
    assert sum(crossed) > 2 or carries == 3
    assert (engine.stats.accepted_tokens > 20) == (right > 0)
    check_empty(engine)


@pytest.mark.exhaustive
@both_executors
@pytest.mark.parametrize("preset", ["bf16", "int8"])
@pytest.mark.parametrize("prompts", [4, 7])
def test_turns_go_on_from_what_they_carried(prompts: int, preset: Preset, pipelined: bool) -> None:
    """Tools say up to 40 tokens between turns, over the ends of chunks."""
    stops = tuple(range(0, VOCABULARY, 4))
    wanted = [
        replace(one, sampling=replace(one.sampling, max_new_tokens=60, stop_token_ids=stops))
        for one in around_chunks()[:prompts]
    ]
    made = dict[str, Any]()
    for name, carries, parks in (("kept", 30, True), ("few", 8, True), ("again", 30, False)):
        engine = hybrid_engine(preset, carries, ROOMY, pipelined)
        made[name] = play(engine, wanted, parks=parks, vocab=VOCABULARY, turns=3)
        check_empty(engine)
    for found, _ in made.values():
        check_equal(found, made["again"][0])
    kept, few, again = (stats.kept_tokens for _, stats in made.values())
    assert kept > few > again == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", ["bf16", "int8"])
def test_given_tokens_score_what_was_recorded(preset: Preset) -> None:
    """More of them than have carries at once, in forwards that end anywhere in chunks."""
    scorer = TokenScorer[int](hybrid(preset), 150)
    pairs = [
        (one, completion)
        for one, group in zip(around_chunks(), plainly(preset), strict=True)
        for completion in group
    ]
    for place, (one, completion) in enumerate(pairs):
        ids = one.prompt.token_ids
        scorer.add(place, Scoring((*ids, *completion.token_ids), len(ids), 1.0))
    found = dict[int, Scored]()
    while scorer.has_work:
        found |= scorer.step()
    for place, (_, completion) in enumerate(pairs):
        assert torch.equal(torch.tensor(found[place].log_probs), torch.tensor(completion.log_probs))
    pool = scorer._allocator.carries
    assert pool.num_free == pool.count == 16
