"""``isobit export``: a run's model, or a folder's, as a Hugging Face folder that other tools load,
in BF16 or with its matrices in FP8 or INT8.

    find_source     what there is (``isobit.commands.export``)
    contents        which tensors the folder gets, in which formats (``isobit.models.saving``)
    export          the folder: written beside its place under a hidden name, and renamed when it is
                    whole.  A process killed at any point leaves the old folder or the new one

What ``isobit export`` takes a model from: a run, that is its finished model or one of its
checkpoints, or a Hugging Face folder.

A run's checkpoint holds FP32 masters, of which the checkpoint's tensors are rows; a finished model
is their BF16 rounding, from which the same 8-bit values are published.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

import torch

from isobit.config.load import build
from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import Recipe, RunConfig, SftConfig, recorded_recipe
from isobit.models.adapter_folder import CONFIG_FILE, write_adapters
from isobit.models.adapters import folded_columns, open_adapters, peft_tensors, without_adapters
from isobit.models.checkpoint import FolderCheckpoint
from isobit.models.config import Lora, ModelConfig
from isobit.models.decoder import build_decoder, checkpoint_shapes, decoder_shape, master_shapes
from isobit.models.folder import base_folder, model_folder, read_any_config
from isobit.models.safetensors import SHARD_BYTES, TensorFile, total_bytes
from isobit.models.saving import (
    Contents,
    MergedTensors,
    Tensors,
    bf16_contents,
    copy_tokenizer,
    fp8_contents,
    int8_contents,
    stored_contents,
    write_folder,
)
from isobit.observe.model_card import CARD_FILE, CardFacts, Merge, model_card
from isobit.observe.run_record import RunRecord, read_run
from isobit.precision.flow import PrecisionFlow, build_flow
from isobit.precision.quant_tensor import QuantTensor, measure_published
from isobit.run.model_source import source_config
from isobit.store.checkpoint import MASTERS, Checkpoint, folders_by_step, read_checkpoint
from isobit.store.directory import RunDirectory, is_run
from isobit.store.keeper import best_on_disk
from isobit.store.manifest import recorded_targets
from isobit.store.newest import Say, newest_usable
from isobit.util.disk_space import check_free, disk_errors
from isobit.util.errors import CheckpointError, ConfigError, ModelError
from isobit.util.files import file_sha256, new_folder


@dataclass(frozen=True, slots=True)
class ExportSource:
    """A model that can be exported, of which no tensor has been read yet."""

    name: str
    """What was named: a path, ``starter``, or a model of the hub."""
    path: Path
    """A run's directory or a model folder."""
    config: ModelConfig
    tensors: Tensors
    tokenizer_from: Path
    """The folder that has the tokenizer's files."""
    precision: PrecisionConfig | None = None
    """The run's own flow; None of a folder."""
    record: RunRecord | None = None
    """What the run has left; None of a folder."""
    step: int | None = None
    """Steps of the run that the model has learnt from."""
    adapters: Mapping[str, torch.Tensor] | None = None
    """A and B by PEFT's names, with LoRA; then ``tensors`` are those of the base."""
    merged: Lora | None = None
    """The adapters that ``tensors`` have been given."""


@dataclass(frozen=True, slots=True)
class MasterTensors:
    """The checkpoint's tensors, read from a file of masters as rows of them (``Tensors``)."""

    file: TensorFile
    places: dict[str, tuple[str, int, int]]
    """The master of each tensor, and its first and last row there."""

    @classmethod
    def of(cls, path: Path, config: ModelConfig) -> "MasterTensors":
        """Raises CheckpointError for masters that are not those of ``config``."""
        file, places = checked_masters(path, config), dict[str, tuple[str, int, int]]()
        for name, master in build_decoder(config).masters().items():
            first = 0
            for part, rows in master.parts.items():
                places[part] = name, first, first + rows
                first += rows
        return cls(file, places)

    def tensor(self, name: str) -> torch.Tensor:
        """FP32."""
        master, first, last = self.places[name]
        return self.file[master][first:last]

    @property
    def in_e4m3(self) -> frozenset[str]:
        """None: masters are FP32."""
        return frozenset()

    def quantised(self, name: str) -> QuantTensor | None:
        """None."""
        return None


def checked_masters(path: Path, config: ModelConfig) -> TensorFile:
    """A file of masters. Raises CheckpointError where they are not those of ``config``."""
    file = TensorFile(path)
    shapes = file.shapes()
    for name, shape in master_shapes(config).items():
        if shapes.get(name) != shape:
            raise CheckpointError(
                f"{path}: {name} has the shape {shapes.get(name, '(none)')}, and the model "
                f"that the run began with asks for {shape}: that is another model now"
            )
    return file


def find_source(name: str | Path, step: int | Literal["best"] | None, say: Say) -> ExportSource:
    """The model that a path names: a model folder, ``starter``, or of a run the model after
    ``step`` steps, by default its finished one or else its newest checkpoint; the best is that by
    the run's ``checkpoint.keep_best``.

    Raises ConfigError for a step that there is none of and a run without a model, ModelError and
    CheckpointError for one that cannot be read.
    """
    path = model_folder(name)
    if not path.exists():
        raise ConfigError(_nothing_at(path))
    if not is_run(path):
        if step is not None:
            raise ConfigError(f"--step is for a run, and {path} is none; leave it out")
        return _folder(str(name), path)
    directory, record = RunDirectory(path), read_run(path)
    if step is None and record.finished and directory.model.is_dir():
        return _finished(directory, record)
    if step == "best":
        step = _best_step(directory, record.setting("config", "checkpoint", "keep_best"), say)
    checkpoint = _checkpoint(directory, step, say)
    return _of_checkpoint(directory, record, checkpoint)


def _nothing_at(path: Path) -> str:
    """What to say of a path that does not exist."""
    above = path.parent
    names = [one.name for one in above.iterdir() if one.is_dir()] if above.is_dir() else []
    near = get_close_matches(path.name, names, n=1)
    return (
        f"no such run or model folder: {path}"
        + (f" (did you mean {above / near[0]}?)" if near else "")
        + "; name the directory that `isobit train` wrote (its `output`), a model folder, or a "
        "model of the hub (org/name)"
    )


def _folder(name: str, path: Path) -> ExportSource:
    config, base = read_any_config(path), base_folder(path)
    adapters = None if config.lora is None else open_adapters(path, config)
    tensors = FolderCheckpoint.open(base, config)
    return ExportSource(name, path, config, tensors, base, adapters=adapters)


def _finished(directory: RunDirectory, record: RunRecord) -> ExportSource:
    recipe = record.setting("config")
    return replace(
        _folder(str(directory.root), directory.model),
        path=directory.root,
        precision=recipe and build(PrecisionConfig, recipe["precision"], "the run's precision"),
        record=record,
        step=record.setting("config", "training", "steps"),
    )


def _best_step(directory: RunDirectory, figure: str | None, say: Say) -> int:
    if figure is None:
        raise ConfigError(
            f"--step is best, but the run in {directory.root} does not say by which figure "
            "(checkpoint.keep_best), and has not kept it; name a step"
        )
    step = best_on_disk(directory.checkpoints, figure)
    if step is None:
        raise ConfigError(
            f"--step is best, but no checkpoint in {directory.checkpoints} was evaluated; name a "
            "step"
        )
    say(f"the best checkpoint by {figure} is that of step {step}")
    return step


def _checkpoint(directory: RunDirectory, step: int | None, say: Say) -> Checkpoint:
    if step is None:
        newest = newest_usable(directory, say)
        if newest is None:
            raise ConfigError(
                f"{directory.root} has neither a finished model nor a checkpoint yet; wait for "
                "one, or go on with the run (--resume)"
            )
        return newest
    folders = folders_by_step(directory.checkpoints)
    if step not in folders:
        there = ", ".join(map(str, sorted(folders))) or "none"
        raise ConfigError(
            f"--step is {step}, but {directory.root} has no checkpoint of that step; there: {there}"
        )
    return read_checkpoint(folders[step])


def _of_checkpoint(
    directory: RunDirectory, record: RunRecord, checkpoint: Checkpoint
) -> ExportSource:
    recipe = _recipe(checkpoint)
    config = (
        source_config(recipe.model, recipe.from_scratch, recipe.objective)
        if isinstance(recipe, SftConfig)
        else source_config(recipe.model)
    )
    if recipe.lora is not None:
        targets = recorded_targets(record.manifest)
        config = replace(config, lora=Lora.of(recipe.lora, config, targets))
    base = base_folder(model_folder(recipe.model))
    masters = None
    adapters = None
    if config.lora is None:
        masters = MasterTensors.of(checkpoint.folder / MASTERS, config)
    else:
        masters = FolderCheckpoint.open(base, config)
        flow = build_flow(recipe.precision, decoder_shape(config))
        trained = checked_masters(checkpoint.folder / MASTERS, config)
        adapters = peft_tensors(config, trained, folded_columns(config, flow, masters.tensor))
    return ExportSource(
        str(directory.root),
        directory.root,
        config,
        masters,
        base,
        recipe.precision,
        record,
        checkpoint.step,
        adapters,
    )


def _recipe(checkpoint: Checkpoint) -> Recipe:
    values = recorded_recipe(checkpoint.manifest["config"])
    kind = RunConfig if "algorithm" in values else SftConfig
    return build(kind, values, str(checkpoint.folder))


ExportFormat = Literal["bf16", "fp8", "int8"]
_OTHER_FILES = 64 << 20
"""Bytes that are kept for tokenizer, configuration and card, generously."""


@dataclass(frozen=True, slots=True)
class ExportResult:
    """A folder that was written."""

    folder: Path
    format: ExportFormat | Literal["fp32"]
    """FP32 of adapters alone."""
    num_bytes: int
    """Bytes of all tensors."""
    files: int
    """Files of tensors."""
    quantised: int
    """Matrices in 8 bits."""
    sampled_in: str | None
    """The flow in which the run sampled, where ``precision`` is another flow; else None."""
    not_whole: tuple[str, ...]
    """Matrices that the flow has in E4M3, and which stock loaders could not read in it."""
    rounding: float | None = None
    """The rms of what rounding changes over that of what merged adapters change; None without any.
    """


def export(
    source: ExportSource,
    target: Path,
    format: ExportFormat = "bf16",
    precision: PrecisionConfig | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    merge: bool = False,
) -> ExportResult:
    """Write a model as the folder ``target``.  Values in 8 bits are those of ``precision``, by
    default the run's own flow, or as they are of a folder that is FP8 already.  With LoRA it is
    PEFT's folder, or with ``merge`` the base with its adapters added.

    Raises ConfigError for a target that cannot be used and a flow without such values or whose
    INT8 vLLM does not take, StorageError for a disk without room, ModelError for a tensor that
    cannot be read.
    """
    check_target(source, target, overwrite)
    _check_has_numbers(source, merge)
    merged = None
    if source.adapters is not None or merge:
        _check_merge(source, format, merge)
        if not merge:
            return _export_adapters(source, target)
        merged = _merged(source)
        lora = source.config.lora
        source = replace(
            source, config=without_adapters(source.config), tensors=merged, merged=lora
        )
    flow = _flow(source, format, precision)
    contents = _contents(source, format, flow)
    needed = total_bytes(contents.layout) + _OTHER_FILES
    check_free(target, needed, f"the folder {target}")
    with disk_errors(target.parent, f"the folder {target}", needed, "export again"):
        digests, rounding = _write(source, target, contents, flow, shard_bytes, merged)
    return ExportResult(
        target,
        format,
        total_bytes(contents.layout),
        len(digests),
        contents.num_quantised,
        _sampled_in(source, flow),
        contents.not_whole,
        rounding,
    )


def _check_has_numbers(source: ExportSource, merge: bool) -> None:
    has_integers = isinstance(source.tensors, FolderCheckpoint) and source.tensors.in_int8
    if has_integers and (merge or source.adapters is None):
        raise ModelError(
            f"the folder {source.tokenizer_from} is in compressed-tensors' format, in INT8, whose "
            "numbers are rounded already; name the run or folder that it was exported from, with "
            "--format bf16, for example"
        )


def _check_merge(source: ExportSource, format: ExportFormat, merge: bool) -> None:
    if source.adapters is None:
        raise ConfigError(
            f"--merge adds adapters to their base, and {source.name} has none; leave it out"
        )
    if not merge and format != "bf16":
        raise ConfigError(
            f"--format is {format}, but adapters are written as PEFT's, in FP32; leave it out, or "
            "add --merge, which writes the base with its adapters"
        )


def _export_adapters(source: ExportSource, target: Path) -> ExportResult:
    lora, tensors = source.config.lora, source.adapters
    assert lora is not None
    assert tensors is not None
    size = total_bytes(tensors)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        disk_errors(target.parent, f"the folder {target}", size, "export again"),
        new_folder(target) as partial,
    ):
        write_adapters(partial, lora, source.tokenizer_from, tensors)
        copy_tokenizer(source.tokenizer_from, partial)
        _write_card(source, target.name, partial, {})
    return ExportResult(target, "fp32", size, 1, 0, None, ())


def _merged(source: ExportSource) -> MergedTensors:
    lora, tensors = source.config.lora, source.adapters
    assert lora is not None
    assert tensors is not None
    return MergedTensors(source.tensors, tensors, lora.scale)


def _rounding(
    source: ExportSource, merged: MergedTensors, contents: Contents, folder: Path
) -> float:
    """``ExportResult.rounding``, of the tensors that were written into ``folder``."""
    written = FolderCheckpoint.open(folder, source.config)
    errors = 0.0
    changes = 0.0
    for name in checkpoint_shapes(source.config):
        change = merged.change(name)
        if change is None:
            continue
        exact = source.tensors.tensor(name)
        if name in contents.folded:
            exact, change = exact * contents.folded[name], change * contents.folded[name]
        changes += float(change.square().sum())
        rows = written.int8_rows(name)
        if rows is None:
            errors += float((written.tensor(name).double() - exact.double()).square().sum())
        else:
            errors += measure_published(exact, rows).squared_errors or 0.0
    return (errors / changes) ** 0.5 if changes else 0.0


def _sampled_in(source: ExportSource, flow: PrecisionFlow | None) -> str | None:
    """The run's flow, where its bytes are not those of ``flow``."""
    own = source.precision
    if flow is None or own is None or build_flow(own, decoder_shape(source.config)) == flow:
        return None
    return own.name


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
    if not any((target / file).is_file() for file in ("config.json", CONFIG_FILE)):
        raise ConfigError(
            f"--to is {str(target)!r}, which holds files but no config.json: it is no model "
            "folder, and is not replaced; name another"
        )


def _flow(
    source: ExportSource, format: ExportFormat, precision: PrecisionConfig | None
) -> PrecisionFlow | None:
    """None for BF16, and where the bytes are there already; options without a preset are those of
    the format's.
    """
    if format == "bf16":
        return None
    if precision is not None and "preset" not in precision.model_fields_set:
        options = precision.model_dump(exclude_unset=True)
        precision = PrecisionConfig.model_validate({**options, "preset": format})
    chosen = precision or source.precision
    if chosen is None and format == "fp8" and source.tensors.in_e4m3:
        return None
    return build_flow(chosen or PrecisionConfig(preset=format), decoder_shape(source.config))


def _contents(source: ExportSource, format: ExportFormat, flow: PrecisionFlow | None) -> Contents:
    if format == "bf16":
        return bf16_contents(source.config, source.tensors)
    if flow is None:
        return stored_contents(source.config, source.tensors)
    if format == "int8":
        is_own = source.precision is not None and _sampled_in(source, flow) is None
        own = is_own and source.merged is None  # with LoRA the tensors are a folder's
        return int8_contents(source.config, flow, source.tensors, fold=not own)
    return fp8_contents(source.config, flow, source.tensors)


def _in_8_bits(contents: Contents) -> Literal["fp8", "int8"] | None:
    if not contents.num_quantised:
        return None
    integers = any(tensor.dtype == torch.int8 for tensor in contents.layout.values())
    return "int8" if integers else "fp8"


def _write(
    source: ExportSource,
    target: Path,
    contents: Contents,
    flow: PrecisionFlow | None,
    shard_bytes: int,
    merged: MergedTensors | None,
) -> tuple[dict[str, str], float | None]:
    """-> the SHA-256 of each file of tensors, and ``ExportResult.rounding``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(target) as partial:
        digests = write_folder(partial, source.config, contents, source.tokenizer_from, shard_bytes)
        rounding = None if merged is None else _rounding(source, merged, contents, partial)
        _write_card(source, target.name, partial, digests, contents, flow, rounding)
    return digests, rounding


def _write_card(
    source: ExportSource,
    name: str,
    partial: Path,
    digests: dict[str, str],
    contents: Contents | None = None,
    flow: PrecisionFlow | None = None,
    rounding: float | None = None,
) -> None:
    """The card of a folder whose other files are written; ``contents`` are a whole model's."""
    others = sorted(file for file in partial.iterdir() if file.name not in digests)
    facts = CardFacts(
        name=name,
        source=source.name,
        config=source.config,
        in_8_bits=None if contents is None else _in_8_bits(contents),
        flow=flow,
        not_whole=() if contents is None else contents.not_whole,
        sampled_in=_sampled_in(source, flow),
        digests=digests | {file.name: file_sha256(file) for file in others},
        record=source.record,
        step=source.step,
        start=source.tokenizer_from,
        merge=None if source.merged is None else Merge(source.merged, rounding or 0.0),
    )
    (partial / CARD_FILE).write_text(model_card(facts), encoding="utf-8")
