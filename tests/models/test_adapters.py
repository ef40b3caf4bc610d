"""LoRA: one function in rollout and training, gradients of the adapters alone, and PEFT's files."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from isobit.config.tables import LORA_TARGETS, Family, PrecisionConfig, Recompute
from isobit.models.adapters import (
    adapter_masters,
)
from isobit.models.config import Lora, ModelConfig
from isobit.models.policy import Policy, random_masters, random_policy
from isobit.models.scorer import ScoredPass, Scorer
from tests.models.exactness_probe import packed, paged
from tests.models.policies import whole_batch

LENGTHS = (1, 18, 67, 130)
FLOWS = ("fp32", "bf16", "fp8-linear", "fp8", "int8-linear", "int8")
FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")
ALL = Lora(8, 12.0, LORA_TARGETS)
SOME = Lora(5, 7.0, ("k_proj", "v_proj", "up_proj"), rslora=True)


def config_of(family: Family = "qwen3", lora: Lora | None = ALL, tied: bool = True) -> ModelConfig:
    config = ModelConfig(family, 128, 128, 192, 2, 4, 2, 32, 256, 1e-6, 1e4, tied)
    return replace(config, lora=lora)


def moved(policy: Policy, seed: int = 1, size: float = 0.05) -> Policy:
    """With adapters that are not zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for master in policy.parameters():
            master.add_(size * torch.randn(master.shape, generator=generator))
    policy.publish()
    return policy


def make(preset: str = "fp32", **options: Any) -> Policy:
    return moved(random_policy(config_of(**options), preset, seed=0))


def tokens(policy: Policy, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(policy.config.vocab_size, (sum(LENGTHS),), generator=generator)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("preset", FLOWS)
def test_rollout_and_training_are_one_function_in_which_adapters_count(
    family: Family, preset: str
) -> None:
    policy = make(preset, family=family)
    ids = tokens(policy)
    trained = packed(policy, ids, LENGTHS)
    assert torch.equal(paged(policy, ids, LENGTHS), trained)
    base = random_policy(config_of(family, None), preset, seed=0)
    assert not torch.equal(packed(base, ids, LENGTHS), trained)


@pytest.mark.parametrize("lora", [SOME, replace(ALL, rank=33), replace(ALL, targets=("o_proj",))])
@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8"])
def test_any_rank_and_targets_are_exact(preset: str, lora: Lora) -> None:
    policy = make(preset, lora=lora)
    ids = tokens(policy)
    assert torch.equal(paged(policy, ids, LENGTHS), packed(policy, ids, LENGTHS))


@pytest.mark.parametrize("preset", ["fp32", "fp8", "int8"])
def test_without_a_change_adapters_leave_the_base_as_it_is(preset: str) -> None:
    policy = random_policy(config_of(), preset, seed=0)
    base = random_policy(config_of(lora=None), preset, seed=0)
    ids = tokens(policy)
    assert torch.equal(packed(policy, ids, LENGTHS), packed(base, ids, LENGTHS))


def gradients(policy: Policy, recompute: Recompute = "none") -> dict[str, torch.Tensor]:
    batch = whole_batch(tokens(policy), LENGTHS, tokens(policy, 4))
    scored = ScoredPass(policy, batch, recompute)
    scores = scored.forward()
    assert torch.equal(scores.log_probs, Scorer(policy).score(batch).log_probs)
    d = torch.linspace(-1, 1, len(scores.log_probs))
    scored.backward(d)
    return {name: master.grad for name, master in policy.masters.items() if master.grad is not None}


@pytest.mark.parametrize("lora", [ALL, SOME])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_merged_matrices(family: Family, lora: Lora) -> None:
    """With W' = W + s B A, and dW' its gradient: dA = s B^T dW' and dB = s dW' A^T."""
    policy = make(family=family, lora=lora)
    assert set(policy.masters) == set(adapter_masters(policy.config))
    described, s = policy.decoder.masters(), lora.scale
    whole: dict[str, torch.Tensor] = {}
    for name, values in random_masters(replace(policy.config, lora=None), 0):
        whole[name] = values
    matrices: list[tuple[str, slice, torch.Tensor, torch.Tensor, str, int]] = []
    for name in [one for one in policy.masters if one.endswith("lora_A.weight")]:
        path = name.removesuffix(".lora_A.weight")
        parts = {part.split(".")[-2]: n for part, n in described[f"{path}.weight"].parts.items()}
        first_b = 0
        for index, target in enumerate(one for one in parts if one in lora.targets):
            begin = sum(list(parts.values())[: list(parts).index(target)])
            rows = slice(begin, begin + parts[target])
            a = policy.masters[name].detach()[index * lora.rank : (index + 1) * lora.rank]
            b = policy.masters[f"{path}.lora_B.weight"].detach()
            b = b[first_b : first_b + parts[target]]
            whole[f"{path}.weight"][rows] += s * (b @ a)
            matrices.append((path, rows, a, b, f"{path}.weight", index))
            first_b += parts[target]
    merged = Policy(replace(policy.config, lora=None), PrecisionConfig(preset="fp32"), whole)
    found, expected = gradients(policy), gradients(merged)
    seen: dict[str, int] = {}
    for path, rows, a, b, matrix, index in matrices:
        dw = expected[matrix][rows]
        d_a = found[f"{path}.lora_A.weight"][index * lora.rank : (index + 1) * lora.rank]
        first = seen.get(path, 0)
        d_b = found[f"{path}.lora_B.weight"][first : first + len(b)]
        seen[path] = first + len(b)
        torch.testing.assert_close(d_a, s * b.t() @ dw, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(d_b, s * dw @ a.t(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8"])
def test_gradients_do_not_depend_on_what_is_computed_again(preset: str) -> None:
    policy = make(preset, family="qwen2")
    levels: tuple[Recompute, ...] = ("none", "mlp", "full")
    found: list[dict[str, torch.Tensor]] = []
    for level in levels:
        found.append({name: grad.clone() for name, grad in gradients(policy, level).items()})
        for master in policy.parameters():
            master.grad = None
    assert found[0].keys() == set(policy.masters)
    assert all(bool(grad.any()) for grad in found[0].values())
    for other in found[1:]:
        assert all(torch.equal(grad, other[name]) for name, grad in found[0].items())


@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8"])
def test_gradients_in_low_precision_are_near_those_in_fp32(preset: str) -> None:
    found, exact = gradients(make(preset)), gradients(make("fp32"))
    for name, grad in found.items():
        error = (grad - exact[name]).norm() / exact[name].norm()
        assert error < (0.05 if preset == "bf16" else 0.3), (name, float(error))
