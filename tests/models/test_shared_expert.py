"""Mixtures with a shared expert and gated delta nets: Qwen3.5 with experts, and Qwen3-Next."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from isobit.config.model_shape import Family
from isobit.config.precision import PrecisionConfig, Preset
from isobit.kernels.spec.hybrid import add_shared, add_shared_backward
from isobit.models.config import ModelConfig
from isobit.models.decoder import build_decoder
from isobit.models.folder import load_policy
from isobit.models.mlp import MixtureOfExperts
from isobit.models.policy import Policy, random_policy
from isobit.models.safetensors import WEIGHTS_FILE
from isobit.models.saving import (
    Contents,
    PolicyTensors,
    fp8_contents,
    int8_contents,
    save_policy,
    write_folder,
)
from isobit.models.scorer import Scorer
from isobit.models.shared_expert import SharedExpert
from isobit.util.errors import ConfigError, ModelError
from tests.models.exactness_probe import packed, paged
from tests.models.policies import (
    delta_nets,
    disturbed,
    logits_of,
    small_experts,
    whole_batch,
)

FAMILIES: tuple[Family, ...] = ("qwen3_5_moe_text", "qwen3_next")
PRESETS: tuple[Preset, ...] = ("fp32", "bf16", "fp8-linear", "fp8", "int8-linear", "int8")
LENGTHS = (1, 18, 67, 130)
IDS = torch.arange(90) * 17 % 60


def config_of(family: Family, width: int = 96) -> ModelConfig:
    sizes = ModelConfig(family, 128, 128, width, 3, 4, 2, 32, 256, 1e-6, 1e4, False,
                        **delta_nets(family, 3))  # fmt: skip
    return replace(sizes, experts=small_experts(family, 4, width))


def make(family: Family = "qwen3_next", preset: Preset = "fp32", width: int = 96) -> Policy:
    """Norms, gates and experts do something."""
    policy = random_policy(config_of(family, width), PrecisionConfig(preset=preset), seed=0)
    with torch.no_grad():
        for name, master in policy.masters.items():
            if "shared_expert" in name or "experts" in name:
                master.mul_(4)
            if name.endswith("shared_expert_gate.weight"):
                master.mul_(4)
    return disturbed(policy)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("preset", PRESETS)
def test_decoding_chunks_and_training_have_the_same_bits(preset: Preset, family: Family) -> None:
    """One token after the other behind a chunk, whole sequences in a batch, and one alone."""
    policy = make(family, preset)
    ids = torch.randint(0, 128, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = packed(policy, ids, LENGTHS)
        assert torch.equal(paged(policy, ids, LENGTHS), whole)
        assert torch.equal(packed(policy, ids[-130:], (130,)), whole[-130:])
    assert torch.equal(Scorer(policy).score(whole_batch(ids, LENGTHS)).log_probs, whole)
    before = policy.masters["layers.1.shared_expert_gate.weight"].clone()
    with torch.no_grad():  # it has a say
        policy.masters["layers.1.shared_expert_gate.weight"].add_(1.0)
    policy.publish()
    assert not torch.equal(packed(policy, ids, LENGTHS), whole) and before.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_rounded_once_and_a_rows_bits_are_its_own(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    routed, shared, dy = ((torch.randn(41, 200) * 3).to(dtype) for _ in range(3))
    gate = torch.randn(41) * 4
    y, (d_shared, d_gate) = add_shared(routed, shared, gate), add_shared_backward(dy, shared, gate)
    leaves = [one.double().requires_grad_() for one in (shared, gate)]
    exact = routed.double() + leaves[1].sigmoid()[:, None] * leaves[0]
    expected = torch.autograd.grad(exact, leaves, dy.double())
    last = torch.finfo(dtype).eps
    assert ((y.double() - exact).abs() <= 0.51 * last * exact.abs() + 1e-6).all()
    assert y.dtype == d_shared.dtype == dtype and d_gate.dtype == torch.float32
    assert (d_shared.double() - expected[0]).norm() <= last * expected[0].norm()
    assert (d_gate.double() - expected[1]).norm() <= 1e-6 * expected[1].norm()
    for first in (1, 7, 40):
        assert torch.equal(add_shared(routed[first:], shared[first:], gate[first:]), y[first:])


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_the_expert_are_those_of_autograd(family: Family) -> None:
    policy = make(family)
    unit = policy.decoder.layers[0].mlp
    assert isinstance(unit, MixtureOfExperts)
    expert = unit._shared
    assert isinstance(expert, SharedExpert)
    torch.manual_seed(3)
    b, routed, d = (torch.randn(37, 128) for _ in range(3))
    weights = policy.weights("training")
    with torch.no_grad():
        y, saved = expert.saving_forward(weights, b, routed)
        assert torch.equal(expert.forward(weights, b, routed), y)
        db = expert.backward(weights, policy.gradient, saved, b, d)
    names = [
        f"layers.0.shared_expert{one}.weight" for one in ("_gate", ".gate_up_proj", ".down_proj")
    ]
    row, gate_up, down = (policy.masters[n].detach().double().requires_grad_() for n in names)
    wide = b.double().requires_grad_()
    gate, up = (wide @ gate_up.t()).chunk(2, 1)
    made = (functional.silu(gate) * up) @ down.t()
    exact = routed.double() + (wide @ row.t()).sigmoid() * made
    expected = torch.autograd.grad(exact, [wide, row, gate_up, down], d.double())
    assert (y - exact).norm() <= 1e-6 * exact.norm()
    for ours, theirs in zip([db, *map(policy.gradient, names)], expected, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def test_rows_of_key_heads_make_what_rows_of_all_heads_make() -> None:
    """Qwen3-Next's matrices are those of Qwen3.5 in another order."""
    ours, other = make("qwen3_next"), make("qwen3_5_moe_text")
    rule = ours.config.delta
    assert rule is not None
    keys, values = rule.key_dim, rule.values // rule.key_heads
    masters = {name: one.detach().clone() for name, one in ours.masters.items()}
    for layer in ours.config.delta_layers:
        heads = masters[f"layers.{layer}.in_proj.weight"].view(rule.key_heads, -1, 128)
        parts = heads.split([keys, keys, values, values], 1)
        masters[f"layers.{layer}.in_proj.weight"] = torch.cat([one.flatten(0, 1) for one in parts])
        heads = masters[f"layers.{layer}.gates.weight"].view(rule.key_heads, -1, 128)
        both = [one.flatten(0, 1) for one in heads.chunk(2, 1)]
        masters[f"layers.{layer}.gates.weight"] = torch.cat(both)
    same = Policy(other.config, PrecisionConfig(preset="fp32"), masters)
    assert torch.equal(logits_of(same, IDS), logits_of(ours, IDS))
    names = [part for one in build_decoder(ours.config).masters().values() for part in one.parts]
    assert "model.layers.0.linear_attn.in_proj_qkvz.weight" in names
    assert "model.layers.0.linear_attn.in_proj_ba.weight" in names
    assert "model.layers.0.mlp.shared_expert_gate.weight" in names
    assert "model.layers.2.mlp.shared_expert.down_proj.weight" in names


def theirs(folder: Path) -> torch.Tensor:
    """transformers' logits of a folder, in FP32."""
    from transformers import AutoModelForCausalLM  # here: it takes 2 s

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(IDS[None]).logits[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_goes_to_transformers_and_back(family: Family, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_policy(make(family), tmp_path / "ours")
    loaded = load_policy(tmp_path / "ours", "fp32")
    torch.testing.assert_close(
        logits_of(loaded, IDS), theirs(tmp_path / "ours"), rtol=1e-4, atol=1e-4
    )
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    again = load_policy(tmp_path / "theirs", "fp32")
    assert again.config == loaded.config == config_of(family)
    assert all(torch.equal(again.masters[n], one) for n, one in loaded.masters.items())


def stacked(folder: Path, layers: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """A folder's tensors, with all experts of these layers in one tensor, as transformers' modules
    have them.
    """
    tensors = load_file(folder / WEIGHTS_FILE)
    for layer in layers:
        path = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{path}.{n}.{one}.weight") for n in range(4)])
            for one in ("gate_proj", "up_proj", "down_proj")
        )
        tensors[f"{path}.gate_up_proj"], tensors[f"{path}.down_proj"] = (
            torch.cat([gate, up], 1),
            down,
        )
    return tensors


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_in_one_tensor_are_read(family: Family, tmp_path: Path) -> None:
    """In all layers or in some; transformers reads the folder, too."""
    save_policy(make(family), tmp_path)
    expected = load_policy(tmp_path, "fp32")
    for layers in ((0, 1, 2), (1,)):
        tensors = stacked(tmp_path, layers)
        save_file(tensors, tmp_path / WEIGHTS_FILE, {"format": "pt"})
        again = load_policy(tmp_path, "fp32")
        assert all(torch.equal(again.masters[n], one) for n, one in expected.masters.items())
        ours = logits_of(again, IDS)
        torch.testing.assert_close(ours, theirs(tmp_path), rtol=1e-4, atol=1e-4)
        save_policy(expected, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts.0.up_proj.weight": torch.zeros(96, 128)}, r"all experts of .*experts\.0\.up_pr"),
        ({"experts.down_proj": torch.zeros(4, 96, 128)}, r"shape \(4, 96, 128\).* \(4, 128, 96\)"),
        (
            {"experts.down_proj": torch.zeros(4, 128, 96).to(torch.float8_e4m3fn)},
            "down_proj is F8_E4M3",
        ),
        (
            {"experts.gate_up_proj": torch.full((4, 192, 128), torch.inf)},
            "gate_up_proj holds a NaN",
        ),
        ({"experts.gate_up_proj": None}, r"8 tensors are missing.*experts\.0\.gate_proj"),
        ({"shared_expert_gate.weight": None}, "1 tensors are missing.*shared_expert_gate"),
        ({"shared_expert.bias": torch.zeros(1)}, r"shared_expert\.bias, which a qwen3_5_moe_text"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(
    changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    save_policy(make("qwen3_5_moe_text"), tmp_path)
    tensors = stacked(tmp_path, (0, 1, 2))
    for name, tensor in changes.items():
        tensors.pop(f"model.layers.1.mlp.{name}", None)
        if tensor is not None:
            tensors[f"model.layers.1.mlp.{name}"] = tensor
    save_file(tensors, tmp_path / WEIGHTS_FILE, {"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load_policy(tmp_path, "fp32")


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_in_fp8_is_read_to_the_same_bits(family: Family, tmp_path: Path) -> None:
    """Gates and routers are in BF16; experts' matrices are written one by one, each with scales.
    In INT8 vLLM has no Hadamard matrix in front of experts.
    """
    policy = make(family, "fp8", width=128)
    contents: Contents = fp8_contents(policy.config, policy.flow, PolicyTensors(policy))
    write_folder(tmp_path, policy.config, contents)
    written = load_file(tmp_path / WEIGHTS_FILE)
    eight = {name for name, one in written.items() if one.dtype == torch.float8_e4m3fn}
    assert {"model.layers.0.mlp.shared_expert.up_proj.weight",
            "model.layers.0.mlp.experts.3.down_proj.weight"} <= eight  # fmt: skip
    assert written["model.layers.0.mlp.shared_expert_gate.weight"].dtype == torch.bfloat16
    again = load_policy(tmp_path, "fp8", trainable=False)
    assert torch.equal(logits_of(again, IDS), logits_of(policy, IDS))
    policy = make(family, "int8")
    with pytest.raises(ConfigError, match=r"experts\.0\.gate_proj is an expert"):
        int8_contents(policy.config, policy.flow, PolicyTensors(policy))


def test_what_stands_out_of_a_norm_is_moved_into_all_that_read_it(tmp_path: Path) -> None:
    """In front of experts in INT8: the same function, in FP32 to a rounding."""
    policy = make("qwen3_next")
    with torch.no_grad():
        for layer in range(3):
            policy.masters[f"layers.{layer}.post_attention_norm.weight"][::16] = 7.0
    policy.publish()
    save_policy(policy, tmp_path)
    plain, folded = load_policy(tmp_path, "fp32"), load_policy(tmp_path, "int8")
    name = "layers.0.shared_expert_gate.weight"
    moved = folded.masters[name] / plain.masters[name]
    assert (moved[:, ::16] >= 8).all() and (moved[:, 1::16] == 1).all()
    masters = {name: one.detach() for name, one in folded.masters.items()}
    again = logits_of(Policy(plain.config, PrecisionConfig(preset="fp32"), masters), IDS)
    torch.testing.assert_close(again, logits_of(plain, IDS), rtol=1e-4, atol=1e-4)
