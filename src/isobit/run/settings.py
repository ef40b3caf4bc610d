"""A recipe completed before anything compares or records it: with the date and the check that an
interrupted run had, and with what the model and its data decide where the recipe leaves it open.
"""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any

from isobit.config.base import MAX_STEPS
from isobit.config.recipes import RunConfig, SftConfig
from isobit.config.tables import ON_MISMATCH
from isobit.models.folder import model_folder, read_config
from isobit.parallel.world import ALONE, World, broadcast
from isobit.run.date import AnyRecipe, date_of, with_date_of
from isobit.store.checkpoint import MANIFEST, folders_by_step
from isobit.store.directory import RunDirectory
from isobit.util.errors import ConfigError
from isobit.util.plain_files import read_plain


def with_date_of_run(
    config: AnyRecipe, resume: bool, world: World = ALONE, *, weights: bool = True
) -> AnyRecipe:
    """A recipe with the date of its run: when that began, where it is resumed."""
    known = partial(_saved_date, RunDirectory(config.output)) if resume else lambda: None
    return with_date_of(config, config.model, world, known, weights)


def with_check_of_run(
    config: RunConfig,
    resume: bool,
    world: World = ALONE,
    say: Callable[[str], None] = lambda _: None,
) -> RunConfig:
    """A recipe that does at a mismatch what its run did so far, where it is resumed and the recipe
    leaves that open: runs of earlier versions warned by default, and go on so.
    """
    if not resume or config.check.on_mismatch != "auto":
        return config
    saved = broadcast(world, lambda: _saved(RunDirectory(config.output), "check", "on_mismatch"))
    if saved not in ON_MISMATCH:
        return config
    say(f'check.on_mismatch is "{saved}", as the run has recorded; set it to have another')
    check = config.check.model_copy(update={"on_mismatch": saved})
    return config.model_copy(update={"check": check})


def _saved_date(directory: RunDirectory) -> datetime | None:
    saved = _saved(directory, "data", "date")
    with suppress(ValueError, TypeError):
        return date_of(saved)
    return None


def _saved(directory: RunDirectory, *keys: str) -> Any:
    """A setting in the run's manifest, or where that is lost, in its newest checkpoint's; None
    where neither has it.
    """
    checkpoints = folders_by_step(directory.checkpoints)
    newest_first = [checkpoints[step] / MANIFEST for step in sorted(checkpoints, reverse=True)]
    for path in (directory.manifest, *newest_first):
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            value = json.loads(read_plain(path))["config"]
            for key in keys:
                value = value[key]
            return value
    return None


def settled(
    config: AnyRecipe, read: Callable[[AnyRecipe], Any], say: Callable[[str], None] = lambda _: None
) -> tuple[AnyRecipe, Any]:
    """The recipe with what a model and its data decide where the recipe leaves it open:
    ``rollout.max_new_tokens``, which is at most half of a small context, and ``training.steps``,
    where ``data.epochs`` is set. It is settled before anything compares or records the recipe.
    Also the data, where they had to be read for it, which ``read`` then need not read again.

    Raises ConfigError where ``training.steps`` is set as well, to another number, and what
    ``read``, which plans the training, raises.
    """
    rollout = config.rollout
    if config.reward is not None and "max_new_tokens" not in rollout.model_fields_set:
        shape = config.from_scratch if isinstance(config, SftConfig) else None
        half = (shape or read_config(model_folder(config.model, False))).max_positions // 2
        if half < rollout.max_new_tokens:
            say(
                f"completions have at most {half} tokens, half of the model's context; another "
                "limit is rollout.max_new_tokens"
            )
            rollout = rollout.model_copy(update={"max_new_tokens": half})
            config = config.model_copy(update={"rollout": rollout})
    epochs, training = config.data.epochs, config.training
    if epochs is None:
        return config, None
    data = read(config).data
    rows, per_step = len(data.prompts), training.prompts_per_step
    steps = math.ceil(epochs * rows / per_step)
    if "steps" in training.model_fields_set and training.steps != steps:
        raise ConfigError(
            f"data.epochs is {epochs:g}, which is {steps} steps of {per_step} of the {rows} "
            f"training prompts, but training.steps is {training.steps}; leave one of them out"
        )
    if steps > MAX_STEPS:
        raise ConfigError(
            f"data.epochs is {epochs:g}, which is {steps:,} steps; a run has at most "
            f"{MAX_STEPS:,}: lower it, or raise training.prompts_per_step"
        )
    training = training.model_copy(update={"steps": steps})
    say(f"data.epochs = {epochs:g} of {rows} prompts: {steps} steps of {per_step}")
    return config.model_copy(update={"training": training}), data
