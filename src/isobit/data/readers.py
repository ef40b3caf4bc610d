"""Readers of JSONL, CSV and Parquet files, which may be compressed. Errors name the file and the
line.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import zlib
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import IO, Any, cast

from isobit.util.errors import DataError
from isobit.util.plain_files import check_plain, open_plain

LONGEST_LINE = 1 << 26
"""Bytes; a device or a binary file without line ends would fill the memory."""
LONGEST_ARRAY = 1 << 30
"""Bytes of a file that is one JSON array, which is read at once."""
MOST_PADDING = 1 << 20
"""Zeros behind the data of a compressed file, as some tapes and full disks leave them."""
MOST_BLANK = 1_000_000
"""Blank lines without a row between them: a small compressed file can hold any number."""


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of ``path`` with their places, as ``line 3``; blank lines are skipped, a byte
    order mark is allowed. A file that is one JSON array gives its objects, as ``element 3``.

    Raises ``DataError`` for a file that cannot be read, bytes that are not UTF-8, and a line or an
    element that is not one JSON object without repeated keys.
    """
    try:
        with _opened(path) as file:
            begun = False
            for number, line in _lines(file, path):
                place = f"line {number}"
                if not begun and line.lstrip().startswith(b"["):
                    yield from _elements(line, file, path)
                    return
                yield place, _object(line, f"{path}, {place}")
                begun = True
    except _DAMAGED as error:
        raise _damaged(path, error) from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise _unreadable(path, error, "JSONL") from error


def _lines(file: IO[bytes], path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers. Raises DataError for one that is too long,
    for too many blank ones, and for another encoding's byte order mark.
    """
    blank = 0
    for number in count(1):
        line = file.readline(LONGEST_LINE + 1)
        if not line:
            return
        if number == 1 and line.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            raise DataError(f"{path} is UTF-16; save the file as UTF-8")
        line = line.removeprefix(BOM_UTF8) if number == 1 else line
        if len(line) > LONGEST_LINE:
            raise DataError(f"{path}, line {number}: longer than {LONGEST_LINE:,} bytes")
        if line.strip():
            yield number, line
            blank = 0
            continue
        blank += 1 + len(line) // 1024
        if blank > MOST_BLANK:
            raise DataError(f"{path}, line {number}: only blank lines for {MOST_BLANK:,} lines")


def _elements(begin: bytes, file: IO[bytes], path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSON array that begins with ``begin`` and goes on in the file."""
    content = begin + file.read(LONGEST_ARRAY)
    if len(content) > LONGEST_ARRAY:
        raise DataError(
            f"{path} is one JSON array of more than {LONGEST_ARRAY:,} bytes; write one object a "
            "line (JSONL)"
        )
    values = _parsed(content, str(path), "expected one JSON array, or one object a line")
    for number, value in enumerate(values, 1):
        place = f"element {number}"
        if not isinstance(value, dict):
            raise DataError(
                f"{path}, {place}: expected a JSON object, found {type(value).__name__}"
            )
        yield place, value


def _unreadable(path: Path, error: OSError | ValueError, kind: str) -> DataError:
    if isinstance(error, OSError) and error.errno is None:  # as bz2 says of damage
        return _damaged(path, error)
    reason = error.strerror if isinstance(error, OSError) else error
    return DataError(f"cannot read {path}: {reason}; expected a {kind} file")


class _Padded:
    """A compressed file for Python's decompressors, which skip zeros behind the data, however many
    there are: a file that was lengthened to a terabyte would come to no end.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._zeros = file, 0
        self.seek, self.seekable = file.seek, file.seekable

    def read(self, size: int = -1) -> bytes:
        content = self._file.read(size)
        self._zeros = 0 if content.strip(b"\0") else self._zeros + len(content)
        if self._zeros > MOST_PADDING:
            raise EOFError(f"more than {MOST_PADDING:,} zeros behind the data")
        return content


_COMPRESSED: Mapping[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lzma.LZMAFile,
}
"""Decompressed content of open files, by the bytes that the files begin with."""
_ZSTANDARD = b"\x28\xb5\x2f\xfd"
_DAMAGED = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """A file's bytes, decompressed, whatever its name. Raises OSError."""
    with open_plain(path) as file:
        begin = file.read(8)
        file.seek(0)
        if begin.startswith(_ZSTANDARD):
            raise DataError(f"{path} is compressed with Zstandard; decompress it, or take gzip")
        for magic, decompressed in _COMPRESSED.items():
            if begin.startswith(magic):
                with decompressed(_Padded(file)) as content:
                    yield content
                return
        yield file


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is a damaged compressed file ({error}); write or fetch it again")


class _TwiceError(Exception):
    """A key that occurs twice in one object."""


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen = set[str]()
        raise _TwiceError(next(key for key, _ in pairs if key in seen or seen.add(key)))
    return value


def _object(line: bytes, place: str) -> dict[str, Any]:
    value = _parsed(line.rstrip(b"\r\n"), place, "expected one object a line")
    if not isinstance(value, dict):
        raise DataError(f"{place}: expected a JSON object, found {type(value).__name__}")
    return value


def _parsed(content: bytes, place: str, expected: str) -> Any:
    """The JSON of bytes in UTF-8. Raises DataError, naming ``place`` and what was ``expected``."""
    try:
        return json.loads(content.decode(), object_pairs_hook=_object_of)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: byte {error.start + 1} of the line is not UTF-8; save the file as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise DataError(
            f"{place}, {where}column {error.colno}: not JSON ({_why(error)}); {expected}"
        ) from error
    except _TwiceError as error:
        raise DataError(f"{place}: the key {error.args[0]!r} is there twice") from None
    except RecursionError as error:
        raise DataError(f"{place}: nested too deeply") from error
    except ValueError as error:  # Python converts no integer of more than some thousand digits
        raise DataError(f"{place}: a number has too many digits; write it as text") from error


def _why(error: json.JSONDecodeError) -> str:
    """The reason that Python gives, or one of the usual slips of files written by hand."""
    before, behind = error.doc[: error.pos].rstrip()[-1:], error.doc[error.pos :].lstrip()[:2]
    if behind[:1] in ("}", "]") and before == ",":
        return f"a comma before {behind[0]!r}, which JSON does not have; remove it"
    if error.msg == "Extra data" and behind[:1] == ",":
        return "a comma behind the object, as in an array; remove it"
    if behind[:1] == "'":
        return "single quotes, as Python prints a dict; JSON has double ones"
    if behind in ("//", "/*"):
        return "a comment, which JSON does not have; remove it"
    return error.msg


_ROWS_AT_ONCE = 1024
_BEYOND = "\0 beyond"
"""The key of values after the last column."""


def read_csv(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of ``path`` as text, with their last lines, as ``line 3``. Columns are parted by
    commas, or by tabs or semicolons where the first line has these and no comma.

    Raises ``DataError`` for a file that cannot be read or is not UTF-8, for missing or repeated
    column names, and for a row with fewer or more values than columns.
    """
    csv.field_size_limit(LONGEST_LINE)  # Python's own is 131,072 characters
    try:
        with (
            _opened(path) as content,
            io.TextIOWrapper(cast(Any, content), encoding="utf-8-sig", newline="") as file,
        ):
            lines = _csv_lines(file, path)
            first = next(lines, "")
            rows = csv.DictReader(
                chain([first], lines), restkey=_BEYOND, strict=True, delimiter=_delimiter(first)
            )
            names = list(rows.fieldnames or ())
            if "" in names or len(set(names)) < len(names):
                raise DataError(
                    f"{path}, line 1: expected a name for each column, and each once; found {names}"
                )
            for row in rows:
                if _BEYOND in row or None in row.values():
                    raise DataError(
                        f"{path}, line {rows.line_num}: not one value for each of the "
                        f"{len(names)} columns; quote text with commas or line breaks"
                    )
                yield f"line {rows.line_num}", row
    except _DAMAGED as error:
        raise _damaged(path, error) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8; save the file as UTF-8") from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise _unreadable(path, error, "CSV") from error
    except csv.Error as error:
        raise DataError(f"{path}: not CSV: {error}; JSONL holds any text") from error


def _csv_lines(file: IO[str], path: Path) -> Iterator[str]:
    """All lines, which are pieces of fields. Raises DataError for one that is too long, and for too
    many blank ones.
    """
    blank = 0
    for number in count(1):
        line = file.readline(LONGEST_LINE + 1)
        if not line:
            return
        if len(line) > LONGEST_LINE:
            raise DataError(f"{path}, line {number}: longer than {LONGEST_LINE:,} characters")
        blank = 0 if line.strip() else blank + 1 + len(line) // 1024
        if blank > MOST_BLANK:
            raise DataError(f"{path}, line {number}: only blank lines for {MOST_BLANK:,} lines")
        yield line


def _delimiter(first: str) -> str:
    return next((one for one in ",\t;" if one in first), ",")


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of ``path``. Raises ``DataError`` for a file that cannot be read as Parquet."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        check_plain(path)
        with ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE):
                yield from batch.to_pylist()
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        raise DataError(f"cannot read {path}: {reason}; expected a Parquet file") from error
    except (pyarrow.ArrowException, ValueError) as error:
        raise DataError(f"{path}: not a Parquet file that can be read: {error}") from error
