"""Several processes for a test: ``in_world(size, "tests.parallel.test_world:work", argument)``
calls a function of a module in that many processes, joined by gloo, with (world, argument), and
gives what each returned.
"""

import os
import socket
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from isobit.parallel.processes import joined
from isobit.parallel.world import decode, encode
from tests.forked import become, warm

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
            (get_context("spawn") if gpus else warm()).Process(
                target=_be_a_rank, args=(target, folder, environment(rank, size, port, gpus))
            )
            for rank in range(size)
        ]
        for process in running:
            process.start()
        for process in running:
            process.join(timeout)
        for process in running:
            process.kill()  # one that has ended stays as it is
            process.join()
        failed = [
            f"rank {rank} (exit {process.exitcode}):\n{(folder / f'{rank}.txt').read_text()}"
            for rank, process in enumerate(running)
            if process.exitcode
        ]
        assert not failed, "\n".join(failed)
        return [decode((folder / str(rank)).read_bytes()) for rank in range(size)]


def _be_a_rank(target: str, folder: Path, environ: dict[str, str]) -> None:
    """One process of a world; it ends as a program does, and its output goes to a file."""
    become(environ, ROOT, folder / f"{environ['RANK']}.txt")
    module, _, function = target.partition(":")
    with joined() as world:
        made = getattr(import_module(module), function)(
            world, decode((folder / "argument").read_bytes())
        )
    (folder / str(world.rank)).write_bytes(encode(made))
