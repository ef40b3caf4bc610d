"""``isobit serve`` before it serves, and with a run; ``isobit chat``."""

import io
import os
import signal
import socket
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pytest

from isobit.cli import serve, ui
from isobit.cli.chat import _lines_said
from isobit.cli.main import main
from isobit.config.recipes import RunConfig
from isobit.config.rollout import RolloutConfig
from isobit.models.folder import load_model
from isobit.records.text import Prompt
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.run.loop import train
from tests.serve.servers import chat_folder, choices, serving

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "uvicorn" else name)
    assert main(["serve", "starter"]) == 2
    assert "needs uvicorn, which the extra `serve` brings: pip install 'isobit[serve]'" in (
        capsys.readouterr().err
    )
    needs = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]["serve"]
    assert {need.partition(">")[0].replace("-", "_") for need in needs} == set(serve.PACKAGES)


def test_what_cannot_be_served_is_said_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "starter", "--api-key", "secret"])
    assert "name the variable that holds the key, as env:NAME" in capsys.readouterr().err
    assert main(["serve", "starter", "--api-key", "env:NO_SUCH_KEY"]) == 2
    assert "the environment has no variable NO_SUCH_KEY" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "no/folder/at/all", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot be listened at" in capsys.readouterr().err
    assert main(["serve", str(tmp_path), "--follow"]) == 2
    assert "--follow is for a run's directory" in capsys.readouterr().err


def test_the_viewer_is_served_at_its_address_until_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ui", str(tmp_path / "absent")]) == 2
    assert "is no folder; name the folder that holds the runs" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(ui.secrets, "token_urlsafe", lambda size: "t" * size)
    address = f"http://127.0.0.1:{port}/{'t' * 24}/"
    found = list[bytes]()

    def look() -> None:
        for _ in range(200):
            with suppress(OSError), urlopen(address, timeout=10) as answer:
                found.append(answer.read())
                break
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=look)
    thread.start()
    try:
        assert main(["ui", str(tmp_path), "--port", str(port)]) == 0
    finally:
        thread.join(30)
        signal.signal(signal.SIGTERM, before)
    assert address in capsys.readouterr().out
    assert len(found) == 1 and b"viewer.js" in found[0]


def test_a_followed_run_is_served_as_its_newest_checkpoint(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The answers are those of the model that the run has ended with."""
    config = make_config()
    train(config)
    model = load_model(config.output / "model", config.precision, trainable=False)
    ids = tuple(model.tokenizer("1+1=")["input_ids"])
    sampling = model.sampling(RolloutConfig(max_new_tokens=12))
    request = Request(Prompt("x", "", ids), 0, 2, sampling, 3)
    engine = NativeEngine(model.policy, RolloutConfig(), model.tokenizer, 0)
    (expected,) = generate(engine, [request])
    asked = {"model": "run", "prompt": "1+1=", "n": 2, "seed": 3, "max_tokens": 12, "logprobs": 0}
    for arguments in (["--follow"], []):
        with serving(config.output, tmp_path, "--name", "run", *arguments) as server:
            made = server.answer(asked)
            assert server.end() == 0
        for choice, completion in zip(choices(made), expected, strict=True):
            assert choice["text"] == completion.text
            assert choice["logprobs"]["token_logprobs"] == list(completion.log_probs)
        version = 2 if arguments else 1
        assert made["system_fingerprint"] == f"{config.precision.preset}-{version}"


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
