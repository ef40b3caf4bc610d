"""``isobit COMMAND``: finds the command's file, and turns errors into a line on stderr and an exit
code.

Exit codes: 0 done, 1 ``verify`` or ``replay`` found a difference or ``doctor`` a failure (or a
fault in Isobit, with its traceback), 2 input that cannot be used, 3 a run stopped because rollout
and training part (``check.on_mismatch``), 4 a rank that stopped since another had failed, 130
stopped by Ctrl-C, 143 by SIGTERM, 129 by a closed terminal (SIGHUP), 152 by a limit on CPU time
(SIGXCPU), 141 a reader of the output that has gone (``| head``). Stopped by a signal, ``train`` and
``sft`` write a checkpoint first, and ``--resume`` goes on from there; a second Ctrl-C stops them at
once, and they go on from the checkpoint before. What ``train`` and ``sft`` print never ends them.
"""

import atexit
import os
import signal
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import isobit
from isobit.errors import Interrupted, IsobitError, shown
from isobit.terminal import prepare, say, settle

COMMANDS = {
    "train": "train a policy with reinforcement learning, as a TOML recipe says",
    "sft": "fine-tune a model on prompts and completions, as a TOML recipe says",
    "rollout": "complete prompts with a model folder",
    "eval": "measure a model folder on a dataset with a reward",
    "verify": (
        "prove that sampled and trained log-probabilities of a model folder are equal, bit for bit"
    ),
    "replay": "do steps of a run again, and compare them with what it has recorded",
    "export": "write the policy of a run, or a model folder, for other tools, in BF16 or FP8",
    "inspect": "show what is in a model folder, what FP8 does to its weights, and what it takes",
    "report": "write the figures of a run as one HTML page",
    "doctor": "test this machine: quantisers, kernels, disk, memory, versions",
    "schema": "print the JSON schema of a recipe, for editors, or its keys as a page",
}
"""Each command is ``isobit.cli.NAME`` with a function ``run(arguments) -> exit code``."""
_TRAININGS = ("train", "sft")
"""Their result is a directory, whoever reads what they print."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` by default) and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    prepare()
    try:
        code = _obey(words)
    except OSError as error:
        try:
            print(flush=True)  # was it the output?
        except OSError:
            return _unread(error)
        raise
    finally:
        lost = settle()
    if lost is not None and code == 0 and words[0] not in _TRAININGS:
        return _unread(lost)
    return code


def program() -> NoReturn:
    """``main`` as a process: it ends with the exit code.

    One of several ranks ends without the interpreter's own end: a worker thread of gloo may still
    hold tensors then, and a thread that asks for the interpreter while that ends is unwound through
    C++ that does not allow it, which aborts the process after its work (SIGABRT, "terminate called
    without an active exception"; pytorch/pytorch issue 38228 and pull request 179291).
    """
    code = main()
    from isobit.parallel.launched import is_launched

    if is_launched():
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        settle()
        os._exit(code)
    sys.exit(code)


def _obey(words: Sequence[str]) -> int:
    if not words or words[0] not in COMMANDS:
        _parser().parse_args(words or ["--help"])
    try:
        return import_module(f"isobit.cli.{words[0]}").run(words[1:])
    except IsobitError as error:
        say(f"error: {error}")
        return error.exit_code
    except PermissionError as error:
        if error.filename is None:
            raise
        say(
            f"error: {shown(error.filename)}: {error.strerror}; it, or a folder above it, is "
            "closed to this user"
        )
        return IsobitError.exit_code
    except Interrupted as stop:
        say(str(stop))
        return stop.exit_code
    except KeyboardInterrupt:
        say("interrupted")
        return 130


def _unread(error: OSError) -> int:
    """The exit code of a command whose output is its result, which could not be written."""
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE
    say(f"error: standard output cannot be written: {error.strerror}")
    return IsobitError.exit_code


def _parser() -> ArgumentParser:
    """Knows --help and --version, and refuses an unknown command."""
    lines = [f"  {name:<10}{text}" for name, text in COMMANDS.items()]
    parser = ArgumentParser(
        prog="isobit",
        usage="isobit [--version] COMMAND ...",
        description="Reinforcement learning of language models in FP8, exact to the bit.",
        epilog="\n".join(["commands:", *lines, "", "isobit COMMAND --help says more."]),
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"isobit {isobit.__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help="one of those below")
    return parser


if __name__ == "__main__":
    program()
