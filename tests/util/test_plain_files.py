"""Pipes, devices and files without an end are refused wherever a path is read."""

import ast
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import isobit
from isobit.config.data import CsvData, HfData, JsonlData, ParquetData
from isobit.config.load import read_toml
from isobit.data.sources import load_rows
from isobit.data.stop_tokens import named_stops
from isobit.data.tokenizer import load_tokenizer
from isobit.models.adapter_folder import CONFIG_FILE, read_adapter_config
from isobit.models.checkpoint import read_json
from isobit.models.safetensors import TensorFile
from isobit.observe.run_record import read_object
from isobit.store.journals import read_lines
from isobit.store.lock import is_held
from isobit.util.errors import ConfigError, DataError, IsobitError, ModelError
from isobit.util.files import file_sha256
from isobit.util.plain_files import check_plain, open_plain, read_plain


def test_a_plain_file_is_read_and_a_link_where_it_may_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_plain(tmp_path / "link") == b"content"
    with pytest.raises(OSError, match="is a link, not a file"):
        open_plain(tmp_path / "link", follow_links=False)
    assert read_plain(tmp_path / "file", 7) == b"content"
    for refused in (read_plain, check_plain):
        with pytest.raises(OSError, match="has more than 6 bytes"):
            refused(tmp_path / "file", 6)
    with pytest.raises(FileNotFoundError):
        open_plain(tmp_path / "absent")
    with pytest.raises(IsADirectoryError):
        open_plain(tmp_path)


def test_what_is_no_file_is_named_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "socket"))
        for path, kind in (
            (tmp_path / "pipe", "a named pipe"),
            (tmp_path / "link", "a named pipe"),
            (tmp_path / "socket", "a socket"),
            (Path("/dev/zero"), "a device"),
        ):
            for read in (open_plain, read_plain, check_plain):
                with pytest.raises(OSError, match=f"is {kind}, not a file"):
                    read(path)


def test_a_pipe_that_takes_the_place_of_a_file_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.touch()
    before = os.open

    def swapped(*arguments: Any, **options: Any) -> int:
        path.unlink()
        os.mkfifo(path)
        return before(*arguments, **options)

    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(OSError, match="is a named pipe"):
        open_plain(path)


def _pipe(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    return path


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (lambda folder: TensorFile(_pipe(folder / "model.safetensors")), ModelError),
        (lambda folder: read_json(_pipe(folder / "config.json")), ModelError),
        (lambda folder: read_adapter_config(_pipe(folder / CONFIG_FILE).parent), ModelError),
        (lambda folder: load_tokenizer(_pipe(folder / "tokenizer_config.json").parent), ModelError),
        (lambda folder: read_toml(_pipe(folder / "run.toml")), ConfigError),
        (lambda folder: load_rows(JsonlData(path=_pipe(folder / "a.jsonl"))), DataError),
        (lambda folder: load_rows(CsvData(path=_pipe(folder / "a.csv"))), DataError),
        (lambda folder: load_rows(ParquetData(path=_pipe(folder / "a.parquet"))), DataError),
        (
            lambda folder: load_rows(HfData(path=_pipe(folder / "README.md").parent)),
            DataError,
        ),
    ],
)
def test_no_reader_waits_for_a_pipe(
    read: Callable[[Path], object], error: type[IsobitError], tmp_path: Path
) -> None:
    (tmp_path / "it").mkdir()
    (tmp_path / "it/tokenizer.json").write_text("{}")
    (tmp_path / "it/rows.jsonl").write_text('{"prompt": "1"}\n')
    with pytest.raises(error, match="is a named pipe, not a file"):
        read(tmp_path / "it")


def test_what_of_a_run_is_a_pipe_is_not_there(tmp_path: Path) -> None:
    problems: list[str] = []
    assert read_object(_pipe(tmp_path / "run.json"), problems) == {}
    assert problems == ["run.json is missing: the page lacks what it holds"]
    assert read_lines(_pipe(tmp_path / "metrics.jsonl")) == []
    assert not is_held(_pipe(tmp_path / ".lock").parent)
    assert named_stops(_pipe(tmp_path / "generation_config.json")) == []
    with pytest.raises(OSError, match="is a named pipe"):
        file_sha256(_pipe(tmp_path / "x"))


def test_a_file_without_an_end_is_no_tokenizer(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match=r"tokenizer\.json has more than 268,435,456 bytes"):
        load_tokenizer(tmp_path)


OWN = {
    "__init__.py", "config/foreign.py", "config/load.py", "config/shipped.py",
    "environments/worker.py",
    "memory/speed.py", "observe/flow_choice.py",
    "observe/report/templates.py", "observe/viewer.py", "parallel/watch.py",
    "proof/doctor_environment.py", "rewards/sandboxed/main.py",
    "rewards/supervisor.py",
    "store/kernels_digest.py", "util/machine.py", "util/plain_files.py",
}  # fmt: skip
"""They also read files of the package, of /proc, or that they have written before."""


@pytest.mark.exhaustive
def test_files_are_read_through_the_one_opener() -> None:
    source = Path(isobit.__file__).parent
    found: dict[str, int] = {}
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _reads(node):
                found[path.relative_to(source).as_posix()] = node.lineno
    assert {name: line for name, line in found.items() if name not in OWN} == {}


def _reads(call: ast.Call) -> bool:
    """Whether a call opens a path for reading, by pathlib or ``open``."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if name in ("read_text", "read_bytes") and len(call.args) < 2:
        return not (name == "read_bytes" and call.args)  # of the layers' bytes
    texts = [one.value for one in call.args if isinstance(one, ast.Constant)]
    is_open = name == "open" or (isinstance(call.func, ast.Name) and call.func.id == "open")
    return is_open and any(mode in ("r", "rb", "rt") for mode in texts)
