"""``isobit inspect FOLDER``: shows what is in a model folder."""

from argparse import ArgumentParser
from collections.abc import Sequence

from isobit.cli.arguments import (
    add_gpu,
    check_directory,
    folder_parser,
    path_value,
    positive,
    set_threads,
    settings_from,
)
from isobit.cli.start import starting
from isobit.util.errors import ConfigError
from isobit.util.strict_json import json_text


def run_inspect(arguments: Sequence[str]) -> int:
    """Inspect, print, and write the page if asked. Raises IsobitError for an unreadable folder."""
    options, overrides = _inspect_parser().parse_known_args(arguments)
    with starting():
        from isobit.config.commands import InspectConfig
        from isobit.models.folder import model_folder
        from isobit.observe.console import Console
        from isobit.observe.inspection import inspect_folder
        from isobit.observe.inspection_page import describe_inspection
    if options.out is not None:
        check_directory(options.out)
    settings = settings_from(InspectConfig, {"precision": options.precision}, overrides)
    if options.gpus is not None and options.gpu is None:
        raise ConfigError("--gpus says how many, and not of which kind: add --gpu h100 or h200")
    set_threads(options)
    weights = options.gpu is None or options.weights or options.out is not None

    console = Console()
    with console.counting("matrices") as on_matrix:
        found = inspect_folder(
            model_folder(options.folder, weights),
            settings.precision,
            options.gpu,
            options.longest,
            on_matrix,
            settings,
            options.gpus or 1,
            weights,
        )
    written = ""
    if options.out is not None:
        from isobit.observe.inspection_page import write_inspection

        path = write_inspection(found, options.out)
        written = f"{path} ({path.stat().st_size / 1000:,.0f} kB)"
    if options.json:
        print(json_text(found.as_json(), indent=2))
    else:
        console.lines([*describe_inspection(found), *(["", written] if written else [])])
    return 0


def _inspect_parser() -> ArgumentParser:
    parser = folder_parser(
        "inspect",
        "Look at a model folder: its tensors and formats, the error of its weights in FP8 by "
        "layer, what each preset\nquantises, and the memory that it takes.  A folder in FP8 is "
        "shown as it is stored.",
        "precision, rollout and training",
        with_seed=False,
    )
    add_gpu(parser, "what it takes there, from config.json alone: ")
    parser.add_argument(
        "--weights",
        action="store_true",
        help="with --gpu: read the weights too, as --out does and as without --gpu",
    )
    parser.add_argument(
        "--longest",
        type=positive,
        metavar="N",
        help="with --gpu: tokens of the longest sequence in training; by default 4096",
    )
    parser.add_argument(
        "--out", metavar="FILE", type=path_value, help="also write it as an HTML page"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    return parser
