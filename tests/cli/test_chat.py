import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from isobit.cli.chat import _lines_said
from isobit.cli.main import main
from tests.serve.servers import chat_folder


def test_lines_of_a_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = b"hi\n\xe8\x83\n\n/help\n/etc/passwd?\r\n\xf0\x9f\x99\x82\n /exit \nmore\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(said), encoding="utf-8"))
    assert list(_lines_said()) == ["hi", "/etc/passwd?", "\U0001f642"]
    told = capsys.readouterr().err
    assert told.count("not UTF-8") == 1 and told.count("Ctrl-D or /exit") == 1


def test_ctrl_c_at_the_prompt_ends_no_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter([KeyboardInterrupt(), "hi", EOFError()])

    def read(_: str) -> str:
        found = next(given)
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr("builtins.input", read)
    assert list(_lines_said()) == ["hi"]


def test_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: Iterator[str] = iter(["1+1=", " ", "3+3=", "9" * 600])

    def answer(_: str) -> str:
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", answer)
    limits = ["--max-new-tokens", "5", "--temperature", "0"]
    assert main(["chat", str(chat_folder(tmp_path)), *limits]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 3  # two answers, and the end of the input
    assert "leaves no room in the model's context of 512" in shown.err
    assert main(["chat", "starter"]) == 2
    assert "has no chat template" in capsys.readouterr().err
