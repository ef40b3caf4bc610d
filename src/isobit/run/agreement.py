"""Refusals of ranks that would not compute the same bits: those with another recipe, other
versions, or another kind of machine.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from isobit.config.recipes import Recipe
from isobit.parallel.world import World, raised_on_all
from isobit.store.compatible import flat
from isobit.store.manifest import environment
from isobit.util.errors import ConfigError


def check_recipes(world: World, config: Recipe) -> None:
    """Refuse ranks that were started with other recipes, naming the first key that differs."""
    differs = _first_difference(world.all_gather(config.model_dump(mode="json")))
    if differs is not None:
        rank, key, theirs, firsts = differs
        raise raised_on_all(
            ConfigError(
                f"rank {rank} was started with {key} = {theirs!r}, rank 0 with {firsts!r}; start "
                "all with the same recipe and overrides"
            )
        )


def check_machines(world: World, device: torch.device) -> None:
    """Refuse ranks with other versions, other GPUs or classes of bits, or on CPUs another number of
    threads.
    """
    here = environment(device)
    # of a CPU what the instructions compute is compared (isobit.store.class_of_bits), not their
    # name
    del here["device"]["instructions" if device.type == "cpu" else "threads"]
    check_alike(world.all_gather({"host": world.host, **here}))


def check_alike(every: Sequence[dict[str, Any]]) -> None:
    """Refuse machines, by rank, of which one differs in anything but its ``host``, or has read
    other ``inputs`` of the run.
    """
    every = [dict(one) for one in every]
    hosts = [one.pop("host") for one in every]
    differs = _first_difference(every)
    if differs is None:
        return
    rank, key, theirs, firsts = differs
    who = f"rank {rank} on {hosts[rank]} has"
    if key.startswith("inputs."):
        problem = (
            f"{who} read another {key.removeprefix('inputs.')} than rank 0 has: it has changed "
            "since the run began; put it back, and go on with --resume"
        )
    else:
        problem = (
            f"{who} {key} {theirs!r}, rank 0 on {hosts[0]} {firsts!r}, and the bits of a run would "
            "depend on which rank computes what; make them alike"
            + (" (the key threads of the recipe)" if key == "device.threads" else "")
        )
    raise raised_on_all(ConfigError(problem))


def _first_difference(every: Sequence[Mapping[str, Any]]) -> tuple[int, str, Any, Any] | None:
    """Rank, key, its value there, and on rank 0."""
    firsts = flat(every[0])
    for rank, one in enumerate(every):
        values = flat(one)
        for key in sorted(firsts.keys() | values.keys()):
            if values.get(key) != firsts.get(key):
                return rank, key, values.get(key), firsts.get(key)
    return None
