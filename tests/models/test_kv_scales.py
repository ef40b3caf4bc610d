"""Scales of Q, K and V a tensor: what they are made from, that both sides and all batches share
them, and who never has them.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from isobit.config.precision import KvCalibration, PrecisionConfig, Preset
from isobit.config.rollout import RolloutConfig
from isobit.kernels.operands import QkvTransform, RopeTable
from isobit.kernels.spec.attention import PackedAttention
from isobit.kernels.spec.qkv import Heads, fixed_bytes, transform_qkv
from isobit.kernels.spec.quantise import scale_byte, scale_of_byte
from isobit.models.frozen import FrozenPolicy
from isobit.models.kv_calibration import calibrate_kv_scales
from isobit.models.policy import Policy, random_policy
from isobit.models.scorer import ScoredPass, Scorer
from isobit.precision.flow import describe_flow
from isobit.precision.kv_scales import DIVISORS_OF_PROMPTS, byte_of
from isobit.precision.quant_tensor import E4M3_MAX
from isobit.records.packing import pack, sequences_of
from isobit.records.text import Group, Prompt, SamplingParams
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.util.errors import ConfigError, RequestError
from tests.models.policies import delta_nets, whole_batch
from tests.tiny import tiny_model

SHAPE = tiny_model(num_layers=3)
PROMPTS = [tuple(range(first, first + 5 + 7 * first % 11)) for first in range(2, 40, 4)]


def policy_of(preset: Preset, calibration: KvCalibration = "engine", **options: Any) -> Policy:
    precision = PrecisionConfig(
        preset=preset, kv_scales="per_tensor", kv_calibration=calibration, **options
    )
    return random_policy(SHAPE, precision, seed=1)


def scales_of(policy: Policy) -> torch.Tensor:
    assert policy.kv_scales is not None
    return policy.kv_scales.bytes


def test_layers_with_a_delta_rule_have_none() -> None:
    shape = replace(SHAPE, family="qwen3_5_text", **delta_nets("qwen3_5_text", 3))
    precision = PrecisionConfig(preset="fp8", kv_scales="per_tensor", kv_calibration="engine")
    policy = random_policy(shape, precision, seed=1)
    assert policy.kv_scales is not None and policy.kv_scales.layers == {2}
    calibrate_kv_scales(policy, PROMPTS, 64)
    assert policy.kv_scales.bytes[2].all() and not policy.kv_scales.bytes[:2].any()


def test_a_byte_is_that_of_the_quantisers() -> None:
    amax = torch.cat([torch.exp(15 * torch.randn(500)), 448 * 2.0 ** torch.arange(-70.0, 60)])
    assert [byte_of(x, E4M3_MAX) for x in amax.tolist()] == scale_byte(amax).tolist()


@pytest.mark.parametrize("hadamard", [True, False])
def test_given_scales_saturate_and_maxima_are_behind_the_hadamard_matrix(hadamard: bool) -> None:
    table = RopeTable.build(torch.rand(16, dtype=torch.float64), 6)
    given = torch.tensor([122, 0, 125], dtype=torch.uint8)
    plain = QkvTransform(4, 2, 32, table.cos, table.sin, 1e-6, None, None, None)
    qkv = (20 * torch.randn(6, 8 * 32) * torch.exp(torch.randn(6, 1))).bfloat16()
    qkv[2, :7] = torch.inf
    rows = table.rows(torch.arange(6))
    behind = transform_qkv(0, qkv, replace(plain, hadamard=True), rows)
    used = replace(plain, hadamard=hadamard, scale_bytes=given, maxima=torch.zeros(3))
    made = transform_qkv(0, qkv, used, rows)
    vectors = [x.float().abs().amax(-1) for x in behind]
    assert used.maxima is not None
    assert used.maxima.tolist() == [float(x[x.isfinite()].max()) for x in vectors]
    for x, byte in zip(made, fixed_bytes(used), strict=True):
        assert byte is not None
        found, local = Heads.encode(x, "e4m3", byte), Heads.encode(x, "e4m3")
        finite = x.float().isfinite().all(-1)
        if not byte:
            assert torch.equal(found.scales, local.scales)
            continue
        assert (found.scales[finite] == byte).all() and (found.scales[~finite] == 255).all()
        wanted = (x.float() / scale_of_byte(byte)).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(found.units()[finite], wanted.float()[finite])
    with pytest.raises(AssertionError):  # nothing would saturate with scales a token
        assert float(vectors[0][vectors[0].isfinite()].max()) <= 448 * 2.0 ** (122 - 127)


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", ["fp8", "fp8-rollout"])
def test_the_scales_do_not_depend_on_batches(preset: Preset) -> None:
    policy = policy_of(preset)
    calibrate_kv_scales(policy, PROMPTS, tokens_per_batch=1000)
    first = scales_of(policy).clone()
    calibrate_kv_scales(policy, PROMPTS[::-1], tokens_per_batch=1)
    assert torch.equal(scales_of(policy), first) and first.all()
    local = random_policy(SHAPE, PrecisionConfig(preset=preset), seed=1)
    maxima = torch.zeros(3, 3)
    weights = replace(local.weights("rollout"), kv_scales=policy.kv_scales, kv_maxima=maxima)
    for ids in PROMPTS:
        attend = PackedAttention(local.flow.rollout, (len(ids),), torch.arange(len(ids)))
        local.decoder.hidden_states(weights, torch.tensor(ids), attend)
    expected = [
        [byte_of(x, divisor) for x, divisor in zip(layer, DIVISORS_OF_PROMPTS, strict=True)]
        for layer in maxima.tolist()
    ]
    assert first.tolist() == expected


@pytest.mark.parametrize("preset", ["fp8", "fp8-rollout"])
def test_an_updates_maxima_are_those_of_its_learning_forward_alone(preset: Preset) -> None:
    policy = policy_of(preset, "trainer", first_layers_bf16=1)
    calibrate_kv_scales(policy, PROMPTS, 100)
    scales = policy.kv_scales
    assert scales is not None and not scales.bytes[0].any()
    batch = whole_batch(torch.arange(2, 40), (30, 8))
    Scorer(policy).score(batch)
    assert not scales.learnt.any()
    ScoredPass(policy, batch, "none").forward()
    assert scales.learnt[1:].all() and not scales.learnt[0].any()
    wanted = [
        [byte_of(1.05 * x, E4M3_MAX) if x else 0 for x in row] for row in scales.learnt.tolist()
    ]
    policy.publish()
    assert scales.bytes.tolist() == wanted and not scales.is_due
    scales.forget_learnt()
    policy.publish()
    assert scales.bytes.tolist() == wanted  # nothing was seen


@pytest.mark.parametrize(("calibration", "is_due"), [("engine", True), ("never", False)])
def test_who_is_calibrated_again(calibration: KvCalibration, is_due: bool) -> None:
    policy = policy_of("fp8", calibration)
    scales = policy.kv_scales
    assert scales is not None and scales.is_due and not scales.is_set
    calibrate_kv_scales(policy, PROMPTS, 100)
    assert not scales.is_due and scales.is_set
    before = scales.bytes.clone()
    policy.publish()
    assert scales.is_due == is_due and torch.equal(scales.bytes, before)


def differing(policy: Policy, engine: NativeEngine) -> list[bool]:
    """Of each sampled token, whether the training forward has another log-probability."""
    requests = [
        Request(Prompt(f"p/{i}", "", ids), 0, 2, SamplingParams(5, 1.0))
        for i, ids in enumerate(PROMPTS[:4])
    ]
    groups = [
        Group(one.prompt, 0, made)
        for one, made in zip(requests, generate(engine, requests), strict=True)
    ]
    batch = pack(sequences_of(groups, [[0.0, 0.0]] * 4), 100)[0]
    return (Scorer(policy).score(batch).log_probs != batch.recorded_log_probs).tolist()


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", ["fp8", "fp8-rollout"])
def test_both_sides_have_the_scales_however_far_they_reach(preset: Preset) -> None:
    policy = policy_of(preset)
    sizes = RolloutConfig(kv_pages=8, max_batched_tokens=7)
    engine = NativeEngine(policy, sizes, None, seed=0)
    with pytest.raises(RequestError, match="calibrate_kv_scales"):
        differing(policy, engine)
    calibrate_kv_scales(policy, PROMPTS, 100)
    assert any(differing(policy, engine)) == (preset == "fp8-rollout") != policy.flow.exact
    scales = policy.kv_scales
    assert scales is not None
    roomy = scales.largest_ratio()
    assert 0 < roomy < 1
    scales.bytes.sub_(4)
    assert any(differing(policy, engine)) == (preset == "fp8-rollout")
    assert scales.largest_ratio() > 8 * roomy


def test_a_frozen_model_has_scales_a_token() -> None:
    policy = policy_of("fp8")
    calibrate_kv_scales(policy, PROMPTS, 100)
    frozen, batch = FrozenPolicy.of(policy), whole_batch(torch.arange(2, 40), (38,))
    local = random_policy(SHAPE, PrecisionConfig(preset="fp8"), seed=1)
    found = Scorer(frozen).score(batch).log_probs
    assert torch.equal(found, Scorer(local).score(batch).log_probs)
    assert not torch.equal(found, Scorer(policy).score(batch).log_probs)
    assert not frozen.is_equal_to(policy)
    frozen.take(policy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "fp8-linear", "kv_scales": "per_tensor"}, "needs Q, K and V in FP8"),
        ({"preset": "int8", "kv_scales": "per_tensor"}, "needs Q, K and V in FP8"),
        ({"preset": "fp8", "kv_calibration": "engine"}, "needs no calibration"),
    ],
)
def test_flows_without_such_scales_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        random_policy(SHAPE, PrecisionConfig(**options), seed=0)


def test_the_flow_says_so() -> None:
    lines = describe_flow(policy_of("fp8-rollout").flow)
    assert any("rollout E4M3, a scale a tensor | training BF16" in line for line in lines)
