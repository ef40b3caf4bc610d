"""What every benchmark shares: which card was measured and its copy bandwidth, how much memory a
run would plan on it, rows as JSON lines, kernel times by the profiler, and a command line whose
errors take one line.

Every row says which card and which versions it comes from, and is on disk before the next
measurement starts.  Rows of two cards are never compared.
"""

import argparse
import gzip
import json
import multiprocessing
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from isobit.config.tables import PrecisionConfig
from isobit.kernels.backend import DeviceMemory, backend_of, support
from isobit.memory.device import DevicePlanner
from isobit.models.config import ModelConfig
from isobit.models.decoder import decoder_shape
from isobit.precision.flow import build_flow
from isobit.util.errors import IsobitError

_BYTES = 1 << 30


def measure_card() -> dict[str, Any]:
    """In a process of its own: an engine's own process should find the card untouched, and may want
    to fork.
    """
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply_async(_measure).get(timeout=60)


def _measure() -> dict[str, Any]:
    import triton

    source = torch.randint(0, 256, (_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    milliseconds = triton.testing.do_bench(
        lambda: target.copy_(source), warmup=20, rep=50, return_mode="median"
    )
    assert isinstance(milliseconds, float)
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "uuid": str(properties.uuid),
        "copy_tb_per_s": 2 * _BYTES / milliseconds / 1e9,
    }


def versions() -> dict[str, str]:
    """The versions that every row depends on."""
    import triton

    return {"torch": torch.__version__, "triton": triton.__version__}


CARD = "cuda"


def card_memory() -> DeviceMemory:
    """The memory interface of the card's back end."""
    memory = backend_of(torch.device(CARD)).memory
    assert memory is not None, "a card has memory for itself"
    return memory


def allocate_in_pages() -> None:
    """Let torch's allocator map single pages, as a run does; before anything is on the card."""
    card_memory().allocate_in_pages()


def card_planner(config: ModelConfig, precision: str, total: int | None = None) -> DevicePlanner:
    """Plans for the card's back end; of ``total`` bytes, or of those that this process can have
    now.
    """
    flow = build_flow(PrecisionConfig.model_validate(precision), decoder_shape(config))
    total = card_memory().available() if total is None else total
    return DevicePlanner(config, flow, support(CARD).sizes, total)


Row = dict[str, Any]


class RowWriter:
    """Appends rows to ``DIR/<engine>-<mode>-<shape>.jsonl`` and prints them; ``common`` is part of
    each.
    """

    def __init__(
        self, directory: Path, engine: str, mode: str, shape: str, card: Row, versions: Row
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"{engine}-{mode}-{shape}.jsonl"
        self._common: Row = {
            "engine": engine,
            "mode": mode,
            "shape": shape,
            "card": card,
            "versions": versions,
        }

    def write(self, **row: Any) -> None:
        line = json.dumps(self._common | row)
        with self._path.open("a") as file:
            file.write(line + "\n")
        print(
            json.dumps({"engine": self._common["engine"], "mode": self._common["mode"]} | row),
            flush=True,
        )


def read_rows(directory: Path) -> list[Row]:
    """All rows of a folder, in the order of the files' names and of their lines; curves are kept as
    ``.jsonl.gz``.
    """
    return [
        json.loads(line)
        for path in sorted([*directory.glob("*.jsonl"), *directory.glob("*.jsonl.gz")])
        for line in _text(path).splitlines()
    ]


def _text(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def card_memory_gib() -> float:
    """What all processes together hold of the card: it includes what an engine has set aside for
    its cache.
    """
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1024  # noqa: S603


def kernel_times(work: Callable[[], object], repeats: int) -> dict[str, tuple[float, float]]:
    """Name -> microseconds and launches of one time of the work, the longest first, over so many
    repeats.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    times, launches = Counter[str](), Counter[str]()
    for event in profiled.events() or ():
        name = event.name.split("<")[0].split("(")[0].removeprefix("void ")
        times[name] += event.device_time_total / repeats
        launches[name] += 1
    return {name: (time, launches[name] / repeats) for name, time in times.most_common()}


def run_command(parser: argparse.ArgumentParser) -> int:
    """Run what the arguments ask for; -> the exit code."""
    arguments = parser.parse_args()
    try:
        arguments.run(arguments)
    except IsobitError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0
