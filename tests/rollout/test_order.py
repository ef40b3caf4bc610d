"""The order of the line: what it saves, and that it changes nothing that is drawn."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from isobit.kernels.operands import Drawn, Draws
from isobit.rollout import order, scheduler
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Handle, Request
from isobit.rollout.runner import ForwardBatch
from isobit.rollout.sequence import Sample, States
from tests.rollout.history_model import make_engine, plain_samples, request
from tests.rollout.test_exactness import TIGHT, generate_with, policy_of, requests
from tests.rollout.test_native import batches, tokens_and_log_probs
from tests.rollout.test_open_engine import both_executors, check_empty, ended, finish, open_engine
from tests.suites import examples

GROUPS, SAMPLES, SLOTS = 32, 8, 64
"""Four times as many samples as slots."""


class Blank:
    """A ModelRunner that always draws the token 0, at once."""

    version, page_tokens = 0, 64

    def forward(self, batch: ForwardBatch) -> States:
        return States(torch.zeros(len(batch.token_ids), 1))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), 2)

    def draw(self, logits: torch.Tensor, draws: Draws) -> Drawn:
        return Drawn(torch.zeros_like(draws.keys), draws.temperatures)

    def copy_pages(self, sources: list[int], targets: list[int]) -> None: ...

    def copy_carries(self, sources: list[int], targets: list[int]) -> None: ...

    def clear_pages(self, pages: list[int]) -> None: ...

    def clear(self) -> None: ...


def first_come(line: Sequence[Sample], *_: Any) -> Sequence[Sample]:
    return line


@pytest.mark.few(1)
@both_executors
@settings(max_examples=examples(60), deadline=None)
@given(batch=batches())
def test_any_batch_draws_the_same_in_order_and_as_it_comes(
    pipelined: bool, batch: tuple[list[Request], dict[str, Any]]
) -> None:
    wanted, sizes = batch
    sizes |= {"max_sequences": 2}
    made = generate(open_engine(pipelined, **sizes)[0], wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "arranged", first_come)
        assert generate(open_engine(pipelined, **sizes)[0], wanted) == made
    assert tokens_and_log_probs(made) == [plain_samples(one) for one in wanted]


def test_a_policys_samples_are_the_same_in_order_and_as_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, wanted = policy_of("fp8"), requests()
    sizes = TIGHT | {"kv_pages": 16, "max_sequences": 3}
    made, engine = generate_with(policy, wanted, **sizes)
    monkeypatch.setattr(scheduler, "arranged", first_come)
    as_they_come, other = generate_with(policy, wanted, **sizes)
    assert made == as_they_come
    assert engine.stats.forwards != other.stats.forwards, "the order was another one"


def skewed_lengths(seed: int) -> list[list[int]]:
    """Log-normal lengths of groups, median 50 and sigma 0.7, within 400; siblings are spread around
    them with sigma 0.3.
    """
    chance = random.Random(seed)
    centres = [50 * chance.lognormvariate(0, 0.7) for _ in range(GROUPS)]
    return [
        [max(1, min(400, round(c * chance.lognormvariate(0, 0.3)))) for _ in range(SAMPLES)]
        for c in centres
    ]


def steps_of(engine: NativeEngine, visit: int, lengths: list[list[int]]) -> int:
    """Forwards that a batch takes whose samples end at these lengths."""
    wanted = [replace(request(n, 30, SAMPLES), visit=visit) for n in range(GROUPS)]
    for one, group in zip(wanted, lengths, strict=True):
        (handles,) = engine.submit([one])
        for handle, length in zip(handles, group, strict=True):
            engine._live[handle].max_length = 30 + length
    finish(engine)
    check_empty(engine)
    assert engine.stats.generated_tokens == sum(map(sum, lengths))
    return engine.stats.forwards


@pytest.mark.exhaustive
@pytest.mark.parametrize("seeds", [(2,), (0, 1, 2)])
def test_a_batch_of_skewed_lengths_takes_fewer_steps_in_order(seeds: tuple[int, ...]) -> None:
    """And fewer again at the second visit, when the first has told the lengths of all groups."""
    sizes: dict[str, Any] = {
        "wrap": lambda _: Blank(),
        "kv_pages": 1000,
        "max_sequences": SLOTS,
        "max_batched_tokens": 2048,
    }
    in_order, again, without = 0, 0, 0
    for seed in seeds:
        lengths = skewed_lengths(seed)
        engine = make_engine(**sizes)[0]
        first, second = (steps_of(engine, visit, lengths) for visit in range(2))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scheduler, "arranged", first_come)
            plain = steps_of(make_engine(**sizes)[0], 0, lengths)
        assert second <= first <= plain
        in_order, again, without = in_order + first, again + second, without + plain
    assert in_order < 0.9 * without
    assert again < 0.75 * without


def test_one_sample_of_each_group_comes_first_and_then_the_longest() -> None:
    engine = make_engine(max_sequences=2)[0]
    wanted = [request(n, 9, 3, max_new_tokens=new) for n, new in enumerate((3, 9, 6))]
    engine.submit(wanted)
    starts = starts_of(engine)
    names = [(int(handle.prompt_id[-1]), handle.sample) for handle in starts]
    assert sorted(names[:3]) == [(0, 0), (1, 0), (2, 0)], "one of each"
    assert [group for group, _ in names[3:]] == [1, 1, 2, 2, 0, 0]


def starts_of(
    engine: NativeEngine, after_step: Callable[[int], None] = lambda _: None
) -> list[Handle]:
    """Step until nobody is live; the samples in the order of their starts."""
    starts: dict[Handle, None] = {}
    step = 0
    while engine.num_live:
        engine.step()
        starts |= dict.fromkeys(sample.handle for sample in engine._scheduler.running)
        after_step(step)
        step += 1
    return list(starts)


def held_pages(engine: NativeEngine) -> int:
    return sum(len(prompt.pages) for prompt in engine._scheduler._held)


@pytest.mark.few(1)
@both_executors
def test_prompts_are_held_to_a_share_of_the_cache(
    pipelined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups whose prompts take 2 pages of 80: without a bound 24 of them would begin at once."""
    wanted = [request(n, 100, 3, max_new_tokens=5) for n in range(24)]
    most: dict[float, int] = {}
    for share in (order.HELD_SHARE, 2.0):
        monkeypatch.setattr(order, "HELD_SHARE", share)
        engine, _ = open_engine(pipelined, kv_pages=80, max_sequences=4, max_batched_tokens=400)
        engine.submit(wanted)
        held: list[int] = []
        starts_of(engine, lambda _, held=held, engine=engine: held.append(held_pages(engine)))
        check_empty(engine)
        most[share] = max(held)
        assert engine.stats.prompt_tokens == 2400, "and computed once"
    bounded, free = most.values()
    assert bounded <= 80 * 0.25 + 4 * 2, "the share, and prompts of the next to start"
    assert free > bounded


def test_no_sample_is_overtaken_by_all_that_come_after_it() -> None:
    """A short answer is known; longer ones keep coming."""
    engine = make_engine(max_sequences=1)[0]
    short = request(0, 5, max_new_tokens=2)
    generate(engine, [short])
    engine.submit([request(1, 5, max_new_tokens=8)])
    engine.step()
    ((last,),) = engine.submit([replace(short, visit=1)])
    found: dict[Handle, Any] = {}
    for index in range(2, 40):
        engine.submit([request(index, 5, max_new_tokens=8)])
        for _ in range(4):
            found |= ended(engine.step())
        if last in found:
            break
    assert last in found and len(found) < 10


def test_what_is_known_of_lengths_is_of_the_last_two_visits_and_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()[0]
    known = engine._lengths
    for visit, new, longest in ((0, 9, 9), (1, 4, 9), (2, 5, 5), (1, 30, 30)):
        generate(engine, [replace(request(0, 5, max_new_tokens=new), visit=visit)])
        assert known.longest("p/0") == longest
    monkeypatch.setattr(order, "MOST_PROMPTS", 2)
    generate(engine, [request(n, 5, max_new_tokens=3) for n in (1, 2)])
    assert (known.longest("p/0"), known.longest("p/2")) == (float("inf"), 3)
