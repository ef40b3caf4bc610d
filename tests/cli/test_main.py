import json
import os
import runpy
import subprocess
import sys
from contextlib import suppress

import pytest

import isobit
from isobit.cli import main as main_module
from isobit.cli.main import COMMANDS, main
from isobit.util.errors import ConfigError

LIGHT = """
import json, sys
from isobit.cli.main import main
try:
    main(json.loads(sys.argv[1]))
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
HEAVY = {"torch", "transformers", "datasets", "numpy", "rich", "reasoning_gym", "tensorboard"}


def command_that(raises: BaseException):
    class Command:
        @staticmethod
        def run_train(arguments: list[str]) -> int:
            raise raises

    return lambda name: Command


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        *([name, "--help"] for name in COMMANDS),
        ["train", "x.toml", "--help"],
    ],
)
def test_help_imports_nothing_heavy(words):
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, json.dumps(words)], capture_output=True, text=True, check=True
    )
    *text, modules = done.stdout.splitlines()
    assert text
    assert "isobit" in json.loads(modules)
    assert not HEAVY & set(json.loads(modules))


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f" {name} {text}" in shown for name, text in COMMANDS.items())


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"isobit {isobit.__version__}\n"


def test_the_package_runs_as_a_module(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["isobit", "--version"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("isobit", run_name="__main__")
    assert capsys.readouterr().out == f"isobit {isobit.__version__}\n"


def test_an_unknown_command_exits_2_and_names_those_that_exist(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["xyz"])
    shown = capsys.readouterr().err
    assert "isobit: error: no command 'xyz'; the commands are train, sft, " in shown
    assert all(name in shown for name in COMMANDS)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("trian", "train"),
        ("evl", "eval"),
        ("Train", "train"),
        ("verfy", "verify"),
        ("rollouts", "rollout"),
        ("docter", "doctor"),
    ],
)
def test_a_misspelt_command_is_answered_with_the_nearest(word: str, meant: str, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([word])
    said = capsys.readouterr().err
    assert f"no command {word!r}; " in said
    assert said.endswith(f"; did you mean {meant}?\n")


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("push", "isobit export RUN --to hf://ORG/NAME"),
        ("compare", "isobit report RUN RUN"),
        ("plot", "isobit report RUN"),
        ("merge", "RUN/model is a Hugging Face folder"),
        ("plan", "isobit train RECIPE.toml --dry-run --gpu NAME"),
        ("bisect", "isobit verify FOLDER --bisect"),
        ("resume", "isobit train RUN --resume"),
        ("finetune", "isobit sft RECIPE.toml"),
        ("help", "isobit COMMAND --help"),
    ],
)
def test_a_command_of_other_tools_is_answered(command: str, answer: str, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([command, "runs/mine"])
    assert f"isobit: error: no command {command!r}: " in (said := capsys.readouterr().err)
    assert answer in said


def test_a_users_mistake_is_one_line_without_traceback(capsys, monkeypatch):
    monkeypatch.setattr(
        main_module, "import_module", command_that(raises=ConfigError("a.b: unknown key"))
    )
    assert main(["train"]) == 2
    assert capsys.readouterr().err == "error: a.b: unknown key\n"


def test_an_interrupt_exits_130(capsys, monkeypatch):
    monkeypatch.setattr(main_module, "import_module", command_that(raises=KeyboardInterrupt()))
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_fault_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(main_module, "import_module", command_that(raises=AssertionError("broken")))
    with pytest.raises(AssertionError, match="broken"):
        main(["train"])


def test_a_rank_does_not_abort_after_its_work() -> None:
    """Threads that come back into the interpreter while that ends would (exit code -6)."""
    program = """
import threading, torch
from isobit.cli import main

def work():
    a = torch.randn(100)
    while True:
        a + a

for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
main.main = lambda: 7
print("its last line")
main.program()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (7, "its last line\n"), ended.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["recipe"],
        *([name, "--help"] for name in COMMANDS),
        ["eval", "--reward-model", "x", "--help"],
    ],
    ids="_".join,
)
def test_help_is_no_wider_than_the_terminal(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for width in (72, 80, 132) if words in (["--help"], ["recipe"]) else (80, 132):
        monkeypatch.setenv("COLUMNS", str(width))
        with suppress(SystemExit):
            main(words)
        lines = capsys.readouterr().out.splitlines()
        wide = [line for line in lines if len(line) > width and " " in line.strip()]
        assert wide == [] or (words == ["recipe"] and wide == lines[-1:])
