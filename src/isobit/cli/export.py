"""``isobit export`` writes a model as a Hugging Face folder, ``isobit inspect`` shows what is in a
model folder, ``isobit report`` writes the metrics of runs as an HTML page, ``isobit schema`` prints
the schema or the keys of the recipes.
"""

import re
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from isobit.cli.arguments import (
    add_gpu,
    add_threads,
    check_directory,
    folder_parser,
    path_value,
    positive,
    precision_value,
    set_threads,
    settings_from,
)
from isobit.cli.main import starting
from isobit.util.errors import ConfigError, shown
from isobit.util.strict_json import json_text

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from isobit.commands.export import ExportResult, ExportSource
    from isobit.config.precision import PrecisionConfig

HUB = "hf:"
"""What a target begins with that is a model of the hub."""
_REPOSITORY = re.compile(r"hf://(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubTarget:
    """A model of the hub that a folder is uploaded to, made and checked before it is written."""

    name: str
    api: "HfApi"

    @classmethod
    def open(cls, target: str, private: bool, overwrite: bool) -> "HubTarget":
        """The repository ``hf://user/name``, created if there is none.  Raises ConfigError for
        another form, without a token, for a model that has files already unless ``overwrite``, and
        where the hub refuses or cannot be reached.
        """
        from huggingface_hub import HfApi, get_token

        match = _REPOSITORY.fullmatch(target)
        if match is None:
            raise ConfigError(f"--to is {target!r}; a model of the hub is written hf://user/name")
        if get_token() is None:
            raise ConfigError(
                f"--to is {target!r}, but there is no token of the hub here: run `hf auth login`, "
                "or set HF_TOKEN to one that may write"
            )
        made = cls(match["name"], HfApi())
        with made.errors("cannot be opened"):
            made.api.create_repo(made.name, private=private or None, exist_ok=True)
            there = set(made.api.list_repo_files(made.name)) - {".gitattributes", "README.md"}
        if there and not overwrite:
            raise ConfigError(
                f"--to is {target!r}, which already holds {len(there)} files; name another model, "
                "or replace it (--overwrite)"
            )
        return made

    def upload(self, folder: Path, message: str) -> str:
        """Upload a folder as one commit, replacing older weights.  -> Its address."""
        with self.errors("did not take the folder"):
            commit = self.api.upload_folder(
                repo_id=self.name,
                folder_path=folder,
                commit_message=message,
                delete_patterns=["*.safetensors", "*.safetensors.index.json"],
            )
        return str(commit.repo_url)

    @contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """Turn every error of the hub into a ConfigError that says what to do."""
        from huggingface_hub.errors import HfHubHTTPError

        try:
            yield
        except Exception as error:  # many types, down to those of its HTTP client
            status = None
            if isinstance(error, HfHubHTTPError) and error.response is not None:
                status = error.response.status_code
            lines = str(error).strip().splitlines() or [""]
            remedy = (
                "the token is not one that may write there; make one that may, and set HF_TOKEN or "
                "run `hf auth login`"
                if status in (401, 403)
                else "check the name on the hub"
                if status in (400, 404, 409)
                else "check the network; the model can also be exported to a folder (--to FOLDER) "
                "and uploaded later with `hf upload`"
            )
            raise ConfigError(
                f"hf://{self.name} {what}: {type(error).__name__}: {shown(lines[0])}; {remedy}"
            ) from error


def export_to_hub(
    source: "ExportSource", target: HubTarget, **settings: Any
) -> tuple["ExportResult", str]:
    """``export`` to a temporary folder, and upload that.  -> Also the model's address."""
    from isobit.commands.export import export

    with TemporaryDirectory(prefix="isobit-export-") as place:
        folder = Path(place) / target.name.rpartition("/")[2]
        result = export(source, folder, **settings)
        step = "" if source.step is None else f" after step {source.step}"
        address = target.upload(folder, f"Upload {result.format} weights{step} by Isobit")
    return result, address


def run_export(arguments: Sequence[str]) -> int:
    options, overrides = _parser().parse_known_args(arguments)
    precision = _precision(options.precision, overrides)
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


def _precision(given: Any, overrides: Sequence[str]) -> "PrecisionConfig | None":
    from isobit.config.commands import ExportConfig

    values = {"precision": given} if given is not None else {}
    return settings_from(ExportConfig, values, overrides).precision


def _describe(result: "ExportResult", address: str | None = None) -> list[str]:
    files = f"{result.files} file{'s' if result.files > 1 else ''} of tensors"
    lines = [
        f"{address or result.folder}: {result.num_bytes / 1e6:,.1f} MB in {files}, {result.format}"
    ]
    if result.rounding is not None:
        lines.append(
            f"adapters are merged: rounding moved their matrices by {100 * result.rounding:.1f}% "
            f"(rms) of what the adapters change"
        )
    if result.quantised:
        own = "the policy's own bytes"
        kind = "INT8" if result.format == "int8" else "E4M3"
        if result.sampled_in is not None:
            own = f"quantised anew: the run sampled in {result.sampled_in}"
        lines.append(f"{result.quantised} matrices in {kind}, {own}")
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


def _add_switches(parser: ArgumentParser) -> None:
    parser.add_argument("--private", action="store_true", help="of a new model of the hub")
    parser.add_argument(
        "--merge",
        action="store_true",
        help="of a run with [lora], or an adapter's folder: add the adapters to their base and "
        "write that; without it PEFT's folder is written",
    )


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="isobit export",
        description=(
            "Write a run's policy, or a model folder, as a Hugging Face folder: shards with an "
            "index, config, tokenizer, chat template, generation config, and a model card with "
            "the run's figures.  transformers and vLLM load it.  With --to hf://user/name it is "
            "uploaded."
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
    parser.add_argument(
        "--to",
        metavar="FOLDER",
        required=True,
        help="what is written: a folder, or a model of the hub as hf://user/name",
    )
    parser.add_argument(
        "--format",
        choices=("bf16", "fp8", "int8"),
        default="bf16",
        help="bf16 (default), or the bytes that the policy samples with: fp8, or int8 for vLLM",
    )
    _add_switches(parser)
    parser.add_argument(
        "--step",
        type=lambda text: text if text == "best" else positive(text),
        metavar="K",
        help="of a run, the checkpoint after K steps, or `best`, by its checkpoint.keep_best; by "
        "default its model, or newest checkpoint",
    )
    parser.add_argument(
        "--precision",
        type=precision_value,
        metavar="NAME",
        help="with fp8 and int8, the flow; by default the run's own, as it is stored, or that of "
        "the format's name",
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


def run_report(arguments: Sequence[str]) -> int:
    """Write the page. Raises IsobitError if there is no run, or the file cannot be written."""
    options = _report_parser().parse_args(arguments)

    from isobit.observe.report.page import report

    if options.watch:
        print("the page is written again until the run ends; Ctrl-C stops that", flush=True)
    path = report(*options.runs, out=options.out, watch=options.watch)
    print(f"{path} ({path.stat().st_size / 1000:,.0f} kB)")
    return 0


def _report_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="isobit report",
        description=(
            "Write a run's rewards, lengths, entropy, log-probability differences, speed, "
            "precision flow and sample completions as one "
            "HTML page, which opens without a network.  It also shows a run that is still going, "
            "or one that was stopped.  Of several runs, the page compares them."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        type=path_value,
        nargs="+",
        help="the directory that `isobit train` or `isobit sft` wrote (its `output`); up to seven",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=path_value,
        help="where to write the page; by default RUN/report.html, of several comparison.html",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="write the page again every 10 s until the run ends; a browser reads it again too",
    )
    return parser
