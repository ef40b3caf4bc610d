"""LoRA on the linears of gated delta nets: PEFT's files and logits, INT8's moved channels, merged
folders, and targets that a model does not have.

tests/models/test_adapters.py has all families: rollout equals training, and gradients.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.commands.export import export, find_source
from isobit.config.lora import LORA_TARGETS, LoraConfig
from isobit.config.model_shape import Family
from isobit.config.precision import named_precision
from isobit.models.adapter_folder import CONFIG_FILE, WEIGHTS_FILE
from isobit.models.adapters import adapter_masters
from isobit.models.config import Lora, ModelConfig
from isobit.models.folder import LoadedModel, load_policy, read_any_config, write_model
from isobit.models.policy import random_policy
from isobit.models.saving import save_policy
from isobit.starter import starter_folder
from isobit.util.errors import ModelError
from tests.models.policies import logits_of
from tests.models.test_adapters import ALL, SOME, check_with_peft, config_of, moved, tokens, trained

SHARED = "shared_expert"
UP = "shared_expert.up_proj.weight"
HYBRIDS: tuple[Family, ...] = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


@pytest.fixture(params=HYBRIDS)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture
def base(family: Family, tmp_path: Path) -> Path:
    """A folder in which a channel of the norms in front of a delta net and of an MLP stands out."""
    policy = random_policy(config_of(family, None, tied=False), "fp32", seed=0)
    with torch.no_grad():
        for norm in ("input_norm", "post_attention_norm"):
            policy.masters[f"layers.0.{norm}.weight"][3] = 40.0
    save_policy(policy, tmp_path / "base", tokenizer_from=starter_folder())
    return tmp_path / "base"


def adapted(base: Path, family: Family, lora: Lora, preset: str = "fp32") -> LoadedModel:
    own = config_of(family, lora).lora
    assert own is not None
    return trained(base, preset, own)


@pytest.mark.few(2)
@pytest.mark.parametrize("lora", [ALL, SOME, Lora(8, 12.0, LORA_TARGETS[4:])])
def test_peft_computes_our_logits_and_writes_our_bytes(
    base: Path, family: Family, lora: Lora, tmp_path: Path
) -> None:
    check_with_peft(adapted(base, family, lora), base, tmp_path)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "named",
    [
        {"target_modules": [*LORA_TARGETS[4:], "shared_expert_gate"]},
        {"target_modules": ["q_proj"], "target_parameters": [f"layers.1.mlp.{UP}"]},
        {"target_modules": [], "target_parameters": [f"mlp.{UP}"]},
        {"target_modules": r".*\.q_proj", "target_parameters": [f"layers.1.mlp.{UP}", UP]},
    ],
)
def test_a_shared_expert_is_read_as_peft_names_it(named: dict[str, Any], tmp_path: Path) -> None:
    """Its modules, which PEFT does not take for routed experts in Qwen3.5, or weights."""
    peft = pytest.importorskip("peft", reason="`pip install peft` trains adapters")
    transformers = pytest.importorskip("transformers")
    base = save(config_of("qwen3_5_moe_text", None, tied=False), tmp_path / "base")
    made = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = peft.get_peft_model(made, peft.LoraConfig(r=8, **named)).eval()
    with torch.no_grad():
        for name, values in theirs.named_parameters():
            values.add_(0.05 if "lora_" in name else 0.0)
    theirs.save_pretrained(tmp_path / "adapters")
    policy = load_policy(tmp_path / "adapters", "fp32")
    ids = tokens(policy)[:100]
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
    found = logits_of(policy, ids)
    torch.testing.assert_close(found, expected[:, : found.shape[1]], rtol=0, atol=1e-3)


@pytest.mark.parametrize("named", ["experts.gate_up_proj", ["gate_proj.weight"], [7], {"a": 1}])
def test_other_weights_than_a_shared_experts_are_refused(named: Any, tmp_path: Path) -> None:
    base = save(config_of("qwen3_next", None, tied=False), tmp_path / "base")
    write_model(trained(base, "fp32", replace(ALL, targets=("q_proj",))), tmp_path / "adapters")
    path = tmp_path / "adapters" / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_parameters": named}))
    with pytest.raises(ModelError, match=r"target_parameters is .* where these are of a shared"):
        read_any_config(tmp_path / "adapters")


def test_all_linears_of_pefts_are_ours() -> None:
    """But for the shared expert's MLP of Qwen3-Next, which PEFT takes for the routed experts'."""
    peft = pytest.importorskip("peft", reason="`pip install peft` finds all linears")
    transformers = pytest.importorskip("transformers")
    for family in HYBRIDS:
        hf_config = transformers.AutoConfig.for_model(**config_of(family, None).to_hf())
        made = transformers.AutoModelForCausalLM.from_config(hf_config)
        named = peft.get_peft_model(made, peft.LoraConfig(target_modules="all-linear"))
        found = set(named.targeted_module_names)
        ours = config_of(family, ALL)
        wanted = {part for one in adapter_masters(ours).values() for part in one.adapter}
        wanted = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in wanted}
        if family == "qwen3_next":
            wanted = {name for name in wanted if ".shared_expert." not in name}
        assert found == wanted


@pytest.mark.few(3)
@pytest.mark.parametrize("preset", ["fp32", "fp8", "int8"])
def test_a_folder_of_adapters_is_the_policy_again(
    preset: str, base: Path, family: Family, tmp_path: Path
) -> None:
    model = adapted(base, family, SOME, preset)
    write_model(model, tmp_path / "adapters")
    again = load_policy(tmp_path / "adapters", preset)
    assert again.config == model.policy.config
    assert again.checksum() == model.policy.checksum()
    for name, master in again.masters.items():
        assert torch.equal(master, model.policy.masters[name])


@pytest.mark.few(1)
def test_int8_moves_what_stands_out_into_every_a_behind_the_norm(
    base: Path, family: Family, tmp_path: Path
) -> None:
    exact = adapted(base, family, ALL)
    write_model(exact, tmp_path / "adapters")
    int8 = load_policy(tmp_path / "adapters", "int8")
    mlps = [f"{SHARED}.gate_up_proj", f"{SHARED}_gate"]
    if exact.policy.config.experts is None:
        mlps = ["gate_up_proj"]
    for reader in ("in_proj", "gates", *mlps):
        name = f"layers.0.{reader}.lora_A.weight"
        factor = int8.masters[name] / exact.policy.masters[name]
        assert factor[:, 3].unique().tolist() == [64.0]
        assert factor[:, :3].unique().tolist() == [1.0]
    ids = tokens(int8)[:100]
    expected, found = logits_of(exact.policy, ids), logits_of(int8, ids)
    assert (found - expected).norm() / expected.norm() < 0.1
    write_model(replace(exact, policy=int8, folder=tmp_path / "adapters"), tmp_path / "second")
    first, second = (tmp_path / place / WEIGHTS_FILE for place in ("adapters", "second"))
    assert first.read_bytes() == second.read_bytes(), "PEFT's numbers"


def test_merged_matrices_are_the_sum_rounded_once(
    base: Path, family: Family, tmp_path: Path
) -> None:
    model = adapted(base, family, ALL)
    write_model(model, tmp_path / "adapters")
    source = find_source(tmp_path / "adapters", None, lambda line: None)
    export(source, tmp_path / "merged", merge=True)
    merged, plain = (load_policy(tmp_path / place, "fp32") for place in ("merged", "base"))
    shared = [f"layers.0.{SHARED}{name}" for name in (".gate_up_proj", ".down_proj", "_gate")]
    if model.policy.config.experts is None:
        shared = []
    for path in ("layers.0.in_proj", "layers.0.gates", "layers.0.out_proj", *shared):
        name = f"{path}.weight"
        a, b = (model.policy.masters[f"{path}.lora_{one}.weight"].detach().double() for one in "AB")
        rows = list(model.policy.decoder.masters()[name].parts.values())
        change = torch.cat(
            [up @ down for up, down in zip(b.split(rows), a.split(ALL.rank), strict=True)]
        )
        expected = plain.masters[name].detach().double() + ALL.scale * change
        assert torch.equal(merged.masters[name], expected.float().bfloat16().float())


def of(model: ModelConfig, *targets: str) -> Lora:
    return Lora.of(LoraConfig(rank=4, targets=targets), model)


def test_targets_are_those_that_a_model_has() -> None:
    dense, joined = (config_of(family, None) for family in ("qwen3_5_text", "qwen3_next"))
    own = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"
    assert of(dense, "all-linear").targets == (*LORA_TARGETS, *own)
    assert of(config_of("llama", None), "all-linear").targets == LORA_TARGETS
    assert of(joined, "out_proj", "q_proj").targets == ("q_proj", "out_proj")
    for model, target, wanted in (
        (config_of("llama", None), "out_proj", r"a llama model has no out_proj; .* down_proj$"),
        (dense, "in_proj_qkvz", r"a qwen3_5_text model has no in_proj_qkvz; .* out_proj$"),
        (joined, "in_proj_z", r"lora\.targets is in_proj_z, and a qwen3_next model has no in_pr"),
    ):
        with pytest.raises(ModelError, match=wanted):
            of(model, "all-linear", target) if model is dense else of(model, target)
    assert of(joined, "all-linear").targets[:7] == LORA_TARGETS
    mixed = of(config_of("qwen3_5_moe_text", None), "all-linear")
    assert mixed.targets == (*LORA_TARGETS, *own, "shared_expert_gate")


@pytest.mark.parametrize("named", ["all-linear", [*LORA_TARGETS, *SOME.targets, "in_proj_qkvz"]])
def test_of_pefts_folders_targets_that_a_model_has_not_change_nothing(
    named: Any, tmp_path: Path
) -> None:
    """PEFT writes the list that it was given, and takes it where one name is found."""
    base = save(config_of("llama", None, tied=False), tmp_path / "base")
    model = trained(base, "fp32", Lora(8, 12.0, LORA_TARGETS))
    write_model(model, tmp_path / "adapters")
    path = tmp_path / "adapters" / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": named}))
    assert read_any_config(tmp_path / "adapters") == model.policy.config


def test_a_folder_without_the_adapters_that_it_names_is_refused(
    base: Path, family: Family, tmp_path: Path
) -> None:
    own = adapted(base, family, replace(ALL, targets=("q_proj",)))
    write_model(own, tmp_path / "adapters")
    path = tmp_path / "adapters" / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": ["out_proj"]}))
    with pytest.raises(ModelError, match="they do not belong together"):
        load_policy(tmp_path / "adapters", "fp32")


def test_a_policy_samples_with_adapters_of_a_delta_net_by_name(
    base: Path, family: Family, tmp_path: Path
) -> None:
    from isobit.models.adapters import add_adapter

    model = adapted(base, family, SOME, "int8")
    write_model(model, tmp_path / "adapters")
    alone, policy = (load_policy(tmp_path / place, "int8") for place in ("adapters", "base"))
    add_adapter(policy, named_precision("int8"), "one", tmp_path / "adapters", base)
    held = policy.adapters["one"].weights.linears
    for path, linear in alone.weights("rollout").linears.items():
        if "lora_" in path:
            assert torch.equal(held[path].matrix, linear.matrix)  # pyright: ignore[reportArgumentType]


def save(config: ModelConfig, folder: Path) -> Path:
    save_policy(random_policy(config, "fp32", seed=0), folder, tokenizer_from=starter_folder())
    return folder


@pytest.mark.exhaustive
def test_adapters_of_one_linear_alone_change_the_function(family: Family) -> None:
    """Each linear's adapter alone, so that none is left out in silence."""
    plain = random_policy(config_of(family, None), "bf16", seed=0)
    ids = tokens(plain)[:100]
    expected = logits_of(plain, ids)
    for target in config_of(family, None).lora_targets[4:]:
        one = random_policy(config_of(family, replace(ALL, targets=(target,))), "bf16", seed=0)
        assert torch.equal(logits_of(one, ids), expected), "B is zeros"
        assert not torch.equal(logits_of(moved(one), ids), expected)
