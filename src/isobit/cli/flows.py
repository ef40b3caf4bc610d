"""``isobit flows FOLDER``: compares precision flows of a model on the same prompts."""

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

from isobit.cli.arguments import (
    add_data,
    add_output,
    evaluation_source,
    folder_parser,
    given,
    precision_value,
    set_threads,
    settings_from,
)
from isobit.cli.start import starting
from isobit.util.errors import ConfigError
from isobit.util.strict_json import json_text


def run_flows(arguments: Sequence[str]) -> int:
    """Compare flows and print. Raises IsobitError for unusable input."""
    options, overrides = _flows_parser().parse_known_args(arguments)
    if options.data is None and options.gpu is None:
        raise ConfigError(
            "--data is missing: name the prompts to answer, or, for memory and estimated speed "
            "alone, a GPU (--gpu h200)"
        )

    from isobit.config.recipes import RunConfig
    from isobit.memory.device import read_card

    config = settings_from(RunConfig, _flow_values(options), overrides)
    if "precision" in config.model_fields_set:
        raise ConfigError("the flows to compare with bf16 are named by --flows, not --precision")
    card = None if options.gpu is None else read_card(options.gpu)
    set_threads(options)
    with starting():
        from isobit.commands.flows import compare_flows
        from isobit.observe.console import Console, terminal_on
        from isobit.observe.flow_choice import describe_comparison

    with redirect_stdout(sys.stderr):  # by a reward in this process: stdout may be JSON
        found = compare_flows(
            options.folder,
            config,
            options.flows or (),
            answers=options.answers,
            card=card,
            threshold=options.loss / 100,
            console=Console(terminal_on("stderr")),
        )
    if options.json:
        print(json_text(found.as_json(), indent=2))
    else:
        Console().lines(describe_comparison(found))
    return 0


def _flow_values(options: Namespace) -> dict[str, Any]:
    """The tables of a run with these prompts as its evaluation."""
    data: dict[str, Any] = {"train": {"type": "jsonl", "path": "starter:train.jsonl"}}
    if options.data is not None:
        name, source = evaluation_source(options)
        data = {"train": source, "eval": {name: source}}
    evaluation = given(max_new_tokens=options.max_new_tokens)
    return {
        "output": options.folder,
        "seed": options.seed,
        "data": {**data, "chat": not options.no_chat},
        "evaluation": {"temperature": 0.0, "samples": 1, **evaluation},
        **({} if options.reward is None else {"reward": {"function": options.reward}}),
    }


def _flows_parser() -> ArgumentParser:
    parser = folder_parser(
        "flows",
        "Compare precision flows of a model on the same prompts, against bf16, and recommend one.",
        "rollout, data, evaluation and reward",
        with_precision=False,
    )
    add_data(parser, required=False)
    parser.add_argument(
        "--flows",
        type=precision_value,
        nargs="+",
        metavar="FLOW",
        help="those beside bf16: presets, or a recipe's tables; by default fp8-linear, fp8, int8, "
        "and fp8 with attention in INT8",
    )
    parser.add_argument(
        "--reward",
        metavar="NAME",
        help="module:function or path/to/file.py:function: compares accuracies as well",
    )
    parser.add_argument(
        "--answers",
        metavar="COLUMN",
        help="score this text of the data behind each prompt; by default what bf16 answers",
    )
    parser.add_argument(
        "--loss",
        type=_points,
        default=1.0,
        metavar="POINTS",
        help="the loss of accuracy that a recommended flow must exclude; by default 1",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="memory and estimated speed on such a GPU too (h100, h200, or its GiB); "
        "without --data nothing else is found",
    )
    parser.add_argument("--max-new-tokens", metavar="N", help="longest completion")
    add_output(parser)
    return parser


def _points(text: str) -> float:
    try:
        points = float(text)
    except ValueError:
        points = 0.0
    if not 0 < points < 100:
        raise ArgumentTypeError(f"{text!r} is not a number of points above 0 and below 100")
    return points
