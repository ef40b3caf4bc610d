"""The public interface: lazy, typed as it is loaded, and strict about what it is given."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import isobit
from isobit.config.run import RunConfig
from isobit.errors import ConfigError

DATA = {"train": {"type": "jsonl", "path": "starter:train.jsonl", "limit": 8}}
SMALL = {
    "rollout": {"max_new_tokens": 4},
    "training": {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2},
}
REWARD = {"function": "isobit.starter.tasks:correct_answer"}


def names_for_type_checkers() -> set[tuple[str, str]]:
    """(module, name) of every import under ``if TYPE_CHECKING``."""
    tree = ast.parse(Path(str(isobit.__file__)).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert all(alias.asname == alias.name for node in imports for alias in node.names)
    return {(str(node.module), alias.name) for node in imports for alias in node.names}


def test_type_checkers_see_the_names_that_are_loaded() -> None:
    assert names_for_type_checkers() == {
        (f"isobit.{home}", name) for name, home in isobit._HOME_OF.items()
    }
    for _, name in names_for_type_checkers():
        assert getattr(isobit, name) is not None
        assert name in dir(isobit)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'isobit' has no attribute 'trian'"):
        getattr(isobit, "trian")  # noqa: B009 (a type checker would refuse the plain form)


def test_importing_and_listing_load_no_torch() -> None:
    code = (
        "import sys, isobit; dir(isobit); isobit.IsobitError; "
        "print(sorted({'torch', 'pydantic', 'transformers'} & set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_a_mapping_a_configuration_and_changes_make_the_same_run(tmp_path: Path) -> None:
    recipe = {"output": tmp_path / "a", "data": DATA, "reward": REWARD, **SMALL}
    first = isobit.train(recipe)
    changed = isobit.train(
        RunConfig.model_validate({**recipe, "seed": 1}), output=tmp_path / "b", seed=0
    )
    changes: dict[str, Any] = {**SMALL, "reward.function": REWARD["function"], "training.steps": 1}
    dotted = isobit.train({"data": DATA}, output=tmp_path / "c", **changes)
    weights = {
        (summary.model / "model.safetensors").read_bytes() for summary in (first, changed, dotted)
    }
    assert len(weights) == 1


def test_a_wrong_key_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(
        isobit.IsobitError,
        match=(
            r"the recipe with its changes: training.stepz: unknown key; did you mean "
            r"training.steps"
        ),
    ):
        isobit.train({"data": DATA}, output=tmp_path / "run", training={"stepz": 3})
    assert not (tmp_path / "run").exists()


def test_generation_takes_a_folder_and_settings() -> None:
    groups = isobit.generate(
        "starter",
        ["1+1+1+1=", "2+2+2+2="],
        samples=2,
        precision="bf16",
        rollout={"max_new_tokens": 3},
    )
    assert [len(group.completions) for group in groups] == [2, 2]
    with pytest.raises(isobit.IsobitError, match=r"rollout\.max_tokens: unknown key"):
        isobit.generate("starter", ["1="], rollout={"max_tokens": 3})


def test_a_function_starts_no_processes(tmp_path):
    recipe = Path(__file__).parents[1] / "recipes" / "quickstart.toml"
    with pytest.raises(ConfigError, match="start this script with torchrun"):
        isobit.train(recipe, output=str(tmp_path / "run"), cluster={"processes": 2})
    assert not (tmp_path / "run").exists()
