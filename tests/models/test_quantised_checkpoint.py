"""FP8 block checkpoints in: bytes and scales as they are, whatever a linear fuses and whatever its
sizes, and every folder that says one thing and holds another.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from isobit.config.precision import PrecisionConfig, Preset
from isobit.kernels.spec.quantise import publish
from isobit.models.checkpoint import FolderCheckpoint
from isobit.models.config import Experts, ModelConfig
from isobit.models.folder import load_policy, read_config
from isobit.models.frozen import FrozenPolicy
from isobit.models.master_values import master_of
from isobit.models.policy import Policy, random_policy
from isobit.models.quantised_checkpoint import read_quantisation
from isobit.models.safetensors import WEIGHTS_FILE
from isobit.models.saving import save_policy
from isobit.precision.quant_tensor import E4M3, Int8Rows, QuantTensor, dequantise
from isobit.proof.verify import VerifyOptions, verify, verify_policy
from isobit.util.errors import ModelError
from tests.ranks import in_ranks

CONFIG = ModelConfig("qwen3", 64, 160, 200, 2, 4, 2, 32, 64, 1e-6, 1e4, tied_embeddings=False)
"""q has 128 rows, k and v 64, gate and up 200; no width is a multiple of 128."""
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
DOWN = "model.layers.1.mlp.down_proj.weight"
SCALES = f"{DOWN}_scale_inv"
Tensors = dict[str, torch.Tensor]
FP8 = PrecisionConfig(preset="fp8")
FP8_FP32_SCALES = PrecisionConfig(preset="fp8", scales="fp32")


def quantised(matrix: torch.Tensor, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Another quantiser than ours: scales of its own choice, up to four times what is needed."""
    rows, columns = (-(-size // 128) for size in matrix.shape)
    scales = torch.empty(rows, columns)
    values = torch.empty(matrix.shape)
    for row in range(rows):
        for column in range(columns):
            block = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
            scale = matrix[block].float().abs().amax() / 448 * (1 + (row + column) % 3)
            scales[row, column] = 2.0 ** scale.log2().ceil() if power_of_two else scale
            values[block] = matrix[block].float() / scales[row, column]
    return values.to(E4M3), scales


def write(
    folder: Path, power_of_two: bool = True, config: ModelConfig = CONFIG, **quantization: Any
) -> Tensors:
    """An FP8 folder; -> its tensors."""
    save_policy(random_policy(config, PrecisionConfig(preset="fp32"), seed=0), folder)
    tensors = load_file(folder / WEIGHTS_FILE)
    for name in list(tensors):
        if name.split(".")[-2] in LINEARS:
            tensors[name], tensors[f"{name}_scale_inv"] = quantised(tensors[name], power_of_two)
    save_file(tensors, folder / WEIGHTS_FILE)
    edit(folder, quantization_config=QUANTIZATION | quantization)
    return tensors


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_FILE)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def is_as_stored(matrix: object, stored: Mapping[str, torch.Tensor], names: list[str]) -> bool:
    """Whether a published matrix has the folder's bytes and scales, part upon part."""
    assert isinstance(matrix, QuantTensor)
    return same_bytes(
        matrix.values.view(torch.uint8), torch.cat([stored[n].view(torch.uint8) for n in names])
    ) and torch.equal(matrix.scales, torch.cat([stored[f"{n}_scale_inv"] for n in names]))


QKV = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"]


def qkv_of(policy: Policy, side: Any = "rollout") -> Any:
    return policy.weights(side).linears["layers.1.qkv_proj"].matrix


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("trainable", [True, False])
def test_inference_takes_bytes_and_scales_as_they_are(
    tmp_path: Path, power_of_two: bool, trainable: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = write(tmp_path, power_of_two)
    policy = load_policy(tmp_path, FP8 if power_of_two else FP8_FP32_SCALES, trainable=trainable)
    assert is_as_stored(qkv_of(policy), stored, QKV)
    assert qkv_of(policy).parts == (128, 64, 64)
    assert qkv_of(policy) is qkv_of(policy, "training"), "a weight exists once"
    down = policy.weights("training").linears["layers.1.down_proj"].matrix
    assert is_as_stored(down, stored, [DOWN])
    assert len(policy.conversion) == 0 and not capsys.readouterr().err
    if trainable:
        master = policy.masters["layers.1.down_proj.weight"]
        expected = dequantise(QuantTensor(stored[DOWN], stored[SCALES], "128x128"))
        assert torch.equal(master, expected)
    else:
        assert not policy.masters


def test_fp32_scales_become_powers_of_two_once_and_the_error_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = write(tmp_path, power_of_two=False)
    policy = load_policy(tmp_path, FP8)
    said = capsys.readouterr().err
    assert said.count("isobit: the folder's FP8 has FP32 scales") == 1
    assert 'precision.scales = "fp32" takes them as they are' in said
    assert len(policy.conversion) == 8, "four linears of two layers"
    name, worst = policy.conversion.worst()
    assert 0 < policy.conversion.error() <= worst < 0.05 and name in said
    matrix = policy.weights("rollout").linears["layers.1.down_proj"].matrix
    assert isinstance(matrix, QuantTensor)
    old = dequantise(QuantTensor(stored[DOWN], stored[SCALES], "128x128")).double()
    error = float((dequantise(matrix).double() - old).norm() / old.norm())
    assert error == pytest.approx(policy.conversion.errors()["layers.1.down_proj"], rel=1e-6)
    again = random_policy(CONFIG, FP8, seed=1)
    again.restore({name: master.detach() for name, master in policy.masters.items()}, 1)
    assert same_bytes(qkv_of(again).values, qkv_of(policy).values), "published from the masters"


def test_after_an_update_the_flow_quantises_by_itself(tmp_path: Path) -> None:
    """And the numbers that did not change are the same numbers: scales get no larger."""
    stored = write(tmp_path)
    policy = load_policy(tmp_path, FP8)
    policy.publish()
    assert not is_as_stored(qkv_of(policy), stored, QKV), "its scales are as small as they can be"
    assert torch.equal(dequantise(qkv_of(policy)), policy.masters["layers.1.qkv_proj.weight"])


def test_a_run_resumed_before_its_first_update_reads_the_folders_bytes(tmp_path: Path) -> None:
    stored = write(tmp_path, power_of_two=False)
    policy = load_policy(tmp_path, FP8_FP32_SCALES)
    masters = {name: master.detach().clone() for name, master in policy.masters.items()}
    again = load_policy(tmp_path, FP8_FP32_SCALES)
    again.restore(masters, 1)
    assert is_as_stored(qkv_of(again), stored, QKV)
    policy.publish()
    again.restore(masters, 2)
    assert is_as_stored(qkv_of(again), stored, QKV), "the masters are still the folder's"
    masters["norm.weight"] += 1
    again.restore(masters, 2)
    assert same_bytes(qkv_of(again).values, qkv_of(policy).values)
    assert torch.equal(qkv_of(again).scales, qkv_of(policy).scales)


@pytest.mark.parametrize("preset", ["fp32", "bf16", "fp8-rollout", "int8"])
def test_other_flows_read_the_numbers(tmp_path: Path, preset: Preset) -> None:
    stored = write(tmp_path)
    policy = load_policy(tmp_path, PrecisionConfig(preset=preset), trainable=False)
    numbers = master_of(QuantTensor(stored[DOWN], stored[SCALES], "128x128", (160,)))
    training = policy.weights("training").linears["layers.1.down_proj"]
    if preset == "int8":
        expected = publish(training.site, numbers)
        assert isinstance(training.matrix, Int8Rows) and isinstance(expected, Int8Rows)
        assert torch.equal(training.matrix.values, expected.values)
        assert torch.equal(training.matrix.scales, expected.scales)
    else:
        assert isinstance(training.matrix, torch.Tensor)
        assert torch.equal(training.matrix.float(), numbers)
    if preset == "fp8-rollout":
        assert is_as_stored(qkv_of(policy), stored, QKV)


@pytest.mark.exhaustive
def test_what_is_sampled_from_a_folders_bytes_is_what_training_computes(tmp_path: Path) -> None:
    write(tmp_path, power_of_two=False)
    policy = load_policy(tmp_path, FP8_FP32_SCALES, trainable=False)
    result = verify_policy(policy, VerifyOptions(prompts=3, samples=1, max_new_tokens=8))
    assert result.comparison.tokens_compared > 100 and result.comparison.tokens_differing == 0


@pytest.mark.exhaustive
def test_so_is_what_ranks_sample_that_share_the_folders_bytes(tmp_path: Path) -> None:
    write(tmp_path, power_of_two=False)
    options = VerifyOptions(prompts=3, samples=1, max_new_tokens=4)
    for result in in_ranks(
        2, lambda world: verify(tmp_path, FP8_FP32_SCALES, options, world=world)
    ):
        assert result.comparison.tokens_compared > 50 and result.comparison.tokens_differing == 0


@pytest.mark.parametrize("power_of_two", [True, False])
def test_the_numbers_are_those_that_transformers_reads(tmp_path: Path, power_of_two: bool) -> None:
    """Stock transformers takes whole blocks only, and rounds what they stand for to BF16."""
    config = replace(CONFIG, hidden_size=256, intermediate_size=384, head_dim=64, num_kv_heads=4)
    write(tmp_path, power_of_two, config)
    masters = load_policy(tmp_path, FP8_FP32_SCALES).masters
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, local_files_only=True
    ).state_dict()
    for ours, names in {
        "layers.1.qkv_proj.weight": QKV,
        "layers.0.down_proj.weight": ["model.layers.0.mlp.down_proj.weight"],
    }.items():
        expected = torch.cat([theirs[name] for name in names])
        assert expected.dtype == torch.bfloat16
        assert torch.equal(masters[ours].bfloat16(), expected)


@pytest.mark.parametrize("power_of_two", [True, False])
def test_experts_stand_one_upon_the_other(tmp_path: Path, power_of_two: bool) -> None:
    """Blocks begin anew at each expert's matrices; the router is not in FP8."""
    config = replace(CONFIG, family="qwen3_moe", experts=Experts(4, 2, 136, True))
    stored = write(tmp_path, power_of_two, config)
    policy = load_policy(tmp_path, FP8 if power_of_two else FP8_FP32_SCALES, trainable=False)
    path = "model.layers.1.mlp.experts"
    gate_up = [f"{path}.{e}.{kind}_proj.weight" for e in range(4) for kind in ("gate", "up")]
    down = [f"{path}.{e}.down_proj.weight" for e in range(4)]
    linears = policy.weights("rollout").linears
    assert is_as_stored(linears["layers.1.experts.gate_up_proj"].matrix, stored, gate_up)
    assert is_as_stored(linears["layers.1.experts.down_proj"].matrix, stored, down)
    rewrite(tmp_path, lambda t: t.pop(f"{down[2]}_scale_inv"))
    with pytest.raises(ModelError, match=rf"{down[2]} is F8_E4M3, and its scales"):
        load_policy(tmp_path, FP8)


def test_a_frozen_policy_takes_them_too(tmp_path: Path) -> None:
    stored = write(tmp_path)
    frozen = FrozenPolicy.load(tmp_path, FP8)
    assert is_as_stored(frozen.weights("training").linears["layers.1.qkv_proj"].matrix, stored, QKV)
    assert frozen.is_equal_to(load_policy(tmp_path, FP8))


def test_one_part_in_bf16_makes_the_fused_matrix_numbers(tmp_path: Path) -> None:
    kept = [*QUANTIZATION["modules_to_not_convert"], "model.layers.1.self_attn.k_proj"]
    stored = write(tmp_path, modules_to_not_convert=kept)
    numbers = dequantise(QuantTensor(stored[QKV[1]], stored[f"{QKV[1]}_scale_inv"], "128x128"))

    def keep(tensors: Tensors) -> None:
        del tensors[f"{QKV[1]}_scale_inv"]
        tensors[QKV[1]] = numbers.bfloat16()

    rewrite(tmp_path, keep)
    parts = [dequantise(QuantTensor(stored[n], stored[f"{n}_scale_inv"], "128x128")) for n in QKV]
    master = load_policy(tmp_path, FP8).masters["layers.1.qkv_proj.weight"]
    assert torch.equal(master, torch.cat(parts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_of_other_formats(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = write(tmp_path)
    rewrite(
        tmp_path,
        lambda t: t.update({n: x.to(dtype) for n, x in t.items() if n.endswith("_scale_inv")}),
    )
    assert is_as_stored(qkv_of(load_policy(tmp_path, FP8)), stored, QKV)


def test_tensors_of_a_folder_one_by_one(tmp_path: Path) -> None:
    stored = write(tmp_path)
    checkpoint = FolderCheckpoint.open(tmp_path, CONFIG)
    assert checkpoint.in_e4m3 == {n for n, x in stored.items() if x.dtype == E4M3}
    found = checkpoint.quantised(DOWN)
    assert found is not None and is_as_stored(found, stored, [DOWN])
    assert torch.equal(checkpoint.tensor(DOWN), dequantise(found))
    assert checkpoint.quantised("lm_head.weight") is None
    assert torch.equal(checkpoint.tensor("lm_head.weight"), stored["lm_head.weight"])


def set_scale(value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[SCALES][1, 1] = value

    return change


def set_byte(tensors: Tensors) -> None:
    tensors[DOWN].view(torch.uint8)[3, 4] = 0xFF


@pytest.mark.few(11)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(SCALES), rf"{DOWN} is F8_E4M3, and its scales {SCALES} are missing; expec"
         r"ted F32, BF16 or F8_E8M0 of the shape \(2, 2\)"),
        (lambda t: t.update({f"{DOWN}_scale": t.pop(SCALES)}), "down_proj.weight_scale, which"),
        (lambda t: t.update({SCALES: torch.ones(2, 1)}), r"_scale_inv has the shape \(2, 1\), but a"
         r" matrix of \(160, 200\) has \(2, 2\) blocks"),
        (lambda t: t.update({SCALES: torch.ones(1)}), r"_scale_inv has the shape \(1,\)"),
        (lambda t: t.update({SCALES: torch.ones(2, 2).half()}), "_scale_inv is F16; expected F32"),
        (lambda t: t.update({SCALES: torch.ones(2, 2).int()}), "_scale_inv is I32; expected F32"),
        (lambda t: t.update({DOWN: torch.ones(160, 200)}), f"{SCALES}, which .* {DOWN} is F32, and "
         "F8_E4M3 alone has scales"),
        (lambda t: t.update({DOWN: t[DOWN].float().to(torch.float8_e5m2)}), f"{DOWN} is F8_E5M2"),
        (lambda t: (t.pop(SCALES), t.update({DOWN: torch.ones(160, 200)})), f"{DOWN} is F32, but qu"
         "antization_config in config.json does not name its module in modules_to_not_convert"),
        (lambda t: t.update({"lm_head.weight": torch.ones(64, 160).to(E4M3),
                             "lm_head.weight_scale_inv": torch.ones(1, 2)}),
         "lm_head.weight is F8_E4M3; expected F32, BF16, F16 or F64, as it is no linear's matrix"),
        (set_scale(torch.nan), "holds a scale that is not positive and finite"),
        (set_scale(torch.inf), "holds a scale that is not positive and finite"),
        (set_scale(0.0), "holds a scale that is not positive and finite"),
        (set_scale(-1.0), "holds a scale that is not positive and finite"),
        (set_scale(1e37), "holds a scale that is not positive and finite"),
        (set_byte, f"{DOWN} holds a NaN"),
    ],
)  # fmt: skip
def test_tensors_that_disagree(
    tmp_path: Path, change: Callable[[Tensors], object], message: str
) -> None:
    write(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        load_policy(tmp_path, FP8, trainable=False)


def test_fp8_without_a_word_in_the_configuration_and_against_its_word(tmp_path: Path) -> None:
    write(tmp_path, modules_to_not_convert=["lm_head", "model.layers.1.mlp"])
    with pytest.raises(ModelError, match=r"is F8_E4M3, but modules_to_not_convert in config\.json"):
        load_policy(tmp_path, FP8)
    edit(tmp_path, quantization_config=None)
    with pytest.raises(
        ModelError, match=r"is F8_E4M3, but config\.json has no quantization_config"
    ):
        load_policy(tmp_path, FP8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method = 'gptq', which is not supported; expected 'fp8'"),
        ({"quant_method": None}, "quant_method = None"),
        ({"fmt": "e5m2"}, "fmt = 'e5m2'"),
        ({"activation_scheme": "static"}, "activation_scheme = 'static'"),
        ({"weight_block_size": [64, 128]}, r"weight_block_size = \[64, 128\]"),
        ({"weight_block_size": None}, "weight_block_size = None"),
        ({"scale_fmt": "e3m4"}, "scale_fmt = 'e3m4', which is not supported"),
        ({"expert_dtype": "fp4"}, "expert_dtype = 'fp4'"),
        ({"kv_cache_scheme": {"bits": 8}}, "kv_cache_scheme = .*, which is not supported"),
        ({"modules_to_not_convert": "lm_head"}, "expected a list of modules"),
        ({"ignored_layers": [1]}, r"ignored_layers is \[1\], expected a list of modules"),
        ({"\x1b[31m": 1}, r"\\x1b\[31m"),
    ],
)
def test_other_quantisations_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write(tmp_path, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        read_config(tmp_path)
    assert str(caught.value).isprintable()


def test_what_a_quantization_config_may_leave_out_and_say_besides() -> None:
    least = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    found = read_quantisation({"quantization_config": least}, "config.json")
    assert found is not None and found.kept == () and not found.keeps("model.layers.0.mlp.up_proj")
    more = {"scale_fmt": "ue8m0", "dequantize": False, "ignored_layers": ["lm_head", "mlp.gate"]}
    found = read_quantisation({"quantization_config": least | more}, "config.json")
    assert found is not None and found.keeps("lm_head")
    assert found.keeps("model.layers.3.mlp.gate") and not found.keeps(
        "model.layers.3.mlp.gate_proj"
    )
    assert read_quantisation({}, "config.json") is None
    with pytest.raises(ModelError, match="expected an object"):
        read_quantisation({"quantization_config": "fp8"}, "config.json")
