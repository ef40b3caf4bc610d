"""The share of published weights that a publication changes, in E4M3 and in BF16."""

import pytest
import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.kernels.spec.quantise import quantise_blocks
from isobit.models.config import ModelConfig
from isobit.models.policy import Policy, random_policy

CONFIG = ModelConfig("qwen3", 64, 128, 256, 2, 2, 2, 64, 128, 1e-6, 1e4, True)
PRESETS: list[Preset] = ["fp8", "bf16", "fp8-rollout"]


def publish_after(policy: Policy, move: float) -> float:
    """Move every master by so much, up or down, as AdamW's first step does."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for master in policy.parameters():
            master += torch.randn(master.shape, generator=generator).sign() * move
    policy.publish()
    return policy.change.share


@pytest.mark.parametrize("preset", PRESETS)
def test_nothing_changes_without_a_step_and_almost_all_with_a_large_one(preset: Preset) -> None:
    policy = random_policy(CONFIG, PrecisionConfig(preset=preset), seed=0)
    assert policy.change.share == 0, "nothing was published again"
    assert publish_after(policy, 0.0) == 0
    assert publish_after(policy, 0.1) > 0.95


def test_the_share_is_that_of_the_bytes_of_all_linears() -> None:
    policy = random_policy(CONFIG, PrecisionConfig(preset="fp8"), seed=0)
    names = [f"{name}.weight" for name in policy.weights("training").linears]

    def published() -> torch.Tensor:
        return torch.cat(
            [
                quantise_blocks(policy.masters[name].detach().bfloat16())
                .values.view(torch.uint8)
                .flatten()
                for name in names
            ]
        )

    before = published()
    share = publish_after(policy, 1e-5)
    assert share == float((published() != before).double().mean())
    assert 0.01 < share < 0.1


def test_one_changed_number_is_seen() -> None:
    policy = random_policy(CONFIG, PrecisionConfig(preset="fp8"), seed=0)
    with torch.no_grad():
        policy.masters["layers.1.down_proj.weight"][5, 7] *= -1
    policy.publish()
    numbers = sum(
        weight.matrix.values.numel()  # pyright: ignore[reportAttributeAccessIssue]
        for weight in policy.weights("rollout").linears.values()
    )
    assert policy.change.share == 1 / numbers
