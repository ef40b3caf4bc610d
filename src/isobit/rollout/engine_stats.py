"""Counts of what an engine has done."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from time import perf_counter
from typing import Protocol


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine last had nothing to do: those of one ``generate`` call."""

    generated_tokens: int = 0
    """Tokens drawn, those of aborted samples included."""
    prompt_tokens: int = 0
    """Prompt tokens put through the model: each prompt once, and again if its pages were given
    up.
    """
    recomputed_tokens: int = 0
    """Generated tokens whose K and V were given up and computed again."""
    kept_tokens: int = 0
    """Tokens of earlier turns whose K and V were still there when their sample came back."""
    preemptions: int = 0
    """Running samples that lost their pages to an earlier one."""
    weight_changes: int = 0
    """Times that new weights were published and all pages dropped."""
    shared_pages: int = 0
    """Pages that a sample took over from its prompt instead of computing them."""
    copied_pages: int = 0
    """Shared partial pages that were copied before the first write into them."""
    chunks: int = 0
    """Pieces of prompts, or of recomputations, that the token budget of a forward cut off before
    the end.
    """
    drafted_tokens: int = 0
    """Guesses of tokens that were verified (``isobit.rollout.drafts``)."""
    accepted_tokens: int = 0
    """Tokens drawn in the step of an earlier one, because that was guessed."""
    forwards: int = 0
    seconds: float = 0.0
    update_s: float = 0.0
    """Seconds of these in which new weights were on their way to an engine with its own copy of
    them.
    """
    kv_ratio: float = 0.0
    """The largest magnitude of Q, K and V over the largest that its scale holds; 0 with scales a
    token.
    """

    def __add__(self, other: "EngineStats") -> "EngineStats":
        """Counts of two calls together."""
        names = [field.name for field in fields(self) if field.name != "kv_ratio"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return EngineStats(**sums, kv_ratio=max(self.kv_ratio, other.kv_ratio))


def of_all_ranks(stats: Sequence[EngineStats]) -> EngineStats:
    """What engines did that worked at the same time: counts added, and the longest time."""
    return replace(sum(stats, EngineStats()), seconds=max(one.seconds for one in stats))


@dataclass(frozen=True, slots=True)
class Progress:
    """A moment of a ``generate`` call."""

    finished: int
    running: int
    total: int
    """Samples."""
    generated_tokens: int
    seconds: float
    """Since the start of the call."""

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the time since the start."""
        return self.generated_tokens / self.seconds if self.seconds > 0 else 0.0


class CountsWork(Protocol):
    """An engine, as far as it counts what it does."""

    @property
    def stats(self) -> EngineStats:
        """Counts since the engine last had no live sample; a new record each time."""
        ...


class Periods:
    """The total of an engine's counts since this was made; the engine begins a new record each time
    that it has had nothing to do.
    """

    def __init__(self, engine: CountsWork) -> None:
        """Begin with ``engine``, which has no live samples."""
        self._engine, self._began = engine, perf_counter()
        self._records = [engine.stats]
        """The first is of what was done before."""
        self.total = EngineStats()

    def note(self) -> None:
        """Bring ``total`` up to date, which stays the same object."""
        if self._records[-1] is not self._engine.stats:
            self._records.append(self._engine.stats)
        total = sum(self._records[1:], EngineStats())
        for field in fields(EngineStats):
            setattr(self.total, field.name, getattr(total, field.name))
        self.total.seconds = perf_counter() - self._began
