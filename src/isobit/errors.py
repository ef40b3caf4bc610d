"""The errors a user can meet: each says what was wrong, what was expected and what to do.

The command line prints the message without a traceback and exits with ``exit_code``.  Broken invariants are not here: those are
``AssertionError`` and keep their traceback.
"""


class IsobitError(Exception):
    """Base of every error caused by input, configuration or data rather than by a fault in Isobit."""

    exit_code = 2


class ConfigError(IsobitError):
    """A configuration key or value that cannot be used."""


class CheckpointError(IsobitError):
    """A model folder that is missing, damaged, or not one of the supported architectures."""


class DataError(IsobitError):
    """A dataset or prompt that cannot be used."""


class RewardError(IsobitError):
    """A reward function that cannot be loaded, or that failed on so much of a batch that no training is possible."""


class RequestError(IsobitError):
    """A generation request that the engine can never serve."""


class NonFiniteError(IsobitError):
    """A NaN or infinity in a tensor of the forward pass; the message names the tensor."""
