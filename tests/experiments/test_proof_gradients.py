"""``experiments.proof.gradients``: what is measured is the backward alone, over one forward."""

from pathlib import Path
from random import Random

import torch

from experiments.proof import gradients
from isobit import load_config
from isobit.models.folder import load_policy
from isobit.starter import starter_folder

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
SMALL = (
    *("--output", "nowhere", "--device", "cpu", "--rollout.max_new_tokens", "8"),
    *("--training.prompts_per_step", "4", "--training.samples_per_prompt", "4"),
)


def test_wgrad_in_bf16_is_nearer_to_the_exact_gradient() -> None:
    config, random = load_config(RECIPE, SMALL), Random(0)
    found = gradients.measure(starter_folder(), config, lambda *_: float(random.random() < 0.5))
    assert 0.99 < found["own"]["cosine"] < found["wgrad_bf16"]["cosine"] < 1
    assert found["own"]["smallest"] < found["own"]["cosine"]
    assert found["tokens"] > 40 and found["norm"] > 0


def test_a_flow_that_multiplies_bf16_operands_backward_has_the_exact_gradient() -> None:
    """But for sums of another order."""
    config = load_config(RECIPE, [*SMALL, "--precision", "bf16"])
    random = Random(1)
    batches, device = gradients.sample(
        starter_folder(), config, lambda *_: float(random.random() < 0.5)
    )
    policy = load_policy(starter_folder(), config.precision, device)
    own, exact = (gradients.policy_gradient(policy, batches, exact=one) for one in (False, True))
    assert own.keys() == exact.keys() and len(own) == 17
    assert all(torch.isfinite(one).all() and one.any() for one in own.values())
    assert gradients.compare(own, exact)["cosine"] > 1 - 1e-6
