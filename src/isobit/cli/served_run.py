"""A run's directory in place of a model folder, for ``isobit serve`` and ``isobit chat``."""

import json
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobit.cli.options import Command
from isobit.config.commands import ServeConfig
from isobit.config.recipes import recorded_recipe
from isobit.store.directory import RunDirectory, is_run
from isobit.util.errors import ConfigError, IsobitError
from isobit.util.plain_files import read_plain
from isobit.util.terminal import say

if TYPE_CHECKING:
    from isobit.models.policy import Policy


POLL_S = 1.0
"""Seconds between two looks for a checkpoint."""


def served_settings(
    command: Command, options: Namespace, overrides: Sequence[str], **tables: Any
) -> ServeConfig:
    """The settings of the command line over ``tables``. The folder of the model becomes
    ``options.model``: of a run it is the finished model, in the run's precision and by its back end
    unless others are named. Raises ConfigError.
    """
    root = Path(options.folder)
    options.model = options.folder
    if is_run(root):
        record = began_with(root)
        tables["precision"], tables["back_end"] = record["precision"], record["back_end"]
        if getattr(options, "follow", False):
            options.model = record["model"]
        elif (root / "model").is_dir():
            options.model = str(root / "model")
        else:
            raise ConfigError(
                f"the run in {root} has not finished, so it has no model yet; follow it with "
                "`isobit serve RUN --follow`, or write a checkpoint of it with `isobit export`"
            )
    return command.settings(ServeConfig, options, overrides, **tables)


def began_with(root: Path) -> dict[str, Any]:
    path = RunDirectory(root).manifest
    try:
        return recorded_recipe(json.loads(read_plain(path))["config"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} does not say what the run began with: {error}") from error


class FollowedRun:
    """The checkpoints of a run as they are written, checked in a thread of their own."""

    def __init__(self, root: Path) -> None:
        """Raises ConfigError for a path that is no run, and a run whose checkpoints do not hold
        all weights of a model that it began with.
        """
        if not is_run(root):
            raise ConfigError(f"--follow is for a run's directory, and {root} is none")
        record = began_with(root)
        if record.get("from_scratch") is not None:
            raise ConfigError("--follow is for a run that began with a model; this one had none")
        if record.get("lora") is not None:
            raise ConfigError(
                "--follow is for a run that trains all weights, and this one trains adapters "
                "(lora); write a checkpoint's with `isobit export RUN --to FOLDER` and serve that, "
                "or RUN once it has finished"
            )
        if record.get("objective") == "preference":
            raise ConfigError(
                'this run trains a reward model (objective = "preference"), which writes no text; '
                "`isobit eval --reward-model` measures one"
            )
        self._checkpoints = RunDirectory(root).checkpoints
        self._step = 0
        self._newest: tuple[int, Path] | None = None

    def start(self, policy: "Policy") -> None:
        """Take the newest checkpoint now, and look for others from now on.  Raises IsobitError for
        one that is not of the policy's model.
        """
        self._look()
        if self._newest is not None:
            self._take(policy, *self._newest)
            self._newest = None
        threading.Thread(target=self._keep_looking, name="checkpoints", daemon=True).start()

    def new_weights(self, policy: "Policy") -> Callable[[], None] | None:
        """What publishes the newest checkpoint, if it has not been."""
        return None if self._newest is None else lambda: self._publish(policy)

    def _keep_looking(self) -> None:
        while True:
            time.sleep(POLL_S)
            self._look()

    def _look(self) -> None:
        """Check the newest checkpoint, all bytes of it, and keep it."""
        from isobit.store.checkpoint import folders_by_step, read_checkpoint

        try:
            folders = folders_by_step(self._checkpoints)
            step = max(folders, default=0)
            if step <= self._step:
                return
            self._step = step
            self._newest = step, read_checkpoint(folders[step]).folder
        except (IsobitError, OSError) as error:  # a run keeps the last few, and removes others
            say(f"isobit: the checkpoint of step {self._step} is passed over: {error}")

    def _publish(self, policy: "Policy") -> None:
        assert self._newest is not None
        (step, folder), self._newest = self._newest, None
        try:
            self._take(policy, step, folder)
        except IsobitError as error:
            say(f"isobit: the checkpoint of step {step} is passed over: {error}")

    def _take(self, policy: "Policy", step: int, folder: Path) -> None:
        from isobit.commands.export import MasterTensors
        from isobit.store.checkpoint import MASTERS

        policy.republish(MasterTensors.of(folder / MASTERS, policy.config).file)
        print(f"isobit: the weights of step {step}, version {policy.version}", flush=True)
