"""``isobit export RUN_OR_FOLDER``: writes a model as a Hugging Face folder, or to the hub."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from isobit.cli.hub import HUB, HubTarget, export_to_hub
from isobit.cli.options import (
    THREADS,
    Command,
    option,
    path_value,
    positive,
    precision_value,
    set_threads,
)
from isobit.cli.start import starting
from isobit.config.commands import ExportConfig
from isobit.util.errors import ConfigError
from isobit.util.terminal import counted

if TYPE_CHECKING:
    from isobit.commands.export import ExportResult

_COMMAND = Command(
    "export",
    "Write a run's policy, or a model folder, as a Hugging Face folder: shards with an index, "
    "config, tokenizer, chat template, generation config, and a model card with the run's figures. "
    " transformers and vLLM load it.  With --to hf://user/name it is uploaded.",
    [
        option(
            "source RUN_OR_FOLDER",
            "the directory that `isobit train` or `sft` wrote, a model folder, a name of the hub, "
            "or `starter`",
        ),
        option(
            "--to FOLDER",
            "what is written: a folder, or a model of the hub as hf://user/name",
            required=True,
        ),
        option(
            "--format",
            "bf16 (default), or the bytes that the policy samples with: fp8, or int8 for vLLM",
            choices=("bf16", "fp8", "int8"),
            default="bf16",
        ),
        option("--private", "of a new model of the hub"),
        option(
            "--merge",
            "of a run with [lora], or an adapter's folder: add the adapters to their base and "
            "write that; without it PEFT's folder is written",
        ),
        option(
            "--step K",
            "of a run, the checkpoint after K steps, or `best`, by its checkpoint.keep_best; by "
            "default its model, or newest checkpoint",
            lambda text: text if text == "best" else positive(text),
        ),
        option(
            "--precision NAME",
            "with fp8 and int8, the flow; by default the run's own, as it is stored, or that of "
            "the format's name",
            precision_value,
            key="precision",
        ),
        option(
            "--shard-mb N",
            "largest file of tensors, in MB; by default 5000",
            positive,
            default=5000,
        ),
        option("--overwrite", "replace a model folder that is there"),
        THREADS,
    ],
    "--precision.KEY VALUE sets any key of precision as well; `isobit train --help` lists them.",
)


def run_export(arguments: Sequence[str]) -> int:
    options, overrides = _COMMAND.read_some(arguments)
    precision = _COMMAND.settings(ExportConfig, options, overrides).precision
    if precision is not None and options.format == "bf16":
        raise ConfigError(
            "--precision says what is written in 8 bits, and --format is bf16: leave one out"
        )
    with starting():
        from isobit.commands.export import export, find_source
        from isobit.observe.console import Console
    set_threads(options)

    console = Console()
    with console.busy("reading"):
        source = find_source(options.source, options.step, console.line)
    settings: dict[str, Any] = {
        "format": options.format,
        "precision": precision,
        "shard_bytes": options.shard_mb * 10**6,
        "merge": options.merge,
    }
    if options.to.startswith(HUB):
        target = HubTarget.open(options.to, options.private, options.overwrite)
        with console.busy(f"writing and uploading {options.to}"):
            result, address = export_to_hub(source, target, **settings)
        console.lines(_describe(result, address))
        return 0
    with console.busy(f"writing {options.to}"):
        result = export(source, path_value(options.to), overwrite=options.overwrite, **settings)
    console.lines(_describe(result))
    return 0


def _describe(result: "ExportResult", address: str | None = None) -> list[str]:
    files = f"{result.files} file{'s' if result.files > 1 else ''} of tensors"
    lines = [
        f"{address or result.folder}: {result.num_bytes / 1e6:,.1f} MB in {files}, {result.format}"
    ]
    if result.rounding is not None:
        lost = ", so that most of it is lost" if result.rounding > 0.5 else ""
        lines += [
            f"adapters are merged: rounding moved their matrices by {100 * result.rounding:.1f}% "
            f"(rms) of what the adapters change{lost}",
            "this is another function than the one that was trained, with adapters beside their "
            "base: measure it again (`isobit eval`)",
        ]
    if result.quantised:
        own = "the policy's own bytes"
        kind = "INT8" if result.format == "int8" else "E4M3"
        if result.rounding is not None:
            own = "quantised anew, from the merged matrices"
        elif result.sampled_in is not None:
            own = f"quantised anew: the run sampled in {result.sampled_in}"
        lines.append(f"{counted(result.quantised, 'matrices', 'matrix')} in {kind}, {own}")
    if result.format == "int8":
        lines.append(
            "vLLM reads it, on one GPU; in transformers call compressed-tensors' "
            "apply_transform_config, as its README.md shows"
        )
    if result.not_whole:
        lines += [
            f"{len(result.not_whole)} matrices are BF16, as the numbers that their E4M3 bytes "
            "stand for: not every",
            "  size of theirs, or of what is fused with them, is a multiple of 128, as stock "
            "loaders ask",
        ]
    return lines
