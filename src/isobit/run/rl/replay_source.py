"""What ``isobit replay`` does again: the run's recipe, the steps, and where they begin.

    --step K     from the newest checkpoint before K, or from the start
    no step      all that digests.jsonl has, from the start

A run that was resumed with something else allowed (``--allow-change``) is another one from there
on: its steps are done again from a checkpoint of that time, with the recipe of now.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isobit.config.load import build
from isobit.config.overrides import apply_overrides, parse_overrides
from isobit.config.run import RunConfig
from isobit.errors import ConfigError
from isobit.parallel.broadcast import told
from isobit.parallel.world import World
from isobit.run.rl.replay_checkpoints import CheckedCheckpoints, Difference
from isobit.store.checkpoint.compatible import REPLAYING, check_compatible, is_allowed
from isobit.store.checkpoint.format import Checkpoint
from isobit.store.checkpoint.usable import Say
from isobit.store.directory import RunDirectory
from isobit.store.lock import is_held
from isobit.store.step_digests import StepDigests, read_digests


@dataclass(slots=True)
class ReplaySource:
    """A recorded run, of which steps are to be done again."""

    directory: RunDirectory
    manifest: Mapping[str, Any]
    config: RunConfig
    """The run's own, but for what changes no step."""
    digests: Mapping[int, StepDigests | None]
    checkpoint: Checkpoint | None
    """Where it begins; None: at the start."""
    last: int
    """The last step that is done again."""
    allowed: Sequence[str]
    differences: list[Difference] = field(default_factory=list)
    """Of checkpoints."""

    @property
    def first(self) -> int:
        """The first step that is done again."""
        return self.checkpoint.step + 1 if self.checkpoint else 1


def find_source(
    root: Path,
    step: int | None,
    overrides: Sequence[str],
    allowed: Sequence[str],
    say: Say,
    world: World,
) -> ReplaySource:
    """Read what a run has recorded, and check its checkpoints; all ranks together, nothing is
    written.

    Raises ConfigError for a directory without a run of ``isobit train`` with digests, for one that
    a process is writing into, for overrides that would change a step, and for steps that cannot be
    done again.
    """
    directory = RunDirectory(root)
    manifest = json.loads(told(world, lambda: json.dumps(_read_manifest(directory))))
    config = _config(directory, manifest, overrides)
    digests = read_digests(root)
    since, changed = _went_on_as_another(manifest)
    why = _describe_change(since, changed, digests)
    last = _last_step(directory, config, digests)
    earliest = max(min(digests) - 1, since)
    if step is not None and not earliest < step <= last:
        raise ConfigError(
            f"--step is {step}, but of {root} steps {earliest + 1} to {last} can be done again"
            + (f": {why}" if step <= earliest else "")
        )
    if step is None and earliest:
        say(f"no step up to {earliest} is done again: {why}")
    checked = CheckedCheckpoints(directory, digests, say, world)
    checkpoint = checked.before(step, earliest) if step else checked.first(earliest)
    if checkpoint is None and earliest:
        raise ConfigError(
            f"{root} has no checkpoint from which step {step or earliest + 1} could be done again; "
            f"there is no way from the start, since {why}"
        )
    if checkpoint is not None and checkpoint.step == since:
        allowed = [*allowed, *changed]
    return ReplaySource(
        directory, manifest, config, digests, checkpoint, step or last, allowed, checked.differences
    )


def _read_manifest(directory: RunDirectory) -> dict[str, Any]:
    """``run.json`` of a run that stands still."""
    if not directory.manifest.is_file():
        raise ConfigError(
            f"{directory.root} holds no run (there is no run.json); name the directory that "
            "`isobit train` wrote"
        )
    if is_held(directory.root):
        raise ConfigError(
            f"{directory.root} is in use by another process, which writes into it; wait for it, or "
            "stop it"
        )
    try:
        manifest = json.loads(directory.manifest.read_text(encoding="utf-8"))
        is_rl = "algorithm" in manifest["config"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{directory.manifest} cannot be read ({error}), and has the recipe; put back a copy"
        ) from None
    if not is_rl:
        raise ConfigError(
            f"{directory.root} is a run of `isobit sft`, which draws nothing and leaves no "
            "digests; replay is for runs of `isobit train`"
        )
    return manifest


def _config(
    directory: RunDirectory, manifest: Mapping[str, Any], overrides: Sequence[str]
) -> RunConfig:
    """The recipe, in one process where nothing else is asked for: who computes changes no byte."""
    path = str(directory.manifest)
    values = {**manifest["config"], "output": str(directory.root), "cluster": {}}
    before = build(RunConfig, values, path)
    config = build(RunConfig, apply_overrides(values, parse_overrides(overrides)), path)
    saved, now = before.model_dump(mode="json"), config.model_dump(mode="json")
    check_compatible(saved, now, config.training.steps, doing=REPLAYING)
    return config


def _went_on_as_another(manifest: Mapping[str, Any]) -> tuple[int, list[str]]:
    """The step after which the run last went on with something allowed to be other, and what; 0
    where it never did.
    """
    for resumed in reversed(manifest.get("resumed", [])):
        changed = [
            name
            for name in resumed.get("changed", {})
            if is_allowed(name, resumed.get("allowed", ()))
        ]
        if changed:
            return resumed["step"], changed
    return 0, []


def _describe_change(
    since: int, changed: Sequence[str], digests: Mapping[int, StepDigests | None]
) -> str:
    """Why not all steps follow from the start; as a sentence of its own it means nothing where they
    do.
    """
    if since:
        return (
            f"the run went on after step {since} with another {', '.join(changed)} "
            "(--allow-change), and its recipe is the one of then"
        )
    return f"the first step with digests is {min(digests, default=0)}"


def _last_step(
    directory: RunDirectory, config: RunConfig, digests: Mapping[int, StepDigests | None]
) -> int:
    """That the run has done: of a finished one its last, whether it still has a line or not."""
    if not digests:
        raise ConfigError(
            f"{directory.root} has no digests of its steps (digests.jsonl): no step was finished, "
            "or an Isobit wrote it that recorded none; there is nothing to compare a replay with"
        )
    finished = config.training.steps if directory.summary.is_file() else 0
    return max(*digests, finished)
