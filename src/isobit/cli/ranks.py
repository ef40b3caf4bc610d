"""Commands that several processes can obey as one: ``rollout``, ``eval`` and ``verify`` with
``cluster.rollout_tp``, for a policy that one GPU cannot hold, and ``replay``.
"""

import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from isobit.cli.waiting import starting
from isobit.errors import IsobitError
from isobit.parallel.launched import end_with_launcher, is_launched

if TYPE_CHECKING:
    from isobit.parallel.world import World

NOT_COMPARED = 2


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


def compare_as_rank(
    arguments: Sequence[str], compare: "Callable[[Sequence[str], World | None], int]"
) -> int:
    """``obey_as_rank`` for a command whose exit code 1 means a difference: a fault of Isobit's is
    none, and ends with ``NOT_COMPARED``.
    """
    try:
        return obey_as_rank(arguments, compare)
    except IsobitError:
        raise
    except Exception:
        traceback.print_exc()
        return NOT_COMPARED


def start_ranks(command: str, arguments: Sequence[str], ranks: int, threads: int | None) -> None:
    """The same command line in so many processes; what they print goes to this one's stdout.
    Raises as ``isobit.run.cluster.launcher.launch`` does.
    """
    from isobit.run.cluster.launcher import launch

    with redirect_stdout(sys.stderr):  # stdout may be JSON
        launch(["-m", "isobit.cli.main", command, *arguments], ranks, threads)
