"""What a training is configured by: one recipe for each kind of it."""

from isobit.config.run import RunConfig
from isobit.config.sft import SftConfig

Recipe = RunConfig | SftConfig
"""The whole configuration of a training."""
