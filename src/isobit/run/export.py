"""``isobit export``: a run's model, or a folder's, as a Hugging Face folder that other tools load,
in BF16 or with its matrices in FP8.

    find_source     what there is (``isobit.run.export_source``)
    contents        which tensors the folder gets, in which formats (``isobit.models.contents``)
    export          the folder: written beside its place under a hidden name, and renamed when it is
                    whole.  A process killed at any point leaves the old folder or the new one
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from isobit.config.precision import PrecisionConfig
from isobit.errors import ConfigError
from isobit.files import check_free, disk_errors, file_sha256, new_folder
from isobit.models.contents import Contents, bf16_contents, fp8_contents, stored_contents
from isobit.models.decoder import decoder_shape
from isobit.models.saving import write_folder
from isobit.models.shards import SHARD_BYTES, total_bytes
from isobit.observe.model_card import CARD_FILE, CardFacts, model_card
from isobit.precision.flow import PrecisionFlow, build_flow
from isobit.run.export_source import ExportSource

ExportFormat = Literal["bf16", "fp8"]
_OTHER_FILES = 64 << 20
"""Bytes that are kept for tokenizer, configuration and card, generously."""


@dataclass(frozen=True, slots=True)
class ExportResult:
    """A folder that was written."""

    folder: Path
    format: ExportFormat
    num_bytes: int
    """Of all tensors."""
    files: int
    """Of tensors."""
    quantised: int
    """Matrices in E4M3."""
    not_whole: tuple[str, ...]
    """Matrices that the flow has in E4M3, and which stock loaders could not read in it."""


def export(
    source: ExportSource,
    target: Path,
    format: ExportFormat = "bf16",
    precision: PrecisionConfig | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> ExportResult:
    """Write a model as the folder ``target``.  FP8 bytes are those of ``precision``, by default the
    run's own flow, or as they are of a folder that is FP8 already.

    Raises ConfigError for a target that cannot be used and a flow without FP8, StorageError for a
    disk without room, ModelError for a tensor that cannot be read.
    """
    check_target(source, target, overwrite)
    flow = _flow(source, precision) if format == "fp8" else None
    contents = _contents(source, format, flow)
    needed = total_bytes(contents.layout) + _OTHER_FILES
    check_free(target, needed, f"the folder {target}")
    with disk_errors(target.parent, f"the folder {target}", needed, "export again"):
        digests = _write(source, target, contents, flow, shard_bytes)
    return ExportResult(
        target,
        format,
        total_bytes(contents.layout),
        len(digests),
        contents.num_quantised,
        contents.not_whole,
    )


def check_target(source: ExportSource, target: Path, overwrite: bool) -> None:
    """Raises ConfigError for a place that is in use, or is the source's own."""
    here, there = target.resolve(), source.path.resolve()
    if here == there or here in there.parents or here == source.tokenizer_from.resolve():
        raise ConfigError(
            f"--to is {str(target)!r}, where the model itself is; a model is never converted in "
            "place: name another folder"
        )
    if target.exists() and not target.is_dir():
        raise ConfigError(f"--to is {str(target)!r}, which is a file; name a folder")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not overwrite:
        raise ConfigError(
            f"--to is {str(target)!r}, which already holds files; name another folder, or replace "
            "it (--overwrite)"
        )
    if not (target / "config.json").is_file():
        raise ConfigError(
            f"--to is {str(target)!r}, which holds files but no config.json: it is no model "
            "folder, and is not replaced; name another"
        )


def _flow(source: ExportSource, precision: PrecisionConfig | None) -> PrecisionFlow | None:
    """None where the bytes are there already."""
    chosen = precision or source.precision
    if chosen is None and source.tensors.in_e4m3:
        return None
    return build_flow(chosen or PrecisionConfig(), decoder_shape(source.config))


def _contents(source: ExportSource, format: ExportFormat, flow: PrecisionFlow | None) -> Contents:
    if format == "bf16":
        return bf16_contents(source.config, source.tensors)
    if flow is None:
        return stored_contents(source.config, source.tensors)
    return fp8_contents(source.config, flow, source.tensors)


def _write(
    source: ExportSource,
    target: Path,
    contents: Contents,
    flow: PrecisionFlow | None,
    shard_bytes: int,
) -> dict[str, str]:
    """-> the SHA-256 of each file of tensors."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(target) as partial:
        digests = write_folder(partial, source.config, contents, source.tokenizer_from, shard_bytes)
        others = sorted(file for file in partial.iterdir() if file.name not in digests)
        facts = CardFacts(
            name=target.name,
            source=source.name,
            config=source.config,
            in_fp8=contents.num_quantised > 0,
            flow=flow,
            not_whole=contents.not_whole,
            digests=digests | {file.name: file_sha256(file) for file in others},
            record=source.record,
            step=source.step,
        )
        (partial / CARD_FILE).write_text(model_card(facts), encoding="utf-8")
    return digests
