"""The table ``checkpoint``: when a run's whole state is written, and which of its states stay."""

from pydantic import Field

from isobit.config.base import Strict
from isobit.config.limits import MAX_STEPS, MAX_WAIT_S


class CheckpointConfig(Strict):
    """When the whole state of a run is written to ``checkpoints/`` in its directory, and how many
    of them stay.

    Beside the rules below there is one after the last step, and one where SIGTERM or Ctrl-C ends
    the run.
    """

    every: int = Field(default=10, ge=0, le=MAX_STEPS)
    """Steps between checkpoints; 0 is only at the end or when the run is interrupted."""
    keep_last: int = Field(default=2, ge=0, le=MAX_STEPS)
    """Keep that many of the newest; 0 writes none at all, for a disk that has no room: a run that
    ends early then begins anew.
    """
    keep_every: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Also keep those of every that many steps (a multiple of ``every``); 0 keeps none for this
    reason.
    """
    wait_for_space_s: float = Field(default=600.0, ge=0, le=MAX_WAIT_S)
    """Seconds that a run waits, trying again, where the disk or a quota is full: what was learnt
    since the last checkpoint is not lost if somebody frees some space; 0 ends the run at once.
    """
    keep_best: str | None = None
    """Also write and keep the one with the highest value of this evaluation figure, for example
    ``eval/held_out/accuracy``; of ``isobit sft``'s ``eval/NAME/loss`` the lowest.
    """
