"""Decoders with experts: against autograd and transformers, exact between paged and packed, and
digests of their routing.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch.nn import functional

from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.training import Recompute
from isobit.kernels.routing import RouterLoss, router_losses, sequence_means
from isobit.models.config import Experts, ModelConfig
from isobit.models.decoder import build_decoder
from isobit.models.folder import load_policy
from isobit.models.mlp import MixtureOfExperts, RouterCoefficients, Routes, digests
from isobit.models.policy import Policy, random_policy
from isobit.models.saving import save_policy
from isobit.models.scorer import ScoredPass, Scorer
from isobit.records.batch import PackedBatch
from tests.models.policies import EXPERTS as EXPERTS_OF
from tests.models.policies import delta_nets, logits_of, whole_batch

LENGTHS = (5, 17, 1, 40)
TOKENS = sum(LENGTHS)
PRESETS: tuple[Preset, ...] = ("fp32", "bf16", "fp8", "int8")
EXPERTS = Experts(8, 2, 40, True, (1,))
CONFIG = ModelConfig("qwen3_moe", 64, 96, 48, 3, 4, 2, 32, 64, 1e-6, 1e4, False, experts=EXPERTS)
GPT_OSS = replace(
    CONFIG,
    family="gpt_oss",
    intermediate_size=40,
    experts=replace(EXPERTS, dense_layers=()),
    sliding_window=9,
    windowless_layers=(1,),
)
SHARED, NEXT = (
    replace(CONFIG, family=family, experts=EXPERTS_OF[family], **delta_nets(family, 3))
    for family in ("qwen3_5_moe_text", "qwen3_next")
)
EACH = pytest.mark.parametrize(
    "config", [CONFIG, GPT_OSS, SHARED, NEXT], ids=lambda config: config.family
)


def make(config: ModelConfig = CONFIG, preset: Preset = "fp32") -> Policy:
    """Weights large enough that experts matter and tokens differ, and biases."""
    policy = random_policy(config, PrecisionConfig(preset=preset), seed=0)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, master in policy.masters.items():
            master.mul_(5.0 if master.ndim == 2 else 1.0)
            if name.endswith(("bias", "sinks")):
                master.normal_(std=0.5, generator=generator)
    policy.publish()
    return policy


def make_batch(lengths: tuple[int, ...] = LENGTHS) -> PackedBatch:
    """Every row is learnt from."""
    ids = torch.randint(64, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    return whole_batch(ids, lengths, ids.flip(0))


def gradients(
    policy: Policy, recompute: Recompute = "none", coefficients: RouterCoefficients | None = None
) -> dict[str, torch.Tensor]:
    batch = make_batch()
    scored = ScoredPass(policy, batch, recompute, coefficients)
    scored.forward()
    scored.backward(torch.linspace(-1, 1, TOKENS))
    found = {name: master.grad for name, master in policy.masters.items()}
    for master in policy.parameters():
        master.grad = None
    return {name: grad for name, grad in found.items() if grad is not None}


def plain_mixture(config: Experts, b: torch.Tensor, masters: dict[str, torch.Tensor]) -> Any:
    """The output, and the logits."""
    logits = b @ masters["router"].t()
    weights, chosen = logits.softmax(-1).topk(config.top_k)
    if config.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    gate_up = masters["gate_up"].view(config.count, 2 * config.intermediate_size, -1)
    down = masters["down"].view(config.count, -1, config.intermediate_size)
    y = torch.zeros_like(b)
    for rank in range(config.top_k):
        e = chosen[:, rank]
        gate, up = torch.einsum("tc,tnc->tn", b, gate_up[e]).chunk(2, -1)
        out = torch.einsum("ti,tci->tc", functional.silu(gate) * up, down[e])
        y = y + weights[:, rank, None] * out
    return y, logits, chosen


@pytest.mark.parametrize("renormalise", [False, True])
def test_gradients_of_the_unit_are_those_of_autograd(renormalise: bool) -> None:
    """With both of the router's losses."""
    policy = make(replace(CONFIG, experts=Experts(8, 2, 40, renormalise)))
    unit, config = policy.decoder.layers[0].mlp, policy.config.experts
    assert config is not None and isinstance(unit, MixtureOfExperts)
    generator = torch.Generator().manual_seed(3)
    h, d = (torch.randn(TOKENS, 96, generator=generator) for _ in range(2))
    routes = Routes(RouterLoss(sequence_means(LENGTHS), balance=0.5, z=0.2))
    weights = policy.weights("training")
    with torch.no_grad():
        _, _, saved = unit.saving_forward(weights, h, None, routes)
        dh = unit.backward(weights, policy.gradient, saved, d, routes)

    names = {
        "norm": "layers.0.post_attention_norm.weight",
        "router": "layers.0.router.weight",
        "gate_up": "layers.0.experts.gate_up_proj.weight",
        "down": "layers.0.experts.down_proj.weight",
    }
    leaves = {k: policy.masters[v].detach().double().requires_grad_() for k, v in names.items()}
    stream = h.double().requires_grad_()
    b = functional.rms_norm(stream, (96,), leaves["norm"], 1e-6)
    y, logits, chosen = plain_mixture(config, b, leaves)
    routing = replace(saved.routing, logits=logits, experts=chosen)
    balance, z = router_losses(routing, sequence_means(LENGTHS).double())
    loss = ((stream + y) * d).sum() + 0.5 * balance.sum() + 0.2 * z.sum()
    expected = torch.autograd.grad(loss, [stream, *leaves.values()])
    found = [dh, *(policy.gradient(name) for name in names.values())]
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() < 1e-5 * other.norm()


@pytest.mark.few(1)
@EACH
@pytest.mark.parametrize("preset", PRESETS)
def test_recomputation_changes_no_bit(preset: Preset, config: ModelConfig) -> None:
    policy = make(config, preset)
    coefficients = RouterCoefficients(0.1, 0.1)
    expected = gradients(policy, "none", coefficients)
    for recompute in get_args(Recompute):
        found = gradients(policy, recompute, coefficients)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    without = gradients(policy)
    assert not torch.equal(without["layers.0.router.weight"], expected["layers.0.router.weight"])
    assert all(bool(grad.any()) for grad in without.values())


@pytest.mark.few(3)
@EACH
@pytest.mark.parametrize("preset", PRESETS)
def test_a_sequence_alone_has_the_same_scores_and_routings(
    preset: Preset, config: ModelConfig
) -> None:
    policy = make(config, preset)
    batch = make_batch()
    whole = Scorer(policy).score(batch)
    passed = ScoredPass(policy, batch, "none").forward()
    assert whole.routings is not None and passed.routings is not None
    assert torch.equal(whole.log_probs, passed.log_probs)
    assert torch.equal(whole.routings, passed.routings)
    start = 0
    for n in LENGTHS:
        rows = slice(start, start + n)
        alone = Scorer(policy).score(
            replace(make_batch((n,)), token_ids=batch.token_ids[rows], targets=batch.targets[rows])
        )
        assert alone.routings is not None
        assert torch.equal(alone.log_probs, whole.log_probs[rows])
        assert torch.equal(alone.routings, whole.routings[rows])
        start += n


def test_digests_tell_experts_ranks_and_layers_apart() -> None:
    layers = [torch.tensor([[0, 1], [1, 0], [0, 1], [0, 2]]).int(), torch.tensor([[3]] * 4).int()]
    found = digests(layers)
    assert found.dtype == torch.int64
    assert found[0] == found[2]
    assert len(set(found.tolist())) == 3
    assert not torch.equal(digests(layers[::-1]), found)
    multiplier, word = 0x9E3779B97F4A7C15, 1 << 64
    by_hand = ((1 * multiplier + 2) * multiplier + 4) % word
    assert int(found[0]) % word == by_hand


def test_the_routers_figures() -> None:
    policy = make()
    router = ScoredPass(policy, make_batch(), "none").forward().router
    assert router is not None
    assert router.balance.shape == router.z.shape == (len(LENGTHS),)
    assert torch.equal(router.load.sum(1), torch.tensor([2 * TOKENS, 2 * TOKENS]))
    assert (router.balance >= 0.99).all()


def test_a_dense_model_has_no_routing() -> None:
    policy = make(replace(CONFIG, family="qwen3", experts=None))
    scores = ScoredPass(policy, make_batch(), "none").forward()
    assert scores.routings is None and scores.router is None


HF: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "num_experts_per_tok": 3, "tie_word_embeddings": False, "initializer_range": 0.2,
}  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    from transformers import (  # takes two seconds, which no other test has to wait
        MixtralConfig,
        MixtralForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    if family == "mixtral":
        theirs = MixtralForCausalLM(
            MixtralConfig(**HF, num_local_experts=5, intermediate_size=40, sliding_window=None)
        )
    else:
        theirs = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **HF,
                num_experts=6,
                moe_intermediate_size=40,
                intermediate_size=56,
                norm_topk_prob=True,
                mlp_only_layers=[1],
            )
        )
    theirs.eval().save_pretrained(tmp_path)
    policy = load_policy(tmp_path, PrecisionConfig(preset="fp32"))
    ids = torch.randint(64, (50,))
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
    torch.testing.assert_close(logits_of(policy, ids), expected, rtol=1e-4, atol=1e-4)


def test_a_folder_holds_what_was_saved(tmp_path: Path) -> None:
    policy = make()
    save_policy(policy, tmp_path)
    loaded = load_policy(tmp_path, PrecisionConfig(preset="fp32"))
    assert loaded.config == policy.config
    for name, master in policy.masters.items():
        assert torch.equal(loaded.masters[name], master.bfloat16().float())


def test_names_of_the_checkpoint() -> None:
    names = [part for master in build_decoder(CONFIG).masters().values() for part in master.parts]
    assert "model.layers.0.mlp.gate.weight" in names
    assert "model.layers.2.mlp.experts.7.down_proj.weight" in names
    assert "model.layers.1.mlp.gate_proj.weight" in names
    mixtral = build_decoder(replace(CONFIG, family="mixtral", experts=Experts(4, 2, 48, True)))
    names = [part for master in mixtral.masters().values() for part in master.parts]
    expected = [
        f"model.layers.0.block_sparse_moe.experts.3.{name}.weight" for name in ("w1", "w3", "w2")
    ]
    assert [name for name in names if "layers.0.block_sparse_moe.experts.3" in name] == expected
