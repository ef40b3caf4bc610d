"""What a run has recorded of all that its steps depend on beside the recipe, compared with what is
there now.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isobit.config.recipe import Recipe
from isobit.store.bits import recorded_class
from isobit.store.checkpoint.compatible import Changes, check_inputs, check_names, flat
from isobit.store.checkpoint.format import Checkpoint
from isobit.store.checkpoint.state import TRAINED_ON


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
) -> Changes:
    """Inputs and class of bits that differ and are ``allowed``, as are the ``settings`` that do.
    Raises ConfigError for others, and for an allowed name that means nothing.
    """
    before, now = recorded_class(old.environment), environment["bits"]
    saved = {**old.inputs, **{f"bits.{name}": value for name, value in before.items()}}
    found = {**inputs, **{f"bits.{name}": value for name, value in now.items()}}
    keys = {*flat(config.model_dump(mode="json")), *settings}
    check_names(allowed, {*keys, *saved, *found})
    return check_inputs(saved, found, allowed)
