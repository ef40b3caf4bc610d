"""Tokens a micro-batch, by update: the setting, unless an out-of-memory has lowered it for the rest
of the run, or a resume has allowed another one.

The cut into micro-batches decides the order in which gradients add up, and with it their bits.
Each change is therefore kept with the update that it was made for, and a resumed run makes it at
that update again, whether it would run out of memory there or not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class BudgetChange:
    """A change to micro-batches of at most ``new`` tokens rather than ``old``."""

    update: int
    """The first update that it is for, counted from 0 (``Trainer.updates``)."""
    old: int
    new: int
    allowed: bool = False
    """Whether it is a setting that was allowed to change, and not of an out-of-memory."""

    def content(self) -> dict[str, int]:
        """The change in the form of JSON."""
        numbers = {"update": self.update, "old": self.old, "new": self.new}
        return {**numbers, **({"allowed": True} if self.allowed else {})}

    @classmethod
    def of_line(cls, content: Mapping[str, Any]) -> Self:
        """Undo ``content``.  Raises KeyError and TypeError for what is no change."""
        numbers = [content[name] for name in ("update", "old", "new")]
        if any(type(number) is not int for number in numbers):
            raise TypeError
        update, old, new = numbers
        allowed = content.get("allowed", False)
        if update < 0 or min(old, new) < 1 or not isinstance(allowed, bool):
            raise TypeError
        return cls(update, old, new, allowed)


class MicrobatchBudget:
    """The tokens a micro-batch of every update of a run, and the changes made so far."""

    def __init__(self, tokens: int) -> None:
        self._setting = tokens
        self.changes: list[BudgetChange] = []
        self.on_change: Callable[[BudgetChange], None] | None = None
        """Called with a change before anything is learnt with it."""

    def at(self, update: int) -> int:
        """The tokens a micro-batch of an update, counted from 0."""
        return next(
            (change.new for change in reversed(self.changes) if change.update <= update),
            self._setting,
        )

    def go_on(self, update: int, recorded: Sequence[BudgetChange], was: int | None = None) -> None:
        """Make the changes again that were recorded after a checkpoint before an ``update``.

        Where the setting ``was`` another then, it holds from there on, and of what was recorded
        only what came after the same change; else what came under another setting is left out.
        """
        if was is None:
            recorded = [
                *takewhile(lambda one: not one.allowed or one.new == self._setting, recorded)
            ]
        else:
            old = self.changes[-1].new if self.changes else was
            change = BudgetChange(update, old, self._setting, allowed=True)
            recorded = recorded if change in recorded[:1] else [change]
        self.changes += recorded

    def set(self, update: int, tokens: int) -> None:
        """Change the tokens a micro-batch from an update on."""
        change = BudgetChange(update, self.at(update), tokens)
        self.changes.append(change)
        if self.on_change is not None:
            self.on_change(change)


Cut = Callable[[int], Sequence[Sequence[int]]]
"""Tokens a micro-batch -> the sequences of each micro-batch, by their indices."""


def halved(tokens: int, lengths: Sequence[int], cut: Cut) -> int | None:
    """The tokens a micro-batch that are tried after so many for sequences of these lengths: halved
    until the cut is another, first down to the longest sequence; None where each sequence is a
    micro-batch already.
    """
    before, longest = cut(tokens), max(lengths)
    tokens = min(tokens, sum(lengths))
    while any(len(members) > 1 for members in before):
        tokens = max(tokens // 2, longest) if tokens > longest else tokens // 2
        if cut(tokens) != before:
            return tokens
    return None
