"""Packages that a run does not use need not be there: a GPU machine often has torch and little
else.
"""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
import tomli_w

from isobit.config.recipes import RunConfig

ABSENT = ("datasets", "reasoning_gym", "tensorboard", "wandb")
COMPILER = "torch._dynamo"
"""Every start would wait a second for it."""
CODE = f"""
import sys
from importlib import metadata
for name in {ABSENT!r}:
    sys.modules[name] = None
sys.modules[{COMPILER!r}] = None
found = metadata.version
def version(name):
    if name.replace("-", "_") in {ABSENT!r}:
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.version = version
from isobit.cli.main import main
sys.exit(main(["train", sys.argv[1]]))
"""


@pytest.mark.exhaustive
def test_a_run_on_jsonl_needs_no_datasets_no_reasoning_gym_no_tensorboard_and_no_compiler(
    make_config: Callable[..., RunConfig],
) -> None:
    config = make_config()
    recipe = config.output.with_name("recipe.toml")
    recipe.write_text(
        tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)), encoding="utf-8"
    )
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(recipe)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "the package tensorboard is not installed: no events are written" in done.stdout
    assert not (config.output / "tensorboard").exists()
    versions = json.loads((config.output / "run.json").read_text())["versions"]
    assert versions["datasets"] == versions["reasoning-gym"] == "not installed"
    assert len((config.output / "metrics.jsonl").read_text().splitlines()) == 4
