"""The engine a step ahead of the tokens that it knows gives what the engine gives that waits for
them.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from isobit.config.rollout import RolloutConfig
from isobit.models.policy import Policy
from isobit.records.text import Completion
from isobit.rollout import scheduler
from isobit.rollout.engine import generate
from isobit.rollout.engine_stats import Progress
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.rollout.runner import PolicyRunner
from isobit.util.errors import NonFiniteError
from tests.rollout.delayed_runner import DelayedRunner
from tests.rollout.history_model import VOCAB, HistoryModel, make_engine, plain_samples, request
from tests.rollout.test_exactness import (
    TIGHT,
    policy_of,
    publish_once,
    recorded_log_probs,
    requests,
    trainer_log_probs,
)
from tests.rollout.test_native import batches, tokens_and_log_probs
from tests.suites import examples


def make_pipelined(**arguments: Any) -> tuple[NativeEngine, HistoryModel, DelayedRunner]:
    runners: list[DelayedRunner] = []

    def wrap(model: Any) -> DelayedRunner:
        runners.append(DelayedRunner(model))
        return runners[0]

    engine, model = make_engine(wrap=wrap, **arguments)
    return engine, model, runners[0]


def check_left_alone(runner: DelayedRunner) -> None:
    """No sample has a place, and every step was waited for."""
    assert not runner.slots
    assert runner.waited == runner.steps


@settings(max_examples=examples(30), deadline=None)
@given(batches())
def test_every_batch_gives_what_a_plain_loop_gives(batch: tuple[list[Request], dict[str, Any]]):
    wanted, sizes = batch
    engine, _, runner = make_pipelined(**sizes)
    groups = generate(engine, wanted)
    assert tokens_and_log_probs(groups) == [plain_samples(r) for r in wanted]
    assert groups == generate(make_engine(**sizes)[0], wanted)
    assert engine.stats.generated_tokens == sum(len(c.token_ids) for group in groups for c in group)
    check_left_alone(runner)


@pytest.mark.exhaustive
@settings(max_examples=examples(30), deadline=None)
@given(batches())
def test_samples_that_wait_to_start_together_draw_the_same(
    batch: tuple[list[Request], dict[str, Any]],
):
    """In every step in which a sample decodes, until patience ends."""
    wanted, sizes = batch
    engine, _, runner = make_pipelined(**sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "START_SHARE", 1000.0)
        patch.setattr(scheduler, "START_TOKENS", 10_000)
        groups = generate(engine, wanted)
    assert tokens_and_log_probs(groups) == [plain_samples(r) for r in wanted]
    check_left_alone(runner)


def test_steps_are_launched_before_the_tokens_of_the_one_before_are_known():
    engine, _, runner = make_pipelined()
    generate(engine, [request(0, 5, 3, max_new_tokens=30)])
    assert runner.steps == 30
    assert runner.overlapped == 29  # the last has no other behind it


def test_a_sample_that_stops_is_decoded_once_more_and_one_at_its_limit_is_not():
    stopping, limited = (
        request(1, 5, max_new_tokens=100, stop_token_ids=(3,)),
        request(1, 5, max_new_tokens=9),
    )
    for wanted, more in ((stopping, 1), (limited, 0)):
        engine, model, runner = make_pipelined()
        ((completion,),) = generate(engine, [wanted])
        assert [(list(completion.token_ids), list(completion.log_probs))] == plain_samples(wanted)
        assert (
            sum(b.token_ids.numel() for b in model.batches)
            == 5 + len(completion.token_ids) - 1 + more
        )
        check_left_alone(runner)


def test_the_place_of_a_sample_that_stopped_goes_to_the_next():
    wanted = [request(i, 5 + i, 2, max_new_tokens=40, stop_token_ids=(3, 4)) for i in range(6)]
    engine, _, runner = make_pipelined(max_sequences=2, kv_pages=2)
    assert tokens_and_log_probs(generate(engine, wanted)) == [plain_samples(r) for r in wanted]
    check_left_alone(runner)


@pytest.mark.exhaustive
def test_preemption_waits_for_tokens_in_flight():
    wanted = [request(i, 40, 2, max_new_tokens=150) for i in range(3)]
    engine, _, runner = make_pipelined(kv_pages=6)
    groups = generate(engine, wanted)
    assert engine.stats.preemptions > 0 and engine.stats.recomputed_tokens > 0
    assert tokens_and_log_probs(groups) == [plain_samples(r) for r in wanted]
    check_left_alone(runner)


def test_a_sample_preempted_after_its_first_token_is_given_it_again():
    """The prompt is prefilled again, and the one token that is left to compute is not on the device
    any more.
    """
    wanted = [
        request(0, 63, max_new_tokens=70),
        request(1, 63, max_new_tokens=3),
        request(2, 64, max_new_tokens=70),
    ]
    engine, _, runner = make_pipelined(kv_pages=4, max_batched_tokens=300)
    groups = generate(engine, wanted)
    assert tokens_and_log_probs(groups) == [plain_samples(r) for r in wanted]
    check_left_alone(runner)


def test_a_step_may_only_take_up_a_preempted_sample():
    """Its prompt is still held for another one, so nothing is put through the model before it runs
    again.
    """
    sizes = [(1, 1, 65), (65, 2, 44), (65, 1, 1), (122, 1, 10), (1, 1, 1)]
    wanted = [
        request(i, length, samples, max_new_tokens=new, temperature=0.0)
        for i, (length, samples, new) in enumerate(sizes)
    ]
    engine, _, runner = make_pipelined(
        page_tokens=32, kv_pages=6, max_sequences=3, max_batched_tokens=4
    )
    assert tokens_and_log_probs(generate(engine, wanted)) == [plain_samples(r) for r in wanted]
    check_left_alone(runner)


def test_pages_that_a_stop_in_flight_frees_prevent_a_preemption():
    """Both samples need their second page for their fifth token, while it is in flight; there is
    one, and that token ends the later one.
    """
    fifth = {i: plain_samples(request(i, 60, max_new_tokens=5))[0][0] for i in range(1, 20)}
    index, stop = next((i, tokens[4]) for i, tokens in fifth.items() if tokens[4] not in tokens[:4])
    for stops, preemptions in (((stop,), 0), ((), 1)):
        wanted = [
            request(0, 60, max_new_tokens=40),
            request(index, 60, max_new_tokens=40, stop_token_ids=stops),
        ]
        engine, _, runner = make_pipelined(kv_pages=3, max_batched_tokens=300)
        assert tokens_and_log_probs(generate(engine, wanted)) == [plain_samples(r) for r in wanted]
        assert engine.stats.preemptions == preemptions
        check_left_alone(runner)


def test_new_weights_between_steps_keep_the_tokens_that_were_in_flight():
    wanted = [request(0, 70, 3, max_new_tokens=30), request(1, 9, 2, max_new_tokens=30)]
    engine, model, runner = make_pipelined()
    drawn_before = 0

    def publish(progress: Progress) -> None:
        nonlocal drawn_before
        if progress.generated_tokens >= 40 and model.version == 0:
            model.version = 1
            drawn_before = progress.generated_tokens + 5  # one of each sample is in flight

    groups = generate(engine, wanted, publish)
    assert engine.stats.weight_changes == 1
    old = 0
    for r, group in zip(wanted, groups, strict=True):
        for completion, (tokens, log_probs) in zip(group, plain_samples(r), strict=True):
            same = sum(a == b for a, b in zip(completion.log_probs, log_probs, strict=True))
            assert list(completion.token_ids[:same]) == tokens[:same]
            assert completion.weights_versions == (0,) * same + (1,) * (30 - same)
            old += same
    assert old == drawn_before
    check_left_alone(runner)


def test_a_step_during_which_weights_change_is_not_used():
    wanted = [request(0, 20, 2), request(1, 130, 2)]
    engine, model, runner = make_pipelined(max_batched_tokens=30)
    forward = model.forward

    def forward_and_publish(batch: Any) -> Any:
        hidden = forward(batch)
        model.version += (
            model.version == 0 and len(model.batches) > 3 and max(batch.paged.counts) > 1
        )  # samples decode beside it
        return hidden

    model.forward = forward_and_publish
    expected = make_engine(max_batched_tokens=30)[0]
    groups = generate(engine, wanted)
    assert {c.weights_versions[0] for c in groups[0]} == {0}
    assert {v for c in groups[1] for v in c.weights_versions} == {1}
    assert tokens_and_log_probs(groups[1:]) == [plain_samples(wanted[1], version=1)]
    before = tokens_and_log_probs(generate(expected, wanted))[0]
    for completion, (tokens, log_probs) in zip(groups[0], before, strict=True):
        assert completion.token_ids[:1] == tuple(tokens[:1]) and completion.log_probs[:1] == tuple(
            log_probs[:1]
        )
        assert len(completion.token_ids) == len(completion.log_probs) == 20
    assert engine.stats.weight_changes == 1
    check_left_alone(runner)


def test_a_log_probability_that_is_not_finite_names_the_prompt_and_leaves_a_clean_engine():
    engine, model, runner = make_pipelined()
    model.poisoned = request(1, 1).prompt.token_ids[0]
    with pytest.raises(
        NonFiniteError,
        match=r"prompt 'p/1' at position 0: the drawn token's log-probability is nan",
    ):
        generate(engine, [request(0, 3), request(1, 1)])
    assert engine.num_live == model.cleared == 0 and not runner.slots
    model.poisoned = None
    assert tokens_and_log_probs(generate(engine, [request(0, 3)])) == [plain_samples(request(0, 3))]


def test_what_is_drawn_after_a_stop_token_may_be_anything():
    stopping = request(1, 5, max_new_tokens=100, stop_token_ids=(3,))
    engine, model, runner = make_pipelined()
    (completion,) = generate(engine, [stopping])[0]
    logits = model.logits

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        values = logits(hidden)
        return values * torch.nan if len(model.logit_rows) == calls else values

    calls = 2 * len(model.logit_rows)
    model.logits = poisoned
    assert generate(engine, [stopping])[0] == [completion]
    assert len(model.logit_rows) == calls
    check_left_alone(runner)


def test_a_call_that_is_broken_off_leaves_nobody_in_the_runner():
    engine, _, runner = make_pipelined()

    def interrupt(progress: Progress) -> None:
        if progress.generated_tokens > 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(engine, [request(0, 5, 3)], interrupt)
    assert not runner.slots


def test_truncated_log_probabilities_and_stop_strings():
    alphabet = Tokenizer(models.BPE({chr(33 + i): i for i in range(VOCAB)}, []))
    alphabet.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=alphabet)
    wanted = [
        request(0, 9, 2, top_k=2),
        request(1, 9, 2),
        request(2, 9, 3, max_new_tokens=60, stop_strings=("!", '"#')),
    ]
    engine, _, runner = make_pipelined(tokenizer=tokenizer)
    groups = generate(engine, wanted)
    assert groups == generate(make_engine(tokenizer=tokenizer)[0], wanted)
    assert groups[0][0].truncated_log_probs is not None and groups[1][0].truncated_log_probs is None
    assert "stop" in {c.finish_reason for c in groups[2]}
    check_left_alone(runner)


def generate_both(
    policy: Policy, wanted: list[Request], **sizes: Any
) -> tuple[list[list[Completion]], list[list[Completion]], NativeEngine]:
    """The completions over a PolicyRunner, those over the same delayed by a step, and the engine of
    these.
    """
    config = RolloutConfig.model_validate({"kv_pages": 40} | sizes)
    engine = NativeEngine(
        policy,
        config,
        None,
        0,
        lambda policy, size: DelayedRunner(PolicyRunner(policy, size)),
    )
    return (
        generate(NativeEngine(policy, config, None, seed=0), wanted),
        generate(engine, wanted),
        engine,
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("sizes", [{}, TIGHT, {"max_sequences": 2}])
@pytest.mark.parametrize(
    "sampling",
    [{"stop_token_ids": (5, 9)}, {"stop_token_ids": (5, 9), "temperature": 0.7, "top_k": 9}],
)
def test_completions_of_a_policy_are_the_same_bit_for_bit_and_those_of_the_training_forward(
    sizes: dict[str, Any], sampling: dict[str, Any]
):
    policy, wanted = policy_of("fp8"), requests(**sampling)
    waiting, pipelined, engine = generate_both(policy, wanted, **sizes)
    assert pipelined == waiting
    assert {c.finish_reason for group in pipelined for c in group} == {"stop", "length"}
    assert (engine.stats.preemptions > 0 and engine.stats.chunks > 0) == (sizes == TIGHT)
    assert torch.equal(recorded_log_probs(pipelined), trainer_log_probs(policy, wanted, pipelined))


def test_a_publication_in_the_middle_changes_no_bit_of_what_either_version_drew():
    policy, wanted = policy_of("bf16", seed=4), requests()
    expected, _, engine = generate_both(policy, wanted)
    groups = generate(engine, wanted, publish_once(policy))
    assert engine.stats.weight_changes == 1
    recorded, new = recorded_log_probs(groups), trainer_log_probs(policy, wanted, groups)
    old = [
        sum(a == b for a, b in zip(x.log_probs, y.log_probs, strict=True))
        for g, h in zip(groups, expected, strict=True)
        for x, y in zip(g, h, strict=True)
    ]
    starts = [
        0,
        *torch.tensor([len(c.token_ids) for group in groups for c in group]).cumsum(0).tolist(),
    ]
    assert 0 < sum(old) < len(recorded)
    for start, end, drawn_before in zip(starts, starts[1:], old, strict=False):
        assert torch.equal(recorded[start + drawn_before : end], new[start + drawn_before : end])
