"""The exact backward that gradients are compared with has the same forward, bit for bit; flipped
bits are caught, masked or missed for a reason.  ``ISOBIT_FLIPS=1000`` runs the whole campaign.
"""

import os
from random import Random

import pytest
import torch

from experiments import exact_backward, gradients
from experiments.bit_flips import REASONS, Outcome, campaign, flip_bit, table
from isobit.config.precision import PrecisionConfig
from isobit.kernels.backend import usable_devices
from isobit.models.policy import random_policy

DEVICES = [device for device, problem in usable_devices().items() if problem is None]


@pytest.fixture
def size() -> gradients.Size:
    return gradients.Size(layers=2, sequences=2, length=128, steps=2)


def test_plain_gradients_are_those_of_the_fp32_flow(size: gradients.Size) -> None:
    policy = random_policy(size.config, PrecisionConfig(preset="fp32"), seed=0)
    _, flow = gradients.gradients(policy, gradients.batch_of(size, 0))
    loss, plain = exact_backward.plain_gradients(policy, gradients.text(size, 0))
    assert loss == pytest.approx(6.3, abs=0.2)
    assert plain.keys() == flow.keys()
    for name, gradient in flow.items():
        assert torch.allclose(
            plain[name], gradient, rtol=1e-3, atol=1e-3 * float(gradient.abs().max())
        ), name


@pytest.mark.parametrize("device", DEVICES)
def test_the_exact_backward_has_the_same_forward_and_is_left_behind(
    size: gradients.Size, device: str
) -> None:
    policy, batch = (
        random_policy(size.config, PrecisionConfig(preset="fp8"), seed=0, device=device),
        gradients.batch_of(size, 0),
    )
    log_probs, before = gradients.gradients(policy, batch)
    with exact_backward.exact_backward(policy) as alone:
        exact_log_probs, exact = gradients.gradients(policy, batch)
    _, after = gradients.gradients(policy, batch)
    assert torch.equal(log_probs, exact_log_probs)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(
        torch.equal(before[name], exact[name]) for name in before if name.endswith("_proj.weight")
    )
    assert alone.keys() == policy.weights("training").linears.keys()
    assert all(0.99 < value < 1 - 1e-6 for pair in alone.values() for value in pair)
    # nothing lies between it and the loss that is quantised: its cosine is its own
    last = "layers.1.down_proj"
    assert exact_backward.cosine(
        before[f"{last}.weight"], exact[f"{last}.weight"]
    ) == pytest.approx(alone[last][1], abs=1e-6)


@pytest.mark.exhaustive
def test_a_small_comparison_meets_the_bars_and_says_which(size: gradients.Size) -> None:
    found = gradients.compare(size, "cpu")
    assert list(found["bars"].values()) == [True] * 5
    assert found["tiny"]["root_mean_square"] == pytest.approx(1e-12, rel=0.05)
    assert len(found["exact"]["worst"]) == 10 and found["exact"]["matrices"] == 2 * 4 + 2
    assert (
        found["exact"]["smallest"]
        == min(found["exact"]["worst"].values())
        > found["fp32"]["smallest"]
    )
    found["alone"]["random"]["dw"] = 0.99
    assert not gradients.bars(found)["one linear alone at least 0.9985"]


@pytest.fixture(scope="module")
def found() -> list[Outcome]:
    return campaign(int(os.environ.get("ISOBIT_FLIPS", "16")), seed=1)


@pytest.mark.exhaustive
def test_what_is_missed_has_a_reason(found: list[Outcome]) -> None:
    made = table(found)
    assert sum(made["all"].values()) == made["flips"] == len(found)
    assert set(made["missed"]) <= set(REASONS)
    assert made["all"]["caught"] > 0 < made["all"]["masked"]


@pytest.mark.exhaustive
def test_nothing_that_a_forward_of_the_rollout_reads_is_missed(found: list[Outcome]) -> None:
    """The cache and the activations of sampling: the recorded log-probabilities say."""
    at_risk = [one for one in found if one.where.startswith(("cache", "rollout", "repeat"))]
    assert at_risk and not [one for one in at_risk if one.state == "missed"]


def test_one_bit_flips() -> None:
    tensors = [torch.zeros(3), torch.zeros((), dtype=torch.uint8), torch.zeros(2, 2).t()]
    for seed in range(20):
        before = [x.clone() for x in tensors]
        flip_bit(Random(seed), tensors)
        changed = sum(
            int((a.reshape(-1).view(torch.uint8) ^ b.reshape(-1).view(torch.uint8)).count_nonzero())
            for a, b in zip(tensors, before, strict=True)
        )
        assert changed == 1
