"""What has to happen under a scenario happens, whatever the page size, for the workloads of the
doctor and of verify.
"""

import pytest

from isobit.proof.doctor import _ON_DEVICE, _SHAPE
from isobit.proof.scenarios import build_workload, engine_scenarios
from isobit.proof.verify import VerifyOptions
from isobit.rollout.engine import generate
from tests.rollout.delayed_runner import DelayedRunner
from tests.rollout.history_model import VOCAB, make_engine
from tests.rollout.test_open_engine import both_executors


@pytest.mark.few(1)  # test_verify.py says what does not happen in its own
@both_executors
@pytest.mark.parametrize("page_tokens", [128, 64])  # of a GPU, and of the CPU
@pytest.mark.parametrize("options", [_ON_DEVICE, VerifyOptions()])
def test_everything_happens(options: VerifyOptions, page_tokens: int, pipelined: bool) -> None:
    sizes = options.prompts, options.samples, options.max_new_tokens
    workload = build_workload(VOCAB, _SHAPE.max_positions, *sizes, options.seed, page_tokens)
    for scenario in engine_scenarios(workload):
        if scenario.turns > 1 or not scenario.must_happen:
            continue  # others give results and weights
        engine, _ = make_engine(
            page_tokens=page_tokens,
            wrap=DelayedRunner if pipelined else None,
            **scenario.rollout.model_dump(exclude_unset=True),
        )
        generate(engine, workload.requests(scenario))
        for count in scenario.must_happen:
            assert getattr(engine.stats, count), f"{scenario.name}: {count}"
