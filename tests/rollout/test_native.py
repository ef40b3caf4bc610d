"""The engine over a model that hashes what it finds in its pages, against a plain loop."""

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.config.rollout import RolloutConfig
from isobit.memory.cache_size import CacheSize, pages_for
from isobit.records.text import Completion
from isobit.rollout.engine import generate
from isobit.rollout.engine_stats import Progress
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.util.errors import NonFiniteError, OutOfMemoryError
from tests.rollout.delayed_runner import DelayedRunner
from tests.rollout.history_model import (
    FakeConfig,
    FakePolicy,
    HistoryModel,
    make_engine,
    plain_samples,
    request,
)
from tests.suites import examples


def tokens_and_log_probs(
    groups: list[list[Completion]],
) -> list[list[tuple[list[int], list[float]]]]:
    return [[(list(c.token_ids), list(c.log_probs)) for c in group] for group in groups]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Request], dict[str, Any]]:
    """Requests of all sizes, and an engine that is barely or amply large enough for them."""
    requests = [
        request(
            index,
            draw(st.one_of(st.integers(1, 20), st.integers(60, 70), st.integers(120, 140))),
            draw(st.integers(1, 5)),
            max_new_tokens=draw(st.integers(1, 40)),
            temperature=draw(st.sampled_from([0.0, 0.7, 1.0])),
            top_k=draw(st.sampled_from([0, 0, 3])),
            stop_token_ids=draw(st.sampled_from([(), (4,)])),
        )
        for index in range(draw(st.integers(1, 5)))
    ]
    page_tokens = draw(st.sampled_from([32, 64, 128]))
    needed = max(
        pages_for(r.max_length(FakeConfig.max_positions) - 1, page_tokens) for r in requests
    )
    sizes = {
        "page_tokens": page_tokens,
        "kv_pages": needed + draw(st.integers(0, 8)),
        "max_sequences": draw(st.integers(1, 9)),
        "max_batched_tokens": draw(st.one_of(st.integers(1, 12), st.integers(40, 300))),
    }
    return requests, sizes


@settings(max_examples=examples(30), deadline=None)
@given(batches())
def test_every_batch_gives_what_a_plain_loop_gives(batch: tuple[list[Request], dict[str, Any]]):
    requests, sizes = batch
    engine, model = make_engine(**sizes)
    groups = generate(engine, requests)
    assert tokens_and_log_probs(groups) == [plain_samples(r) for r in requests]
    assert all(b.token_ids.numel() <= sizes["max_batched_tokens"] for b in model.batches)
    assert engine.stats.forwards == len(model.batches)
    assert engine.stats.generated_tokens == sum(len(c.token_ids) for group in groups for c in group)


@pytest.mark.exhaustive
def test_nothing_but_time_depends_on_the_engines_sizes_or_on_the_order_of_requests():
    requests = [
        request(i, length, samples, max_new_tokens=90)
        for i, (length, samples) in enumerate([(5, 4), (130, 3), (64, 2), (63, 5)])
    ]
    expected = tokens_and_log_probs(generate(make_engine()[0], requests))
    tight: list[dict[str, Any]] = [
        {"kv_pages": 4},
        {"max_sequences": 1},
        {"max_batched_tokens": 7},
        {"kv_pages": 5, "max_batched_tokens": 3},
    ]
    for sizes in tight:
        assert tokens_and_log_probs(generate(make_engine(**sizes)[0], requests)) == expected
    assert tokens_and_log_probs(generate(make_engine()[0], requests[::-1])) == expected[::-1]


def test_the_seed_and_the_visit_change_the_samples():
    first = request(0, 5, 2)
    again = Request(first.prompt, 1, 2, first.sampling)
    samples = [
        generate(make_engine(seed)[0], [r])[0][0].token_ids
        for seed, r in [(0, first), (1, first), (0, again)]
    ]
    assert len(set(samples)) == 3


def test_the_samples_of_a_prompt_share_its_full_pages_and_copy_the_partial_one():
    engine, model = make_engine()
    generate(engine, [request(0, 130, samples=4)])
    assert engine.stats.prompt_tokens == 130
    assert engine.stats.shared_pages == 4 * 3
    assert engine.stats.copied_pages == 3  # the last sample to start takes the prompt's own
    tables = model.batches[-1].paged.block_table
    assert len(tables[:, 0].unique()) == len(tables[:, 1].unique()) == 1
    assert len(tables[:, 2].unique()) == 4
    assert model.logit_rows[:2] == [1, 4]  # all first tokens come from one row


def test_a_prompt_of_whole_pages_is_shared_without_a_copy():
    engine, _ = make_engine()
    generate(engine, [request(0, 128, samples=4)])
    assert (engine.stats.shared_pages, engine.stats.copied_pages) == (8, 0)


def test_samples_that_find_no_place_yet_start_from_the_same_prefill():
    engine, _ = make_engine(max_sequences=2)
    generate(engine, [request(0, 30, samples=7)])
    assert engine.stats.prompt_tokens == 30


def test_one_page_serves_several_samples_one_after_the_other():
    engine, _ = make_engine(kv_pages=1)
    requests = [request(0, 10, samples=3)]
    assert tokens_and_log_probs(generate(engine, requests)) == [plain_samples(requests[0])]
    assert engine.stats.prompt_tokens == 30  # the prompt had to give up its page to the sample


@pytest.mark.parametrize(("kv_pages", "length"), [(1, 64), (2, 128)])
def test_a_prompt_may_fill_the_cache_if_its_answer_is_one_token(kv_pages: int, length: int):
    engine, _ = make_engine(kv_pages=kv_pages)
    wanted = [request(0, length, 2, max_new_tokens=1)]
    assert tokens_and_log_probs(generate(engine, wanted)) == [plain_samples(wanted[0])]


def test_long_prompts_are_cut_into_chunks_beside_decoding_samples():
    engine, model = make_engine(max_batched_tokens=20)
    generate(engine, [request(0, 4, samples=3, max_new_tokens=12), request(1, 100)])
    assert engine.stats.chunks >= 4
    mixed = [b.paged.counts for b in model.batches if len(b.paged.counts) == 4]
    assert (1, 1, 1, 17) in mixed


def test_preempted_samples_continue_with_the_tokens_and_log_probabilities_they_had():
    requests = [request(i, 40, 2, max_new_tokens=150) for i in range(3)]
    engine, _ = make_engine(kv_pages=6)
    groups = generate(engine, requests)
    assert engine.stats.preemptions > 0
    assert engine.stats.recomputed_tokens > 0
    assert tokens_and_log_probs(groups) == [plain_samples(r) for r in requests]


def test_the_latest_arrival_gives_way_and_the_first_is_never_preempted():
    engine, model = make_engine(kv_pages=4, max_batched_tokens=300)
    generate(engine, [request(i, 60 + i, max_new_tokens=130) for i in range(3)])
    assert engine.stats.preemptions > 0
    first_positions = [
        int(b.positions[0]) for b in model.batches[1:130]
    ]  # of the first sequence of each forward
    assert first_positions == list(range(60, 189))


@pytest.mark.parametrize(
    ("kv_pages", "requests", "prompt_tokens"),
    [
        pytest.param(3, [request(0, 30, 6)], 30, id="a sample waits for a page of its own"),
        pytest.param(
            3,
            [request(0, 30, 6), request(1, 100)],
            130,
            id="a prompt keeps its pages before later prompts",
        ),
        pytest.param(
            2,
            [request(0, 30, max_new_tokens=60), request(1, 30)],
            60,
            id="a prompt waits for a page for its sample",
        ),
    ],
)
def test_nothing_starts_that_would_have_to_give_way_at_once(
    kv_pages: int, requests: list[Request], prompt_tokens: int
):
    engine, _ = make_engine(kv_pages=kv_pages, max_batched_tokens=300)
    generate(engine, requests)
    assert engine.stats.preemptions == 0
    assert engine.stats.prompt_tokens == prompt_tokens


def test_new_weights_between_steps_drop_all_pages_and_keep_what_was_recorded():
    requests = [request(0, 70, 3, max_new_tokens=30), request(1, 9, 2, max_new_tokens=30)]
    engine, model = make_engine()

    def publish(progress: Progress) -> None:
        if progress.generated_tokens >= 40 and model.version == 0:
            model.version = 1  # from here on the model refuses pages written under version 0

    groups = generate(engine, requests, publish)
    assert engine.stats.weight_changes == 1
    for r, group in zip(requests, groups, strict=True):
        for completion, (tokens, log_probs) in zip(group, plain_samples(r), strict=True):
            drawn_before = sum(
                a == b for a, b in zip(completion.log_probs, log_probs, strict=False)
            )
            assert 0 < drawn_before < 30
            assert list(completion.token_ids[:drawn_before]) == tokens[:drawn_before]
            assert len(completion.token_ids) == len(completion.log_probs) == 30
            versions = (0,) * drawn_before + (1,) * (30 - drawn_before)
            assert completion.weights_versions == versions


def test_a_forward_during_which_weights_change_is_not_used():
    engine, model = make_engine()
    forward = model.forward

    def forward_and_publish(batch: Any) -> Any:
        hidden = forward(batch)
        model.version += len(model.batches) == 1
        return hidden

    model.forward = forward_and_publish
    requests = [request(0, 20, 2)]
    groups = generate(engine, requests)
    assert tokens_and_log_probs(groups) == [plain_samples(requests[0], version=1)]
    assert {v for c in groups[0] for v in c.weights_versions} == {1}


def test_new_weights_between_calls_need_no_word():
    engine, model = make_engine()
    requests = [request(0, 20, 2)]
    generate(engine, requests)
    model.version = 5
    groups = generate(engine, requests)
    assert tokens_and_log_probs(groups) == [plain_samples(requests[0], version=5)]
    assert engine.stats.weight_changes == 0


def test_finish_reasons():
    long, stopped = (
        request(0, 500, max_new_tokens=100),
        request(1, 5, max_new_tokens=100, stop_token_ids=(3,)),
    )
    (at_context,), (at_stop,) = generate(make_engine()[0], [long, stopped])
    assert (at_context.finish_reason, len(at_context.token_ids)) == (
        "length",
        FakePolicy.config.max_positions - 500,
    )
    assert (at_stop.finish_reason, at_stop.token_ids[-1]) == ("stop", 3)
    assert 3 not in at_stop.token_ids[:-1]
    (one,) = generate(make_engine()[0], [request(0, 5, max_new_tokens=1)])[0]
    assert (one.finish_reason, len(one.token_ids)) == ("length", 1)


def test_greedy_takes_the_most_likely_token_and_records_temperature_one():
    greedy, warm = request(0, 9, temperature=0.0), request(1, 9, temperature=0.5)
    (cold,), (hot,) = generate(make_engine()[0], [greedy, warm])
    assert (cold.sequence.temperature, hot.sequence.temperature) == (1.0, 0.5)
    assert [(list(cold.token_ids), list(cold.log_probs))] == plain_samples(greedy)
    assert [(list(hot.token_ids), list(hot.log_probs))] == plain_samples(warm)


def test_truncated_log_probabilities_are_recorded_where_a_filter_is_on():
    plain, filtered = request(0, 9, 2), request(1, 9, 2, top_k=2)
    without, with_filter = generate(make_engine()[0], [plain, filtered])
    assert all(c.truncated_log_probs is None for c in without)
    for completion in with_filter:
        assert completion.truncated_log_probs is not None
        assert len(completion.truncated_log_probs) == len(completion.log_probs)
        assert all(
            narrow > full
            for narrow, full in zip(
                completion.truncated_log_probs, completion.log_probs, strict=True
            )
        )


def test_non_finite_logits_are_an_error_that_names_the_prompt_and_leaves_a_clean_engine():
    engine, model = make_engine()
    model.poisoned = request(1, 1).prompt.token_ids[0]
    with pytest.raises(NonFiniteError, match=r"prompt 'p/1' at position 0: 1 of 11"):
        generate(engine, [request(0, 3), request(1, 1)])
    assert engine.num_live == model.cleared == 0
    model.poisoned = None
    assert tokens_and_log_probs(generate(engine, [request(0, 3)])) == [plain_samples(request(0, 3))]


def test_progress_is_reported_after_every_step():
    seen: list[Progress] = []
    engine, _ = make_engine()
    generate(engine, [request(0, 5, 3), request(1, 5)], seen.append)
    assert (seen[-1].finished, seen[-1].total, seen[-1].running) == (4, 4, 0)
    assert seen[-1].generated_tokens == 4 * 20
    assert [p.generated_tokens for p in seen] == sorted(p.generated_tokens for p in seen)
    assert seen[-1].tokens_per_second > 0


def test_no_requests_give_no_completions():
    assert generate(make_engine()[0], []) == []


def test_a_gpu_without_memory_names_the_keys_that_lower_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(batch: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.\nMore lines")

    engine, model = make_engine()
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", forward)
        with pytest.raises(
            OutOfMemoryError,
            match=r"rollout ran out of memory: 3\.00 GiB more were needed; lower rollout\.kv_",
        ):
            generate(engine, [request(0, 5)])
    assert generate(engine, [request(0, 5)]), "the engine goes on"


@pytest.mark.parametrize("pipelined", [False, True])
def test_what_was_released_is_made_again_with_the_same_pages_and_draws_the_same(
    pipelined: bool,
) -> None:
    made: list[tuple[int, weakref.ref[Any]]] = []

    def make(_: Any, size: CacheSize) -> Any:
        runner = DelayedRunner(HistoryModel(size)) if pipelined else HistoryModel(size)
        made.append((size.pages, weakref.ref(runner)))
        return runner

    policy: Any = FakePolicy()
    engine = NativeEngine(
        policy, RolloutConfig(kv_pages=13, max_sequences=3, max_batched_tokens=37), None, 0, make
    )
    requests = [request(i, 30 + 50 * i, samples=2) for i in range(3)]
    before = generate(engine, requests)
    # nothing but the engine may hold the runner: memory that waits for a collection is not given
    # back
    gc.disable()
    try:
        engine.release()
        assert made[0][1]() is None
    finally:
        gc.enable()
    engine.release()
    engine.check(requests)
    assert generate(engine, requests) == before
    assert [pages for pages, _ in made] == [13, 13]
