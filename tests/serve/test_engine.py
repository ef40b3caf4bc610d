"""The thread of the engine: its errors, its end, and new weights."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from isobit.config.rollout import RolloutConfig
from isobit.records.text import Completion
from isobit.rollout.engine import SampleEvent
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.rollout.scoring import Scoring, TokenScorer
from isobit.serve import engine as module
from isobit.serve.engine import (
    Accepted,
    Done,
    EngineCall,
    EngineStoppedError,
    EngineThread,
    PausedError,
    Scores,
)
from isobit.util.errors import NonFiniteError, RequestError
from tests.rollout.history_model import make_engine, plain_samples, request
from tests.rollout.test_exactness import policy_of, requests


def make_thread(**arguments: Any) -> EngineThread:
    policy = policy_of("fp8")
    engine = NativeEngine(policy, RolloutConfig(), None, 0)
    return EngineThread(engine, TokenScorer(policy, 100), **arguments)


def run(thread: EngineThread, use: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        thread.start()
        try:
            await asyncio.wait_for(use(), 120)
        finally:
            await asyncio.to_thread(thread.stop)

    asyncio.run(main())


async def drawn(
    thread: EngineThread, request: Request, call: EngineCall | None = None
) -> Completion:
    """The first sample of a request, in a call that stays open if it is given."""
    mine = call or EngineCall()
    thread.submit(mine, [request], "tokens")
    assert isinstance(await mine.next(), Accepted)
    while True:
        told = await mine.next()
        assert isinstance(told, SampleEvent)
        if told.completion is not None:
            if call is None:
                thread.cancel(mine)
            return told.completion


def test_a_sample_that_fails_ends_its_call_alone() -> None:
    """Three calls run; one of them ends in the step in which the bad one fails."""
    engine, model = make_engine()
    bad = request(1, 1, 2)
    model.poisoned = bad.prompt.token_ids[0]
    good = [request(0, 70), request(2, 3), request(3, 5, max_new_tokens=1)]
    scorer: Any = SimpleNamespace(has_work=False, keys=[], drop=lambda keys: None)
    thread = EngineThread(engine, scorer)

    async def use() -> None:
        thread.pause(control := EngineCall(is_control=True), "keep")
        await control.next()
        tasks = [asyncio.create_task(drawn(thread, one)) for one in (good[0], bad, *good[1:])]
        await asyncio.sleep(0.05)
        thread.resume(EngineCall(is_control=True))
        first, failed, *others = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(failed, NonFiniteError) and "prompt 'p/1' at position 0" in str(failed)
        for one, found in zip(good, [first, *others], strict=True):
            assert isinstance(found, Completion)
            ((tokens, log_probs),) = plain_samples(one)
            assert ([*found.token_ids], [*found.log_probs]) == (tokens, log_probs)
        model.poisoned = None
        assert isinstance(await drawn(thread, replace(bad, visit=1)), Completion)

    run(thread, use)
    assert thread.has_ended_well and thread.fault == "the server is shutting down"


def test_an_error_of_the_engine_ends_its_calls_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thread, asked = make_thread(), requests()
    step = thread.engine.step

    def fail() -> list[SampleEvent]:
        thread.engine.abort(list(thread.engine._live))
        monkeypatch.setattr(thread.engine, "step", step)
        raise NonFiniteError("logits of a prompt are NaN")

    async def use() -> None:
        expected = await drawn(thread, asked[0])
        monkeypatch.setattr(thread.engine, "step", fail)
        with pytest.raises(NonFiniteError, match="are NaN"):
            await drawn(thread, asked[1])
        again = await drawn(thread, asked[0])
        assert again.log_probs == expected.log_probs

    run(thread, use)
    assert thread.has_ended_well


def test_a_fault_ends_the_thread_and_whoever_waits_or_comes_later(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[bool] = []
    thread = make_thread(on_fault=lambda: ended.append(True))
    monkeypatch.setattr(thread.engine, "step", lambda: 1 / 0)

    async def use() -> None:
        for one in requests()[:2]:
            with pytest.raises(EngineStoppedError, match="ZeroDivisionError"):
                await drawn(thread, one)

    run(thread, use)
    assert ended == [True] and not thread.has_ended_well
    assert "division by zero" in capfd.readouterr().err


async def _last_of(call: EngineCall) -> None:
    while True:
        await call.next()


def test_what_is_live_when_the_thread_is_stopped_is_told_so() -> None:
    thread = make_thread()

    async def main() -> None:
        thread.start()
        call = EngineCall()
        thread.submit(call, requests(), "end")
        assert isinstance(await call.next(), Accepted)
        await asyncio.to_thread(thread.stop)
        with pytest.raises(EngineStoppedError, match="shutting down"):
            await _last_of(call)

    asyncio.run(main())


def test_what_cannot_be_scored_is_told_and_a_cancelled_call_leaves_nothing() -> None:
    thread = make_thread()

    async def use() -> None:
        call = EngineCall()
        thread.score(call, 0, Scoring((1,), 1, 1.0))
        with pytest.raises(RequestError):
            await call.next()
        thread.score(call, 1, Scoring(tuple(range(50)), 1, 1.0))
        scores = await call.next()
        assert isinstance(scores, Scores) and scores.place == 1
        thread.submit(call, requests(), "tokens")
        await call.next()
        thread.cancel(call)
        await drawn(thread, requests()[0])
        assert thread.engine.num_live == 0
        assert thread.engine.free_pages == thread.engine.limits.num_pages

    run(thread, use)


def test_new_weights_come_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is open keeps its weights to its end, and those that come later wait for it."""
    monkeypatch.setattr(module, "POLL_S", 0.0)
    policy, other = policy_of("fp8"), policy_of("fp8", 1)
    kept = {name: master.detach().clone() for name, master in policy.masters.items()}
    new = {name: master.detach() for name, master in other.masters.items()}
    offered: list[dict[str, Any]] = []

    def look() -> Callable[[], None] | None:
        return (lambda: policy.republish(offered.pop())) if offered else None

    thread, asked = make_thread(new_weights=look), requests()
    request, later = asked[0], asked[3]
    found: list[Completion] = []

    async def use() -> None:
        before, call = await drawn(thread, request), EngineCall()
        thread.score(call, 0, Scoring((1, 2), 1, 1.0))
        assert isinstance(await call.next(), Scores)
        version = policy.version
        offered.append(new)
        while thread._take_weights is None:
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(drawn(thread, later))
        assert (await drawn(thread, request, call)).log_probs == before.log_probs
        assert policy.version == version and not waiting.done()
        thread.cancel(call)
        found.append(await waiting)
        assert policy.version == version + 1
        assert set(found[0].weights_versions) == {policy.version}

    try:
        run(thread, use)
    finally:
        policy.republish(kept)
    alone = NativeEngine(other, RolloutConfig(), None, 0)
    ((handle, *_),) = alone.submit([later])
    while alone.num_live:
        for event in alone.step():
            if event.handle == handle and event.completion is not None:
                assert event.completion.log_probs == found[0].log_probs


def test_pauses_and_pushed_weights() -> None:
    """Kept calls stand still and go on as if nothing had been; no weights are taken meanwhile. A
    pause with ``wait`` lets them end, one with ``abort`` ends them; later calls wait.
    """
    policy = policy_of("fp8")
    kept = {name: master.detach().clone() for name, master in policy.masters.items()}
    thread, request, version = make_thread(), requests()[0], policy.version

    async def control(ask: Callable[..., None], *arguments: Any) -> None:
        call = EngineCall(is_control=True)
        ask(call, *arguments)
        assert await call.next() == Done()

    async def use() -> None:
        expected = await drawn(thread, request)
        call = EngineCall()
        task = asyncio.create_task(drawn(thread, request, call))
        while not thread.engine.num_live:
            await asyncio.sleep(0)
        await control(thread.pause, "keep")
        steps = thread.engine.stats.forwards
        later = asyncio.create_task(drawn(thread, request))
        with pytest.raises(RequestError, match="a pause keeps requests open"):
            await control(thread.publish, lambda: policy.republish(kept))
        await asyncio.sleep(0.1)
        assert thread.engine.stats.forwards == steps and not task.done() and not later.done()

        waiting = asyncio.create_task(control(thread.pause, "wait"))
        assert (await task).log_probs == expected.log_probs
        assert not waiting.done()  # the call is still open
        published = asyncio.create_task(control(thread.publish, lambda: policy.republish(kept)))
        await asyncio.sleep(0.1)
        assert policy.version == version and not published.done()
        thread.cancel(call)
        await asyncio.gather(waiting, published)
        assert policy.version == version + 1 and not later.done()
        await control(thread.resume)
        again = await later
        assert again.log_probs == expected.log_probs
        assert set(again.weights_versions) == {version + 1}

        task = asyncio.create_task(drawn(thread, request, call := EngineCall()))
        while not thread.engine.num_live:
            await asyncio.sleep(0)
        aborting = asyncio.create_task(control(thread.pause, "abort"))
        with pytest.raises(PausedError):
            await task
        thread.cancel(call)
        await aborting
        assert thread.engine.num_live == 0
        await control(thread.resume)
        assert (await drawn(thread, request)).log_probs == expected.log_probs

    run(thread, use)
    assert thread.has_ended_well
