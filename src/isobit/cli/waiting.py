"""A live line while the heavy libraries are imported, which takes seconds on a cold disk."""

from contextlib import AbstractContextManager, nullcontext


def starting() -> AbstractContextManager[object]:
    """A spinner on stderr, gone afterwards; nothing without a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    return console.status("starting") if console.is_terminal else nullcontext()
