"""The rollout engine that a recipe names (``rollout.engine``)."""

import os
from collections.abc import Callable

from isobit.config.recipes import Recipe
from isobit.config.rollout import RolloutConfig, RunRolloutConfig
from isobit.memory.cache_size import choose_cache_size
from isobit.models.folder import LoadedModel
from isobit.models.policy_share import PublishedShare
from isobit.models.tensor_parallel import check_shared_by
from isobit.parallel.world import ALONE, World
from isobit.rollout.engine import RolloutEngine
from isobit.rollout.native import NativeEngine
from isobit.rollout.shared_engine import SharedEngine
from isobit.store.manifest import environment
from isobit.util.errors import ConfigError
from isobit.util.option_secrets import ENVIRONMENT


def make_engine(
    model: LoadedModel,
    rollout: RolloutConfig,
    config: Recipe,
    world: World,
    sharing: World,
    longest: int,
    watch: Callable[[], None],
) -> RolloutEngine:
    """What ``rollout.engine`` names, for a run of ``config`` with sizes of ``rollout`` that asks
    for sequences of at most ``longest`` tokens; every rank of its world has servers of its own, and
    the ranks ``sharing`` a native engine have one together.  ``watch`` is called while servers are
    waited for.  Raises ConfigError where it cannot be had.
    """
    seed, output = config.seed, config.output
    if not isinstance(rollout, RunRolloutConfig) or rollout.engine == "native":
        if sharing.size == 1:
            size = choose_cache_size(model.policy, rollout, longest)
            return NativeEngine(model.policy, rollout, model.tokenizer, seed, size=size)
        firsts = range(0, world.size, sharing.size)
        places = range(sharing.size)
        peers = world.split_groups([[first + place for first in firsts] for place in places])
        share = PublishedShare(model.policy)
        engine = NativeEngine(share, rollout, model.tokenizer, seed)
        return SharedEngine(share, engine, sharing, peers)
    if rollout.engine == "http":
        from isobit.rollout.http_engine import HttpEngine

        bits = environment(model.policy.device)["bits"]
        key, run = _server_key(rollout), f"{world.host}:{output.resolve()}"
        own = rollout.model_copy(update={"servers": rollout.servers[world.rank :: world.size]})
        return HttpEngine(model.policy, own, key, model.tokenizer, seed, bits, run, world, watch)
    if rollout.servers:
        from isobit.rollout.vllm_server import VllmServers

        key = _server_key(rollout)
        return VllmServers(model.policy, rollout, key, model.tokenizer, model.folder, watch)
    from isobit.rollout.vllm_engine import VllmEngine

    pages = choose_cache_size(model.policy, rollout).pages
    return VllmEngine(model.policy, rollout, model.tokenizer, seed, pages)


def sharing_world(world: World, rollout_tp: int) -> World:
    """The ranks that share this one's engine, every ``rollout_tp`` neighbours.  Raises ConfigError
    where they cannot.
    """
    if rollout_tp == 1:
        return ALONE
    check_shared_by(world.size, rollout_tp)
    hosts = world.all_gather(world.host)
    for first in range(0, world.size, rollout_tp):
        sharing = sorted(set(hosts[first : first + rollout_tp]))
        if len(sharing) > 1:
            raise ConfigError(
                f"cluster.rollout_tp is {rollout_tp}, but ranks {first} to "
                f"{first + rollout_tp - 1} would share an engine and are on {', '.join(sharing)}; "
                "start as many processes on every host as shares its engines evenly, or lower "
                "cluster.rollout_tp"
            )
    return world.split(range(0, world.size + 1, rollout_tp))


def _server_key(rollout: RunRolloutConfig) -> str | None:
    if rollout.server_key is None:
        return None
    name = rollout.server_key.removeprefix(ENVIRONMENT)
    if not (key := os.environ.get(name, "").strip()):
        raise ConfigError(
            f"rollout.server_key is {rollout.server_key!r}, but the environment has no variable "
            f"{name} with a key; export it before the run, also before --resume"
        )
    return key
