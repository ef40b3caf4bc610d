"""CSV and Parquet files: what a row holds, and what a user reads when a file is wrong."""

from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from isobit.config.data import CsvData, ParquetData
from isobit.data.sources import load_rows
from isobit.errors import DataError


def csv_rows(tmp_path: Path, content: bytes, **keys: object) -> list[tuple[object, dict, str]]:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    source = CsvData.model_validate({"path": path, **keys})
    return [(row.prompt, dict(row.columns), row.place) for row in load_rows(source)]


def test_csv_values_are_text_as_it_stands(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbfquestion,answer\n"a, ""b""\nc",007\n\xc3\xa9,\n'
    rows = csv_rows(tmp_path, content, prompt="question")
    path = tmp_path / "rows.csv"
    assert rows == [
        ('a, "b"\nc', {"answer": "007"}, f"{path}, line 3"),
        ("é", {"answer": ""}, f"{path}, line 4"),
    ]
    assert len(csv_rows(tmp_path, content + b"1,2,3\n", prompt="question", limit=2)) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"prompt,answer\na,b,c\n", "line 2: not one value for each of the 2 columns"),
        (b"prompt,answer\na\n", "line 2: not one value for each of the 2 columns"),
        (b"prompt,prompt\na,b\n", "line 1: expected a name for each column, and each once"),
        (b"prompt,\na,b\n", "line 1: expected a name for each column, and each once"),
        (b'prompt\n"a\n', "not CSV: unexpected end of data"),
        (b"prompt\n\xff\n", "not UTF-8"),
        (b"", "has no rows"),
        (b"promt\na\n", "line 2: no column 'prompt'; .* did you mean 'promt'"),
    ],
)
def test_csv_that_is_wrong(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        csv_rows(tmp_path, content)


def test_parquet_rows_are_python_values(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1+1="}]
    rows = [{"prompt": messages, "answer": i, "info": {"x": [i]}} for i in range(3)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = load_rows(ParquetData(path=tmp_path / "rows.parquet", limit=2))
    assert [row.prompt for row in found] == [tuple(messages)] * 2
    assert [row.columns for row in found] == [{"answer": i, "info": {"x": [i]}} for i in (0, 1)]
    assert found[1].place.endswith("rows.parquet, row 1")


def test_parquet_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    for content in (b"", b"PAR1 not really PAR1", None):
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        with pytest.raises(DataError, match=r"rows\.parquet"):
            load_rows(ParquetData(path=path))
