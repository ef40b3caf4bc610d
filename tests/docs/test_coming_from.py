"""The page for those who come from elsewhere names keys that exist, and defaults that are ours."""

import re
from pathlib import Path

from isobit.config.algorithm import GrpoConfig
from isobit.config.foreign import FRAMEWORKS, foreign_rows
from isobit.config.keys import all_keys
from isobit.config.recipes import RunConfig, SftConfig
from isobit.config.training import TrainingConfig
from tools import site

PAGE = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text(encoding="utf-8")


def test_every_key_of_the_names_exists_in_the_schema() -> None:
    keys = {key.path for key in all_keys(RunConfig)}
    said = keys | {key.path for key in all_keys(SftConfig)}
    said |= {key.rpartition(".")[0] for key in said}
    rows = [row for section in foreign_rows().values() for row in section]
    assert len(rows) >= 150
    for row in rows:
        assert row.names and (bool(row.key) or bool(row.say)), row
        assert not row.key or row.key in keys, row.key
        for name in re.findall(
            r"(?:training|data|algorithm|rollout|cluster)\.[a-zA-Z_.]*\w", row.say
        ):
            assert name in said, name


def test_every_name_stands_for_one_thing() -> None:
    for framework in FRAMEWORKS:
        names = [
            name
            for rows in foreign_rows().values()
            for row in rows
            for name in row.names.get(framework, ())
        ]
        assert len(names) == len(set(names)) and len(names) > 60, framework


def test_the_site_has_the_names_on_the_page() -> None:
    tables = site.tables_of_names()
    assert PAGE.count(site.NAMES) == 1
    for title, rows in foreign_rows().items():
        assert f"\n### {title}\n" in tables
        for row in rows:
            assert all(f"`{name}`" in tables for name in row.all_names())
    lines = [line for line in tables.splitlines() if line.startswith("| ")]
    assert all(line.count(" | ") == len(FRAMEWORKS) for line in lines)


def test_the_keys_in_the_prose_exist() -> None:
    keys = {key.path for key in all_keys(RunConfig)}
    tables = "training|algorithm|checkpoint|cluster"
    named = set(re.findall(rf"`((?:{tables})\.[A-Za-z_.]+)`", PAGE))
    assert len(named) > 3 and named <= keys, named - keys


def test_the_defaults_that_are_told_are_ours() -> None:
    training, grpo = TrainingConfig(), GrpoConfig()
    page = " ".join(PAGE.split())
    assert f"`training.beta2` is {training.beta2} " in page
    assert f"`training.weight_decay` {training.weight_decay:g} " in page
    assert f"`training.schedule` {training.schedule} " in page
    assert f"`algorithm.clip_high` {grpo.clip_high} for GRPO" in page
    assert grpo.dual_clip is None and not RunConfig.model_fields["corrections"].default
