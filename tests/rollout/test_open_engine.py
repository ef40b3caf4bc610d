"""Requests that come and go while others run: what they draw, what they leave behind, and what is
told of them on the way.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.config.rollout import RolloutConfig
from isobit.memory.cache_size import CacheSize
from isobit.records.text import Completion
from isobit.rollout import scheduler
from isobit.rollout.engine import SampleEvent, generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Handle, Request
from isobit.rollout.runner import PolicyRunner
from isobit.util.errors import DataError, IsobitError, NonFiniteError, RequestError
from tests.rollout.delayed_runner import DelayedRunner
from tests.rollout.history_model import VOCAB, HistoryModel, make_engine, plain_samples, request
from tests.rollout.test_exactness import TIGHT, policy_of, requests
from tests.rollout.test_sequence import BYTES
from tests.suites import examples

both_executors = pytest.mark.parametrize("pipelined", [False, True])


def open_engine(pipelined: bool, **arguments: Any) -> tuple[NativeEngine, HistoryModel]:
    return make_engine(wrap=DelayedRunner if pipelined else None, **arguments)


def finish(engine: NativeEngine) -> dict[Handle, Completion]:
    """Step until nobody is live."""
    found: dict[Handle, Completion] = {}
    while engine.num_live:
        found |= ended(engine.step())
    return found


def ended(events: list[SampleEvent]) -> dict[Handle, Completion]:
    return {event.handle: event.completion for event in events if event.completion is not None}


def free_pages(engine: NativeEngine) -> int:
    return engine._allocator.num_free


def check_empty(engine: NativeEngine) -> None:
    assert engine.num_live == engine.num_running == 0
    assert free_pages(engine) == engine._limits.num_pages
    runner = engine._executor.runner
    if isinstance(runner, DelayedRunner):
        assert not runner.slots and runner.waited == runner.steps


def is_prefix(completion: Completion, plain: tuple[list[int], list[float]]) -> bool:
    """Whether the sample is what a plain loop gives, as far as it came."""
    tokens, log_probs = plain
    count = len(completion.token_ids)
    return completion.token_ids == tuple(tokens[:count]) and completion.log_probs == tuple(
        log_probs[:count]
    )


# ------------------------------------------------------------------------------------ coming


@pytest.mark.few(1)
@both_executors
@settings(max_examples=examples(30), deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 140), st.integers(1, 4)), min_size=1, max_size=6
    ),
    kv_pages=st.sampled_from([3, 5, 40]),
    max_batched_tokens=st.sampled_from([7, 100]),
)
def test_those_who_come_while_others_run_draw_what_they_draw_alone(
    pipelined: bool,
    arrivals: list[tuple[int, int, int]],
    kv_pages: int,
    max_batched_tokens: int,
) -> None:
    engine, _ = open_engine(pipelined, kv_pages=kv_pages, max_batched_tokens=max_batched_tokens)
    found: dict[Handle, Completion] = {}
    expected: dict[Handle, tuple[list[int], list[float]]] = {}
    for index, (steps, length, samples) in enumerate(arrivals):
        for _ in range(steps):
            found |= ended(engine.step())
        wanted = request(index, length, samples)
        (handles,) = engine.submit([wanted])
        expected |= zip(handles, plain_samples(wanted), strict=True)
    found |= finish(engine)
    drawn = {h: (list(c.token_ids), list(c.log_probs)) for h, c in found.items()}
    assert drawn == expected
    check_empty(engine)


@pytest.mark.exhaustive
@both_executors
def test_a_policys_samples_are_those_of_a_closed_batch(pipelined: bool) -> None:
    """The same with real arithmetic, few pages and prompts in pieces."""
    policy, wanted = policy_of("fp8"), requests()

    def make(policy: Any, size: CacheSize) -> Any:
        runner = PolicyRunner(policy, size)
        return DelayedRunner(runner) if pipelined else runner

    config = RolloutConfig(**TIGHT)
    closed = generate(NativeEngine(policy, config, None, 0, make), wanted)
    engine = NativeEngine(policy, config, None, 0, make)
    found: dict[Handle, Completion] = {}
    handles = []
    for one in wanted:
        handles += engine.submit([one])
        for _ in range(3):
            found |= ended(engine.step())
    found |= finish(engine)
    for group, expected in zip(handles, closed, strict=True):
        for handle, completion in zip(group, expected, strict=True):
            assert found[handle].token_ids == completion.token_ids
            assert torch.equal(
                torch.tensor(found[handle].log_probs), torch.tensor(completion.log_probs)
            )


@both_executors
def test_a_live_visit_is_refused_and_taken_on_again_when_it_has_ended(pipelined: bool) -> None:
    engine, _ = open_engine(pipelined)
    first, again = request(0, 5, 2, max_new_tokens=3), request(0, 5, 2, max_new_tokens=3)
    engine.submit([first])
    with pytest.raises(RequestError, match="requested twice for visit 0"):
        engine.submit([request(1, 4), again])
    assert engine.num_live == 2, "nothing of a refused call is taken on"
    engine.submit([replace(again, visit=1)])
    before = finish(engine)
    engine.submit([again])
    after = finish(engine)
    assert len(after) == 2
    assert after == {handle: before[handle] for handle in after}


def test_counts_are_those_since_nobody_was_live() -> None:
    engine, _ = open_engine(False)
    engine.submit([request(0, 5, max_new_tokens=4)])
    engine.step()
    engine.submit([request(1, 5, max_new_tokens=4)])
    finish(engine)
    first = engine.stats
    assert (first.generated_tokens, first.prompt_tokens) == (8, 10)
    engine.submit([request(2, 3, max_new_tokens=2)])
    finish(engine)
    assert (engine.stats.generated_tokens, engine.stats.prompt_tokens) == (2, 3)
    assert first.generated_tokens == 8


# ------------------------------------------------------------------------------------ leaving


@both_executors
@pytest.mark.parametrize(
    ("steps", "state"), [(0, "waiting"), (2, "half a prompt"), (6, "first token"), (9, "decoding")]
)
def test_an_aborted_request_frees_everything_in_every_state(
    pipelined: bool, steps: int, state: str
) -> None:
    """A prompt of 130 tokens goes in pieces of 30: five steps.  Then its three samples draw."""
    engine, _ = open_engine(pipelined, max_batched_tokens=30)
    wanted = request(0, 130, 3)
    (handles,) = engine.submit([wanted])
    for _ in range(steps):
        assert not engine.step()
    known = max(0, steps - 4 - pipelined)  # the newest token is in flight
    assert (free_pages(engine) == 40) == (steps == 0), state
    completions = ended(engine.abort(handles))
    assert list(completions) == handles
    for completion, plain in zip(completions.values(), plain_samples(wanted), strict=True):
        assert completion.finish_reason == "aborted"
        assert len(completion.token_ids) == known
        assert is_prefix(completion, plain)
        assert completion.sequence.token_ids[:130].tolist() == list(wanted.prompt.token_ids)
    check_empty(engine)
    assert engine.step() == engine.abort(handles) == []


@both_executors
def test_one_sample_leaves_and_its_siblings_go_on(pipelined: bool) -> None:
    engine, _ = open_engine(pipelined)
    wanted = request(0, 70, 3)
    (handles,) = engine.submit([wanted])
    for _ in range(6):
        engine.step()
    left = ended(engine.abort([handles[1]]))
    assert list(left) == [handles[1]] and len(left[handles[1]].token_ids) >= 4
    found = finish(engine)
    for index in (0, 2):
        assert found[handles[index]].finish_reason == "length"
        assert is_prefix(found[handles[index]], plain_samples(wanted)[index])
    check_empty(engine)


@both_executors
def test_samples_that_wait_leave_their_prompt_to_those_who_run(pipelined: bool) -> None:
    """One of five has a place, as has another's; four wait, and hold the prompt's pages."""
    engine, _ = open_engine(pipelined, max_sequences=2)
    wanted, other = request(0, 70, 5, max_new_tokens=8), request(1, 9, max_new_tokens=8)
    handles, (last,) = engine.submit([wanted, other])
    engine.step()
    assert engine.num_running == 2
    engine.abort(handles[2:])
    assert engine.num_live == 3
    found = finish(engine)
    assert list(found) == [handles[0], last, handles[1]]
    assert engine.stats.prompt_tokens == 79
    check_empty(engine)


@both_executors
@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_any_coming_and_going_leaves_an_empty_engine(pipelined: bool, data: st.DataObject) -> None:
    engine, _ = open_engine(
        pipelined,
        kv_pages=data.draw(st.sampled_from([4, 6, 20])),
        max_batched_tokens=data.draw(st.sampled_from([5, 40])),
        max_sequences=data.draw(st.sampled_from([1, 3, 8])),
    )
    with pytest.MonkeyPatch.context() as patch:
        share = data.draw(st.sampled_from([scheduler.START_SHARE, 1000.0]))
        patch.setattr(scheduler, "START_SHARE", share)
        come_and_go(engine, data)


def come_and_go(engine: NativeEngine, data: st.DataObject) -> None:
    plain: dict[Handle, tuple[list[int], list[float]]] = {}
    found: dict[Handle, Completion] = {}
    for index in range(data.draw(st.integers(3, 20))):
        match data.draw(st.sampled_from(["submit", "step", "step", "abort", "release"])):
            case "submit":
                wanted = request(
                    index,
                    data.draw(st.integers(1, 140)),
                    data.draw(st.integers(1, 4)),
                    stop_token_ids=(3,),
                )
                (handles,) = engine.submit([wanted])
                plain |= zip(handles, plain_samples(wanted), strict=True)
            case "step":
                for _ in range(data.draw(st.integers(1, 8))):
                    found |= ended(engine.step())
            case "abort":
                asked = [handle for handle in plain if data.draw(st.booleans())]
                found |= ended(engine.abort(asked))
                assert all(handle in found for handle in asked)
            case _:
                engine.release()
    found |= finish(engine) | ended(engine.step())
    assert found.keys() == plain.keys()
    for handle, completion in found.items():
        assert is_prefix(completion, plain[handle])
        whole = len(completion.token_ids) == len(plain[handle][0])
        assert whole or completion.finish_reason == "aborted"
    engine.submit([request(99, 1, max_new_tokens=1)])
    finish(engine)
    check_empty(engine)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("decoding", "length", "expected"),
    [
        (40, 5, [4, 10]),  # five start together, then six
        (80, 5, [8]),  # nine, the first of which has waited for eight steps
        (8, 5, [0, 2, 4, 6, 8, 11]),  # one beside eight, not beside nine
        (80, 300, [1, 3, 5, 7, 9, 11]),  # 600 tokens do not wait
    ],
)
def test_prompts_start_together_where_decoding_is_captured(
    decoding: int, length: int, expected: list[int]
) -> None:
    """A prompt comes before each of twelve steps."""
    sizes = {"max_sequences": 128, "max_batched_tokens": 1000, "kv_pages": 400}
    for pipelined in (True, False):
        engine, _ = open_engine(pipelined, **sizes)
        first = request(0, 5, decoding, max_new_tokens=50)
        plain = dict(zip(*engine.submit([first]), plain_samples(first), strict=True))
        engine.step()
        started: list[int] = []
        for index in range(12):
            wanted = request(1 + index, length)
            plain |= zip(*engine.submit([wanted]), plain_samples(wanted), strict=True)
            before = engine.stats.prompt_tokens
            engine.step()
            if engine.stats.prompt_tokens > before:
                started.append(index)
        assert started == (expected if pipelined else [*range(12)])
        drawn = finish(engine)
        assert {handle: [*one.token_ids] for handle, one in drawn.items()} == {
            handle: tokens for handle, (tokens, _) in plain.items()
        }


@both_executors
def test_a_step_that_fails_leaves_nobody_live_and_a_usable_engine(pipelined: bool) -> None:
    engine, model = open_engine(pipelined)
    engine.submit([request(0, 3, 2)], follow="tokens")
    engine.step()
    (handles,) = engine.submit([request(1, 1)])
    logits, model.logits = model.logits, lambda hidden: hidden[0, 0, 0]
    with pytest.raises(IndexError):
        finish(engine)
    assert model.cleared == 1
    check_empty(engine)
    assert engine.abort(handles) == engine.step() == []
    model.logits = logits
    wanted = request(0, 3, 2)
    (handles,) = engine.submit([wanted])
    found = finish(engine)
    for handle, plain in zip(handles, plain_samples(wanted), strict=True):
        assert is_prefix(found[handle], plain) and found[handle].finish_reason == "length"


@both_executors
def test_samples_without_finite_logits_fail_alone(pipelined: bool) -> None:
    """The others draw what they draw alone, those that end in the same step are told by the next,
    and nobody reads what is left in the pages of those that failed.
    """
    engine, model = open_engine(pipelined, kv_pages=7)
    good, bad = [request(0, 70, 2), request(2, 5, max_new_tokens=1)], request(1, 1, 2)
    model.poisoned = bad.prompt.token_ids[0]
    plain = {one.prompt.id: plain_samples(one) for one in good}
    engine.submit([good[0], bad, good[1]], follow="tokens")
    found, failed = dict[Handle, Completion](), dict[Handle, IsobitError]()
    waits = True
    while engine.num_live or waits:
        try:
            events = engine.step()
            waits = bool(events)
            found |= ended(events)
        except NonFiniteError as error:
            failed |= error.samples
            waits = True
    assert [(one.prompt_id, one.sample) for one in failed] == [("p/1", 0), ("p/1", 1)]
    assert all("prompt 'p/1' at position 0" in str(one) for one in failed.values())
    assert len(found) == 3 and model.cleared == 0
    for handle, one in found.items():
        tokens, log_probs = plain[handle.prompt_id][handle.sample]
        assert [*one.token_ids] == tokens and [*one.log_probs] == log_probs
    check_empty(engine)
    model.poisoned = None
    assert not model.pages_cleared
    wanted = [request(index, 70) for index in range(3, 6)]
    assert [[*one.token_ids] for (one,) in generate(engine, wanted)] == [
        plain_samples(one)[0][0] for one in wanted
    ]
    assert model.pages_cleared


@both_executors
def test_a_prompt_that_goes_half_computed_leaves_nothing_in_its_pages(pipelined: bool) -> None:
    engine, model = open_engine(pipelined, kv_pages=4, max_batched_tokens=70)
    (handles,) = engine.submit([request(0, 130)])
    engine.step()
    engine.abort(handles)
    check_empty(engine)
    generate(engine, [request(1, 130)])
    assert model.pages_cleared


class Mute:
    """A tokenizer without a text for one token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __getattr__(self, name: str) -> Any:
        return getattr(BYTES, name)

    def decode(self, token_ids: list[int], **how: Any) -> str:
        if self.token in token_ids:
            raise PanicException("slice index starts at 1 but ends at 0")
        return str(BYTES.decode(token_ids, **how))


class PanicException(BaseException):
    """As the tokenizers' library raises it."""


@both_executors
@pytest.mark.parametrize("follow", ["end", "text"])
@pytest.mark.parametrize("stop", [(), ("x",)])
def test_a_text_that_cannot_be_decoded_fails_its_sample_alone(
    pipelined: bool, follow: Any, stop: tuple[str, ...]
) -> None:
    wanted = [request(index, 3, max_new_tokens=2) for index in range(4)]
    said = [set(plain_samples(one)[0][0]) for one in wanted]
    token = next(one for one in range(VOCAB) if 0 < sum(one in tokens for tokens in said) < 4)
    mute = {at for at, tokens in enumerate(said) if token in tokens}
    engine, _ = open_engine(pipelined, tokenizer=Mute(token))
    wanted = [replace(one, sampling=replace(one.sampling, stop_strings=stop)) for one in wanted]
    handles = [group[0] for group in engine.submit(wanted, follow)]
    found, failed = dict[Handle, Completion](), dict[Handle, IsobitError]()
    for _ in range(9):
        try:
            found |= ended(engine.step())
        except DataError as error:
            failed |= error.samples
    assert set(failed) == {handles[at] for at in mute}
    assert set(found) == {handle for at, handle in enumerate(handles) if at not in mute}
    assert all("cannot decode the tokens" in str(one) for one in failed.values())
    check_empty(engine)


# ------------------------------------------------------------------------------------ following


@both_executors
def test_tokens_come_out_as_they_are_drawn(pipelined: bool) -> None:
    engine, _ = open_engine(pipelined)
    wanted, unseen = request(0, 5, 2, max_new_tokens=6), request(1, 5, max_new_tokens=6)
    ((one, two),) = engine.submit([wanted], follow="tokens")
    engine.submit([unseen])
    told: dict[Handle, list[SampleEvent]] = {one: [], two: []}
    while engine.num_live:
        for event in engine.step():
            if event.handle in told:
                told[event.handle].append(event)
            else:
                assert event.completion is not None and not event.token_ids
    for handle, (tokens, log_probs) in zip((one, two), plain_samples(wanted), strict=True):
        events = told[handle]
        assert [len(event.token_ids) for event in events] == [1] * 6
        assert [token for event in events for token in event.token_ids] == tokens
        assert [value for event in events for value in event.log_probs] == log_probs
        assert [event.completion is not None for event in events] == [False] * 5 + [True]
        assert not any(event.text for event in events)


@pytest.mark.few(1)
@both_executors
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"stop_token_ids": (5,)},
        {"stop_strings": ('"%', "never")},
        {"stop_strings": ("$", "%#'")},
    ],
)
def test_text_that_is_followed_adds_up_to_the_final_text(
    pipelined: bool, sampling: dict[str, Any]
) -> None:
    engine, _ = open_engine(pipelined, tokenizer=BYTES)
    wanted = [request(i, 8, 2, max_new_tokens=60, **sampling) for i in range(6)]
    handles = [handle for group in engine.submit(wanted, follow="text") for handle in group]
    texts, pieces = dict.fromkeys(handles, ""), dict.fromkeys(handles, 0)
    found: dict[Handle, Completion] = {}
    while engine.num_live:
        events = engine.step()
        for event in events:
            texts[event.handle] += event.text
            pieces[event.handle] += bool(event.text)
        found |= ended(events)
    assert texts == {handle: completion.text for handle, completion in found.items()}
    assert sum(pieces.values()) > sum(map(len, texts.values())) * 0.5, "not all at the end"
    assert generate(engine, wanted) == [
        [found[handle] for handle in handles[i : i + 2]] for i in range(0, 12, 2)
    ]


def test_the_text_of_an_aborted_sample_is_told_to_its_end() -> None:
    engine, _ = open_engine(False, tokenizer=BYTES)
    ((handle,),) = engine.submit([request(0, 8, stop_strings=("!never",))], follow="text")
    told = "".join(event.text for _ in range(12) for event in engine.step())
    (last,) = engine.abort([handle])
    assert last.completion is not None
    assert told + last.text == last.completion.text
    assert len(last.completion.text) == 12


def test_text_cannot_be_followed_without_a_tokenizer() -> None:
    engine, _ = open_engine(False)
    with pytest.raises(RequestError, match="this engine has no tokenizer"):
        engine.submit([request(0, 5)], follow="text")
    assert engine.num_live == 0


# ------------------------------------------------------------------------------------ weights


@both_executors
def test_weights_taken_in_mid_run_give_each_token_its_version(pipelined: bool) -> None:
    engine, model = open_engine(pipelined)
    wanted = request(0, 70, 2, max_new_tokens=12)
    (handles,) = engine.submit([wanted])
    for _ in range(5):
        engine.step()
    model.version = 3
    engine.take_weights()
    assert (engine.num_running, engine.stats.weight_changes) == (0, 1)
    found = finish(engine)
    for handle, plain in zip(handles, plain_samples(wanted), strict=True):
        versions = found[handle].weights_versions
        old = versions.count(0)
        assert versions == (0,) * old + (3,) * (12 - old) and 3 <= old < 12
        assert found[handle].token_ids[:old] == tuple(plain[0][:old])
        assert found[handle].log_probs[:old] == tuple(plain[1][:old])
    check_empty(engine)


def test_weights_published_while_the_last_tokens_are_in_flight() -> None:
    engine, model = open_engine(True)
    ((handle,),) = engine.submit([request(0, 5, max_new_tokens=3)])
    for _ in range(3):
        assert not engine.step()
    model.version = 1
    (event,) = engine.step()
    assert event.handle == handle and event.completion is not None
    assert event.completion.weights_versions == (0, 0, 0)
    check_empty(engine)


def test_what_ends_while_weights_are_taken_or_memory_is_released_is_told_by_the_next_step() -> None:
    for outside in (NativeEngine.take_weights, NativeEngine.release):
        engine, model = open_engine(True)
        ((handle,), _) = engine.submit(
            [request(0, 5, max_new_tokens=3), request(1, 5, max_new_tokens=5)]
        )
        for _ in range(3):
            engine.step()
        model.version = 1
        outside(engine)
        assert engine.num_live == 1
        assert list(ended(engine.step())) == [handle]
        finish(engine)


@both_executors
def test_released_in_mid_run_the_samples_draw_what_they_would_have_drawn(pipelined: bool) -> None:
    made: list[Any] = []

    def make(_: Any, size: CacheSize) -> Any:
        made.append(HistoryModel(size))
        return DelayedRunner(made[-1]) if pipelined else made[-1]

    engine = open_engine(False)[0]
    config = RolloutConfig(kv_pages=13, max_sequences=3, max_batched_tokens=37)
    engine = NativeEngine(engine._policy, config, None, 0, make)
    wanted = [request(i, 30 + 50 * i, samples=2) for i in range(3)]
    handles = engine.submit(wanted)
    found: dict[Handle, Completion] = {}
    for _ in range(4):
        for _ in range(5):
            found |= ended(engine.step())
        engine.release()
        assert engine.num_running == 0
    found |= finish(engine)
    assert len(made) == 5
    for one, group in zip(wanted, handles, strict=True):
        for handle, plain in zip(group, plain_samples(one), strict=True):
            assert is_prefix(found[handle], plain) and found[handle].finish_reason == "length"
    check_empty(engine)


# ------------------------------------------------------------------------------------ the loop


@both_executors
def test_a_loop_that_is_broken_off_leaves_an_empty_engine_with_its_cache(pipelined: bool) -> None:
    engine, model = open_engine(pipelined)

    def interrupt(progress: Any) -> None:
        if progress.generated_tokens > 10:
            raise KeyboardInterrupt

    wanted: list[Request] = [request(0, 5, 3)]
    with pytest.raises(KeyboardInterrupt):
        generate(engine, wanted, interrupt)
    check_empty(engine)
    assert model.cleared == 0
    assert [len(c.token_ids) for c in generate(engine, wanted)[0]] == [20, 20, 20]


def test_the_loop_needs_the_engine_for_itself() -> None:
    engine, _ = open_engine(False)
    (handles,) = engine.submit([request(0, 5, 2)])
    with pytest.raises(RequestError, match="2 samples of it are live"):
        generate(engine, [request(1, 5)])
    assert len(engine.abort(handles)) == 2
    assert len(generate(engine, [request(1, 5)])) == 1
