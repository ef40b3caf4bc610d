"""Commands that several processes can obey as one: ``rollout``, ``eval`` and ``verify`` with
``cluster.rollout_tp``, for a policy that one GPU cannot hold.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from isobit.cli.waiting import starting
from isobit.parallel.launched import end_with_launcher, is_launched

if TYPE_CHECKING:
    from isobit.parallel.world import World


def obey_as_rank(
    arguments: Sequence[str], obey: "Callable[[Sequence[str], World | None], int]"
) -> int:
    """``obey`` the command line with the world of this process, where a launcher has started it as
    one of several, or alone with None.
    """
    box = end_with_launcher()
    if not is_launched():
        return obey(arguments, None)
    with starting():
        from isobit.run.cluster.rank import as_rank
    with as_rank(box) as world:
        return obey(arguments, world)


def start_ranks(command: str, arguments: Sequence[str], ranks: int, threads: int | None) -> None:
    """The same command line in so many processes; what they print goes to this one's stdout.
    Raises as ``isobit.run.cluster.launcher.launch`` does.
    """
    from isobit.run.cluster.launcher import launch

    with redirect_stdout(sys.stderr):  # stdout may be JSON
        launch(["-m", "isobit.cli.main", command, *arguments], ranks, threads)
