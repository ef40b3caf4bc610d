"""PEFT's folders: what of them is plain LoRA, and how everything else is refused by its name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.models.adapter_folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_config,
    base_name,
    read_adapter_config,
    write_adapters,
)
from isobit.models.adapters import adapter_masters, open_adapters
from isobit.models.config import Lora, ModelConfig
from isobit.models.folder import base_folder
from isobit.models.safetensors import TensorFile, write_tensors
from isobit.starter import starter_folder
from isobit.util.errors import ModelError

LORA = Lora(4, 8.0, ("q_proj", "v_proj"))
CONFIG = ModelConfig("qwen3", 128, 64, 96, 2, 4, 2, 16, 256, 1e-6, 1e4, True, lora=LORA)
LAYER = "base_model.model.model.layers.{}.self_attn.{}.lora_{}.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = {
        name: torch.full((rows, *master.shape[1:]), 0.25)
        for master in adapter_masters(CONFIG).values()
        for name, rows in master.adapter.items()
    }
    write_adapters(tmp_path / "adapters", LORA, tmp_path / "base", made)
    return tmp_path / "adapters"


def change(folder: Path, **changes: Any) -> None:
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    (folder / WEIGHTS_FILE).unlink()  # which is mapped
    write_tensors(folder / WEIGHTS_FILE, tensors, tensors.__getitem__)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: values.clone() for name, values in TensorFile(folder / WEIGHTS_FILE).items()}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peft_type": "IA3"}, "peft_type is not LORA"),
        ({"use_dora": True}, "use_dora is True, which may change what an adapter computes"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"kasa_config": {"beta": 1e-4}}, "kasa_config is"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is"),
        ({"of_the_next_version": 3}, "of_the_next_version is 3"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16'"),
        ({"init_lora_weights": "OLoRA"}, "init_lora_weights is 'OLoRA'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq'"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights is 'lora_ga'"),
        ({"init_lora_weights": "of the next version"}, "init_lora_weights is 'of the next"),
        ({"target_modules": ["q_proj", "v_proj", "embed_tokens"]}, "names embed_tokens"),
        ({"target_modules": ["layers.0.self_attn.q_proj", "v_proj"]}, "layers.1.self_attn.q_proj"),
        ({"target_modules": 7}, "target_modules is 7"),
        ({"target_modules": [["q_proj"]]}, "target_modules is"),
        ({"r": 16}, "r is 16, and adapters in .* have the rank 4: they do not belong together"),
        ({"r": True}, "r is True"),
        ({"rank_pattern": {"q_proj": 4}, "r": 8}, "rank_pattern says"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern is"),
        ({"alpha_pattern": {"(a+)+q_proj": 3}}, "alpha_pattern is"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
        ({"lora_alpha": 1e308}, r"lora_alpha is 1e\+308"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
        ({"lora_alpha": 0}, "lora_alpha is 0"),
        ({"lora_alpha": True}, "lora_alpha is True"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path is None"),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_its_key(
    changes: dict[str, Any], reason: str, folder: Path
) -> None:
    change(folder, **changes)
    with pytest.raises(ModelError, match=reason):
        open_adapters(folder, CONFIG)


@pytest.mark.parametrize(
    "changes",
    [
        {"init_lora_weights": "gaussian", "eva_config": {"rho": 2.0}, "lora_dropout": 0.1},
        {"init_lora_weights": "eva", "ensure_weight_tying": True, "peft_version": "0.21.2"},
        {"init_lora_weights": False, "of_the_next_version": None, "another": {}},
        {"exclude_modules": ["o_proj"]},
        {"target_modules": r".*self_attn\.(q|v)_proj"},
        {"target_modules": ["self_attn.q_proj", "v_proj", "visual_proj"]},
        {"rank_pattern": {"o_proj": 8}, "alpha_pattern": {"o_proj": 3, r"layers\.9\.q_proj": 5}},
        {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 8}},
        {"layers_to_transform": [0, 1]},
    ],
)
def test_keys_that_change_nothing_are_taken(changes: dict[str, Any], folder: Path) -> None:
    change(folder, **changes)
    assert read_adapter_config(folder).lora == LORA
    assert all(bool((values == 0.25).all()) for values in open_adapters(folder, CONFIG).values())


def test_linears_that_an_expression_leaves_out_have_zeros(folder: Path) -> None:
    """Of a list, which names every layer, they are missing."""
    left = {LAYER.format(1, "v_proj", one): None for one in "AB"}
    rewrite(folder, {name: one for name, one in stored(folder).items() if name not in left})
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.v_proj.* has the shape \(none\)"):
        open_adapters(folder, CONFIG)
    change(folder, target_modules="model.layers.0.*|.*1.self_attn.q_proj")
    assert read_adapter_config(folder).lora == LORA
    found = open_adapters(folder, CONFIG)
    assert {name for name, values in found.items() if not bool(values.any())} == left.keys()
    change(folder, target_modules=["v_proj", "q_proj"], layers_to_transform=[0])
    assert open_adapters(folder, CONFIG).keys() == found.keys()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (torch.full((4, 64), 1e38), r"q_proj\.lora_A\.weight holds numbers from 1e\+38"),
        (torch.full((4, 64), float("nan")), "holds numbers from nan"),
        (torch.full((4, 64), -float("inf")), "holds numbers from -inf"),
        (torch.ones(4, 64, dtype=torch.int8), "is I8; the numbers of an adapter are one of F32"),
        (torch.ones(4, 64).to(torch.float8_e4m3fn), "is F8_E4M3; the numbers"),
        (torch.ones(4, 64).bool(), "is BOOL; the numbers"),
        (torch.full((4, 64), 1e300, dtype=torch.float64), "holds numbers from inf"),
        (torch.ones(256), "is no A or B of a linear"),
        (torch.ones(4, 32), r"has the shape \(4, 32\)"),
    ],
)
def test_numbers_that_nothing_can_be_computed_with_are_refused_by_name(
    values: torch.Tensor, reason: str, folder: Path
) -> None:
    rewrite(folder, stored(folder) | {LAYER.format(1, "q_proj", "A"): values})
    with pytest.raises(ModelError, match=reason):
        open_adapters(folder, CONFIG)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_formats_of_numbers_are_read_as_fp32(dtype: torch.dtype, folder: Path) -> None:
    rewrite(folder, {name: one.to(dtype) for name, one in stored(folder).items()})
    for values in open_adapters(folder, CONFIG).values():
        assert values.dtype == torch.float32
        assert bool((values == 0.25).all())


def test_other_tensors_and_half_a_pair_are_refused_by_name(folder: Path) -> None:
    whole = stored(folder)
    bias = LAYER.format(0, "q_proj", "B").replace("weight", "bias")
    rewrite(folder, whole | {bias: torch.zeros(64)})
    with pytest.raises(ModelError, match=r"q_proj\.lora_B\.bias is no A or B of a linear"):
        open_adapters(folder, CONFIG)
    half = LAYER.format(1, "q_proj", "B")
    rewrite(folder, {name: one for name, one in whole.items() if name != half})
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.q_proj has a lora_A, but no"):
        open_adapters(folder, CONFIG)
    named = {name.replace("q_proj", "c_attn"): one for name, one in whole.items()}
    rewrite(folder, named)
    with pytest.raises(ModelError, match="has an adapter of c_attn; they are read of q_proj"):
        read_adapter_config(folder)
    rewrite(folder, {name.replace("layers.1", "layers.7"): one for name, one in whole.items()})
    change(folder, target_modules=".*")
    with pytest.raises(ModelError, match=r"layers\.7.*ask for \(none\)"):
        open_adapters(folder, CONFIG)


def test_a_base_is_named_without_a_place_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = tmp_path / "hub/models--org--name/snapshots/0123"
    commit.mkdir(parents=True)
    (tmp_path / "here/models/base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    for base, name in (
        (commit, ("org/name", "0123")),
        (starter_folder(), ("starter", None)),
        (Path("models/base"), ("./models/base", None)),
        (tmp_path / "here/models/base", ("./models/base", None)),
        (tmp_path / "elsewhere/base", ("./base", None)),
        (Path("../elsewhere/base"), ("./base", None)),
        (tmp_path / "here", ("./here", None)),
    ):
        assert base_name(base) == name
        assert str(tmp_path) not in json.dumps(adapter_config(LORA, base))


def test_a_local_base_is_found_by_its_run_from_here_and_beside_the_adapter(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model(path: str) -> Path:
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "config.json").write_text("{}")
        return tmp_path / path

    change(folder, base_model_name_or_path="./models/base")
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    with pytest.raises(ModelError, match=r"is \./models/base, and there is no such model folder"):
        base_folder(folder)
    beside = model("base")
    assert base_folder(folder).resolve() == beside
    here = model("cwd/models/base")
    assert base_folder(folder).resolve() == here
    recorded, other = model("far/base"), model("far/other")
    manifest = tmp_path / "run.json"
    manifest.write_text(json.dumps({"config": {"model": str(recorded)}}))
    assert base_folder(folder) == recorded
    manifest.write_text(json.dumps({"config": {"model": str(other)}}))
    assert base_folder(folder).resolve() == here
    manifest.write_text(json.dumps({"config": {"model": str(folder)}}))  # its own base
    assert base_folder(folder).resolve() == here
    shutil.copytree(folder, tmp_path / "next/model")
    (tmp_path / "next/run.json").write_text(json.dumps({"config": {"model": str(folder)}}))
    manifest.write_text(json.dumps({"config": {"model": str(recorded)}}))
    assert base_folder(tmp_path / "next/model") == recorded
