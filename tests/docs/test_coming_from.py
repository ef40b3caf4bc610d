"""The page for those who come from elsewhere names keys that exist, and defaults that are ours."""

import re
from pathlib import Path

from isobit.config.algorithm import GrpoConfig
from isobit.config.recipes import RunConfig
from isobit.config.schema import all_keys
from isobit.config.tables import TrainingConfig

PAGE = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\|[^|]*\|[^|]*\|([^|]*)\|$", re.MULTILINE)


def test_every_key_of_the_tables_exists() -> None:
    keys = {key.path for key in all_keys(RunConfig)} | {"corrections"}
    named = {
        word
        for cell in ROW.findall(PAGE)
        for word in re.findall(r"`([a-z_]+(?:\.[A-Za-z_]+)*)`", cell)
    }
    assert len(named) > 40
    assert named <= keys, named - keys


def test_the_defaults_that_are_told_are_ours() -> None:
    training, grpo = TrainingConfig(), GrpoConfig()
    assert f"`training.beta2` is {training.beta2} " in PAGE
    assert f"`training.weight_decay` {training.weight_decay:g} " in PAGE
    assert f"`training.schedule` {training.schedule}\n" in PAGE
    assert f"`algorithm.clip_high` {grpo.clip_high} for GRPO" in PAGE
    assert grpo.dual_clip is None and not RunConfig.model_fields["corrections"].default
