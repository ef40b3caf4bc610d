"""What a run has recorded of all that its steps depend on beside the recipe, compared with what is
there now.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isobit.config.recipe import Recipe
from isobit.errors import CheckpointError
from isobit.store.bits import recorded_class
from isobit.store.checkpoint.compatible import (
    RESUMING,
    Changes,
    Doing,
    check_inputs,
    check_names,
    flat,
)
from isobit.store.checkpoint.format import Checkpoint
from isobit.store.checkpoint.state import TRAINED_ON
from isobit.store.directory import RunDirectory, no_run


@dataclass(frozen=True, slots=True)
class Recorded:
    """Inputs, and the versions and the machine that computed."""

    inputs: Mapping[str, str]
    """Digests by name."""
    environment: Mapping[str, Any]

    @property
    def is_partial(self) -> bool:
        """Whether an Isobit wrote it that knew of the training data alone."""
        return not self.inputs.keys() - {TRAINED_ON}


def recorded(manifest: Mapping[str, Any], checkpoint: Checkpoint | None) -> Recorded:
    """At the checkpoint, or at the beginning of the run, whose manifest is ``run.json``."""
    if checkpoint is None:
        return Recorded(manifest.get("inputs", {}), manifest)
    written = checkpoint.manifest
    learnt = {TRAINED_ON: checkpoint.state["prompts_sha256"]}
    return Recorded(written.get("inputs", learnt), written["environment"])


def compare(
    old: Recorded,
    config: Recipe,
    inputs: Mapping[str, str],
    environment: Mapping[str, Any],
    allowed: Sequence[str],
    settings: Collection[str] = (),
    doing: Doing = RESUMING,
) -> Changes:
    """Inputs and class of bits that differ and are ``allowed``, as are the ``settings`` that do.
    Raises ConfigError for others, and for an allowed name that means nothing.
    """
    before, now = recorded_class(old.environment), environment["bits"]
    saved = {**old.inputs, **{f"bits.{name}": value for name, value in before.items()}}
    found = {**inputs, **{f"bits.{name}": value for name, value in now.items()}}
    keys = {*flat(config.model_dump(mode="json")), *settings}
    check_names(allowed, {*keys, *saved, *found})
    return check_inputs(saved, found, allowed, doing)


def run_manifest(directory: RunDirectory, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """``run.json``, or what the checkpoint knows of it where it is lost; its configuration is the
    one of the checkpoint, with the processes that there were.
    """
    config = {"config": checkpoint.manifest["config"]} if checkpoint else {}
    try:
        content = json.loads(directory.manifest.read_text(encoding="utf-8"))
        ran = content["config"]
        cluster = {"cluster": ran["cluster"]} if "cluster" in ran else {}
        return {**content, "config": {**config.get("config", ran), **cluster}}
    except FileNotFoundError:
        if checkpoint is None:
            raise no_run(directory.root) from None
    except (OSError, RecursionError, ValueError, KeyError, TypeError):
        if checkpoint is None:
            raise CheckpointError(
                f"{directory.manifest} is damaged, and there is no checkpoint yet; begin again in "
                "another directory (--output PATH)"
            ) from None
    return {**config, **checkpoint.manifest["environment"]}


def notes(old: Recorded, differs: Sequence[str], now: Mapping[str, Any]) -> list[str]:
    """Lines on what ``differs``, on other versions, and on what cannot be compared."""
    partial = (
        "note: this run was begun by an Isobit that recorded no digests of its data, its reward or "
        "its tokenizer: they are not compared"
    )
    return [
        *([partial] if old.is_partial else []),
        *(
            f"note: {line}: the bits may not be those of a run that was never interrupted"
            for line in (*differs, *_differences(old.environment, now))
        ),
    ]


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Versions and machines that are not those recorded, and of which the class of bits says
    nothing.
    """
    compared = {"threads", "type", *new["bits"]}
    pairs = {
        name: (old.get(part, {}).get(name), value)
        for part in ("versions", "device")
        for name, value in new[part].items()
        if name not in compared
    }
    return [
        f"{name} is {now}, the checkpoint was written with {before}"
        for name, (before, now) in pairs.items()
        if before not in (None, now)
    ]
