"""On a GPU too, what the engine records is what the training forward computes: graphs, chunks,
sharing, preemption.
"""

from collections.abc import Callable

import pytest
import torch

from isobit.config.precision import Preset
from isobit.config.rollout import RolloutConfig
from isobit.models.policy import Policy
from isobit.proof.verify import VerifyOptions, VerifyResult, verify_policy
from isobit.records.text import Prompt, SamplingParams
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request

MakePolicy = Callable[..., Policy]

OPTIONS = VerifyOptions(prompts=10, samples=3, max_new_tokens=24)


def check(policy: Policy) -> VerifyResult:
    return verify_policy(policy, OPTIONS)


@pytest.mark.parametrize("preset", ["fp8", "fp8-linear", "int8", "int8-linear", "bf16"])
def test_no_log_probability_differs(shape: str, preset: Preset, make_policy: MakePolicy) -> None:
    result = check(make_policy(shape, preset))
    assert result.comparison.tokens_differing == 0
    assert result.missing == () and result.comparison.tokens_compared > 10_000


@pytest.mark.parametrize("preset", ["fp8", "int8", "bf16"])
@pytest.mark.parametrize("shape", ["moe", "hybrid_experts"])
def test_no_routing_differs(shape: str, preset: Preset, make_policy: MakePolicy) -> None:
    comparison = check(make_policy(shape, preset)).comparison
    assert comparison.routings_differing == 0 and comparison.routings_compared > 10_000


@pytest.mark.parametrize("shape", ["qwen3", "moe"])
@pytest.mark.parametrize(("preset", "attention"), [("fp8", "int8"), ("int8", "fp8")])
def test_attention_in_another_format_is_exact_too(
    shape: str, preset: Preset, attention: str, make_policy: MakePolicy
) -> None:
    assert check(make_policy(shape, preset, attention=attention)).exit_code == 0


def test_fp32_scales_are_exact_too(make_policy: MakePolicy) -> None:
    assert check(make_policy("qwen3", "fp8", scales="fp32")).exit_code == 0


@pytest.mark.parametrize("shape", ["qwen3", "moe"])
def test_scales_a_tensor_are_exact_too(shape: str, make_policy: MakePolicy) -> None:
    policy = make_policy(shape, "fp8", kv_scales="per_tensor", kv_calibration="engine")
    assert check(policy).exit_code == 0
    assert policy.kv_scales is not None and policy.kv_scales.bytes.all()


def test_a_flow_with_two_functions_differs(make_policy: MakePolicy) -> None:
    result = check(make_policy("qwen3", "fp8-rollout"))
    assert result.comparison.tokens_differing > result.comparison.tokens_compared // 2


@pytest.mark.parametrize("sizes", [{}, {"max_sequences": 3}, {"max_batched_tokens": 33}])
def test_a_hybrids_sample_does_not_depend_on_how_it_was_scheduled(
    sizes: dict[str, int], make_policy: MakePolicy
) -> None:
    policy = make_policy("hybrid", "int8", trainable=False)
    expected = generate(
        NativeEngine(policy, RolloutConfig(max_sequences=1, speculation=0), None, 1), requests(4)
    )
    made = generate(NativeEngine(policy, RolloutConfig(**sizes), None, 1), requests(4))  # type: ignore[arg-type]
    assert made == expected


def requests(samples: int, **sampling: float) -> list[Request]:
    generator = torch.Generator().manual_seed(3)
    prompts = [
        tuple(torch.randint(1000, (n,), generator=generator).tolist()) for n in (5, 130, 300, 64)
    ]
    params = SamplingParams(40, **sampling)  # type: ignore[arg-type]
    return [Request(Prompt(f"p{i}", "", ids), 0, samples, params) for i, ids in enumerate(prompts)]


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.0}, {"top_k": 20, "top_p": 0.9, "temperature": 1.3}]
)
def test_a_sample_does_not_depend_on_how_it_was_scheduled(
    sampling: dict[str, float], make_policy: MakePolicy
) -> None:
    policy = make_policy("qwen3", "fp8", trainable=False)
    settings = [
        {},
        {"max_sequences": 3},
        {"kv_pages": 9, "max_batched_tokens": 70},
        {"max_batched_tokens": 33, "max_sequences": 7},
    ]
    made = [
        generate(NativeEngine(policy, RolloutConfig(**one), None, seed=1), requests(4, **sampling))
        for one in settings
    ]  # type: ignore[arg-type]
    assert all(other == made[0] for other in made[1:])
    alone = [
        generate(NativeEngine(policy, RolloutConfig(), None, seed=1), [one])[0]
        for one in requests(4, **sampling)
    ]
    assert alone == made[0]


def test_samples_of_a_prompt_differ_and_repeat_with_their_seed(make_policy: MakePolicy) -> None:
    policy = make_policy("qwen3", "fp8", trainable=False)
    first, again, other = (
        generate(NativeEngine(policy, RolloutConfig(), None, seed), requests(4))
        for seed in (0, 0, 1)
    )
    assert first == again and first != other
    assert len({completion.token_ids for group in first for completion in group}) == 16


def test_new_weights_are_read_without_another_capture(make_policy: MakePolicy) -> None:
    policy = make_policy("qwen3", "fp8")
    engine = NativeEngine(policy, RolloutConfig(), None, seed=0)
    before = generate(engine, requests(2))
    with torch.no_grad():
        for master in policy.parameters():
            master.mul_(1.5)
    policy.publish()
    after = generate(engine, requests(2))
    fresh = generate(NativeEngine(policy, RolloutConfig(), None, seed=0), requests(2))
    assert after == fresh and after != before
    assert {v for group in after for c in group for v in c.weights_versions} == {2}
