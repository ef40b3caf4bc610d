"""A mixture of experts under ``isobit verify``: the same experts in rollout and training, counted;
and routers that differ, named.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.kernels.routing import Routing
from isobit.kernels.spec import experts as experts_module
from isobit.kernels.spec.backend import SpecBackend
from isobit.models.config import Experts, ModelConfig
from isobit.models.policy import Policy, random_policy
from isobit.proof.bisect import bisect_policy, describe_bisect
from isobit.proof.scenarios import tied_routers
from isobit.proof.verify import VerifyOptions, verify_policy

CONFIG = ModelConfig(
    "qwen3_moe", 96, 72, 64, 2, 4, 2, 16, 192, 1e-6, 1e4, True, experts=Experts(6, 2, 40, True)
)
GPT_OSS = replace(CONFIG, family="gpt_oss", sliding_window=20, windowless_layers=(1,))
SMALL = VerifyOptions(prompts=4, samples=2, max_new_tokens=6)
TWINS = 1, 4
"""Experts whose rows of the router are equal."""


def make(
    preset: Preset = "fp8", same_matrices: bool = False, config: ModelConfig = CONFIG
) -> Policy:
    """Routers with two experts that always tie, and that all tokens like; biases and sinks that
    count.
    """
    policy = random_policy(config, PrecisionConfig(preset=preset), seed=0)
    first, second = TWINS
    with torch.no_grad():
        for name, master in policy.masters.items():
            if name.endswith("proj.weight"):
                master.mul_(4)
            if name.endswith(("bias", "sinks")):
                master.copy_(4 * torch.randn(len(master)))
            if name.endswith("router.weight"):
                master.mul_(4)
                master[second] = master[first]
            if same_matrices and ".experts." in name:
                rows = master.shape[0] // 6
                master[second * rows : (second + 1) * rows] = master[first * rows : 2 * rows]
    policy.publish()
    return policy


def replace_route(
    monkeypatch: pytest.MonkeyPatch, mutant: Callable[..., Routing], is_due: Callable[[], bool]
) -> None:
    def route(*arguments: Any) -> Routing:
        return (mutant if is_due() else experts_module.route)(*arguments)

    monkeypatch.setattr(SpecBackend, "route", staticmethod(route))


def with_ties_to_the_higher(
    x: torch.Tensor, router: torch.Tensor, top_k: int, renormalise: bool, bias: None
) -> Routing:
    """The mirrored experts, mirrored back."""
    found = experts_module.route(x, router.flip(0), top_k, renormalise)
    return Routing(router.shape[0] - 1 - found.experts, found.weights, found.logits.flip(1))


def with_bf16_logits(
    x: torch.Tensor, router: torch.Tensor, top_k: int, renormalise: bool, bias: None
) -> Routing:
    logits = experts_module.route(x, router, top_k, renormalise).logits.bfloat16().float()
    weights, experts = logits.softmax(-1).topk(top_k)
    return Routing(experts.int(), weights / weights.sum(-1, keepdim=True), logits)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("one_scenario")
@pytest.mark.parametrize("config", [CONFIG, GPT_OSS], ids=lambda config: config.family)
@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8"])
def test_exact_flows_route_alike(preset: Preset, config: ModelConfig) -> None:
    result = verify_policy(make(preset, config=config), SMALL)
    counts = result.comparison
    assert not counts.differs
    assert counts.routings_compared == counts.tokens_compared > 0 == counts.routings_differing
    assert result.as_json()["routings_differing"] == 0


def test_tied_routers_have_tied_biases() -> None:
    policy = make(config=GPT_OSS)
    plain, tied = policy.weights("training").plain, "layers.0.router.bias"
    before = plain[tied]
    with tied_routers(policy):
        groups = plain[tied].view(2, 3), plain["layers.0.router.weight"].view(2, 3, -1)
        assert all(torch.equal(one, one[:, :1].expand_as(one)) for one in groups)
    assert plain[tied] is before and len(before.unique()) == 6


@pytest.mark.usefixtures("one_scenario")
def test_two_functions_route_differently() -> None:
    counts = verify_policy(make("fp8-rollout"), SMALL).comparison
    assert 0 < counts.routings_differing < counts.routings_compared == counts.tokens_compared


@pytest.mark.usefixtures("one_scenario")
def test_a_dense_model_compares_no_routing() -> None:
    config = ModelConfig("qwen3", 96, 72, 64, 1, 4, 2, 16, 192, 1e-6, 1e4, True)
    result = verify_policy(random_policy(config, PrecisionConfig(preset="bf16"), 0), SMALL)
    assert result.comparison.routings_compared == 0
    assert "routings_compared" not in result.as_json()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("one_scenario")
@pytest.mark.parametrize(
    ("mutant", "site", "kind"),
    [
        (with_ties_to_the_higher, "layers.0.router.experts", "router, choice of experts"),
        (with_bf16_logits, "layers.0.router.logits", "router, logits"),
    ],
)
def test_a_router_that_differs_is_named(
    mutant: Callable[..., Routing],
    site: str,
    kind: str,
    in_rollout: Callable[[], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace_route(monkeypatch, mutant, in_rollout)
    result = bisect_policy(make(), SMALL)
    assert result.exit_code == 1
    assert result.verified.comparison.tokens_differing > 0
    assert result.verified.comparison.routings_differing > 0
    assert result.parting is not None
    assert (result.parting.difference.site, result.parting.kind) == (site, kind)
    assert site in describe_bisect(result)[0]


@pytest.mark.usefixtures("one_scenario")
def test_other_experts_of_equal_outputs_are_a_difference(
    in_rollout: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which no log-probability shows."""
    replace_route(monkeypatch, with_ties_to_the_higher, in_rollout)
    result = verify_policy(make("bf16", same_matrices=True), SMALL)
    assert result.comparison.routings_differing > 0 == result.comparison.tokens_differing
    assert result.exit_code == 1
