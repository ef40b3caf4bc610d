"""What the ranks that draw samples together tell one another while they do: notes and counters on
their world's board, which nobody waits for.

    tickets        the requests handed out so far, in their order
    finished, tokens, running       of all ranks
    load/r         the live samples of rank r
    ask/r/n        n-th note to rank r: another one has room for some of its samples
    answer/r       to rank r, which has asked: the samples that it gets
    home/r/n       n-th note to rank r: completions of samples that it had given away
    stop           a rank has failed, or was told to stop

Every call has names of its own.  Whoever reads a note addressed to it takes it away; the rest is
removed when all ranks have left, because a note must not go while somebody reads it.
"""

from dataclasses import dataclass

from isobit.parallel.world import World


@dataclass(frozen=True, slots=True)
class Counts:
    """Of all ranks: samples that have ended, tokens drawn, samples that run."""

    finished: int = 0
    tokens: int = 0
    running: int = 0

    def __sub__(self, other: "Counts") -> "Counts":
        """What has come since."""
        return Counts(
            self.finished - other.finished, self.tokens - other.tokens, self.running - other.running
        )


class Desk:
    """The notes of one call, seen from one rank."""

    def __init__(self, world: World) -> None:
        """Every rank calls it equally often."""
        self._board, self._rank = world.board, world.rank
        self._call = f"rollout/{self._board.add(f'rollout/calls/{world.rank}', 1)}"
        self._posted: set[str] = set()
        self._read = {"ask": 0, "home": 0}

    def take_ticket(self) -> int:
        """The place of the next request, counted from 0; no request has it once all are gone."""
        return self._board.add(f"{self._call}/tickets", 1) - 1

    def count(self, more: Counts) -> Counts:
        """Add what was done here since the last call; what all ranks have done."""
        numbers = {
            "tokens": more.tokens,
            "running": more.running,
            "finished": more.finished,
        }
        return Counts(
            **{name: self._board.add(f"{self._call}/{name}", n) for name, n in numbers.items()}
        )

    def show_load(self, live: int) -> None:
        """Let the others see how many live samples are here."""
        self._post(f"load/{self._rank}", str(live).encode())

    def load(self, rank: int) -> int:
        """The live samples of a rank, as it has shown them last."""
        note = self._board.read(f"{self._call}/load/{rank}")
        return 0 if note is None else int(note)

    def ask(self, rank: int, live: int) -> None:
        """Ask a rank for samples, with the number of those that are here."""
        self._send("ask", rank, f"{self._rank} {live}".encode())

    def asked(self) -> list[tuple[int, int]]:
        """The ranks that have asked this one, with their live samples."""
        notes = [note.split() for note in self._received("ask")]
        return [(int(rank), int(live)) for rank, live in notes]

    def answer(self, rank: int, note: bytes) -> None:
        """To a rank that has asked."""
        self._post(f"answer/{rank}", note)

    def answered(self) -> bytes | None:
        """What the rank that was asked has sent; None where it has not looked yet."""
        name = f"{self._call}/answer/{self._rank}"
        note = self._board.read(name)
        if note is not None:
            self._board.remove(name)
        return note

    def send_home(self, rank: int, note: bytes) -> None:
        """To the rank that some completions belong to."""
        self._send("home", rank, note)

    def come_home(self) -> list[bytes]:
        """What others have sent since the last call."""
        return self._received("home")

    def stop(self) -> None:
        """Tell all ranks to leave."""
        self._post("stop", b"")

    @property
    def is_stopped(self) -> bool:
        """Whether any rank has said so."""
        return self._board.read(f"{self._call}/stop") is not None

    def clear(self) -> None:
        """Take away what this rank has left; all have left the call."""
        for name in self._posted:
            self._board.remove(name)

    def _post(self, name: str, note: bytes) -> None:
        self._board.post(f"{self._call}/{name}", note)
        self._posted.add(f"{self._call}/{name}")

    def _send(self, kind: str, rank: int, note: bytes) -> None:
        number = self._board.add(f"{self._call}/{kind}/{rank}", 1) - 1
        self._post(f"{kind}/{rank}/{number}", note)

    def _received(self, kind: str) -> list[bytes]:
        """In order: one that is numbered, but not there yet, holds up those behind it."""
        found: list[bytes] = []
        while True:
            name = f"{self._call}/{kind}/{self._rank}/{self._read[kind]}"
            note = self._board.read(name)
            if note is None:
                return found
            self._board.remove(name)
            self._read[kind] += 1
            found.append(note)
