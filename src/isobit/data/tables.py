"""CSV and Parquet files as rows.  Every fault is named by file and line or row."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isobit.errors import DataError

_ROWS_AT_ONCE = 1024
_BEYOND = "\0 beyond"
"""What the library calls the values behind the last column."""


def read_csv(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of ``path`` with the numbers of their last lines, each value as the text that stands
    there.

    Raises ``DataError`` for a file that cannot be read or is not UTF-8, for column names that are
    missing or come twice, and for a row with fewer or more values than columns.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, restkey=_BEYOND, strict=True)
            names = list(rows.fieldnames or ())
            if "" in names or len(set(names)) < len(names):
                raise DataError(
                    f"{path}, line 1: expected a name for each column, and each once; found {names}"
                )
            for row in rows:
                if _BEYOND in row or None in row.values():
                    raise DataError(
                        f"{path}, line {rows.line_num}: not one value for each of the "
                        f"{len(names)} columns that line 1 names; put text with commas or line "
                        "breaks into quotes"
                    )
                yield rows.line_num, row
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; expected a CSV file") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8; save the file as UTF-8") from error
    except csv.Error as error:
        raise DataError(f"{path}: not CSV: {error}; JSONL holds any text") from error


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of ``path``.  Raises ``DataError`` for a file that cannot be read as Parquet."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE):
                yield from batch.to_pylist()
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        raise DataError(f"cannot read {path}: {reason}; expected a Parquet file") from error
    except (pyarrow.ArrowException, ValueError) as error:
        raise DataError(f"{path}: not a Parquet file that can be read: {error}") from error
