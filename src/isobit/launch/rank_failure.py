"""How a rank ended that should not have, in several lines that are printed once for all ranks."""

import signal
from dataclasses import dataclass

from isobit.util.errors import how_it_ended
from isobit.util.terminal import gib


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How a rank ended that should not have."""

    rank: int
    host: str
    process: int
    """The number of its process there."""
    exit_code: int
    """Its exit code; negative: the signal that killed it."""
    phase: str | None
    """The part of the run that it was in; None where that is not known."""
    seconds: float
    """Seconds since it was started."""
    memory: int | None
    """The most bytes of main memory that it held at once; None where that is not known."""
    last_lines: str | None
    """The last lines that it printed; None where they are on the terminal already."""
    fault: str | None
    """The exception that ended it, where it could still note it."""

    @property
    def code(self) -> int:
        """The exit code as a shell gives it: 128 and the number of a signal."""
        return 128 - self.exit_code if self.exit_code < 0 else self.exit_code

    def describe(self) -> str:
        """Several lines: who, how, in which phase, with how much memory, and its last words."""
        how = how_it_ended(self.exit_code)
        phase = f" in {self.phase}" if self.phase else ""
        fault = f" by {self.fault.splitlines()[0]}" if self.fault else ""
        held = f"; it held at most {gib(self.memory)} of main memory" if self.memory else ""
        who = f"rank {self.rank} ({self.host}, process {self.process})"
        lines = [f"{who} {how}{phase} after {self.seconds:.0f} s{fault}{held}"]
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
