"""Which processes of a test still run."""

import time
from pathlib import Path


def processes(folder: Path, count: int) -> list[int]:
    """Those of the ranks, once all run."""
    while len(found := list(folder.iterdir())) < count or not all(
        path.read_text() for path in found
    ):
        time.sleep(0.01)
    return [int((folder / str(rank)).read_text()) for rank in range(count)]


def wait_for_the_end_of(pids: list[int]) -> None:
    while any(is_alive(pid) for pid in pids):
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
