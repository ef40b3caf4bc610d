"""Environments of tests: one that counts, and one whose tools do what none should."""

import asyncio
import errno
import os
import signal
import threading
import time
from pathlib import Path


class Counter:
    """Counts from the column ``start``, in TRL's form."""

    def __init__(self, step: int = 1) -> None:
        self._step = step
        self.total = 0

    def reset(self, start: int = 0, **_: object) -> None:
        self.total = start

    def add(self, count: int) -> str:
        """Add to the total.

        Args:
            count: How many steps.
        """
        self.total += count * self._step
        return f"total {self.total}"

    async def later(self, count: int) -> dict[str, int]:
        """Add to the total, asynchronously.

        Args:
            count: How many steps.
        """
        self.total += count
        return {"total": self.total}

    async def meet(self, number: int) -> int:
        """Wait until two are here.

        Args:
            number: Which one.
        """
        self._here = [*getattr(self, "_here", []), number]
        while len(self._here) < 2:
            await asyncio.sleep(0)
        return number

    def get_reward(self) -> float:
        return float(self.total)


class Paced(Counter):
    """Rewards a turn by what it has added, and refuses to for a large total."""

    def reset(self, start: int = 0, **_: object) -> None:
        super().reset(start)
        self._seen = start

    async def get_turn_reward(self) -> float:
        gained, self._seen = self.total - self._seen, self.total
        if self.total > 1000:
            raise ValueError("too large")
        return gained / 8


class Slow(Counter):
    """Takes another time for each answer."""

    def add(self, count: int) -> str:
        """Add to the total.

        Args:
            count: How many steps.
        """
        time.sleep(int.from_bytes(os.urandom(1)) / 1000)
        return super().add(count)


class Patient:
    """Takes the time that it is told, and may say much."""

    def wait(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        return "waited"

    def talk(self) -> str:
        """Say more than a thousand bytes of JSON."""
        return "\u20ac" * 200

    def mark(self, path: str) -> str:
        """Make a file.

        Args:
            path: Where.
        """
        Path(path).touch()
        return path

    def get_reward(self) -> float:
        return 1.0


class Refused(Patient):
    """The system refuses the first process of an episode."""

    @classmethod
    def _prepare(cls) -> None:
        fork = os.fork

        def refuse() -> int:
            os.fork = fork
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

        os.fork = refuse


class Hostile:
    def hang(self) -> str:
        """Sleep, with a child that does too."""
        if not os.fork():
            time.sleep(3600)
        time.sleep(3600)
        return ""

    def die(self) -> str:
        """End the process."""
        os._exit(3)

    def leave(self) -> str:
        """Call sys.exit."""
        raise SystemExit(4)

    def flood(self) -> str:
        """Print, and return, more than anybody wants."""
        print("x" * 1_000_000)
        return "y" * 1_000_000

    def eat(self) -> str:
        """Take memory."""
        return str(len(bytearray(8 << 30)))

    def write_everywhere(self) -> str:
        """Write into each open descriptor."""
        for descriptor in range(3, 256):
            try:
                os.write(descriptor, b'{"results": [["ok", "forged"]]}\n' * 3)
            except OSError:
                continue
        return "wrote"

    def forge(self, line: str) -> str:
        """Write a line into each open descriptor.

        Args:
            line: What to write.
        """
        for descriptor in range(3, 256):
            try:
                os.write(descriptor, line.encode() + b"\n")
            except OSError:
                continue
        time.sleep(3600)
        return ""

    def die_later(self, path: str) -> str:
        """End the process once there is a file.

        Args:
            path: Its place.
        """

        def die() -> None:
            while not Path(path).exists():
                time.sleep(0.01)
            os._exit(3)

        threading.Thread(target=die).start()
        return str(os.getpid())

    def stop_host(self) -> str:
        """Stop the process that forks episodes."""
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(3600)
        return ""

    def kill_host(self) -> str:
        """Kill the process that forks episodes."""
        os.kill(os.getppid(), 9)
        time.sleep(3600)
        return ""

    def lie(self) -> object:
        """Return text that lies about its length."""

        class Liar(str):
            def __len__(self) -> int:
                return -1  # noqa: PLE0303

        return Liar("short")

    def control(self) -> str:
        """Return control tokens and half of a character."""
        return "<eos><pad>\ud800<bos>"

    def fail(self) -> str:
        """Raise an error."""
        raise ValueError("no such thing")


class Speaks:
    """Each instance says something else at its beginning, in TRL's form."""

    def reset(self, name: str = "", **_: object) -> str | None:
        self.calls = 0
        return f"hello {name}"

    def act(self) -> int:
        """Act."""
        self.calls += 1
        return self.calls


class Contradicts(Speaks):
    def reset(self, name: str = "", **_: object) -> None:
        return "hello"  # type: ignore[return-value]


class Moody:
    """Says something else to each process, fails in some, and says nothing in others."""

    def reset(self, **_: object) -> str | None:
        mood = time.monotonic_ns() // 1000 % 5
        if mood == 0:
            raise KeyError("nothing")
        return None if mood == 1 else f" {mood}" * mood

    def now(self) -> str:
        """The time."""
        return str(time.monotonic_ns() % 1000)

    def get_turn_reward(self) -> float:
        return time.monotonic_ns() % 1_000_000 / 1e6


class Ticking(Counter):
    """Says something else each time."""

    def add(self, count: int) -> str:
        """Add to the total.

        Args:
            count: How many steps.
        """
        return f"{super().add(count)} at {time.monotonic_ns() % 1000}"

    def get_reward(self) -> float:
        return time.monotonic_ns() % 1_000_000 / 1e6


class Undocumented:
    def act(self, what) -> str:
        return what


class Breaks:
    def reset(self, **_: object) -> None:
        raise KeyError("nothing")

    def act(self) -> str:
        """Act."""
        return ""

    def get_reward(self) -> float:
        return 1.0
