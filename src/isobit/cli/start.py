"""How a command starts: heavy imports behind a spinner, and as one of several ranks."""

import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import TYPE_CHECKING, TextIO, cast

from isobit.parallel.black_box import end_with_launcher
from isobit.parallel.launched import is_launched
from isobit.util.errors import IsobitError
from isobit.util.terminal import Standard

if TYPE_CHECKING:
    from isobit.parallel.world import World


def starting() -> AbstractContextManager[object]:
    """A spinner on stderr while heavy libraries are imported, if there is a terminal."""
    from rich.console import Console

    console = Console(file=cast(TextIO, Standard("stderr")))
    return console.status("starting") if console.is_terminal else nullcontext()


class DiffersError(IsobitError):
    """Ends one of several ranks with ``exit_code``: their launcher expects an error."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


NOT_COMPARED = 2


def obey_as_rank(
    arguments: Sequence[str], obey: "Callable[[Sequence[str], World | None], int]"
) -> int:
    """Call ``obey`` with the world of this process if a launcher started it, else with None."""
    box = end_with_launcher()
    if not is_launched():
        return obey(arguments, None)
    with starting():
        from isobit.launch.own_rank import as_rank
    with as_rank(box) as world:
        return obey(arguments, world)


def compare_as_rank(
    arguments: Sequence[str], compare: "Callable[[Sequence[str], World | None], int]"
) -> int:
    """``obey_as_rank`` for a command whose exit code 1 means a difference; a fault in Isobit ends
    with ``NOT_COMPARED``.
    """
    try:
        return obey_as_rank(arguments, compare)
    except IsobitError:
        raise
    except Exception:
        traceback.print_exc()
        return NOT_COMPARED


def start_ranks(command: str, arguments: Sequence[str], ranks: int, threads: int | None) -> None:
    """Run the same command line in ``ranks`` processes, whose output goes to this one's stdout.
    Raises as ``isobit.launch.local.launch`` does.
    """
    from isobit.launch.local import launch

    with redirect_stdout(sys.stderr):  # stdout may be JSON
        launch(["-m", "isobit.cli.main", command, *arguments], ranks, threads)
