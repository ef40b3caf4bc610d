"""``isobit inspect FOLDER``: shows what is in a model folder."""

from collections.abc import Sequence

from isobit.cli.options import (
    FOLDER,
    JSON,
    PRECISION,
    THREADS,
    Command,
    also_keys,
    check_directory,
    gpu_options,
    option,
    path_value,
    positive,
    set_threads,
)
from isobit.cli.start import starting
from isobit.config.commands import InspectConfig
from isobit.util.errors import ConfigError
from isobit.util.strict_json import json_text

_COMMAND = Command(
    "inspect",
    "Look at a model folder: its tensors and formats, the error of its weights in 8 bits by layer, "
    "what each preset quantises, and the memory that it takes.  A folder in FP8 is shown as it is "
    "stored.",
    [
        FOLDER,
        PRECISION,
        THREADS,
        *gpu_options("what it takes there, from config.json alone: "),
        option("--weights", "with --gpu: read the weights too, as --out does and as without --gpu"),
        option(
            "--longest N",
            "with --gpu: tokens of the longest sequence in training; by default 4096",
            positive,
        ),
        option("--out FILE", "also write it as an HTML page", path_value),
        JSON,
    ],
    also_keys("precision, rollout and training"),
)


def run_inspect(arguments: Sequence[str]) -> int:
    """Inspect, print, and write the page if asked. Raises IsobitError for an unreadable folder."""
    options, overrides = _COMMAND.read_some(arguments)
    with starting():
        from isobit.models.folder import model_folder
        from isobit.observe.console import Console
        from isobit.observe.inspection import inspect_folder
        from isobit.observe.inspection_page import describe_inspection
    if options.out is not None:
        check_directory(options.out)
    settings = _COMMAND.settings(InspectConfig, options, overrides)
    if options.gpus is not None and options.gpu is None:
        raise ConfigError("--gpus says how many, and not of which kind: add --gpu h100 or h200")
    set_threads(options)
    weights = options.gpu is None or options.weights or options.out is not None

    console = Console()
    with console.counting("matrices") as on_matrix:
        inspection = inspect_folder(
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

        path = write_inspection(inspection, options.out)
        written = f"{path} ({path.stat().st_size / 1000:,.0f} kB)"
    if options.json:
        print(json_text(inspection.as_json(), indent=2))
    else:
        console.lines([*describe_inspection(inspection), *(["", written] if written else [])])
    return 0
