"""Rows given from Python: found by their digest, and what a user reads when they are no rows."""

from typing import Any

import numpy as np
import pytest

from isobit.config.data import RowsData
from isobit.data.given import give_rows
from isobit.data.sources import load_rows
from isobit.errors import DataError

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": np.int64(4)}]


def test_rows_are_found_while_they_are_held() -> None:
    held = give_rows(iter(ROWS), "data.train")
    source = RowsData(count=2, sha256=held.sha256)
    assert [row.prompt for row in load_rows(source)] == ["1+1=", "2+2="]
    assert load_rows(source)[1].place == "the rows given, row 1"
    again = give_rows(ROWS, "data.train")
    assert again is held
    del held, again
    with pytest.raises(DataError, match=r"2 rows that were given from Python.*resume=True"):
        load_rows(source)


def test_the_digest_is_of_order_and_values() -> None:
    def digest(*rows: Any) -> str:
        return give_rows(rows, "data").sha256

    assert digest(*ROWS) != digest(*reversed(ROWS))
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest({"a": {"x", "y", "z"}}) == digest({"a": {"z", "x", "y"}})
    large = np.zeros(5000)
    other = large.copy()
    other[2500] = 1
    assert digest({"a": large}) != digest({"a": other}), "str() would leave the middle out"


@pytest.mark.parametrize("rows", [["1+1="], [("prompt", "1+1=")], [{1: "1+1="}]])
def test_what_are_no_rows(rows: list[Any]) -> None:
    with pytest.raises(DataError, match=r"data\.train: row 0 is .*expected a list of mappings"):
        give_rows(rows, "data.train")
