"""The source of a user's code, with what it imports of the user's own."""

from pathlib import Path

import pytest

from isobit.util.user_source import source_sha256

REWARD = (
    "import json\nimport torch\nfrom helpers_of_mine import double\ndef f(p, c):\n    return 1.0\n"
)

DEEPER = [f"deeper/{name}.py" for name in ("at/__init__", "at/inner", "at/beside", "above")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine.py").write_text(REWARD)
    (tmp_path / "helpers_of_mine.py").write_text(
        "def double(x):\n    from deeper.at import inner\n"
    )
    package = tmp_path / "deeper" / "at"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from .. import above\n")
    (package / "inner.py").write_text("from .beside import *\n")
    (package / "beside.py").write_text("x = 1\n")
    (tmp_path / "deeper" / "above.py").write_text("y = 1\n")
    (tmp_path / "deeper" / "unrelated.py").write_text("")
    return tmp_path


@pytest.mark.parametrize("named", ["file", "module"])
@pytest.mark.parametrize("edited", ["mine.py", "helpers_of_mine.py", *DEEPER])
def test_every_file_of_the_user_s_counts(named: str, edited: str, folder: Path) -> None:
    place = {"file": f"{folder / 'mine.py'}:f", "module": "mine:f"}[named]
    before = source_sha256(place)
    assert before == source_sha256(place) is not None
    (folder / "deeper" / "unrelated.py").write_text("x = 2")
    assert source_sha256(place) == before
    (folder / edited).write_text((folder / edited).read_text() + "# edited\n")
    assert source_sha256(place) != before


def test_what_is_no_file_of_the_user_s_has_no_source(folder: Path) -> None:
    for place in ("json:loads", "torch:add", "isobit.starter.tasks:correct_answer", "gone:f"):
        assert source_sha256(place) is None
    assert source_sha256(str(folder / "gone.py:f")) is None
    assert source_sha256("python:<lambda>@0123") is None


def test_a_source_that_cannot_be_parsed_counts_by_its_bytes(folder: Path) -> None:
    (folder / "mine.py").write_bytes(b"def (\xff\x00")
    assert source_sha256(str(folder / "mine.py:f"))
