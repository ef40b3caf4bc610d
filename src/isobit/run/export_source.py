"""What ``isobit export`` takes a model from: a run, that is its finished model or one of its
checkpoints, or a Hugging Face folder.

A run's checkpoint holds FP32 masters, of which the checkpoint's tensors are rows; a finished model
is their BF16 rounding, from which the same FP8 bytes are published.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from isobit.config.load import build
from isobit.config.precision import PrecisionConfig
from isobit.config.recipe import Recipe
from isobit.config.run import RunConfig
from isobit.config.sft import SftConfig
from isobit.errors import CheckpointError, ConfigError
from isobit.models.checkpoint import Checkpoint as FolderCheckpoint
from isobit.models.config import ModelConfig
from isobit.models.contents import Tensors
from isobit.models.decoder import build_decoder
from isobit.models.folder import read_any_config
from isobit.models.loaded import model_folder
from isobit.models.tensor_file import TensorFile
from isobit.observe.report.source import RunRecord, read_run
from isobit.precision.quant_tensor import QuantTensor
from isobit.run.model_source import source_config
from isobit.store.checkpoint.format import MASTERS, Checkpoint, folders_by_step, read_checkpoint
from isobit.store.checkpoint.retention import best_on_disk
from isobit.store.checkpoint.usable import newest_usable
from isobit.store.directory import RunDirectory

Say = Callable[[str], None]
"""Prints a line."""


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


@dataclass(frozen=True, slots=True)
class MasterTensors:
    """The checkpoint's tensors, read from a file of masters as rows of them (``Tensors``)."""

    file: TensorFile
    places: dict[str, tuple[str, int, int]]
    """Of each tensor its master, and the first and last row."""

    @classmethod
    def of(cls, path: Path, config: ModelConfig) -> "MasterTensors":
        """Raises CheckpointError for masters that are not those of ``config``."""
        file = TensorFile(path)
        shapes = file.shapes()
        places: dict[str, tuple[str, int, int]] = {}
        for name, master in build_decoder(config).masters().items():
            if shapes.get(name) != master.shape:
                raise CheckpointError(
                    f"{path}: {name} has the shape {shapes.get(name, '(none)')}, and the model "
                    f"that the run began with asks for {master.shape}: that is another model now"
                )
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


def find_source(name: str | Path, step: int | Literal["best"] | None, say: Say) -> ExportSource:
    """The model that a path names: a model folder, ``starter``, or of a run the model after
    ``step`` steps, by default its finished one or else its newest checkpoint; the best is that by
    the run's ``checkpoint.keep_best``.

    Raises ConfigError for a step that there is none of and a run without a model, ModelError and
    CheckpointError for one that cannot be read.
    """
    path = model_folder(name)
    if not _is_run(path):
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


def _is_run(path: Path) -> bool:
    directory = RunDirectory(path)
    return directory.manifest.is_file() or directory.checkpoints.is_dir()


def _folder(name: str, path: Path) -> ExportSource:
    config = read_any_config(path)
    return ExportSource(name, path, config, FolderCheckpoint.open(path, config), path)


def _finished(directory: RunDirectory, record: RunRecord) -> ExportSource:
    config = read_any_config(directory.model)
    recipe = record.setting("config")
    return ExportSource(
        str(directory.root),
        directory.root,
        config,
        FolderCheckpoint.open(directory.model, config),
        directory.model,
        None if recipe is None else _precision(recipe),
        record,
        record.setting("config", "training", "steps"),
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
    return ExportSource(
        str(directory.root),
        directory.root,
        config,
        MasterTensors.of(checkpoint.folder / MASTERS, config),
        model_folder(recipe.model),
        recipe.precision,
        record,
        checkpoint.step,
    )


def _recipe(checkpoint: Checkpoint) -> Recipe:
    values = checkpoint.manifest["config"]
    kind = RunConfig if "algorithm" in values else SftConfig
    return build(kind, values, str(checkpoint.folder))


def _precision(recipe: dict[str, object]) -> PrecisionConfig:
    return build(PrecisionConfig, recipe["precision"], "the run's precision")  # pyright: ignore[reportArgumentType]
