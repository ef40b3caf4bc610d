"""One completion of a step, as it is judged and learnt from."""

from dataclasses import dataclass

from isobit.records.sequence import TokenSequence


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion with its reward, as a step learns from it."""

    sequence: TokenSequence
    reward: float | None
    """None excludes it."""
    truncated: bool = False
    """Whether the length limit ended it."""
    advantage: float | None = None
    """That it was given when it was fresh; None of a fresh one."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it to learn from."""
        return self.sequence.response_length == 0
