"""Weights that a trainer pushes to a server, of families that may have experts in one tensor."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from isobit.config.precision import PrecisionConfig
from isobit.models.config import ModelConfig
from isobit.models.folder import load_policy
from isobit.models.policy import random_policy
from isobit.models.safetensors import WEIGHTS_FILE
from isobit.models.saving import save_policy
from isobit.serve.errors import ApiError
from isobit.serve.weights import WeightUpdates
from tests.models.test_shared_expert import config_of, stacked
from tests.models.test_stacked import CONFIG as GPT_OSS
from tests.serve.test_weights import sent

INT8 = PrecisionConfig(preset="int8")
EXPERTS = "model.layers.1.mlp.experts"


def saved(config: ModelConfig, folder: Path) -> Path:
    save_policy(random_policy(config, PrecisionConfig(preset="fp32"), seed=1), folder)
    return folder


def updates_of(config: ModelConfig, root: Path) -> WeightUpdates:
    policy = load_policy(saved(config, root / "old"), INT8, trainable=False)
    return WeightUpdates(policy, None, root)  # type: ignore[arg-type]


def pushed(updates: WeightUpdates, *paths: str) -> int:
    """The checksum of the published bytes after an update by files."""

    async def push() -> None:
        await updates._start(sent())
        for path in paths:
            await updates._update(sent(update_info={"path": path}))

    asyncio.run(push())
    staged = updates._begun()
    updates._check(staged)
    updates.policy.republish(updates._masters(staged))
    return updates.policy.checksum()


def newer(config: ModelConfig, root: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder with other weights, whose experts differ from each other."""
    folder = saved(config, root / "new")
    tensors = load_file(folder / WEIGHTS_FILE)
    generator = torch.Generator().manual_seed(3)
    for values in tensors.values():
        values += torch.randn(values.shape, generator=generator).to(values.dtype) / 8
    save_file(tensors, folder / WEIGHTS_FILE)
    return tensors


def test_gpt_oss_is_updated_by_the_names_of_its_folder(tmp_path: Path) -> None:
    updates, tensors = updates_of(GPT_OSS, tmp_path), newer(GPT_OSS, tmp_path)
    assert tensors[f"{EXPERTS}.gate_up_proj"].shape == (3, 64, 192)
    before = updates.policy.checksum()
    expected = load_policy(tmp_path / "new", INT8, trainable=False).checksum()
    assert pushed(updates, f"new/{WEIGHTS_FILE}") == expected != before
    names = sorted(tensors)
    for place, part in enumerate((names[:5], names[5:])):
        save_file({name: tensors[name] for name in part}, tmp_path / f"{place}.safetensors")
    updates = updates_of(GPT_OSS, tmp_path)
    assert pushed(updates, "0.safetensors", "1.safetensors") == expected


@pytest.mark.parametrize("layers", [(), (0, 1, 2), (1,)])
def test_others_are_updated_in_either_form(layers: tuple[int, ...], tmp_path: Path) -> None:
    config = config_of("qwen3_next")
    updates = updates_of(config, tmp_path)
    newer(config, tmp_path)
    expected = load_policy(tmp_path / "new", INT8, trainable=False).checksum()
    save_file(stacked(tmp_path / "new", layers), tmp_path / "sent.safetensors")
    assert pushed(updates, "sent.safetensors") == expected


def test_what_is_missing_misshaped_or_there_twice_is_refused(tmp_path: Path) -> None:
    updates, tensors = updates_of(GPT_OSS, tmp_path), newer(GPT_OSS, tmp_path)
    name = f"{EXPERTS}.down_proj_bias"

    def refused(changes: dict[str, Any], updates: WeightUpdates, own: dict[str, Any]) -> str:
        made = {key: one for key, one in (own | changes).items() if one is not None}
        save_file(made, tmp_path / "sent.safetensors")
        with pytest.raises(ApiError) as error:
            pushed(updates, "sent.safetensors")
        return str(error.value)

    assert f"1 tensors have not come, the first is {name}" in refused(
        {name: None}, updates, tensors
    )
    wrong = {f"{EXPERTS}.down_proj": torch.zeros(3, 64, 96)}
    assert "has the shape (3, 64, 96); expected (3, 96, 64)" in refused(wrong, updates, tensors)
    own = {f"{EXPERTS}.0.up_proj.weight": torch.zeros(96, 64)}
    assert "has no such tensor" in refused(own, updates, tensors)
    config = config_of("qwen3_next")
    other = updates_of(config, tmp_path / "other")
    newer(config, tmp_path / "other")
    twice = {f"{EXPERTS}.0.up_proj.weight": torch.zeros(96, 128)}
    of_stacks = stacked(tmp_path / "other" / "new", (0, 1, 2))
    other.root = tmp_path
    assert "has all experts of a layer, and" in refused(twice, other, of_stacks)
