"""What an engine did, and how far a ``generate`` call has come: plain records for a progress bar,
metrics and tests.
"""

from dataclasses import dataclass, fields


@dataclass(slots=True)
class EngineStats:
    """Counts from the first request after the engine had nothing to do: those of one ``generate``
    call.
    """

    generated_tokens: int = 0
    """Those of samples that were aborted as well."""
    prompt_tokens: int = 0
    """Prompt tokens put through the model: each prompt once, and again if its pages were given
    up.
    """
    recomputed_tokens: int = 0
    """Generated tokens whose K and V were given up and computed again."""
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
    forwards: int = 0
    seconds: float = 0.0

    def __add__(self, other: "EngineStats") -> "EngineStats":
        """Of two calls together."""
        names = [field.name for field in fields(self)]
        return EngineStats(*(getattr(self, name) + getattr(other, name) for name in names))


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
