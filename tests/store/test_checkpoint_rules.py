"""Which checkpoints stay, which settings may change, and what a checkpoint's folder is called."""

import re
from pathlib import Path
from typing import Any

import pytest

from isobit.config.tables import CheckpointConfig
from isobit.store.checkpoint import folder_name, step_of
from isobit.store.compatible import MAY_CHANGE, changed_keys, check_compatible
from isobit.store.keeper import best_step, steps_to_keep
from isobit.util.errors import ConfigError

NO_FIGURES = dict.fromkeys(range(2, 21, 2))


@pytest.mark.parametrize(
    ("config", "figures", "kept"),
    [
        ({"keep_last": 1}, NO_FIGURES, {20}),
        ({"keep_last": 3}, NO_FIGURES, {16, 18, 20}),
        ({"keep_last": 30}, NO_FIGURES, set(NO_FIGURES)),
        ({"keep_last": 1, "keep_every": 6}, NO_FIGURES, {6, 12, 18, 20}),
        ({"keep_last": 1}, {2: 0.5, 4: 0.9, 6: 0.9, 8: None, 10: 0.1}, {4, 10}),
        ({"keep_last": 1}, {}, set()),
    ],
)
def test_the_newest_the_multiples_and_the_best_stay(
    config: dict[str, Any], figures: dict[int, float | None], kept: set[int]
) -> None:
    assert steps_to_keep(figures, CheckpointConfig(**config)) == kept


def test_the_best_is_the_first_with_the_highest_value() -> None:
    assert best_step({8: 0.5, 2: 0.5, 4: None, 6: 0.1}) == 2
    assert best_step({2: None}) is None


def test_differing_keys_are_dotted_and_hold_both_values() -> None:
    saved = {"a": {"b": 1, "c": [1, 2]}, "d": {}, "gone": 1}
    now = {"a": {"b": 2, "c": (1, 2)}, "d": {"e": 5}, "gone": 1}
    assert changed_keys(saved, now) == {"a.b": (1, 2), "d": ({}, "not set"), "d.e": ("not set", 5)}
    assert changed_keys({"a": {"b": 1}}, {"a": {"b": 1, "later": None}, "new": None}) == {}


def config(steps: int = 10, schedule: str = "constant", **more: object) -> dict[str, object]:
    return {"training": {"steps": steps, "schedule": schedule}, **more}


def test_steps_may_change_with_a_constant_schedule_and_not_below_what_is_done() -> None:
    assert check_compatible(config(10), config(20), step=10) == {"training.steps": (10, 20)}
    assert check_compatible(config(10), config(6), step=6) == {"training.steps": (10, 6)}
    for saved, now, step in (
        (config(10), config(5), 6),
        (config(10, "cosine"), config(20, "cosine"), 0),
    ):
        with pytest.raises(ConfigError, match=r"training\.steps: 10 in the run"):
            check_compatible(saved, now, step)


def test_slots_and_the_sizes_of_microbatches_may_not_change() -> None:
    for key in ("slots", "tokens_per_microbatch"):
        saved, now = ({"training": {"steps": 2, key: number}} for number in (1, 2))
        with pytest.raises(ConfigError, match=rf"training\.{key}: 1 in the run, 2 now"):
            check_compatible(saved, now, step=1)


def test_the_refusal_names_what_may_change() -> None:
    with pytest.raises(ConfigError) as error:
        check_compatible(config(seed=1), config(seed=2), step=0)
    assert "seed: 1 in the run, 2 now" in str(error.value)
    assert all(key in str(error.value) for key in MAY_CHANGE)


def test_only_folders_with_a_step_are_checkpoints(tmp_path: Path) -> None:
    assert folder_name(10) == "step_000010" and folder_name(12345678) == "step_12345678"
    for name, step in {
        "step_000010": 10,
        "step_1234567": 1234567,
        "step_10": None,
        "step_000010.tmp": None,
        ".step_000010": None,
    }.items():
        (tmp_path / name).mkdir()
        assert step_of(tmp_path / name) == step
    (tmp_path / "step_000011").write_text("")
    (tmp_path / "step_000012").symlink_to(tmp_path / "step_000010")
    assert step_of(tmp_path / "step_000011") is None and step_of(tmp_path / "step_000012") is None


def test_the_page_on_checkpoints_names_all_that_may_change() -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    part = page[page.index("These may change at a resume") : page.index("Any other change")]
    named = re.findall(r"`([\w.]+)`", part)
    for key in MAY_CHANGE:
        assert key in named or key.rpartition(".")[2] in named, key
