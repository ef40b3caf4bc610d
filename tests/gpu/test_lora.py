"""On a GPU too, adapters are part of one function of rollout and training, and learn."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from isobit.config.tables import LORA_TARGETS, Preset, Recompute, named_precision

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from isobit.models.adapters import check_delivered, drawn_adapters
from isobit.models.config import Lora
from isobit.models.policy import Policy, random_masters, random_policy
from isobit.models.saving import save_policy
from isobit.models.scorer import ScoredPass, Scorer
from isobit.proof.verify import VerifyOptions, verify_policy
from isobit.starter import starter_folder
from isobit.util.errors import MismatchError
from tests.gpu.conftest import SHAPES
from tests.models.policies import whole_batch
from tests.rollout.test_adapters import adapters_of, check_together

ALL = Lora(8, 16.0, LORA_TARGETS)
SOME = Lora(33, 7.0, ("k_proj", "v_proj", "up_proj"), rslora=True)
LENGTHS = (1, 18, 67, 300)
OPTIONS = VerifyOptions(prompts=6, samples=2, max_new_tokens=16)


def policy_of(shape: str, preset: Preset, lora: Lora = ALL, device: str = "cuda") -> Policy:
    """With adapters that are not zero, and the same numbers on every device."""
    config = replace(SHAPES[shape], lora=lora)
    drawn = ((name, one.to(device)) for name, one in random_masters(config, 0))
    masters = drawn_adapters(drawn, config, 0)
    policy = Policy(config, named_precision(preset), masters, device)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for master in policy.parameters():
            master.add_((0.05 * torch.randn(master.shape, generator=generator)).to(master))
    policy.publish()
    return policy


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "moe"])
@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8"])
def test_no_log_probability_differs(shape: str, preset: Preset) -> None:
    result = verify_policy(policy_of(shape, preset), OPTIONS)
    assert result.comparison.tokens_differing == 0
    assert result.missing == () and result.comparison.tokens_compared > 2_000


@pytest.mark.parametrize("preset", ["fp8-linear", "int8-linear", "fp8"])
def test_any_rank_and_targets_are_exact(preset: Preset) -> None:
    assert verify_policy(policy_of("qwen3", preset, SOME), OPTIONS).exit_code == 0


def gradients(policy: Policy, recompute: Recompute) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids, targets = torch.randint(policy.config.vocab_size, (2, sum(LENGTHS)), generator=generator)
    batch = whole_batch(ids, LENGTHS, targets)
    scored = ScoredPass(policy, batch, recompute)
    scores = scored.forward()
    assert torch.equal(scores.log_probs, Scorer(policy).score(batch).log_probs)
    scored.backward(torch.linspace(-1, 1, len(scores.log_probs)))
    found = {name: one.grad for name, one in policy.masters.items() if one.grad is not None}
    assert set(found) == {name for name in policy.masters if "lora_" in name} != set()
    return {name: gradient.cpu() for name, gradient in found.items()}


@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("shape", ["qwen3", "qwen2", "smollm2"])
def test_adapters_alone_have_gradients_which_are_right(shape: str, preset: Preset) -> None:
    """Within twice the error that the CPU's arithmetic of the flow has against FP32's."""
    found = gradients(policy_of(shape, preset), "none")
    again = gradients(policy_of(shape, preset), "full")
    cpu = gradients(policy_of(shape, preset, device="cpu"), "none")
    exact = gradients(policy_of(shape, "fp32", device="cpu"), "none")
    for name, expected in exact.items():
        assert torch.equal(found[name], again[name]), name
        allowed = 2 * (cpu[name] - expected).norm()
        assert (found[name] - expected).norm() <= allowed, name


def test_a_publication_is_one_rounding() -> None:
    policy = policy_of("qwen3", "fp8")
    joined = policy.joined
    assert joined is not None and joined.are_read(policy)
    for name in joined.places:
        held = policy.weights("rollout").linears[name.removesuffix(".weight")].matrix
        assert isinstance(held, torch.Tensor)
        assert torch.equal(held, policy.masters[name].detach().bfloat16())
    check_delivered(policy)
    joined.published[5] += 1
    with pytest.raises(MismatchError, match="rollout reads another"):
        check_delivered(policy)


@pytest.mark.parametrize("preset", ["fp8", "int8"])
def test_adapters_in_one_batch_draw_what_each_draws_alone(preset: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    config = replace(SHAPES["qwen3"], tokenizer_size=None)
    save_policy(random_policy(config, "bf16", 0), base, tokenizer_from=starter_folder())
    folders = adapters_of(base, tmp_path)
    check_together(base, folders, preset, "cuda", ("direct", "captured"))
