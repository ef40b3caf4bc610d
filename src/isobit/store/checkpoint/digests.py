"""SHA-256 of a checkpoint's files in chunks of 64 MiB, computed side by side by ranks and threads.

Chunk i of all files together is rank i mod W's; what it reads is what the disk shows it, whoever
wrote it.  The digests, unlike one of a whole file, do not depend on who computes which.
"""

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from isobit.parallel.agreement import gathered
from isobit.parallel.world import World

CHUNK_BYTES = 64 << 20
_READ_BYTES = 1 << 20
_THREADS = 4
"""Of a process; one computes 0.5 to 2 GB/s."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of a file."""

    file: str
    begin: int
    end: int


def chunks_of(sizes: Mapping[str, int], chunk_bytes: int) -> list[Chunk]:
    """Those of files of so many bytes, in the files' order; one, of nothing, of an empty file."""
    return [
        Chunk(file, begin, min(begin + chunk_bytes, size))
        for file, size in sizes.items()
        for begin in range(0, max(size, 1), chunk_bytes)
    ]


def own_digests(world: World, folder: Path, chunks: Sequence[Chunk]) -> list[str]:
    """Of the rank's chunks.  Raises OSError where one cannot be read."""

    def digest(chunk: Chunk) -> str:
        made = _sha256(folder, chunk)
        world.pulse.beat()
        return made

    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(digest, chunks[world.rank :: world.size]))


def first_damage(
    world: World, folder: Path, chunks: Sequence[Chunk], expected: Sequence[str]
) -> str | None:
    """What is wrong with the first chunk that is not as it was written, on every rank alike; None
    where all are.
    """

    mine = range(world.rank, len(chunks), world.size)

    def damage_at(place: int) -> str | None:
        found = _damage(folder, chunks[place], expected[place])
        world.pulse.beat()
        return found

    def look() -> list[tuple[int, str]]:
        with ThreadPoolExecutor(_THREADS) as threads:
            found = threads.map(damage_at, mine)
            return [(place, text) for place, text in zip(mine, found, strict=True) if text]

    problems = [problem for found in gathered(world, look) for problem in found]
    return min(problems)[1] if problems else None


def _damage(folder: Path, chunk: Chunk, expected: str) -> str | None:
    path = folder / chunk.file
    try:
        found = _sha256(folder, chunk)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if found == expected:
        return None
    return f"{path} does not have the SHA-256 of what was written: its bytes have changed"


def _sha256(folder: Path, chunk: Chunk) -> str:
    """Opened anew: a network file system then shows what other hosts have written."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
    with (folder / chunk.file).open("rb", buffering=0) as file:
        file.seek(chunk.begin)
        left = chunk.end - chunk.begin
        while left and (count := file.readinto(buffer[:left])):
            digest.update(buffer[:count])
            left -= count
    return digest.hexdigest()
