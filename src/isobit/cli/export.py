"""``isobit export RUN_OR_FOLDER --to FOLDER``: a model as a Hugging Face folder for other tools, in
BF16 or in FP8.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobit.cli.arguments import add_threads, positive, precision_value, set_threads
from isobit.cli.waiting import starting
from isobit.errors import ConfigError

if TYPE_CHECKING:
    from isobit.config.precision import PrecisionConfig
    from isobit.run.export import ExportResult


def run(arguments: Sequence[str]) -> int:
    """Write the folder and say what is in it.  Raises IsobitError for what cannot be used."""
    options, overrides = _parser().parse_known_args(arguments)
    precision = _precision(options.precision, overrides)
    if precision is not None and options.format == "bf16":
        raise ConfigError(
            "--precision says which bytes are written in FP8, and --format is bf16: leave one out"
        )
    with starting():
        from isobit.observe.console import Console
        from isobit.run.export import export
        from isobit.run.export_source import find_source
    set_threads(options)

    console = Console()
    with console.busy("reading"):
        source = find_source(options.source, options.step, console.line)
    with console.busy(f"writing {options.to}"):
        result = export(
            source,
            options.to,
            options.format,
            precision,
            options.shard_mb * 10**6,
            options.overwrite,
        )
    console.lines(_describe(result))
    return 0


def _precision(given: Any, overrides: Sequence[str]) -> "PrecisionConfig | None":
    """The flow of the command line; None where it says nothing of it."""
    from isobit.cli.arguments import settings_from
    from isobit.config.commands import ExportConfig

    values = {"precision": given} if given is not None else {}
    return settings_from(ExportConfig, values, overrides).precision


def _describe(result: "ExportResult") -> list[str]:
    files = f"{result.files} file{'s' if result.files > 1 else ''} of tensors"
    lines = [f"{result.folder}: {result.num_bytes / 1e6:,.1f} MB in {files}, {result.format}"]
    if result.quantised:
        lines.append(f"{result.quantised} matrices in E4M3, the policy's own bytes")
    if result.not_whole:
        lines += [
            f"{len(result.not_whole)} matrices are BF16, as the numbers that their E4M3 bytes "
            "stand for: not every",
            "  size of theirs, or of what is fused with them, is a multiple of 128, as stock "
            "loaders ask",
        ]
    return lines


def _step(text: str) -> int | str:
    return text if text == "best" else positive(text)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="isobit export",
        description=(
            "Write a run's policy, or a model folder, as a Hugging Face folder: shards with an "
            "index, config, tokenizer, chat template, generation config, and a model card with "
            "the run's figures.  transformers and vLLM load it."
        ),
        epilog=(
            "--precision.KEY VALUE sets any key of precision as well; `isobit train --help` lists "
            "them."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "source",
        metavar="RUN_OR_FOLDER",
        help="the directory that `isobit train` or `sft` wrote, a model folder, a name of the hub, "
        "or `starter`",
    )
    parser.add_argument("--to", metavar="FOLDER", type=Path, required=True, help="what is written")
    parser.add_argument(
        "--format",
        choices=("bf16", "fp8"),
        default="bf16",
        help="bf16 (default), or fp8: the bytes that the policy samples with",
    )
    parser.add_argument(
        "--step",
        type=_step,
        metavar="K",
        help="of a run, the checkpoint after K steps, or `best`, by its checkpoint.keep_best; by "
        "default its model, or newest checkpoint",
    )
    parser.add_argument(
        "--precision",
        type=precision_value,
        metavar="NAME",
        help="with fp8, the flow; by default the run's own, as it is stored, or fp8",
    )
    parser.add_argument(
        "--shard-mb",
        type=positive,
        metavar="N",
        default=5000,
        help="largest file of tensors, in MB; by default 5000",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a model folder that is there"
    )
    add_threads(parser)
    return parser
