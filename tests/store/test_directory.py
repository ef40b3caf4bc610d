"""A run's directory is its own."""

import json
from pathlib import Path

import pytest

from isobit.errors import ConfigError
from isobit.store.directory import check_unused, write_json


def test_a_new_and_an_empty_directory_are_taken(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for root in (tmp_path / "a" / "b", tmp_path / "empty"):
        check_unused(root)
    assert not (tmp_path / "a").exists(), "nothing is written"


def test_a_used_directory_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError) as error:
        check_unused(tmp_path)
    for part in (str(tmp_path), "files of a run", "--output", f"rm -r {tmp_path}"):
        assert part in str(error.value)


def test_a_file_and_a_place_below_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        check_unused(tmp_path / "file")
    with pytest.raises(ConfigError, match="nothing can be written"):
        check_unused(tmp_path / "file" / "run")


def test_checking_writes_nothing(tmp_path: Path) -> None:
    check_unused(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_json_replaces_the_old_file_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    write_json(path, {"a": "é"})
    assert path.read_text(encoding="utf-8") == '{\n  "a": "é"\n}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]
