"""A run of reinforcement learning on the processes of a world, each with its part in it."""

from collections.abc import Sequence

from isobit.config.run import RunConfig
from isobit.parallel.world import ALONE, World
from isobit.run.rl.apart import Apart, check_parts
from isobit.run.rl.loop import train
from isobit.run.rl.rollouter import sample_for_trainers


def train_by_ranks(
    config: RunConfig, resume: bool = False, world: World = ALONE, allowed: Sequence[str] = ()
) -> None:
    """``isobit.run.rl.loop.train`` by all ranks of a world, or by its first ones while the others
    sample (``cluster.rollouters``).  Raises as it does, and ConfigError for a world that is too
    small.
    """
    if not config.cluster.rollouters:
        train(config, resume=resume, world=world, allowed=allowed)
        return
    check_parts(config, world)
    apart = Apart(world, config.cluster.rollouters)
    if apart.is_rollouter:
        sample_for_trainers(config, apart)
        return
    with apart.attended():
        train(config, resume=resume, world=apart.mine, apart=apart, allowed=allowed)
