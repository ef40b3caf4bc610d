"""A rank with a world, for the launcher: ``python trained.py CASE``."""

import sys

from isobit.errors import DataError
from isobit.parallel.launched import end_with_launcher

CASE = sys.argv[1]


def main() -> None:
    """What the case says, on rank 1 or on both."""
    box = end_with_launcher()
    from isobit.parallel.agreement import together
    from isobit.parallel.world import World
    from isobit.run.cluster.rank import as_rank

    def fail(world: World) -> None:
        if world.rank == 1 or CASE == "all":
            raise {"fault": ZeroDivisionError}.get(CASE, DataError)("no such file")

    with as_rank(box) as world:
        world.pulse.beat("training")
        if CASE in ("agreed", "fault"):
            together(world, lambda: fail(world))
        elif CASE != "fine":
            fail(world)
        assert [one + 1 for one in world.messages(world.rank)] == [1, 2]


if __name__ == "__main__":
    main()
