"""The runner of a GPU, on the specification: state on the device, padded and captured decode steps,
tokens that arrive behind the step.  What it gives is what the engine gives that waits.
"""

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.config.precision import Preset
from isobit.config.rollout import RolloutConfig
from isobit.kernels.backend import Captured, backend_of
from isobit.kernels.spec.backend import SpecBackend
from isobit.memory.cache_size import CacheSize
from isobit.models.function import SampledPolicy
from isobit.models.policy import Policy
from isobit.records.text import Completion
from isobit.rollout import graph_runner
from isobit.rollout.engine import generate
from isobit.rollout.executor import PipelinedExecutor
from isobit.rollout.graph_runner import DeviceState, GraphRunner, graph_sizes
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.util.errors import NonFiniteError
from tests.rollout.history_model import having_carries
from tests.rollout.test_carries import around_chunks, check_same, hybrid, plainly
from tests.rollout.test_drafts import (
    Knowing,
    check_equal,
    guess,
    known_of,
    policy_named,
    short_requests,
    without,
)
from tests.rollout.test_exactness import (
    TIGHT,
    generate_with,
    policy_of,
    publish_once,
    recorded_log_probs,
    requests,
    trainer_log_probs,
)
from tests.rollout.test_open_engine import check_empty
from tests.suites import examples

Groups = list[list[Completion]]
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"stop_token_ids": (5,)},
    {"stop_token_ids": (5,), "temperature": 0.7, "top_k": 9},
    {"top_p": 0.9, "min_p": 0.05},
]


def make_engine(policy: Policy, **sizes: Any) -> tuple[NativeEngine, list[GraphRunner]]:
    """An engine over a GraphRunner, by default without guesses, and the runners it has made."""
    config = RolloutConfig.model_validate({"kv_pages": 40, "speculation": 0} | sizes)
    runners: list[GraphRunner] = []

    def make_runner(policy: SampledPolicy, size: CacheSize) -> GraphRunner:
        runners.append(GraphRunner(policy, size, config.max_sequences))
        return runners[-1]

    return NativeEngine(policy, config, None, 0, make_runner), runners


def generate_both(
    policy: Policy, wanted: list[Request], **sizes: Any
) -> tuple[Groups, Groups, NativeEngine, GraphRunner]:
    """By the engine that waits, and by the one that does not."""
    config = RolloutConfig.model_validate({"kv_pages": 40} | sizes)
    engine, runners = make_engine(policy, **sizes)
    assert isinstance(engine._executor, PipelinedExecutor)
    direct = generate(NativeEngine(policy, config, None, 0), wanted)
    return direct, generate(engine, wanted), engine, runners[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("sizes", [{}, TIGHT, {"max_sequences": 3}], ids=["roomy", "tight", "few"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: ",".join(s) or "plain")
def test_tokens_and_log_probabilities_are_those_of_the_engine_that_waits(
    sampling: dict[str, Any], sizes: dict[str, Any]
) -> None:
    policy, wanted = policy_of("fp8"), requests(**sampling)
    engine, (runner,) = make_engine(policy, **sizes)
    pipelined = generate(engine, wanted)
    assert pipelined == drawn_waiting(tuple(sampling.items()))
    assert torch.equal(recorded_log_probs(pipelined), trainer_log_probs(policy, wanted, pipelined))
    assert (engine.stats.preemptions > 0) == (sizes == TIGHT)
    assert not runner._state._slots and not runner._drawn, "nobody has a place any more"


@cache
def drawn_waiting(sampling: tuple[tuple[str, Any], ...]) -> Groups:
    """By the engine that waits, in a roomy cache: sizes change nothing (``test_exactness``)."""
    return generate_with(policy_of("fp8"), requests(**dict(sampling)), kv_pages=40)[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", ["fp32", "bf16", "fp8-linear", "fp8", "int8-linear", "int8"])
def test_every_flow(preset: Preset) -> None:
    policy, wanted = policy_of(preset), requests()
    direct, pipelined, _, _ = generate_both(policy, wanted)
    assert pipelined == direct
    assert torch.equal(recorded_log_probs(pipelined), trainer_log_probs(policy, wanted, pipelined))


def test_steps_are_captured_once_for_a_size_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a back end whose captured steps serve all lengths, as a GPU's serve thousands."""
    captures: list[Captured | None] = []
    capture = SpecBackend.capture

    def counting(self: SpecBackend, step: Any, beside: Captured | None = None) -> Captured:
        captures.append(beside)
        step()  # a GPU runs the step over padding alone before and while it captures it
        return capture(self, step, beside)

    monkeypatch.setattr(SpecBackend, "capture", counting)
    monkeypatch.setattr(SpecBackend, "reach", lambda self, length, rows: 256)
    policy, wanted = policy_of("fp8"), requests()
    direct, pipelined, engine, runner = generate_both(policy, wanted)
    assert pipelined == direct
    assert [key.size for key in runner._steps] == sorted(
        {key.size for key in runner._steps}, reverse=True
    ), "11 samples at most, and they only get fewer"
    assert len(captures) == len(runner._steps) <= 5
    assert captures[0] is None and all(captures[1:]), "graphs share the memory of the first"
    assert generate(engine, wanted) == direct and len(captures) == len(runner._steps)


@pytest.mark.parametrize("guessed", [False, True])
def test_captured_steps_of_all_sizes_leave_their_logits_in_one_place(
    guessed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a captured step returns keeps its memory for as long as the step."""
    kept: list[torch.Tensor] = []
    capture = SpecBackend.capture

    def keeping(self: SpecBackend, step: Any, beside: Captured | None = None) -> Captured:
        kept.append(step()[0])
        return capture(self, step, beside)

    monkeypatch.setattr(SpecBackend, "capture", keeping)
    sampling = {"top_p": 0.9, "min_p": 0.05}
    policy, wanted = policy_of("fp8"), requests(**sampling)
    expected = drawn_waiting(tuple(sampling.items()))
    engine, (runner,) = make_engine(policy)
    if guessed:
        guess(engine, Knowing(known_of(wanted, expected), 0.8, policy.config.vocab_size, 5))
    assert generate(engine, wanted) == expected
    kinds = {(key.filtered, key.verifies) for key in runner._steps if key.filtered}
    logits = {made.untyped_storage().data_ptr() for made in kept if made.ndim == 2}
    assert len(runner._steps) > 4 and len(logits) == len(kinds) == 1 + guessed


def test_no_step_is_captured_for_longer_sequences_than_the_model_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A back end's steps serve up to twice as many parts of keys, or any length."""
    policy = policy_of("fp8")
    _, (runner,) = make_engine(policy)
    longest = policy.config.max_positions
    for reach in (7, longest - 1, longest, longest + 1, 1 << 30):
        monkeypatch.setattr(SpecBackend, "reach", lambda self, length, rows, of=reach: of)
        assert runner._reach(3, 1) == min(reach, longest)


@pytest.mark.few(1)
@pytest.mark.parametrize("sizes", [{}, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: ",".join(s) or "plain")
def test_guesses_are_rows_of_a_captured_step_and_change_nothing(
    sampling: dict[str, Any], sizes: dict[str, Any]
) -> None:
    policy, wanted = policy_of("fp8"), requests(**sampling)
    expected = drawn_waiting(tuple(sampling.items()))
    engine, (runner,) = make_engine(policy, **sizes)
    guess(engine, Knowing(known_of(wanted, expected), 0.8, policy.config.vocab_size, 5))
    assert generate(engine, wanted) == expected
    stats = engine.stats
    assert stats.drafted_tokens > stats.accepted_tokens > stats.generated_tokens // 4
    assert {key.verifies for key in runner._steps} == {False, True}, "and steps without any"
    assert not runner._state._slots and not runner._drawn


def test_rejected_rows_leave_no_routing() -> None:
    policy, wanted = policy_named("moe"), short_requests({})
    expected = without("moe", 0)
    engine, _ = make_engine(policy)
    guess(engine, Knowing(known_of(wanted, expected), 0.8, policy.config.vocab_size, 5))
    check_equal(generate(engine, wanted), expected)
    assert all(one.routings for group in expected for one in group)
    assert engine.stats.drafted_tokens > engine.stats.accepted_tokens > 20


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_a_device_counts_the_guesses_that_it_has_drawn(data: st.DataObject) -> None:
    """As a loop over the rows of each sample does."""
    slots = data.draw(st.permutations(range(4)))[: data.draw(st.integers(1, 4))]
    rows, drawn, expected = list[tuple[int, int, int]](), list[int](), dict[int, tuple[int, int]]()
    for slot in slots:
        count = data.draw(st.integers(1, 4))
        guesses = [-1, *(data.draw(st.integers(0, 2)) for _ in range(count - 1))]
        tokens = [data.draw(st.integers(0, 2)) for _ in range(count)]
        last = next((at for at in range(count - 1) if tokens[at] != guesses[at + 1]), count - 1)
        expected[slot] = tokens[last], last + 1
        rows += [(slot, guess, place) for place, guess in enumerate(guesses)]
        drawn += tokens
    padded = data.draw(st.integers(0, 3))
    state = DeviceState(4, 3, 64, 9, backend_of(torch.device("cpu")))
    state.tokens.fill_(7)
    columns = torch.tensor([*rows, *[(state.padding, -1, 0)] * padded]).T.contiguous()
    state.append(columns, torch.tensor([*drawn, *[5] * padded]))
    for slot in range(4):
        token, grown = expected.get(slot, (7, 0))
        assert (int(state.tokens[slot]), int(state.lengths[slot])) == (token, grown)
    assert int(state.lengths[state.padding]) == 0


def test_steps_are_measured_once_and_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that counts the tokens of the longest sequence of each replay, and the rows."""
    clock = [0.0]

    def capture(self: SpecBackend, step: Any, beside: Captured | None = None) -> Any:
        def replay() -> Any:
            clock[0] += 1 + 0.5 * float(runner._state.lengths[runner._state.padding])
            return step()

        return SimpleNamespace(replay=replay)

    monkeypatch.setattr(graph_runner, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(graph_runner, "_measured", {})
    monkeypatch.setattr(SpecBackend, "capture", capture)
    monkeypatch.setattr(SpecBackend, "reach", lambda self, length, rows: 256)
    policy, wanted = policy_of("fp8"), requests()
    engine, (runner,) = make_engine(policy, speculation=4)
    assert runner.step_seconds(3, 0) == 1.0 and runner.step_seconds(4, 100) == 51.0
    assert len(runner._steps) == len(graph_runner._measured) == 1
    before, captures = clock[0], engine._executor.captures
    assert runner.step_seconds(4, 7) == 4.5 and clock[0] == before
    assert captures and engine._executor.captures == captures, "nothing was captured or measured"
    assert not runner._state.lengths.any() and runner._rows[1].max() > 1, "other tokens each"
    assert generate(engine, wanted) == drawn_waiting(())
    assert engine._executor.captures > captures, "steps of other sizes, and without guesses"


def test_new_weights_between_steps_need_no_other_capture() -> None:
    policy, wanted = policy_of("bf16", seed=5), requests()
    direct = generate(NativeEngine(policy, RolloutConfig(kv_pages=40), None, 0), wanted)
    engine, _ = make_engine(policy)
    version = policy.version
    groups = generate(engine, wanted, publish_once(policy))
    assert engine.stats.weight_changes == 1
    recorded, new = recorded_log_probs(groups), trainer_log_probs(policy, wanted, groups)
    before = recorded_log_probs(direct)
    versions = torch.tensor([v for group in groups for c in group for v in c.weights_versions])
    of_old, of_new = versions == version, versions == version + 1
    assert of_old.any() and of_new.any() and (of_old | of_new).all()
    assert torch.equal(recorded[of_old], before[of_old])
    assert torch.equal(recorded[of_new], new[of_new])


def test_a_released_engine_makes_its_runner_again_and_draws_the_same() -> None:
    policy, wanted = policy_of("fp8"), requests()
    engine, runners = make_engine(policy)
    first = generate(engine, wanted)
    engine.release()
    assert generate(engine, wanted) == first and len(runners) == 2


def test_logits_that_are_not_finite_leave_a_clean_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, wanted = policy_of("fp8"), requests()
    engine, runners = make_engine(policy)
    expected = generate(engine, wanted)
    with monkeypatch.context() as patch:
        patch.setattr(GraphRunner, "_logits", lambda self, hidden: hidden.float() * torch.nan)
        with pytest.raises(NonFiniteError):
            generate(engine, wanted)
    assert not runners[0]._state._slots and not runners[0]._drawn
    assert generate(engine, wanted) == expected


def test_slow_captures_are_announced_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(graph_runner, "_SLOW_CAPTURE", 0.0)
    monkeypatch.setattr(graph_runner, "_compiled", set())
    policy, wanted = policy_of("fp8"), requests()[:1]
    for lines in (1, 0):
        engine, _ = make_engine(policy)
        generate(engine, wanted)
        said = capsys.readouterr().err
        assert ("for 4 decoding sequences were compiled or loaded" in said) == bool(lines)


@pytest.mark.parametrize("most", [1, 2, 3, 31, 64, 65, 256, 300, 512, 1024])
def test_every_batch_has_a_size_and_the_largest_is_exact(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    assert len(sizes) <= 7 + most // 64
    for batch in range(1, most + 1):
        size = next(size for size in sizes if size >= batch)
        assert size < 2 * batch or size - batch < 64


@pytest.mark.few(1)
@pytest.mark.parametrize("right", [None, 0.8])
@pytest.mark.parametrize("few", [0, 1], ids=["roomy", "few"])
def test_what_is_carried_goes_with_each_step(few: int, right: float | None) -> None:
    """Rows of a sample's guesses are one sequence of its delta rules; padding has a carry of its
    own.
    """
    policy, wanted, expected = hybrid("bf16"), around_chunks(), plainly("bf16")
    with having_carries((30, 5)[few]):
        engine, (runner,) = make_engine(policy, **({"max_sequences": 12}, {"kv_pages": 8})[few])
    if right is not None:
        guess(engine, Knowing(known_of(wanted, expected), right, policy.config.vocab_size, 7))
    check_same(generate(engine, wanted), expected)
    assert (engine.stats.accepted_tokens > 20) == (right is not None)
    assert {key.verifies for key in runner._steps} == {False} | ({True} if right else set())
    check_empty(engine)
