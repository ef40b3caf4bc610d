"""The errors that a user can meet. Each says what was wrong, what was expected and what to do.

The command line prints the message without a traceback and exits with ``exit_code``. Broken
invariants are ``AssertionError`` and keep their traceback.
"""

import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from isobit.util.terminal import gib

_LONGEST = 4000
"""Characters of a message, and of each line of a list below it."""
_LONGEST_NAME = 200
"""Characters of a name in a message."""


def escaped(text: str) -> str:
    """``text`` with unprintable characters, but tabs and line ends, as Python writes them."""
    if text.isprintable():
        return text
    return "".join(c if c in "\t\n" or c.isprintable() else ascii(c)[1:-1] for c in text)


class IsobitError(Exception):
    """Base of every error caused by input, configuration or data rather than by a fault in Isobit.

    ``lines`` is a list that belongs to the message ``text``, a line for each thing that is wrong:
    however many there are, all are shown. A text may quote untrusted files: unprintable characters,
    which could drive a terminal, are escaped, and the middle of a very long one is left out.
    """

    exit_code = 2
    samples: Mapping[Any, "IsobitError"] = MappingProxyType({})
    """The samples that an error of an engine's step belongs to alone, each with its own, while all
    others go on. Empty where the whole step has failed."""

    def __init__(self, text: object = "", *lines: str) -> None:
        super().__init__(text, *lines)
        self.lines = lines

    def __str__(self) -> str:
        return "\n".join(_bounded(str(text)) for text in self.args)


def _bounded(text: str) -> str:
    text = escaped(text)
    more = len(text) - _LONGEST
    if more <= 0:
        return text
    return f"{text[: _LONGEST // 2]} [{more:,} characters left out] {text[-_LONGEST // 2 :]}"


class OutOfMemoryError(IsobitError):
    """A device's memory that ran out in a phase of a run, and could not be worked around.

    ``phase`` is what was being done (``rollout``), ``reason`` torch's message, ``free`` the free
    bytes (None if unknown), ``advice`` the settings that lower the need.
    """

    def __init__(self, phase: str, reason: str, free: int | None, advice: str) -> None:
        size = re.search(r"Tried to allocate ([\d.]+ \w+)", reason)
        needed = f"{size[1]} more were needed" if size else reason.partition(". ")[0]
        there = f", and {gib(free)} were free" if free is not None else ""
        super().__init__(f"{phase} ran out of memory: {needed}{there}; {advice}")


class ConfigError(IsobitError):
    """A configuration key or value that cannot be used."""


class ModelError(IsobitError):
    """A model folder that is missing, damaged, or not one of the supported architectures."""


class CheckpointError(IsobitError):
    """A checkpoint that is missing, damaged, or not of the model that the run began with."""


class DataError(IsobitError):
    """A dataset or prompt that cannot be used."""


class RewardError(IsobitError):
    """A reward function that cannot be loaded, or that failed on too much of a batch."""


class ToolError(IsobitError):
    """An environment cannot be loaded, or its processes fail again and again."""


class RequestError(IsobitError):
    """A generation request that the engine can never serve."""


class StorageError(IsobitError):
    """A disk that is full or cannot be written; the message says what was needed and is free."""


class NoSpaceError(StorageError):
    """A disk or a quota that is full; space may be freed while the run waits."""


class StoppedAtOnce(KeyboardInterrupt):
    """A second Ctrl-C, after which nothing more is saved."""


class Interrupted(KeyboardInterrupt):
    """A run that a signal stopped in good order. ``except Exception`` does not catch it."""

    def __init__(self, signal_name: str, signal_number: int) -> None:
        super().__init__(f"stopped by {signal_name}")
        self.signal_name = signal_name
        self.exit_code = 128 + signal_number


class MismatchError(IsobitError):
    exit_code = 3


class NoSignalError(IsobitError):
    exit_code = 3


class PeerError(IsobitError):
    """Another rank has failed, and this one stops with it; the other rank reports the cause."""

    exit_code = 4

    def __init__(self, rank: int | None, reason: str) -> None:
        who = "another rank" if rank is None else f"rank {rank}"
        super().__init__(f"{who} failed: {reason}")
        self.rank, self.reason = rank, reason


class ServerError(IsobitError):
    """Servers that sample for a run are gone, or cannot sample what it asks for."""

    exit_code = 4


class NonFiniteError(IsobitError):
    """A NaN or infinity in a tensor of the forward pass; the message names the tensor."""


def shown(name: object) -> str:
    """A name from a file, for a message: on one line, printable, of bounded length."""
    text = str(name)
    if len(text) > _LONGEST_NAME:
        text = f"{text[:_LONGEST_NAME]}..."
    return text if text.isprintable() else ascii(text)


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """``; did you mean X?``, or nothing where no candidate is near."""
    cutoff = 0.6 if len(word) > 2 else 0.75  # two letters of four are no likeness
    known = {candidate.lower(): candidate for candidate in candidates}
    near = get_close_matches(word[:_LONGEST_NAME].lower(), known, n=1, cutoff=cutoff)
    return f"; did you mean {known[near[0]]}?" if near else ""


@contextmanager
def hub_errors(
    kind: type[IsobitError],
    known: str,
    unknown: str,
    failed: str,
    remedy: str,
    revision: str | None,
) -> Iterator[None]:
    """Turn errors of the Hugging Face hub within the block into errors of ``kind``.

    Each begins with one of the texts: ``known`` if only the ``revision`` is missing, ``unknown`` if
    the hub has no such repository, or ``failed`` if it could not be asked, for which ``remedy`` is
    advice besides checking the network.
    """
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except IsobitError:
        raise
    except RevisionNotFoundError:
        raise kind(
            f"{known}, but no revision {revision}; name a branch, a tag or a commit of it"
        ) from None
    except RepositoryNotFoundError:  # gated ones too
        raise kind(
            f"{unknown}, or none that you may read; check the name, accept its terms on its page, "
            "and set HF_TOKEN where it is private"
        ) from None
    except Exception as error:  # the library raises many types, down to those of its HTTP client
        reason = str(error).strip().splitlines()
        raise kind(
            f"{failed}: {type(error).__name__}: {shown(reason[0] if reason else '')}; check the "
            f"network, or {remedy}"
        ) from error


def how_it_ended(exit_code: int) -> str:
    """``was killed by SIGSEGV`` or ``ended with exit code 1``, of a process; a code below 0 is the
    signal that killed it.
    """
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"
