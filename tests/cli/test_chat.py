import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isobit.cli.chat import _lines_said, _say_answer, _turn
from isobit.cli.main import main
from isobit.config.data import ChatConfig
from isobit.records.text import SamplingParams
from tests.data.test_chat_templates import tokenizer_of
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


class Engine:
    """Says a text letter by letter, and is stopped, if it ``stops``, ahead of its last one."""

    def __init__(self, text: str, stops: bool) -> None:
        self._left, self._stops = [*text], stops

    @property
    def num_live(self) -> int:
        return len(self._left)

    def submit(self, requests: Any, follow: str) -> list[list[int]]:
        return [[0]]

    def step(self) -> list[Any]:
        if self._stops and len(self._left) == 1:
            raise KeyboardInterrupt
        return [SimpleNamespace(text=self._left.pop(0))]

    def abort(self, handles: Any) -> list[Any]:
        return [SimpleNamespace(text="".join(self._left))]


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("shows", [False, True])
def test_gpt_oss_goes_on_with_its_answer_alone(
    shows: bool, stops: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its template refuses channels in a message."""
    tokenizer = tokenizer_of("gpt_oss")
    model: Any = SimpleNamespace(
        tokenizer=tokenizer,
        context=4096,
        sampling=lambda _: SamplingParams(9, special_tokens=shows),
    )
    chat: Any = SimpleNamespace(data=ChatConfig(), rollout=None)
    messages: list[Any] = [{"role": "user", "content": "6*7?"}]
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>4<2 "
    )
    for prompted in ("", "<|channel|>analysis<|message|>"):
        request, reader, hides = _turn(messages, model, chat)
        assert request.sampling.special_tokens and hides is not shows
        drawn: Any = Engine(text.removeprefix(prompted), stops)
        if prompted:
            tokenizer_template = str(tokenizer.chat_template)
            begun = "{% if add_generation_prompt %}" + prompted + "{% endif %}"
            tokenizer.chat_template = tokenizer_template + begun
            try:
                request, reader, hides = _turn(messages, model, chat)
            finally:
                tokenizer.chat_template = tokenizer_template  # of all tests
        assert _say_answer(drawn, request, reader, hides) == "4<2 "
        told = capsys.readouterr().out
        assert told == (text.removeprefix(prompted) if shows else "4<2 ") + "\n"
    model.tokenizer = tokenizer_of("qwen3")
    request, reader, hides = _turn(messages, model, chat)
    drawn = Engine(text, stops)
    assert _say_answer(drawn, request, reader, hides) == text
