"""The full-text index of a folder of documents (SQLite's FTS5), for the environment ``search``.

It is made once for a folder with its present files.
"""

import hashlib
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from isobit.util.errors import ToolError
from isobit.util.files import file_sha256
from isobit.util.plain_files import read_plain

SUFFIXES = (".txt", ".md")


def _documents(folder: Path, suffixes: Sequence[str]) -> list[tuple[str, Path]]:
    """Names and paths, sorted."""
    found = (path for path in folder.rglob("*") if path.suffix in suffixes and path.is_file())
    return sorted((path.relative_to(folder).as_posix(), path) for path in found)


def documents_sha256(
    folder: str, suffixes: Sequence[str] = SUFFIXES, index: str | None = None
) -> str:
    """A digest of the names and contents of the documents that ``Search`` finds with these
    options.
    """
    digest = hashlib.sha256()
    for name, path in _documents(Path(folder).expanduser(), suffixes):
        digest.update(f"{name}\0{file_sha256(path)}\0".encode())
    return digest.hexdigest()


def built_index(folder: Path, suffixes: Sequence[str], index: str | None) -> Path:
    """The file of the index, which is written unless it is there: its name tells the folder, and
    the sizes and times of its files.  Raises ToolError for a folder without documents.
    """
    documents = _documents(folder, suffixes)
    if not documents:
        raise ToolError(
            f"{folder} (environment.options.folder) has no file with the suffix "
            f"{' or '.join(suffixes)}"
        )
    seen = hashlib.sha256(str(folder.absolute()).encode())
    for name, path in documents:
        about = path.stat()
        seen.update(f"\0{name}\0{about.st_size}\0{about.st_mtime_ns}".encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "isobit" / "search"
    home = Path(index).expanduser() if index else cache
    index_path = home / f"{seen.hexdigest()[:32]}.sqlite"
    if index_path.exists():
        return index_path
    index_path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = index_path.with_suffix(f".{os.getpid()}")
    unfinished.unlink(missing_ok=True)
    database = sqlite3.connect(unfinished)
    try:
        with database:
            database.execute("CREATE VIRTUAL TABLE documents USING fts5(document UNINDEXED, text)")
            rows = (
                (name, read_plain(path, largest=None).decode("utf-8", "replace"))
                for name, path in documents
            )
            database.executemany("INSERT INTO documents VALUES (?, ?)", rows)
            database.execute("INSERT INTO documents(documents) VALUES ('optimize')")
    finally:
        database.close()
    unfinished.replace(index_path)  # whoever builds it at the same time writes the same
    return index_path
