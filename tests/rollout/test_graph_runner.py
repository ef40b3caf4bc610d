"""The runner of a GPU, on the specification: state on the device, padded and captured decode steps,
tokens that arrive behind the step.  What it gives is what the engine gives that waits.
"""

from functools import cache
from typing import Any

import pytest
import torch

from isobit.config.precision import Preset
from isobit.config.rollout import RolloutConfig
from isobit.kernels.backend import Captured
from isobit.kernels.spec.backend import SpecBackend
from isobit.models.function import SampledPolicy
from isobit.models.policy import Policy
from isobit.records.text import Completion
from isobit.rollout import graph_runner
from isobit.rollout.engine import generate
from isobit.rollout.executor import PipelinedExecutor
from isobit.rollout.graph_runner import GraphRunner, graph_sizes
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.util.errors import NonFiniteError
from tests.rollout.test_exactness import (
    TIGHT,
    generate_with,
    policy_of,
    publish_once,
    recorded_log_probs,
    requests,
    trainer_log_probs,
)

Groups = list[list[Completion]]
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"stop_token_ids": (5,)},
    {"stop_token_ids": (5,), "temperature": 0.7, "top_k": 9},
    {"top_p": 0.9, "min_p": 0.05},
]


def make_engine(policy: Policy, **sizes: Any) -> tuple[NativeEngine, list[GraphRunner]]:
    """An engine over a GraphRunner, and the runners that it has made."""
    config = RolloutConfig.model_validate({"kv_pages": 40} | sizes)
    runners: list[GraphRunner] = []

    def make_runner(policy: SampledPolicy, num_pages: int) -> GraphRunner:
        runners.append(GraphRunner(policy, num_pages, config.max_sequences))
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
    monkeypatch.setattr(SpecBackend, "reach", lambda self, length: 256)
    policy, wanted = policy_of("fp8"), requests()
    direct, pipelined, engine, runner = generate_both(policy, wanted)
    assert pipelined == direct
    assert [key.size for key in runner._steps] == sorted(
        {key.size for key in runner._steps}, reverse=True
    ), "11 samples at most, and they only get fewer"
    assert len(captures) == len(runner._steps) <= 5
    assert captures[0] is None and all(captures[1:]), "graphs share the memory of the first"
    assert generate(engine, wanted) == direct and len(captures) == len(runner._steps)


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
