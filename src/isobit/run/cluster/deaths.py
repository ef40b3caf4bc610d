"""A rank that has ended and should not have: how that is told, once for all ranks."""

import signal
from dataclasses import dataclass

from isobit.errors import IsobitError
from isobit.units import gib


class RankError(IsobitError):
    """A rank has failed, and all have ended with it; ``exit_code`` is that rank's.  It ``died``
    unless it knew of an error that a user can meet: started again, it may live.
    """

    def __init__(self, text: str, exit_code: int, died: bool = False) -> None:
        super().__init__(text)
        self.exit_code = exit_code
        self.died = died


@dataclass(frozen=True, slots=True)
class Death:
    """How a rank ended."""

    rank: int
    host: str
    process: int
    """Its number there."""
    exit_code: int
    """Negative: the signal that killed it."""
    phase: str | None
    """The part of the run that it was in, where that is known."""
    seconds: float
    """Since it was started."""
    memory: int | None
    """The most bytes of main memory that it held at once, where that is known."""
    last_lines: str | None
    """Of what it printed; None where that is on the terminal already."""

    @property
    def code(self) -> int:
        """As a shell gives it: 128 and the number of a signal."""
        return 128 - self.exit_code if self.exit_code < 0 else self.exit_code

    def describe(self) -> str:
        """Several lines: who, how, in which phase, with how much memory, and its last words."""
        how = f"ended with exit code {self.exit_code}"
        if self.exit_code < 0:
            how = f"was killed by {_name(-self.exit_code)}"
        phase = f" in {self.phase}" if self.phase else ""
        held = f"; it held at most {gib(self.memory)} of main memory" if self.memory else ""
        lines = [f"{self._who()} {how}{phase} after {self.seconds:.0f} s{held}"]
        if self.exit_code == -signal.SIGKILL:
            lines.append(
                "  who kills so is often the kernel, for want of memory (`dmesg` says it), a "
                "container's limit, or a batch system's"
            )
        if self.last_lines is None:
            lines.append("  what it printed is above")
        elif self.last_lines.strip():
            lines += ["  the last that it printed:"]
            lines += [f"  | {line}" for line in self.last_lines.rstrip().splitlines()]
        else:
            lines.append("  it printed nothing")
        return "\n".join(lines)

    def _who(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.process})"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
