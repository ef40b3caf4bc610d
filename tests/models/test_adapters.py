"""LoRA: one function in rollout and training, gradients of the adapters alone, and PEFT's files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.commands.export import export, find_source
from isobit.config.lora import KNOWN_TARGETS, LORA_TARGETS
from isobit.config.model_shape import MIXTURES, Family
from isobit.config.precision import PrecisionConfig, named_precision
from isobit.config.training import Recompute
from isobit.kernels.operands import LinearWeight
from isobit.kernels.spec.backend import SpecBackend
from isobit.models.adapter_delivery import JoinedAdapters, filled
from isobit.models.adapter_folder import CONFIG_FILE, WEIGHTS_FILE
from isobit.models.adapters import adapter_masters
from isobit.models.config import Experts, Lora, ModelConfig
from isobit.models.decoder import master_shapes
from isobit.models.folder import (
    LoadedModel,
    load_model,
    load_policy,
    read_config,
    read_masters,
    write_model,
)
from isobit.models.frozen import FrozenPolicy
from isobit.models.policy import Policy, random_masters, random_policy
from isobit.models.published import PublishedWeights
from isobit.models.saving import MergedTensors, save_policy
from isobit.models.scorer import ScoredPass, Scorer
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import DTYPES, Int8Rows, hadamard_matrix, rotation_size
from isobit.starter import starter_folder
from isobit.util.errors import ConfigError, MismatchError, ModelError
from tests.models.exactness_probe import packed, paged
from tests.models.policies import (
    delta_nets,
    logits_of,
    published_tensors,
    small_experts,
    whole_batch,
)

LENGTHS = (1, 18, 67, 130)
FLOWS = ("fp32", "bf16", "fp8-linear", "fp8", "int8-linear", "int8")
FAMILIES: tuple[Family, ...] = (
    "llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "phi3", "olmo2", "gemma3_text",
    "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen3_moe", "gpt_oss",
)  # fmt: skip
ALL = Lora(8, 12.0, KNOWN_TARGETS)
OF_HYBRIDS = "in_proj_z", "in_proj_a", "in_proj_qkvz", "shared_expert_gate"
SOME = Lora(5, 7.0, ("k_proj", "v_proj", "up_proj", "qkv_proj", *OF_HYBRIDS), rslora=True)


def config_of(family: Family = "qwen3", lora: Lora | None = ALL, tied: bool = True) -> ModelConfig:
    config = ModelConfig("llama", 128, 128, 192, 2, 4, 2, 32, 256, 1e-6, 1e4, tied)
    config = replace(config, family=family, **delta_nets(family, 2))
    if family in MIXTURES:
        config = replace(config, experts=small_experts(family, 4, 64))
    lora = None if lora is None else lora.within(config)
    if lora is not None and config.experts is not None and config.experts.shared_size is None:
        ours = tuple(name for name in lora.targets if name not in LORA_TARGETS[4:])
        lora = replace(lora, targets=ours)
    return replace(config, lora=lora)


def moved(policy: Policy, seed: int = 1, size: float = 0.05) -> Policy:
    """With adapters that are not zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for master in policy.parameters():
            master.add_(size * torch.randn(master.shape, generator=generator))
    policy.publish()
    return policy


INT8_BEFORE = {"preset": "int8", "dgrad": "fp8"}
"""With the DGrad that ``int8`` had in earlier versions."""


def make(preset: Any = "fp32", **options: Any) -> Policy:
    precision = PrecisionConfig.model_validate(preset)
    return moved(random_policy(config_of(**options), precision, seed=0))


def tokens(policy: Policy, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(policy.config.vocab_size, (sum(LENGTHS),), generator=generator)


@pytest.mark.few(1)
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


@pytest.mark.few(2)
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


@pytest.mark.few(2)
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


@pytest.mark.few(2)
@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8", INT8_BEFORE])
def test_gradients_do_not_depend_on_what_is_computed_again(preset: Any) -> None:
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


@pytest.mark.few(2)
@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8", INT8_BEFORE])
def test_gradients_in_low_precision_are_near_those_in_fp32(preset: Any) -> None:
    found, exact = gradients(make(preset)), gradients(make("fp32"))
    for name, grad in found.items():
        error = (grad - exact[name]).norm() / exact[name].norm()
        assert error < (0.05 if preset == "bf16" else 0.3), (name, float(error))


def test_a_frozen_base_has_dgrad_in_int8() -> None:
    """Where nothing lies between an adapter and the loss, its gradient is as it was."""
    as_before, found = (gradients(make(preset, tied=False)) for preset in (INT8_BEFORE, "int8"))
    same = {name for name, grad in found.items() if torch.equal(grad, as_before[name])}
    assert same == {f"layers.1.down_proj.lora_{one}.weight" for one in "AB"}
    site = make("int8").flow.training.linear(0, "qkv_proj")
    assert (site.dgrad, site.wgrad) == ("int8", "bf16")


def test_only_adapters_have_masters_moments_and_checkpoints() -> None:
    policy = make("fp8", lora=SOME)
    names = {name for name in policy.decoder.masters() if "lora_" in name}
    assert set(policy.masters) == set(policy.shapes) == names == set(master_shapes(policy.config))
    published = policy.weights("rollout").linears
    assert published["layers.0.qkv_proj.lora_A"].matrix.shape == (10, 128)  # pyright: ignore
    assert published["layers.0.qkv_proj.lora_B"].matrix.shape == (128, 5)  # pyright: ignore
    assert "layers.0.o_proj.lora_A" not in published


def test_a_publication_that_delivers_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make("fp8")
    policy.publish()
    monkeypatch.setattr(PublishedWeights, "republish", lambda *arguments: None)
    with pytest.raises(MismatchError, match=r"rollout reads another layers\.0\.qkv_proj\.lora_A"):
        moved(policy)


def test_a_copy_on_one_side_that_stays_as_it_was_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = make("fp8")
    linears = policy.weights("rollout").linears
    stale = linears["layers.1.down_proj.lora_B"]
    assert isinstance(stale.matrix, torch.Tensor)
    linears["layers.1.down_proj.lora_B"] = replace(stale, matrix=stale.matrix.clone())
    moved(policy)  # which writes to both
    monkeypatch.setattr(
        PublishedWeights, "_of", lambda self, path: [self.sides["training"].linears[path]]
    )
    with pytest.raises(MismatchError, match=r"rollout reads another layers\.1\.down_proj\.lora_B"):
        moved(policy)


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A back end that publishes plain matrices as a GPU does."""

    def publish(site: Site, master: torch.Tensor) -> Any:
        return exact(site, master) if site.kind != "adapter" else master.detach().to(dtype(site))

    def republish(weight: LinearWeight, master: torch.Tensor) -> torch.Tensor:
        assert weight.site.kind != "adapter", "one by one"
        return one_by_one(weight, master)

    def dtype(site: Site) -> torch.dtype:
        return DTYPES[site.forward]

    exact, one_by_one = SpecBackend.publish, SpecBackend.republish
    monkeypatch.setattr(SpecBackend, "publish", staticmethod(publish))
    monkeypatch.setattr(SpecBackend, "republish", staticmethod(republish))
    monkeypatch.setattr(SpecBackend, "rounds_alone", True)


@pytest.mark.few(3)
@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("lora", [ALL, SOME])
@pytest.mark.parametrize("preset", ["fp32", "fp8", "fp8-rollout"])
def test_where_numbers_are_rounded_alone_a_publication_is_one_rounding(
    preset: str, lora: Lora
) -> None:
    policy = random_policy(replace(config_of(lora=lora), value_head=True), preset, seed=0)
    assert policy.joined is not None
    assert set(policy.joined.places) == set(policy.masters) - {"value_head.weight"}
    before = policy.checksum()
    moved(policy)
    changed = sum(int(policy.masters[name].count_nonzero()) for name in policy.joined.places)
    assert 0 < policy.change.share <= 1
    assert changed > 1000
    assert policy.checksum() != before
    storages = {policy.masters[name].untyped_storage()._cdata for name in policy.joined.places}
    assert len(storages) == 1
    for side in ("rollout", "training"):
        for name in policy.joined.places:
            held = policy.weights(side).linears[name.removesuffix(".weight")]
            made = policy.masters[name].detach().to(policy.joined.published.dtype)
            assert torch.equal(held.matrix, made)  # pyright: ignore[reportArgumentType]
    again = random_policy(policy.config, preset, seed=5)
    again.restore({name: one.detach().clone() for name, one in policy.masters.items()}, 7)
    for name in policy.joined.places:
        held = again.weights("rollout").linears[name.removesuffix(".weight")].matrix
        own = policy.weights("rollout").linears[name.removesuffix(".weight")].matrix
        assert torch.equal(held, own)  # pyright: ignore[reportArgumentType]
    gradients(policy)
    assert policy.masters["layers.1.qkv_proj.lora_A.weight"].grad is not None


@pytest.mark.usefixtures("rounding")
def test_a_joined_publication_that_is_not_read_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make("fp8")
    linears = policy.weights("rollout").linears
    stale = linears["layers.1.down_proj.lora_B"]
    assert isinstance(stale.matrix, torch.Tensor)
    linears["layers.1.down_proj.lora_B"] = replace(stale, matrix=stale.matrix.clone())
    with pytest.raises(MismatchError, match=r"rollout reads another layers\.1\.down_proj\.lora_B"):
        moved(policy)
    policy = make("fp8")
    monkeypatch.setattr(JoinedAdapters, "publish", lambda self: torch.zeros((), dtype=torch.int64))
    with pytest.raises(MismatchError, match=r"rollout reads another layers\.0\.qkv_proj\.lora_A"):
        moved(policy)


def test_filled_adapters_are_not_zero_and_go_away_again() -> None:
    policy = random_policy(config_of(), "fp8", seed=0)
    ids, before = tokens(policy), policy.checksum()
    base = packed(policy, ids, LENGTHS)
    with filled(policy):
        assert policy.checksum() != before
        assert not torch.equal(packed(policy, ids, LENGTHS), base)
    assert policy.checksum() == before


def test_the_reference_is_the_base_without_a_copy() -> None:
    policy = make("fp8")
    base = random_policy(config_of(lora=None), "fp8", seed=0)
    frozen, batch = FrozenPolicy.of(policy), whole_batch(tokens(policy), LENGTHS)
    assert torch.equal(Scorer(frozen).score(batch).log_probs, Scorer(base).score(batch).log_probs)
    assert not frozen.is_equal_to(policy)
    own = {id(tensor) for tensor in published_tensors(policy, ["training"])}
    assert {id(tensor) for tensor in frozen.tensors().values()} <= own
    digest = frozen.digest()
    moved(policy, seed=9)
    assert FrozenPolicy.of(policy).digest() == digest


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder in which two channels of a norm stand out, so that INT8 folds them."""
    config = config_of("llama", None, tied=False)
    policy = random_policy(config, "fp32", seed=0)
    with torch.no_grad():
        policy.masters["layers.0.input_norm.weight"][3] = 40.0
        policy.masters["layers.1.post_attention_norm.weight"][7] = 9.0
    save_policy(policy, tmp_path / "base", tokenizer_from=starter_folder())
    return tmp_path / "base"


def trained(base: Path, preset: str, lora: Lora = ALL) -> LoadedModel:
    config = read_config(base)
    config = replace(config, lora=lora.within(config))
    policy = Policy(config, named_precision(preset), read_masters(base, config))
    loaded = load_model(base, preset)
    return replace(loaded, policy=moved(policy))


@pytest.mark.parametrize("preset", ["fp32", "fp8", "int8"])
def test_a_folder_of_adapters_is_the_policy_again(preset: str, base: Path, tmp_path: Path) -> None:
    model = trained(base, preset, SOME)
    write_model(model, tmp_path / "adapters")
    again = load_policy(tmp_path / "adapters", preset)
    assert again.config == model.policy.config
    assert again.checksum() == model.policy.checksum()
    for name, master in again.masters.items():
        assert torch.equal(master, model.policy.masters[name])
    write_model(replace(model, policy=again, folder=tmp_path / "adapters"), tmp_path / "second")
    for file in (WEIGHTS_FILE, CONFIG_FILE):
        assert (tmp_path / "second" / file).read_bytes() == (
            tmp_path / "adapters" / file
        ).read_bytes()


def test_int8_moves_what_stands_out_and_files_have_pefts_numbers(
    base: Path, tmp_path: Path
) -> None:
    """A policy in INT8 that reads the adapters of one in FP32 is the same function, nearly."""
    exact = trained(base, "fp32")
    write_model(exact, tmp_path / "adapters")
    int8 = load_policy(tmp_path / "adapters", "int8")
    name = "layers.0.qkv_proj.lora_A.weight"
    factor = int8.masters[name] / exact.policy.masters[name]
    assert factor[:, 3].unique().tolist() == [64.0]
    assert factor[:, :3].unique().tolist() == [1.0]
    ids = tokens(int8)[:100]
    expected, found = logits_of(exact.policy, ids), logits_of(int8, ids)
    assert (found - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize("lora", [ALL, SOME])
def test_peft_computes_our_logits_and_writes_our_bytes(
    base: Path, lora: Lora, tmp_path: Path
) -> None:
    check_with_peft(trained(base, "fp32", lora), base, tmp_path)


def check_with_peft(model: LoadedModel, base: Path, place: Path) -> None:
    """PEFT computes a model's logits from its folder of adapters, ``place`` / "adapters", which it
    writes again byte for byte.
    """
    peft = pytest.importorskip("peft", reason="`pip install peft` loads what runs leave")
    transformers = pytest.importorskip("transformers")
    folder, again = place / "adapters", place / "theirs"
    write_model(model, folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, folder).eval()
    ids = tokens(model.policy)[:100]
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
        with theirs.disable_adapter():
            plain = theirs(ids[None]).logits[0]
    found = logits_of(model.policy, ids)
    expected, plain = (one[:, : found.shape[1]] for one in (expected, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    assert (plain - expected).abs().max() > 0.1
    theirs.save_pretrained(again)
    assert (again / WEIGHTS_FILE).read_bytes() == (folder / WEIGHTS_FILE).read_bytes()
    policy = load_policy(again, "fp32")
    assert policy.config == model.policy.config
    assert policy.checksum() == model.policy.checksum()


def test_merged_matrices_are_the_sum_rounded_once(base: Path, tmp_path: Path) -> None:
    model = trained(base, "fp32", SOME)
    write_model(model, tmp_path / "adapters")
    source = find_source(tmp_path / "adapters", None, lambda line: None)
    result = export(source, tmp_path / "merged", merge=True)
    merged = load_policy(tmp_path / "merged", "fp32")
    a = model.policy.masters["layers.0.qkv_proj.lora_A.weight"].detach()[:5].double()
    b = model.policy.masters["layers.0.qkv_proj.lora_B.weight"].detach()[:64].double()
    plain = load_policy(base, "fp32").masters["layers.0.qkv_proj.weight"].detach()
    expected = (plain[128:192].double() + SOME.scale * (b @ a)).float().bfloat16().float()
    assert torch.equal(merged.masters["layers.0.qkv_proj.weight"][128:192], expected)
    assert torch.equal(merged.masters["layers.0.qkv_proj.weight"][:128], plain[:128])
    assert result.rounding is not None
    assert 0 < result.rounding < 0.1
    coarse = export(source, tmp_path / "fp8", "fp8", PrecisionConfig(preset="fp8"), merge=True)
    assert coarse.rounding is not None
    assert coarse.rounding > 4 * result.rounding
    card = (tmp_path / "fp8" / "README.md").read_text()
    assert f"Rounding moved them by {100 * coarse.rounding:.1f}% (rms) of what" in card
    with pytest.raises(ConfigError, match="add --merge"):
        export(source, tmp_path / "no", "fp8")


def test_rounding_in_int8_is_measured_in_the_numbers_that_are_stored(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are those of the sum with its norms folded, behind a Hadamard matrix."""
    write_model(trained(base, "int8"), tmp_path / "adapters")
    source = find_source(tmp_path / "adapters", None, lambda line: None)
    source = replace(source, precision=named_precision("int8"))  # as of a run's
    capsys.readouterr()
    found = export(source, tmp_path / "int8", "int8", merge=True)
    assert "2 channels of 2 norms" in capsys.readouterr().err
    assert source.adapters is not None
    merged = MergedTensors(source.tensors, source.adapters, ALL.scale)
    written = load_policy(found.folder, "int8", trainable=False)
    norms = {
        "qkv": ("layers.0.input_norm.weight", "model.layers.0.input_layernorm.weight"),
        "gate_up": (
            "layers.1.post_attention_norm.weight", "model.layers.1.post_attention_layernorm.weight",
        ),
    }  # fmt: skip
    errors = changes = 0.0
    for path, linear in written.weights("rollout").linears.items():
        parts = list(written.decoder.masters()[f"{path}.weight"].parts)
        exact = torch.cat([merged.tensor(part) for part in parts])
        change = torch.cat([merged.tensor(part) - source.tensors.tensor(part) for part in parts])
        for reader, (ours, theirs) in norms.items():
            if path.startswith(ours[:9]) and reader in path:
                factor = source.tensors.tensor(theirs) / written.weights("rollout").plain[ours]
                exact, change = exact * factor, change * factor
        matrix, size = linear.matrix, rotation_size(exact.shape[1])
        assert isinstance(matrix, Int8Rows)
        rows = (matrix.values * matrix.scales[:, None]).view(-1, size) @ hadamard_matrix(size)
        errors += float((rows.view(exact.shape) - exact).square().sum())
        changes += float(change.square().sum())
    assert found.rounding == pytest.approx((errors / changes) ** 0.5, rel=1e-3)


def test_models_that_cannot_have_adapters_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"experts of a qwen3_moe model.*set lora\.targ"):
        replace(config_of(lora=None), family="qwen3_moe", experts=Experts(4, 2, 64, True), lora=ALL)
    with pytest.raises(ModelError, match="does not train a reward model"):
        replace(config_of(), score_head=True)
