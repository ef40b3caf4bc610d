"""The errors a user can meet: each says what was wrong, what was expected and what to do.

The command line prints the message without a traceback and exits with ``exit_code``.  Broken
invariants are not here: those are ``AssertionError`` and keep their traceback.
"""

import re

from isobit.util.terminal import gib

_LONGEST = 4000
"""Characters of a message: some ten problems of a recipe, each on its line."""
_LONGEST_NAME = 200
"""Characters of a name in a message."""


class IsobitError(Exception):
    """Base of every error caused by input, configuration or data rather than by a fault in
    Isobit.

    Its text quotes what strangers wrote, names of tensors or a template's own error: characters
    that could drive a terminal are shown as escapes, and the middle of what would fill pages is
    left out.
    """

    exit_code = 2

    def __str__(self) -> str:
        text = "".join(
            c if c in "\t\n" or c.isprintable() else ascii(c)[1:-1] for c in super().__str__()
        )
        more = len(text) - _LONGEST
        if more <= 0:
            return text
        return f"{text[: _LONGEST // 2]} [{more:,} characters left out] {text[-_LONGEST // 2 :]}"


class OutOfMemoryError(IsobitError):
    """A device's memory that ran out in a phase of a run, and could not be worked around.

    ``phase`` is what was being done (``rollout``), ``reason`` what torch said, which holds the size
    that was asked for, ``free`` the bytes that were free then (None where nobody knows), ``advice``
    the settings that lower the need.
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
    """A checkpoint of a run that is missing, damaged, or not of the model that it began with."""


class DataError(IsobitError):
    """A dataset or prompt that cannot be used."""


class RewardError(IsobitError):
    """A reward function that cannot be loaded, or that failed on so much of a batch that no
    training is possible.
    """


class RequestError(IsobitError):
    """A generation request that the engine can never serve."""


class StorageError(IsobitError):
    """A disk that is full or cannot be written; the message says what was needed and what is
    free.
    """


class NoSpaceError(StorageError):
    """A disk or a quota that has no room now, and may have some later."""


class StoppedAtOnce(KeyboardInterrupt):
    """A second Ctrl-C: the process may be in the middle of anything, and nothing more is saved."""


class Interrupted(KeyboardInterrupt):
    """A run that stopped on a signal at a moment of its own choice.  Code that survives any
    ``Exception`` does not catch it.
    """

    def __init__(self, signal_name: str, signal_number: int) -> None:
        super().__init__(f"stopped by {signal_name}")
        self.signal_name = signal_name
        self.exit_code = 128 + signal_number


class MismatchError(IsobitError):
    """Rollout and training gave different log-probabilities, and the run was told to stop at
    that.
    """

    exit_code = 3


class NoSignalError(IsobitError):
    """Rewards that had nothing to teach for too many steps, in a run that was told to stop at
    that.
    """

    exit_code = 3


class PeerError(IsobitError):
    """Another rank has failed, and this one stops with it: it is the other that says why."""

    exit_code = 4

    def __init__(self, rank: int | None, reason: str) -> None:
        who = "another rank" if rank is None else f"rank {rank}"
        super().__init__(f"{who} failed: {reason}")
        self.rank, self.reason = rank, reason


class NonFiniteError(IsobitError):
    """A NaN or infinity in a tensor of the forward pass; the message names the tensor."""


def shown(name: object) -> str:
    """What a file calls something, for a message: on one line, printable, of bounded length."""
    text = str(name)
    if len(text) > _LONGEST_NAME:
        text = f"{text[:_LONGEST_NAME]}..."
    return text if text.isprintable() else ascii(text)
