"""Errors quote strangers: what they wrote cannot drive a terminal."""

import pickle

import pytest

from isobit.cli.main import main
from isobit.util.errors import IsobitError, ModelError


def test_control_characters_are_shown_as_escapes() -> None:
    error = ModelError("tensor \x1b[31mred\x07, \x9b and \ud800 in\ta\ntable, naïve 日本")
    shown = "tensor \\x1b[31mred\\x07, \\x9b and \\ud800 in\ta\ntable, naïve 日本"
    assert str(error) == shown and f"{error}" == shown
    assert str(IsobitError()) == ""


def test_the_middle_of_a_text_of_pages_is_left_out() -> None:
    text = str(ModelError(f"the file x: {'1' * 100_000}; write it again"))
    assert text.startswith("the file x: 111") and text.endswith("111; write it again")
    assert "[96,0" in text and "characters left out]" in text and len(text) < 4100


def test_a_list_is_shown_whole_however_many_lines_it_has() -> None:
    lines = [f"  key {i}: {'x' * 100}" for i in range(1000)]
    error = IsobitError("1,000 keys", *lines, f"  last: \x1b[31m{'1' * 9000}")
    shown = str(error).splitlines()
    assert shown[:-1] == ["1,000 keys", *lines]
    assert shown[-1].startswith("  last: \\x1b[31m1") and "[5,0" in shown[-1]
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_the_command_line_prints_them_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["verify", "/nowhere/\x1b]0;title\x07"]) == 2
    assert "error: /nowhere/\\x1b]0;title\\x07 is not a folder" in capsys.readouterr().err
