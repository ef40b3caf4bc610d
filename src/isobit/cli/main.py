"""``isobit COMMAND``: runs a command, and turns errors into a line on stderr and an exit code.

Exit codes: 0 done, 1 ``verify``, ``replay`` or ``diff`` found a difference or ``doctor`` a failure
(or a fault in Isobit, with its traceback), 2 unusable input, 3 a run stopped by
``check.on_mismatch`` or ``check.on_no_signal``, 4 a rank stopped because another had failed, 130
Ctrl-C, 143 SIGTERM, 129 SIGHUP, 152 SIGXCPU, 141 a closed output pipe (``| head``). On a signal,
``train`` and ``sft`` write a checkpoint first; a second Ctrl-C stops them at once. A closed output
never ends them.
"""

import atexit
import os
import signal
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module
from textwrap import fill
from typing import NoReturn

import isobit
from isobit.parallel.launched import is_launched
from isobit.util.errors import Interrupted, IsobitError, did_you_mean, shown
from isobit.util.terminal import help_width, prepare, say, settle

COMMANDS = {
    "train": "train a policy with reinforcement learning, as a TOML recipe says",
    "sft": "fine-tune a model on prompts and completions, as a TOML recipe says",
    "recipe": "print a recipe that comes with Isobit, with its data and reward, or list them all",
    "rollout": "complete prompts with a model folder",
    "eval": "measure a model folder on a dataset with a reward",
    "flows": "compare precision flows of a model on the same prompts, and recommend one",
    "serve": "serve a model folder by OpenAI's interface",
    "chat": "converse with a model folder in the terminal",
    "verify": (
        "prove that sampled and trained log-probabilities of a model folder are equal, bit for bit"
    ),
    "replay": "do steps of a run again, and compare them with what it has recorded",
    "diff": "compare two runs file by file, and name the first step and file that differ",
    "export": "write the policy of a run, or a model folder, for other tools, in BF16 or 8 bits",
    "inspect": "show what is in a model folder, what 8 bits do to its weights, and what it takes",
    "report": "write the figures of a run as one HTML page",
    "ui": "show runs in the browser: curves as they grow, every completion, comparisons",
    "doctor": "test this machine: quantisers, kernels, disk, memory, versions",
    "schema": "print the JSON schema of a recipe, for editors, or its keys as a page",
}
"""Each command is a function ``run_NAME(arguments) -> exit code`` in ``isobit.cli.NAME``."""
_ELSEWHERE = {
    "push": "use `isobit export RUN --to hf://ORG/NAME`",
    "upload": "use `isobit export RUN --to hf://ORG/NAME`",
    "compare": "use `isobit report RUN RUN`",
    "plot": "use `isobit report RUN`",
    "merge": "RUN/model is a Hugging Face folder, and `isobit export` writes others",
    "convert": "RUN/model is a Hugging Face folder, and `isobit export` writes others",
    "generate": "use `isobit rollout FOLDER --prompt TEXT`",
    "evaluate": "use `isobit eval FOLDER --data WHAT`",
    "plan": "use `isobit train RECIPE.toml --dry-run --gpu NAME`",
    "bisect": "use `isobit verify FOLDER --bisect`",
    "resume": "use `isobit train RUN --resume`",
    "finetune": "use `isobit sft RECIPE.toml`",
    "help": "use `isobit COMMAND --help`",
    "recipes": "use `isobit recipe`",
    "init": "use `isobit recipe NAME > my.toml`",
    "fetch": "use `isobit recipe NAME --out FOLDER`",
}
"""Commands of other tools, and what to do here."""
_TRAININGS = ("train", "sft")
"""Their result is a directory, so that unreadable output is no error."""


def main(arguments: Sequence[str] | None = None) -> int:
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
    """Run ``main`` as a process.

    One of several ranks ends without the interpreter's finalisation: a gloo worker thread that
    still holds tensors then would abort the process after its work (pytorch/pytorch issue 38228 and
    pull request 179291).
    """
    code = main()
    if is_launched():
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        settle()
        os._exit(code)
    sys.exit(code)


def _obey(words: Sequence[str]) -> int:
    if not words or words[0] not in COMMANDS:
        parser = _parser()
        if words and not words[0].startswith("-"):
            parser.error(_no_command(words[0]))
        parser.parse_args(words or ["--help"])
    try:
        module = import_module(f"isobit.cli.{words[0]}")
        return getattr(module, f"run_{words[0]}")(words[1:])
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


def _no_command(word: str) -> str:
    if word in _ELSEWHERE:
        return f"no command {word!r}: {_ELSEWHERE[word]}; isobit --help has the commands"
    commands = f"{', '.join(COMMANDS)}{did_you_mean(word, COMMANDS)}"
    return f"no command {word[:40]!r}; the commands are {commands}"


def _unread(error: OSError) -> int:
    """The exit code of a command whose output is its result, which could not be written."""
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE
    say(f"error: standard output cannot be written: {error.strerror}")
    return IsobitError.exit_code


def _parser() -> ArgumentParser:
    lines = [
        fill(text, help_width(), initial_indent=f"  {name:<10}", subsequent_indent=12 * " ")
        for name, text in COMMANDS.items()
    ]
    parser = ArgumentParser(
        prog="isobit",
        usage="isobit [--version] COMMAND ...",
        description="Reinforcement learning of language models in 8 bits, exact to the bit.",
        epilog="\n".join(["commands:", *lines, "", "isobit COMMAND --help says more."]),
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"isobit {isobit.__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help="one of those below")
    return parser


if __name__ == "__main__":
    program()
