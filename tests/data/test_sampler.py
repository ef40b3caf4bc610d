"""The order of prompts: a function of the seed, whatever else happens in the process."""

import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.data.sampler import PromptSampler
from isobit.records.text import Prompt
from isobit.util.errors import DataError


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"train/{index}", str(index), (index,)) for index in range(count)]


def ids(batch: list[tuple[Prompt, int]]) -> list[tuple[str, int]]:
    return [(prompt.id, visit) for prompt, visit in batch]


@settings(deadline=None)
@given(
    count=st.integers(1, 20),
    per_step=st.integers(1, 25),
    seed=st.integers(0, 2**32),
    shuffle=st.booleans(),
)
def test_every_epoch_visits_every_prompt_once(
    count: int, per_step: int, seed: int, shuffle: bool
) -> None:
    sampler = PromptSampler(prompts(count), per_step, seed, shuffle)
    seen = [pair for _ in range(3 * count) for pair in ids(sampler.next())][: 3 * count]
    for epoch in range(3):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == sorted(
            (f"train/{index}", epoch) for index in range(count)
        )


def test_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    def order(seed: int) -> list[list[tuple[str, int]]]:
        sampler = PromptSampler(prompts(50), 50, seed)
        return [ids(sampler.next()) for _ in range(2)]

    torch.manual_seed(1)
    random.seed(1)
    first = order(3)
    torch.manual_seed(2)
    random.seed(2)
    assert order(3) == first
    assert order(4) != first
    assert [name for name, _ in first[0]] != [name for name, _ in first[1]]


def test_the_order_of_a_seed_never_changes() -> None:
    sampler = PromptSampler(prompts(8), 8, seed=0)
    assert [prompt.id for prompt, _ in sampler.next()] == [f"train/{digit}" for digit in "70153426"]


def test_without_shuffling_the_order_is_the_datasets() -> None:
    sampler = PromptSampler(prompts(3), 4, seed=0, shuffle=False)
    assert ids(sampler.next()) == [("train/0", 0), ("train/1", 0), ("train/2", 0), ("train/0", 1)]


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7])
def test_a_restored_sampler_continues(steps: int) -> None:
    sampler = PromptSampler(prompts(7), 3, seed=5)
    for _ in range(steps):
        sampler.next()
    restored = PromptSampler(prompts(7), 3, seed=5)
    restored.restore(json.loads(json.dumps(sampler.state())))
    assert [ids(restored.next()) for _ in range(6)] == [ids(sampler.next()) for _ in range(6)]


def test_a_state_of_other_data_is_refused() -> None:
    with pytest.raises(DataError, match="state is of 7 prompts, but the dataset has 8"):
        PromptSampler(prompts(8), 3, seed=5).restore(PromptSampler(prompts(7), 3, seed=5).state())


def test_no_prompts_is_an_error() -> None:
    with pytest.raises(DataError, match="no prompts"):
        PromptSampler([], 3, seed=5)


@pytest.mark.parametrize(("taken", "again"), [(3, 2), (5, 5), (9, 5), (10, 1), (4, 0), (12, 12)])
def test_the_last_prompts_are_given_again_across_epochs(taken: int, again: int) -> None:
    sampler = PromptSampler(prompts(5), 2, seed=7)
    seen = ids(sampler.next(taken))
    sampler.give_again(again)
    assert ids(sampler.next(again)) == seen[taken - again :]
    assert ids(sampler.next(1)) == ids(PromptSampler(prompts(5), 2, 7).next(taken + 1))[taken:]
