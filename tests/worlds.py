"""Several processes for a test: ``in_world(size, "tests.parallel.test_world:work", argument)``
calls a function of a module in that many processes, joined by gloo, with (world, argument), and
gives what each returned.
"""

import os
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from isobit.parallel.message import decode, encode
from isobit.parallel.processes import joined

ROOT = Path(__file__).parents[1]


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def environment(rank: int, size: int, port: int, gpus: bool = False) -> dict[str, str]:
    """What a launcher sets, and one thread a process; without ``gpus`` no process sees any."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}",
        **({} if gpus else {"CUDA_VISIBLE_DEVICES": ""}),
    }


def in_world(
    size: int, target: str, argument: Any = None, timeout: float = 240, gpus: bool = False
) -> list[Any]:
    """What each rank returned; AssertionError with the output of those that failed."""
    with TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        (folder / "argument").write_bytes(encode(argument))
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.worlds", target, str(folder)],
                env=environment(rank, size, port, gpus),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            said = [process.communicate(timeout=timeout)[0] for process in running]
        finally:
            for process in running:
                process.kill()
        failed = [
            f"rank {rank} (exit {process.returncode}):\n{text}"
            for rank, (process, text) in enumerate(zip(running, said, strict=True))
            if process.returncode
        ]
        assert not failed, "\n".join(failed)
        return [decode((folder / str(rank)).read_bytes()) for rank in range(size)]


def main() -> None:
    """One process of a world."""
    target, folder = sys.argv[1], Path(sys.argv[2])
    module, _, function = target.partition(":")
    with joined() as world:
        made = getattr(import_module(module), function)(
            world, decode((folder / "argument").read_bytes())
        )
    (folder / str(world.rank)).write_bytes(encode(made))


if __name__ == "__main__":
    main()
