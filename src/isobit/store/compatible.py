"""Which settings and inputs a resumed run may change; all other changes are refused.

What may change leaves the result of every step as it was.  Anything else has to be allowed by name
(``--allow-change``) and is journalled.  Inputs are data, reward code, tokenizers
(``isobit.run.data``) and the class of bits (``isobit.store.class_of_bits``).
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isobit.config.recipes import Recipe, completed_recipe, recorded_recipe
from isobit.store.checkpoint import Checkpoint
from isobit.store.class_of_bits import recorded_bits
from isobit.store.directory import RunDirectory, no_run
from isobit.util.errors import CheckpointError, ConfigError, did_you_mean
from isobit.util.plain_files import read_plain

MAY_CHANGE = {
    "output": "the same directory, called or placed differently",
    "checkpoint": "when the state is saved, and what is kept",
    "check": "whether a difference of bits warns or stops",
    "tracking": "where figures are sent as well",
    "evaluation.every": "how often the policy is measured; a measurement changes nothing",
    "back_end": "what it changes is part of the class of bits, which is compared",
    "cluster": "who computes: the bytes of a run do not depend on it",
    "rollout.max_sequences": "the engine's bits do not depend on the sizes of its batches",
    "rollout.max_batched_tokens": "nor on the chunks of a prompt",
    "rollout.kv_pages": "nor on the size of its cache",
    "rollout.kv_memory_gib": "nor on the memory for it",
    "rollout.speculation": "nor on guesses of its tokens",
    "rollout.servers": "nor on who samples elsewhere",
    "rollout.server_key": "nor on their key",
    "rollout.servers_timeout_s": "nor on how long they may be away",
    "reward.offload": "where reward models lie changes no score",
    "reference.offload": "nor on where the reference model lies while it does not score",
    "environment.openenv": "an address does not tell what its server says",
    "training.recompute": "a layer that is computed again has the same bits",
    "training.offload_moments": "where the moments lie changes none of them",
    "data.epochs": "it sets training.steps, which is compared",
    "data.streaming": "where the prompts lie changes none of them",
    "training.steps": "with the constant schedule and no warmup_ratio, and not below the steps "
    "already done; with async.lag not where more steps would have sampled more ahead",
}
"""Keys or whole tables, with the reason."""
DRAWN_BY = {
    "seed": "the noise, and the order of the prompts",
    "precision": "the function that draws",
    "lora": "likewise",
    "model.config": "likewise",
    "model.tokenizer": "where a stop string ends an answer",
    "model.tokens": "the tokens that can be drawn",
    "model.generation": "those that end an answer",
    "data.train.content": "the prompts",
    "data.shuffle": "their order",
    "environment": "what tools say",
    "rollout": "how a token is drawn, and where an answer ends",
    "training.prompts_per_step": "the groups of a batch",
    "training.samples_per_prompt": "the samples of a group",
    "algorithm.name": "whether greedy samples belong to them",
    "algorithm.dynamic_sampling": "whether groups are replaced",
    "algorithm.max_refills": "likewise",
}
"""Settings and inputs, or whole tables of them, that say what is drawn: after a change of one, what
was drawn ahead of a checkpoint is not learnt from.  Those in ``MAY_CHANGE`` are not among them.
"""
_DRAWS_NOTHING = "precision.dgrad", "precision.wgrad", "rollout.weights_folder"
"""What these tables hold beside."""
_ORDERED_BY = "seed", "data.train.content", "data.shuffle"
"""Those that say which prompts come next."""

Changes = Mapping[str, tuple[Any, Any]]  # by name: the value in the run, and now
ALL_TOKENS = "every row of lm_head"
"""The input ``model.tokens`` of runs in which each row was a token of the distribution, as in those
that did not record it.
"""
_ABSENT = "not set"
_BITS = (
    "  (bits: a processor, torch or Isobit other than the one that the run was begun with may "
    "compute other bits; go back to that one, or allow the change; see docs/checkpoints.md)"
)
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Doing:
    """What is refused after a change, and what the user can do."""

    name: str
    settings: str  # for settings, after "set them back"
    inputs: str  # for inputs, after "put it back"


RESUMING = Doing(
    "resumed",
    ", or start a new run (--output PATH), or go on as another run than the one begun: "
    "--allow-change {names}; only these may change by themselves: "
    f"{', '.join(MAY_CHANGE)} (training.steps {MAY_CHANGE['training.steps']})",
    ", or start a new run (--output PATH), or go on as another run than the one begun: "
    "--allow-change {names}",
)
REPLAYING = Doing(
    "replayed",
    f"; only these change no step: {', '.join(MAY_CHANGE)}",
    ", or replay where it is what it was; with --allow-change {names} the steps are done all the "
    "same, and may differ for this reason alone",
)


def changed_keys(saved: Mapping[str, Any], config: Mapping[str, Any]) -> Changes:
    """The dotted keys whose values differ, with the saved value and the one now.  A key that an
    earlier version did not have counts as its default.
    """
    old, new = flat(recorded_recipe(saved)), flat(recorded_recipe(config))
    before, now = flat(completed_recipe(saved)), flat(completed_recipe(config))
    return {
        key: (old.get(key, _ABSENT), new.get(key, _ABSENT))
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    }


def check_compatible(
    saved: Mapping[str, Any],
    config: Mapping[str, Any],
    step: int,
    allowed: Sequence[str] = (),
    doing: Doing = RESUMING,
    bits: Callable[[], Changes] = dict,
) -> Changes:
    """The keys that differ and may, by themselves or because they are ``allowed``.  Raises
    ConfigError listing all that may not, with the ``bits`` that ``compare`` will refuse after them;
    ``step`` steps are done.
    """
    changed = changed_keys(saved, config)
    refused = {
        key: values
        for key, values in changed.items()
        if not _may_change(key, saved, config, step) and not is_allowed(key, allowed)
    }
    if refused:
        others = bits()
        lines = [
            f"this run cannot be {doing.name} with another configuration; {len(refused)} "
            f"{'key differs' if len(refused) == 1 else 'keys differ'}",
            *_table(refused),
            *(_not_sampled(saved, config, step) if "training.steps" in refused else []),
            *([*_table(others), _BITS] if others else []),
            "set them back" + doing.settings.format(names=",".join([*refused, *others])),
        ]
        raise ConfigError(*lines)
    return changed


def check_inputs(
    saved: Mapping[str, str],
    inputs: Mapping[str, str],
    allowed: Sequence[str] = (),
    doing: Doing = RESUMING,
) -> Changes:
    """The same for inputs and class of bits, all of which must be ``allowed`` to change."""
    changed = {
        name: (value, inputs.get(name, _ABSENT))
        for name, value in sorted(saved.items())
        if inputs.get(name, _ABSENT) != value
    }
    refused = {name: values for name, values in changed.items() if not is_allowed(name, allowed)}
    if refused:
        lines = [
            f"this run cannot be {doing.name}: not all that its steps depend on is what it was",
            *_table(refused),
            *([_BITS] if any(is_allowed(name, ["bits"]) for name in refused) else []),
            "put it back" + doing.inputs.format(names=",".join(refused)),
        ]
        raise ConfigError(*lines)
    return changed


def check_names(allowed: Sequence[str], known: Collection[str]) -> None:
    """Raise ConfigError for a name that is neither one of ``known`` nor a table of them."""
    for name in allowed:
        if any(is_allowed(key, [name]) for key in known):
            continue
        near = did_you_mean(name, known)
        raise ConfigError(f"--allow-change {name}: there is no such key or input{near}")


def is_allowed(key: str, allowed: Sequence[str]) -> bool:
    """Whether a key, or a table that contains it, is among those named."""
    return any(key == name or key.startswith(f"{name}.") for name in allowed)


def draws_others(changed: Collection[str]) -> list[str]:
    """Those of some changed settings and inputs that say what is drawn."""
    return [key for key in _among(changed, tuple(DRAWN_BY)) if key not in _DRAWS_NOTHING]


def orders_others(changed: Collection[str]) -> bool:
    """Whether other prompts come next after these changes."""
    return bool(_among(changed, _ORDERED_BY))


def grades_others(changed: Collection[str]) -> list[str]:
    """Those of some changed settings and inputs that say which reward a completion has."""
    return _among(changed, ["reward"])


def _among(changed: Collection[str], tables: Sequence[str]) -> list[str]:
    free = tuple(MAY_CHANGE)
    return [key for key in changed if is_allowed(key, tables) and not is_allowed(key, free)]


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a configuration by dotted key."""
    return dict(_flat(config))


def _table(changes: Changes) -> list[str]:
    return [
        f"  {key}: {_short(old)} in the run, {_short(new)} now"
        for key, (old, new) in changes.items()
    ]


def _short(value: Any) -> str:
    """A value, a digest by its first digits."""
    if value is None or value is _ABSENT:
        return _ABSENT
    is_digest = isinstance(value, str) and _DIGEST.fullmatch(value)
    return f"SHA-256 {value[:12]}.." if is_digest else repr(value)


def _may_change(key: str, saved: Mapping[str, Any], config: Mapping[str, Any], step: int) -> bool:
    if key == "training.steps":
        training = config["training"]
        fixed = training["schedule"] == "constant" and not training.get("warmup_ratio")
        return fixed and training["steps"] >= step and not _not_sampled(saved, config, step)
    return is_allowed(key, tuple(MAY_CHANGE))


def _not_sampled(saved: Mapping[str, Any], config: Mapping[str, Any], step: int) -> list[str]:
    """A line on the batches that a run of more steps would have sampled ahead of the checkpoint
    after ``step``, by weights that are gone; none where the run has sampled them, or begins.
    """
    before = flat(recorded_recipe(saved))
    now = config["training"]["steps"]
    steps, lag = before.get("training.steps", now), before.get("async.lag", 0)
    first, last = max(steps, step) + 1, min(now, step + lag)
    if not (step and lag and first <= last):
        return []
    which = f"step {first}" if first == last else f"steps {first} to {last}"
    return [
        f"  (training.steps: with async.lag = {lag} the batches of {which} would have been sampled "
        f"before the checkpoint of step {step}, by older weights; the run of {steps} steps has not "
        "sampled them, and newer weights would)"
    ]


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True)
class Recorded:
    """The inputs, and the versions and machine that computed."""

    inputs: Mapping[str, str]  # digests by name
    environment: Mapping[str, Any]


def recorded(manifest: Mapping[str, Any], checkpoint: Checkpoint | None) -> Recorded:
    """What was recorded at the checkpoint, or at the start of the run whose manifest is
    ``run.json``.
    """
    if checkpoint is None:
        return Recorded(manifest["inputs"], manifest)
    return Recorded(checkpoint.manifest["inputs"], checkpoint.manifest["environment"])


def compare(
    old: Recorded,
    config: Recipe,
    inputs: Mapping[str, str],
    environment: Mapping[str, Any],
    allowed: Sequence[str],
    settings: Collection[str] = (),
    doing: Doing = RESUMING,
) -> Changes:
    """The inputs and parts of the class of bits that differ and are ``allowed``.  Raises
    ConfigError for others, and for an allowed name that is no key, setting or input.
    """
    tokens = {"model.tokens": ALL_TOKENS} if "model.tokens" in inputs else {}
    saved = {**tokens, **old.inputs, **_bits(old.environment)}
    found = {**inputs, **_bits(environment)}
    keys = {*flat(config.model_dump(mode="json")), *settings}
    check_names(allowed, {*keys, *saved, *found})
    return check_inputs(saved, found, allowed, doing)


def refused_bits(old: Recorded, environment: Mapping[str, Any], allowed: Sequence[str]) -> Changes:
    """The parts of the class of bits that differ and are not ``allowed``."""
    before, now = _bits(old.environment), _bits(environment)
    return {
        name: (value, now.get(name, _ABSENT))
        for name, value in before.items()
        if now.get(name) != value and not is_allowed(name, allowed)
    }


def _bits(environment: Mapping[str, Any]) -> dict[str, str]:
    return {f"bits.{name}": value for name, value in recorded_bits(environment["bits"]).items()}


def run_manifest(directory: RunDirectory, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """``run.json``, or what the checkpoint has of it where it is lost; with the checkpoint's
    configuration, but the number of processes of ``run.json``.
    """
    config = {"config": checkpoint.manifest["config"]} if checkpoint else {}
    try:
        content = json.loads(read_plain(directory.manifest))
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
    """Lines about ``differs`` and about other versions."""
    return [
        f"note: {line}: the bits may not be those of a run that was never interrupted"
        for line in (*differs, *_differences(old.environment, now))
    ]


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Versions and machines that differ and are not part of the class of bits."""
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
