"""The environment of ``benchmarks.tool_latency``, which its host imports: it must load fast."""

import time


class SlowTool:
    """A tool that takes the time that it is asked to take, as a search or a compiler would.

    Args:
        scale: of that time; 0 answers at once.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale

    def reset(self, **_: object) -> None:
        """Nothing is said before the first turn."""

    def look_up(self, seconds: float) -> str:
        """Answer after some time.

        Args:
            seconds: How long it takes.
        """
        if self._scale:
            time.sleep(seconds * self._scale)
        return "found 3 of 7 pages"
