"""Standard streams that are gone, full, or cannot hold a character."""

import errno
import io
import os
import subprocess
import sys

import pytest

from isobit.observe.console import Console
from isobit.util.terminal import Standard, gib, settle

# Every way that standard output may fail, in one process: it prints on standard error what came of
# it, and has the exit code of the command.
SCRIPT = """
import os, sys
from isobit.cli import main as command
class Printing:
    def run(arguments):
        if arguments == ["console"]:
            from isobit.observe.console import Console
            for _ in range(3):
                Console().line("a line \\u2603")
        else:
            print("a result")
        return 0
    run_eval = run_train = run
command.import_module = lambda name: Printing
sys.exit(command.main(sys.argv[1:]))
"""


class Failing(io.StringIO):
    """A stream of which every write fails."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise self._error


@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("I/O operation on closed file"),
    ],
    ids=["pipe", "terminal", "disk", "closed"],
)
def test_what_cannot_be_written_is_left_out_and_that_is_said_once(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", Failing(error))
    console = Console()
    for _ in range(3):
        console.line("a line")
    with console.busy("working"), console.generating("rollout"):
        pass
    said = capsys.readouterr().err
    assert said.count("standard output cannot be written") == 1
    assert (getattr(error, "strerror", None) or str(error)) in said


def test_nothing_is_said_where_standard_error_is_gone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Failing(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    Console().line("a line")
    monkeypatch.setattr(sys, "stdout", None)
    Console().line("a line")


def test_a_character_that_the_encoding_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    Console().line("kaputt: ü ☃")
    assert settle() is None
    assert raw.getvalue() == b"kaputt: \\xfc \\u2603\n"


def test_a_stream_is_looked_up_when_it_is_written_to(capsys: pytest.CaptureFixture[str]) -> None:
    stream = Standard("stdout")
    print("one", file=stream)  # type: ignore[arg-type]
    assert capsys.readouterr().out == "one\n"
    assert not stream.isatty()


@pytest.mark.exhaustive
def test_an_output_that_is_the_result_fails_without_a_traceback_and_a_run_goes_on() -> None:
    with open("/dev/full", "w") as full:
        found = {
            (words, name): _run(words, stdout)
            for words in (("eval",), ("train", "console"))
            for name, stdout in (("pipe", _unread_pipe()), ("disk", full.fileno()))
        }
    assert {key: code for key, (code, _) in found.items()} == {
        (("eval",), "pipe"): 141,
        (("eval",), "disk"): 2,
        (("train", "console"), "pipe"): 0,
        (("train", "console"), "disk"): 0,
    }
    assert found[("eval",), "pipe"][1] == ""
    assert found[("eval",), "disk"][1] == (
        "error: standard output cannot be written: No space left on device\n"
    )
    said = found[("train", "console"), "pipe"][1]
    assert said == (
        "standard output cannot be written (Broken pipe): the work goes on without it\n"
    )


def _unread_pipe() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


def _run(words: tuple[str, ...], stdout: int) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 KiB"),
        (789 << 10, "789 KiB"),
        (1020 << 10, "1,020 KiB"),
        (1048575, "1,024 KiB"),
        (999.7 * (1 << 20), "1,000 MiB"),
        (1020 << 20, "1,020 MiB"),
        (1.234 * (1 << 30), "1.23 GiB"),
        (999.7 * (1 << 30), "1,000 GiB"),
    ],
)
def test_sizes_have_no_exponent(size: float, text: str) -> None:
    assert gib(size) == text
