"""The rollout engine that a recipe names (``rollout.engine``)."""

import os
from pathlib import Path

from isobit.config.rollout import RolloutConfig, RunRolloutConfig
from isobit.memory.cache_size import choose_num_pages
from isobit.models.folder import LoadedModel
from isobit.parallel.world import World
from isobit.rollout.engine import RolloutEngine
from isobit.rollout.native import NativeEngine
from isobit.store.manifest import environment
from isobit.util.errors import ConfigError
from isobit.util.option_secrets import ENVIRONMENT


def make_engine(
    model: LoadedModel, rollout: RolloutConfig, seed: int, output: Path, world: World
) -> RolloutEngine:
    """What ``rollout.engine`` names, for a run in the directory ``output``; every rank of its world
    has servers of its own.  Raises ConfigError where it cannot be had.
    """
    if not isinstance(rollout, RunRolloutConfig) or rollout.engine == "native":
        return NativeEngine(model.policy, rollout, model.tokenizer, seed)
    if rollout.engine == "http":
        from isobit.rollout.http_engine import HttpEngine

        bits = environment(model.policy.device)["bits"]
        key, run = _server_key(rollout), f"{world.host}:{output.resolve()}"
        if len(rollout.servers) < world.size:
            raise ConfigError(
                f"rollout.servers names {len(rollout.servers)}, and the run has {world.size} "
                "processes, each of which samples at servers of its own: start as many servers "
                "as processes, or lower cluster.processes"
            )
        own = rollout.model_copy(update={"servers": rollout.servers[world.rank :: world.size]})
        return HttpEngine(model.policy, own, key, model.tokenizer, seed, bits, run, world)
    if rollout.servers:
        from isobit.rollout.vllm_server import VllmServers

        key = _server_key(rollout)
        return VllmServers(model.policy, rollout, key, model.tokenizer, model.folder)
    from isobit.rollout.vllm_engine import VllmEngine

    pages = choose_num_pages(model.policy, rollout)
    return VllmEngine(model.policy, rollout, model.tokenizer, seed, pages)


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
