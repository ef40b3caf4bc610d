"""Shared by the benchmarks: the card and its copy bandwidth, rows as JSON lines, times of kernels,
memory plans, and a command line whose errors take one line.

Every row names its card and versions, and is on disk before the next measurement starts.  Rows of
two cards are never compared.
"""

import argparse
import gzip
import json
import multiprocessing
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import precision_of
from isobit.kernels.backend import DeviceMemory, back_end_of, backend_of, support, use_back_end
from isobit.memory.device import DevicePlanner
from isobit.models.config import ModelConfig
from isobit.models.decoder import decoder_shape
from isobit.models.layers import Weights
from isobit.precision.flow import build_flow
from isobit.util.errors import IsobitError
from isobit.util.strict_json import json_text


def measure_card() -> dict[str, Any]:
    """The card's name, UUID and copy bandwidth.  Another process measures, because an engine must
    find the card untouched; a new one, since the choice of a back end may have asked the driver.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(_measure).get(timeout=60)


def _measure() -> dict[str, Any]:
    card = torch.cuda.get_device_properties(0)
    return {"name": card.name, "uuid": str(card.uuid), "copy_tb_per_s": copy_tb_per_s()}


def copy_tb_per_s() -> float:
    """TB/s of a copy within the card, bytes read and bytes written."""
    source = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source)) / 1e12


def seconds(work: Callable[[], object], repeats_ms: int = 50) -> float:
    """The median time of work on the card, from repeats that take about ``repeats_ms``."""
    import triton

    milliseconds = triton.testing.do_bench(work, warmup=20, rep=repeats_ms, return_mode="median")
    assert isinstance(milliseconds, float)
    return milliseconds * 1e-3


def card_row() -> dict[str, Any]:
    """The card and the versions, as a row of their own."""
    card = torch.cuda.get_device_properties(0)
    return {"card": card.name, "uuid": str(card.uuid)} | versions()


def printed(row: "Row") -> "Row":
    """Print a row as JSON, and return it."""
    print(json_text(row), flush=True)
    return row


def append_row(out: Path | None, row: "Row") -> None:
    """Add a line to a file of rows where a command was given one."""
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(json_text(row) + "\n")


def around_dashes(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command's own words, and those behind ``--``, which are for another."""
    cut = words.index("--") if "--" in words else len(words)
    return list(words[:cut]), list(words[cut + 1 :])


def versions() -> dict[str, str]:
    """The versions that every row depends on, and a back end that is not Hopper's."""
    import triton

    back_end = back_end_of("cuda")
    other = {} if back_end == "hopper" else {"back_end": back_end}
    return {"torch": torch.__version__, "triton": triton.__version__} | other


CARD = "cuda"


def card_memory() -> DeviceMemory:
    """The memory interface of the card's back end."""
    memory = backend_of(torch.device(CARD)).memory
    assert memory is not None, "a card has memory for itself"
    return memory


def allocate_in_pages() -> None:
    """Let torch's allocator map single pages, as a run does; call it before using the card."""
    card_memory().allocate_in_pages()


def card_planner(config: ModelConfig, precision: str, total: int | None = None) -> DevicePlanner:
    """Plans ``total`` bytes of the card, by default all that this process can have now."""
    flow = build_flow(precision_of(precision), decoder_shape(config))
    total = card_memory().available() if total is None else total
    return DevicePlanner(config, flow, support(CARD).sizes, total)


def published_tensors(weights: Weights) -> dict[str, torch.Tensor]:
    """All tensors of one side, by name, but for those of RoPE."""
    tensors = dict(weights.plain)
    for name, linear in weights.linears.items():
        if isinstance(linear.matrix, torch.Tensor):
            tensors[name] = linear.matrix
        else:
            tensors[f"{name}.values"] = linear.matrix.values
            tensors[f"{name}.scales"] = linear.matrix.scales
        if linear.bias is not None:
            tensors[f"{name}.bias"] = linear.bias
    return tensors


Row = dict[str, Any]
Cells = Callable[[Row], Iterable[str]]


class RowWriter:
    """Appends rows to ``DIR/<engine>-<mode>-<shape>.jsonl`` and prints them; ``common`` is part of
    each.
    """

    def __init__(
        self, directory: Path, engine: str, mode: str, shape: str, card: Row, versions: Row
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"{engine}-{mode}-{shape}.jsonl"
        self._short: Row = {"engine": engine, "mode": mode}
        self._common: Row = {**self._short, "shape": shape, "card": card, "versions": versions}

    def write(self, **row: Any) -> None:
        with self._path.open("a") as file:
            file.write(json_text(self._common | row) + "\n")
        print(json_text(self._short | row), flush=True)


def read_rows(directory: Path) -> list[Row]:
    """All rows of a folder, in the order of the files' names and of their lines; curves are kept as
    ``.jsonl.gz``.
    """
    rows: list[Row] = []
    for path in sorted([*directory.glob("*.jsonl"), *directory.glob("*.jsonl.gz")]):
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        rows += map(json.loads, text.splitlines())
    return rows


def markdown(cells: Iterable[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"


def print_by_card(title: str, head: Sequence[str], lines: Sequence[Row], cells: Cells) -> None:
    """A table for each shape and card; ``head`` is the header and its rule."""
    for shape, card in dict.fromkeys((line["shape"], line["card"]["uuid"]) for line in lines):
        body = [
            markdown(cells(line))
            for line in lines
            if (line["shape"], line["card"]["uuid"]) == (shape, card)
        ]
        print("\n".join([f"{title}{shape}, card {card}", "", *head, *body, ""]))


def write_json(out: Path | None, result: object) -> None:
    """Write a result where a command was given a file for it."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json_text(result, indent=2) + "\n")


def card_memory_gib() -> float:
    """What all processes hold of the card, including what an engine has reserved for its cache."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1024  # noqa: S603


def kernel_times(work: Callable[[], object], repeats: int) -> dict[str, tuple[float, float]]:
    """Microseconds and launches of each kernel in one repeat, the longest first."""
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


Parser = argparse.ArgumentParser
Command = Callable[[argparse.Namespace], None]


class Commands:
    """The command line of a module, whose first line describes it."""

    def __init__(self, doc: str | None) -> None:
        self.parser = make_parser(doc)
        self._commands = self.parser.add_subparsers(required=True)

    def add(self, name: str, run: Command, shape: bool = True, out: bool = True) -> Parser:
        """A command, with ``--shape`` and ``--out`` unless it has no use for one."""
        command = self._commands.add_parser(name)
        if shape:
            command.add_argument("--shape", default="qwen3-8b")
        if out:
            command.add_argument("--out", type=Path, required=True)
        command.add_argument("--back-end", choices=("auto", "hopper", "triton"), default="auto")
        command.set_defaults(run=run)
        return command

    def add_table(self, run: Callable[[Path], None]) -> None:
        """The command ``table DIR``."""
        command = self._commands.add_parser("table")
        command.add_argument("directory", type=Path)
        command.set_defaults(run=lambda arguments: run(arguments.directory))


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser that the first line of a module's docstring describes."""
    return argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)


def names_of(known: Iterable[str], what: str) -> Callable[[str], list[str]]:
    """The type of an argument that lists known names, separated by commas."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            listed = f"{', '.join(unknown)}: the {what} are {', '.join(known)}"
            raise argparse.ArgumentTypeError(listed)
        return names

    return parse


def run_command(parser: argparse.ArgumentParser) -> int:
    """Run what the arguments ask for; -> the exit code."""
    arguments = parser.parse_args()
    try:
        use_back_end(getattr(arguments, "back_end", "auto"))
        arguments.run(arguments)
    except IsobitError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0
