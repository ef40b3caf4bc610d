"""Ranks that are not alike are refused, by name, on all of them."""

from typing import Any

import pytest
import torch

from isobit.config.recipes import RunConfig
from isobit.config.rules import check_started
from isobit.parallel.world import Alone, is_raised_on_all
from isobit.run.agreement import check_machines, check_recipes
from isobit.run.rollouter_process import train_by_ranks
from isobit.util.errors import ConfigError

CPU = torch.device("cpu")


class Among(Alone):
    """One of two; what the other says differs as the test wants."""

    def __init__(self, **other: Any) -> None:
        super().__init__()
        self._other = other

    def all_gather(self, mine: Any) -> list[Any]:
        found = {**mine, **self._other}
        return [
            mine,
            {
                key: {**mine[key], **found[key]} if isinstance(mine[key], dict) else found[key]
                for key in found
            },
        ]


def config() -> RunConfig:
    data = {"train": {"type": "jsonl", "path": "starter:train.jsonl"}}
    return RunConfig.model_validate({"output": "run", "data": data})


def test_equal_ranks_pass() -> None:
    check_recipes(Among(), config())
    check_machines(Among(), CPU)


def test_another_recipe() -> None:
    with pytest.raises(ConfigError, match=r"rank 1 .* training\.steps = 7, rank 0 with 20") as told:
        check_recipes(Among(training={"steps": 7}), config())
    assert is_raised_on_all(told.value)


def test_another_number_of_threads() -> None:
    with pytest.raises(ConfigError, match=r"rank 1 on far has device\.threads 77.*the key threads"):
        check_machines(Among(host="far", device={"threads": 77}), CPU)


def test_another_version() -> None:
    with pytest.raises(ConfigError, match=r"rank 1 on far has versions\.torch '1\.0'"):
        check_machines(Among(host="far", versions={"torch": "1.0"}), CPU)


@pytest.mark.parametrize("tables", [{}, {"servers": ["http://a:1"], "weights_folder": "here"}])
def test_engines_of_one_process_are_refused_where_torchrun_has_started_several(
    tables: dict[str, Any],
) -> None:
    """Of which the recipe says nothing."""
    values = config().model_dump(mode="json", by_alias=True)
    values["rollout"] |= {"engine": "vllm", **tables}
    recipe = RunConfig.model_validate(values)
    check_started(recipe, 1)
    with pytest.raises(ConfigError, match="a run of one process, and 2 processes were started"):
        train_by_ranks(recipe, world=Several())


class Several(Alone):
    """A world of two, of which nothing is asked."""

    size = 2
