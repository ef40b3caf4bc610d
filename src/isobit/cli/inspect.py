"""``isobit inspect FOLDER``: what is in a model folder, what FP8 does to its weights, and what it
takes.
"""

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from isobit.cli.arguments import (
    check_directory,
    folder_parser,
    positive,
    set_threads,
    settings_from,
)
from isobit.cli.waiting import starting


def run(arguments: Sequence[str]) -> int:
    """Look, print the tables, and write the page where one is asked for.  Raises IsobitError for a
    folder that cannot be read.
    """
    options, overrides = _parser().parse_known_args(arguments)
    with starting():
        from isobit.config.commands import InspectConfig
        from isobit.models.loaded import model_folder
        from isobit.observe.console import Console
        from isobit.observe.inspection.describe import describe_inspection
        from isobit.observe.inspection.record import inspect_folder
    if options.out is not None:
        check_directory(options.out)
    settings = settings_from(InspectConfig, {"precision": options.precision}, overrides)
    set_threads(options)

    console = Console()
    with console.counting("matrices") as on_matrix:
        found = inspect_folder(
            model_folder(options.folder),
            settings.precision,
            options.gpu,
            options.longest,
            on_matrix,
        )
    written = ""
    if options.out is not None:
        from isobit.observe.inspection.page import write_inspection

        path = write_inspection(found, options.out)
        written = f"{path} ({path.stat().st_size / 1000:,.0f} kB)"
    if options.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        console.lines([*describe_inspection(found), *(["", written] if written else [])])
    return 0


def _parser() -> ArgumentParser:
    parser = folder_parser(
        "inspect",
        "Look at a model folder: its tensors and formats, the error of its weights in FP8 by "
        "layer, what each preset\nquantises, and the memory that it takes.  A folder in FP8 is "
        "shown as it is stored.",
        "precision",
        with_seed=False,
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="h100 or h200: the memory that it takes there"
    )
    parser.add_argument(
        "--longest",
        type=positive,
        metavar="N",
        help="with --gpu: tokens of the longest sequence in training; by default 4096",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="also write it as an HTML page")
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    return parser
