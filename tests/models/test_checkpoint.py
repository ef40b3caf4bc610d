"""Masters from a folder's tensors, and every tensor that does not fit the configuration.

Tensors in pieces are what they are in one.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from isobit.config.precision import PrecisionConfig
from isobit.models import checkpoint
from isobit.models.checkpoint import FolderCheckpoint
from isobit.models.config import ModelConfig
from isobit.models.policy import random_policy
from isobit.models.rope import LinearScaling, Llama3Scaling, YarnScaling
from isobit.models.safetensors import WEIGHTS_FILE
from isobit.models.saving import save_policy
from isobit.precision.quant_tensor import E4M3
from isobit.util.errors import ModelError

CONFIG = ModelConfig("qwen2", 64, 128, 256, 2, 4, 2, 32, 128, 1e-6, 1e4, tied_embeddings=True)
DOWN = "model.layers.1.mlp.down_proj.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    policy = random_policy(CONFIG, PrecisionConfig(preset="fp32"), seed=0)
    with torch.no_grad():
        for master in policy.masters.values():
            master.add_(torch.randn_like(master))
    save_policy(policy, tmp_path)
    return tmp_path


def rewrite(folder: Path, change: Callable[[Tensors], Tensors | None]) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    changed = change(tensors)
    save_file(tensors if changed is None else changed, folder / WEIGHTS_FILE)


def masters_of(folder: Path, config: ModelConfig = CONFIG) -> Tensors:
    masters: dict[str, Any] = dict(FolderCheckpoint.open(folder, config).masters())
    return masters


def test_masters_are_the_checkpoints_tensors_row_upon_row(folder: Path) -> None:
    stored, masters = load_file(folder / WEIGHTS_FILE), masters_of(folder)
    path = "model.layers.1.self_attn"
    for kind in ("weight", "bias"):
        parts = [stored[f"{path}.{name}_proj.{kind}"] for name in "qkv"]
        assert torch.equal(masters[f"layers.1.qkv_proj.{kind}"], torch.cat(parts).float())
    assert torch.equal(masters["norm.weight"], stored["model.norm.weight"].float())
    assert all(master.dtype == torch.float32 for master in masters.values())


def test_masters_do_not_depend_on_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = masters_of(folder)
    monkeypatch.setattr(checkpoint, "PIECE", 1000)
    assert all(torch.equal(master, whole[name]) for name, master in masters_of(folder).items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.bfloat16])
def test_formats_of_weights(folder: Path, dtype: torch.dtype) -> None:
    exact = {name: x.half().to(dtype) for name, x in load_file(folder / WEIGHTS_FILE).items()}
    rewrite(folder, lambda _: exact)
    assert torch.equal(masters_of(folder)["layers.1.down_proj.weight"], exact[DOWN].float())


@pytest.mark.parametrize(
    "dtype",
    [
        torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
        torch.float8_e5m2, torch.float8_e8m0fnu,
    ],
)  # fmt: skip
def test_every_other_format_is_refused_by_name(folder: Path, dtype: torch.dtype) -> None:
    """faults.md D6: a matrix of int8, uint8, int64, bool or F8_E5M2 was read in silence."""
    rewrite(folder, lambda tensors: tensors.update({DOWN: torch.ones(128, 256).to(dtype)}))
    with pytest.raises(ModelError, match=rf"{DOWN} is \w+; expected F32, BF16, F16 or F64"):
        masters_of(folder)


def with_head(difference: float, dtype: torch.dtype = torch.bfloat16) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        head = tensors["model.embed_tokens.weight"].clone()
        head[63, 127] += difference
        tensors["lm_head.weight"] = head.to(dtype)

    return change


def test_a_head_stored_beside_the_embedding_that_it_is_tied_to(folder: Path) -> None:
    rewrite(folder, with_head(0.0))
    assert "lm_head.weight" not in masters_of(folder)
    for change in (with_head(0.5), with_head(0.0, torch.float32)):
        rewrite(folder, change)
        with pytest.raises(ModelError, match=r"lm_head\.weight is another matrix"):
            masters_of(folder)
    untied = replace(CONFIG, tied_embeddings=False)
    assert "lm_head.weight" in masters_of(folder, untied)


LLAMA3 = Llama3Scaling(8.0, 1.0, 4.0, 64)
SCALINGS = [None, LinearScaling(2.0), LLAMA3, YarnScaling(4.0, 64)]


def buffers_of(config: ModelConfig, dtype: torch.dtype) -> Tensors:
    """What transformers of Llama 2's time would have stored of a model: computed in FP32."""
    half = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**half)
    scaling = config.rope_scaling
    stretched = frequencies
    if scaling is not None:
        stretched = scaling.stretched(frequencies.double(), config.rope_theta, 0).float()
    angles = torch.outer(torch.arange(config.max_positions).float(), stretched).repeat(1, 2)
    factor = config.attention_scaling
    found = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": stretched,
        "model.rotary_emb.inv_freq": stretched,
        "model.rotary_emb.original_inv_freq": frequencies,
        "model.layers.1.self_attn.rotary_emb.cos_cached": (angles.cos() * factor)[None, None],
        "model.layers.1.self_attn.rotary_emb.sin_cached": angles.sin() * factor,
    }
    return {name: values.to(dtype).contiguous() for name, values in found.items()}


@pytest.mark.few(11)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
def test_rotary_buffers_of_old_checkpoints_are_left_aside(
    scaling: Any, dtype: torch.dtype, theta: float, folder: Path
) -> None:
    config = replace(CONFIG, rope_theta=theta, rope_scaling=scaling)
    before = masters_of(folder, config)
    buffers = {name: one.clone() for name, one in buffers_of(config, dtype).items()}
    rewrite(folder, lambda tensors: tensors.update(buffers))
    after = masters_of(folder, config)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("name", buffers_of(CONFIG, torch.float32))
def test_buffers_that_the_configuration_does_not_give_are_refused_with_numbers(
    name: str, folder: Path
) -> None:
    right = buffers_of(CONFIG, torch.float32)[name]
    wrong = {
        "another theta": buffers_of(replace(CONFIG, rope_theta=5e5), torch.float32)[name],
        "one number": torch.where(torch.arange(right.numel()).view_as(right) == 3, 0.5, right),
        "NaN": torch.full_like(right, torch.nan),
        "shape": right.flatten()[:-1].clone(),
    }
    for kind, values in wrong.items():
        rewrite(folder, lambda tensors, values=values: tensors.update({name: values.clone()}))
        message = "but config.json asks for" if kind == "shape" else "but config.json .* gives"
        with pytest.raises(ModelError, match=message) as error:
            masters_of(folder)
        assert name in str(error.value)
    other = {f"{name}_of_another_kind": right.clone()}
    rewrite(folder, lambda tensors: {n: x for n, x in tensors.items() if n != name} | other)
    with pytest.raises(ModelError, match="which a qwen2 decoder does not read"):
        masters_of(folder)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e300])
def test_what_is_not_finite_as_a_master_is_refused_by_name(folder: Path, value: float) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[DOWN] = tensors[DOWN].double()
        tensors[DOWN][3, 4] = value

    rewrite(folder, spoil)
    with pytest.raises(ModelError, match=rf"{DOWN} holds a NaN or an infinity"):
        masters_of(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {n: x for n, x in t.items() if n != DOWN}, f"are missing, the first is {DOWN}"),
        (lambda t: t.update(renamed=t.pop(DOWN)), "holds renamed, which a qwen2 decoder does not"),
        (lambda t: t.update({f"{DOWN}_scale_inv": torch.ones(1, 2)}), "down_proj.weight_scale_inv"),
        (lambda t: t.update({DOWN: torch.ones(256, 128)}), rf"{DOWN} has the shape \(256, 128\)"),
        (lambda t: t.update({"\x1b[31m": torch.ones(1)}), r"holds '\\x1b\[31m', which"),
    ],
)
def test_config_and_tensors_that_disagree(
    folder: Path, change: Callable[[Tensors], Tensors | None], message: str
) -> None:
    rewrite(folder, change)
    with pytest.raises(ModelError, match=message):
        FolderCheckpoint.open(folder, CONFIG)


def test_finite_numbers() -> None:
    x = torch.randn(5, 7)
    assert checkpoint.is_finite(x)
    for value in (torch.nan, torch.inf, -torch.inf):
        x[2, 3] = value
        assert not checkpoint.is_finite(x)


def test_pieces_land_in_rows_of_a_larger_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "PIECE", 10)
    target, source = torch.zeros(9, 4), torch.randn(5, 4).bfloat16()
    checkpoint.copy_in_pieces(target[2:7], source)
    assert torch.equal(target[2:7], source.float())
    assert not target[:2].any() and not target[7:].any()


def test_equality_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "PIECE", 10)
    x = torch.randn(9, 4)
    assert checkpoint.is_equal_in_pieces(x, x.clone())
    for place in (0, 35):
        other = x.clone()
        other.view(-1)[place] += 1
        assert not checkpoint.is_equal_in_pieces(x, other)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_both_nans_of_e4m3_are_found_and_no_other_byte(
    byte: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PIECE", 10)
    every = torch.tensor([x for x in range(256) if x & 0x7F != 0x7F], dtype=torch.uint8)
    assert not checkpoint.holds_nan_byte(every.view(E4M3))
    every[200] = byte
    assert checkpoint.holds_nan_byte(every.view(E4M3))
