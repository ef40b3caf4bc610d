"""Rows in a temporary file: what was put in, and nothing left behind."""

import errno
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobit.data.spool import Mapped, Spool
from isobit.records.text import Prompt
from isobit.util.errors import DataError


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"train/{index}", str(index), (index,)) for index in range(count)]


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
