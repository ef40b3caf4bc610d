"""``isobit flows FOLDER``: compares precision flows of a model on the same prompts."""

import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

from isobit.cli.eval import MAX_NEW_TOKENS, PROBLEMS, SPLIT, data_option, evaluation_source
from isobit.cli.options import (
    FOLDER,
    GPU_NAMES,
    JSON,
    NO_CHAT,
    SEED,
    THREADS,
    Command,
    also_keys,
    option,
    precision_value,
    set_threads,
)
from isobit.cli.start import starting
from isobit.config.recipes import RunConfig
from isobit.util.errors import ConfigError
from isobit.util.strict_json import json_text


def _points(text: str) -> float:
    try:
        points = float(text)
    except ValueError:
        points = 0.0
    if not 0 < points < 100:
        raise ArgumentTypeError(f"{text!r} is not a number of points above 0 and below 100")
    return points


_COMMAND = Command(
    "flows",
    "Compare precision flows of a model on the same prompts, against bf16, and recommend one.",
    [
        FOLDER,
        SEED,
        THREADS,
        data_option(required=False),
        SPLIT,
        PROBLEMS,
        option(
            "--flows FLOW",
            "those beside bf16: presets, or a recipe's tables; by default int8, fp8, fp8 with "
            "attention in INT8, and fp8-linear",
            precision_value,
            nargs="+",
        ),
        option(
            "--reward NAME",
            "module:function or path/to/file.py:function: compares accuracies as well",
            str,
            key="reward.function",
        ),
        option(
            "--answers COLUMN",
            "score this text of the data behind each prompt; by default what bf16 answers",
        ),
        option(
            "--loss POINTS",
            "the loss of accuracy that a recommended flow must exclude; by default 1",
            _points,
            default=1.0,
        ),
        option(
            "--gpu NAME",
            f"memory and estimated speed on such a GPU too: {GPU_NAMES}; without "
            "--data nothing else is found",
        ),
        MAX_NEW_TOKENS,
        NO_CHAT,
        JSON,
    ],
    also_keys("rollout, data, evaluation and reward"),
)


def run_flows(arguments: Sequence[str]) -> int:
    """Compare flows and print. Raises IsobitError for unusable input."""
    options, overrides = _COMMAND.read_some(arguments)
    if options.data is None and options.gpu is None:
        raise ConfigError(
            "--data is missing: name the prompts to answer, or, for memory and estimated speed "
            "alone, a GPU (--gpu h200)"
        )
    from isobit.memory.cards import read_card

    config = _COMMAND.settings(RunConfig, options, overrides, **_tables(options))
    if "precision" in config.model_fields_set:
        raise ConfigError("the flows to compare with bf16 are named by --flows, not --precision")
    card = None if options.gpu is None else read_card(options.gpu)
    set_threads(options)
    with starting():
        from isobit.commands.flows import compare_flows
        from isobit.observe.console import Console, terminal_on
        from isobit.observe.flow_choice import describe_comparison

    with redirect_stdout(sys.stderr):  # by a reward in this process: stdout may be JSON
        comparison = compare_flows(
            options.folder,
            config,
            options.flows or (),
            answers=options.answers,
            card=card,
            threshold=options.loss / 100,
            console=Console(terminal_on("stderr")),
        )
    if options.json:
        print(json_text(comparison.as_json(), indent=2))
    else:
        console = Console()
        console.lines(describe_comparison(comparison, console.width))
    return 0


def _tables(options: Namespace) -> dict[str, Any]:
    """The tables of a run with these prompts as its evaluation."""
    data: dict[str, Any] = {"train": {"type": "jsonl", "path": "starter:train.jsonl"}}
    if options.data is not None:
        name, source = evaluation_source(options)
        data = {"train": source, "eval": {name: source}}
    return {
        "output": options.folder,
        "seed": options.seed,
        "data": {**data, "chat": not options.no_chat},
        "evaluation": {"temperature": 0.0, "samples": 1},
    }
