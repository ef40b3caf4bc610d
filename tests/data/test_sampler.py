"""The order of prompts: a function of the seed, whatever else happens in the process."""

import errno
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.data.sampler import Mapped, PromptSampler, Spool
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


COLUMNS = st.dictionaries(
    st.text(max_size=3),
    st.none() | st.text(max_size=4) | st.floats() | st.binary(max_size=3) | st.datetimes(),
    max_size=3,
)


@given(numbers=st.sets(st.integers(0, 10**6), min_size=1, max_size=20), columns=COLUMNS)
def test_a_spool_gives_back_what_it_was_given(numbers: set[int], columns: dict[str, Any]) -> None:
    given_prompts = [
        Prompt(f"a/b/{number}", str(number), (number, 1), columns, [{"role": "user"}])
        for number in sorted(numbers)
    ]
    spool = Spool(iter(given_prompts), lambda prompt: prompt.id)
    assert repr(list(spool.items_in_order)) == repr(given_prompts)  # NaN equals NaN
    assert repr(spool.items_in_order[-1]) == repr(given_prompts[-1])
    assert list(spool) == [prompt.id for prompt in given_prompts]
    assert all(repr(spool[prompt.id]) == repr(prompt) for prompt in given_prompts)
    for missing in (f"a/b/{max(numbers) + 1}", f"a/{min(numbers)}", "a/b/", "a/b/-1"):
        with pytest.raises(KeyError):
            spool[missing]


def test_a_spool_leaves_no_file_and_names_the_folder_when_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spool = Spool(prompts(10), lambda prompt: prompt.id)
    assert not list(tmp_path.iterdir())
    assert f"in {tmp_path}" in spool.describe()

    class Full(io.BytesIO):
        def write(self, _: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: Full())
    with pytest.raises(DataError, match=r"is full after 0 training rows .* variable TMPDIR"):
        Spool(prompts(1), lambda prompt: prompt.id)


def test_a_mapped_sequence_makes_items_when_they_are_asked_for() -> None:
    made: list[int] = []

    def make(number: int) -> int:
        made.append(number)
        return -number

    mapped = Mapped(range(5), make)
    assert (len(mapped), made) == (5, [])
    assert (mapped[2], mapped[-1], mapped[1:3]) == (-2, -4, [-1, -2])
    assert list(mapped) == [0, -1, -2, -3, -4]
