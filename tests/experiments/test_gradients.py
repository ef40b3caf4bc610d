"""``experiments.gradients``: the exact backward, also on a Hopper GPU where there is one, the plain
FP32 model, and a small run from training to bars.
"""

import pytest
import torch

from experiments import exact_backward, gradients
from isobit.config.tables import PrecisionConfig
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
