"""Which settings a resumed run may change, and the refusal of all others.

What may change leaves every step the function that it was.  Anything else would make the rest of
the run one that no uninterrupted run could have been.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from isobit.errors import ConfigError

MAY_CHANGE = {
    "output": "the same directory, called or placed differently",
    "checkpoint": "when the state is saved, and what is kept",
    "check": "whether a difference of bits warns or stops",
    "tracking": "where figures are sent as well",
    "evaluation.every": "how often the policy is measured; a measurement changes nothing",
    "cluster": "who computes: the bytes of a run do not depend on it",
    "rollout.max_sequences": "the engine's bits do not depend on the sizes of its batches",
    "rollout.max_batched_tokens": "nor on the chunks of a prompt",
    "rollout.kv_pages": "nor on the size of its cache",
    "rollout.kv_memory_gib": "nor on the memory for it",
    "reward.offload": "where reward models lie changes no score",
    "reference.offload": "nor on where the reference model lies while it does not score",
    "training.recompute": "a layer that is computed again has the same bits",
    "training.offload_moments": "where the moments lie changes none of them",
    "training.steps": "with the constant schedule, and not below the steps already done",
}
"""Keys, or whole tables, with the reason."""

_ABSENT = "nothing"


def changed_keys(saved: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with both: in the saved configuration, and now."""
    old, new = dict(_flat(saved)), dict(_flat(config))
    keys = sorted(old.keys() | new.keys())
    return {
        key: (old.get(key, _ABSENT), new.get(key, _ABSENT))
        for key in keys
        if old.get(key, _ABSENT) != new.get(key, _ABSENT)
    }


def check_compatible(
    saved: Mapping[str, Any], config: Mapping[str, Any], step: int
) -> dict[str, tuple[Any, Any]]:
    """The keys that differ and may.  Raises ConfigError listing all those that may not; ``step``
    steps are done.
    """
    changed = changed_keys(saved, config)
    refused = {key: values for key, values in changed.items() if not _may_change(key, config, step)}
    if refused:
        lines = [f"  {key}: {old!r} in the run, {new!r} now" for key, (old, new) in refused.items()]
        raise ConfigError(
            "\n".join(
                [
                    f"this run cannot be resumed with another configuration; {len(refused)} keys "
                    "differ",
                    *lines,
                    "set them back, or start a new run (--output PATH); only these may change: "
                    f"{', '.join(MAY_CHANGE)} "
                    f"(training.steps {MAY_CHANGE['training.steps']})",
                ]
            )
        )
    return changed


def _may_change(key: str, config: Mapping[str, Any], step: int) -> bool:
    if key == "training.steps":
        return config["training"]["schedule"] == "constant" and config["training"]["steps"] >= step
    return any(key == allowed or key.startswith(f"{allowed}.") for allowed in MAY_CHANGE)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value
