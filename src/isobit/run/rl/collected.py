"""A batch: the graded groups that one step learns from, and what it took to get them."""

from dataclasses import dataclass

from isobit.records.text import Group
from isobit.rewards.grade import GradeStats
from isobit.rollout.progress import EngineStats
from isobit.training.comparison import Comparison, Mismatch


@dataclass(frozen=True, slots=True)
class Collected:
    """What a step learns from, and what it took to get it."""

    groups: list[Group]
    grades: GradeStats
    engine: EngineStats
    refills: int = 0
    """How often further prompts were taken."""
    dropped_groups: int = 0
    """Level groups that others replaced."""
    comparison: Comparison | None = None
    """Of some completions with the trainer's forward, by the weights that drew them; None where all
    are compared as they are learnt from.
    """
    mismatch: Mismatch | None = None
    """Of the same tokens."""
