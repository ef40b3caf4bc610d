"""Updates of weights as deltas against whole weights: bytes and seconds, master by master, so that
a shape of any size fits.

    python -m benchmarks.weight_deltas [--shape qwen3-8b] [--device cuda] [--rate 1e-6] [--out FILE]

Masters are random (N(0, 0.02), norms 1).  An update moves each number by the learning rate, up or
down, as AdamW's first one does.

    bf16           what ``rollout.engine = "http"`` sends: masters rounded to BF16
    e4m3, int8     the bytes that a publication makes of the linears, without scales, for comparison
    numbers        how many change; of pages of 4 KiB, how many hold one that does
    delta          its bytes (``isobit.models.weight_deltas``), over those of all

Seconds, in all: ``round`` (all weights to BF16 and to the host), ``find`` (the same of an update,
with what changed, and its encoding), ``digest`` (of all weights, which each side takes, tensors of
``TOGETHER`` bytes side by side), ``apply`` (read and written into a copy), and ``send_delta`` and
``send_whole`` through a socket of this machine.

Sums so far are printed every ``EVERY_S`` seconds, and written: a row says how many of the masters
it is of.
"""

import argparse
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch

from benchmarks.common import printed, write_json
from isobit.config.precision import PrecisionConfig, Preset
from isobit.kernels.backend import backend_of
from isobit.models.decoder import build_decoder
from isobit.models.policy import random_masters
from isobit.models.shapes import model_shape
from isobit.models.weight_deltas import (
    apply_change,
    digest_of,
    files_of,
    parted_names,
    read_file,
    rounded,
)
from isobit.precision.flow import PrecisionFlow, build_flow
from isobit.precision.quant_tensor import Int8Rows, QuantTensor
from isobit.util.strict_json import json_text

PAGE = 4096
EVERY_S, TOGETHER, COUNTED = 5.0, 4 << 30, 1 << 26
"""Between two lines; bytes whose digest is taken at once; numbers that are counted at once."""
_WORD = {1: torch.uint8, 2: torch.int16}
Made = TypeVar("Made")


class Sink:
    """The other end of a socket, which reads and drops."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self._ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        self._read = threading.Thread(target=self._drop, args=(theirs,), daemon=True)
        self._read.start()

    def send(self, pieces: Iterable[memoryview]) -> None:
        for piece in pieces:
            self._ours.sendall(piece)

    def _drop(self, theirs: socket.socket) -> None:
        buffer = bytearray(1 << 20)
        while theirs.recv_into(buffer):
            pass


class Measured:
    """Sums over the masters."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.formats: dict[str, Counter[str]] = {}
        self.sent: Counter[str] = Counter()
        self._device = device

    @contextmanager
    def clock(self, name: str):  # noqa: ANN201 (a context manager)
        self._settle()
        began = perf_counter()
        yield
        self._settle()
        self.seconds[name] += perf_counter() - began

    def timed(self, name: str, work: Callable[[], Made]) -> Made:
        with self.clock(name):
            return work()

    def count(self, name: str, old: torch.Tensor, new: torch.Tensor) -> None:
        """The numbers of a format before and after, on their device."""
        width, found = old.element_size(), self.formats.setdefault(name, Counter())
        before, after = (one.reshape(-1).view(_WORD[width]).split(COUNTED) for one in (old, new))
        numbers = old.numel()
        pages = changed = changed_pages = 0
        for differs in (one != other for one, other in zip(before, after, strict=True)):
            padded = torch.nn.functional.pad(differs, (0, -len(differs) % (PAGE // width)))
            touched = padded.view(-1, PAGE // width).any(1)
            pages += len(touched)
            changed += int(differs.sum())
            changed_pages += int(touched.sum())
        found.update(
            numbers=numbers,
            changed=changed,
            pages=pages,
            changed_pages=changed_pages,
            whole_bytes=numbers * width,
            delta_bytes=numbers // 128 + changed * (1 + width),
        )

    def row(self) -> dict[str, Any]:
        formats = {
            name: {
                **counts,
                "changed_share": counts["changed"] / counts["numbers"],
                "changed_pages_share": counts["changed_pages"] / counts["pages"],
                "delta_share": counts["delta_bytes"] / counts["whole_bytes"],
            }
            for name, counts in self.formats.items()
        }
        is_gpu = self._device.type == "cuda"
        return {
            "sent_delta_bytes": self.sent["delta"],
            "sent_whole_bytes": self.sent["whole"],
            "seconds": {name: round(value, 4) for name, value in self.seconds.items()},
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if is_gpu else None,
            "formats": formats,
        }

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def moved(master: torch.Tensor, rate: float, generator: torch.Generator) -> torch.Tensor:
    """A master after an update."""
    words = torch.empty(-(-master.numel() // 8), dtype=torch.int64, device=master.device)
    up = words.random_(generator=generator).view(torch.uint8)[: master.numel()] & 1
    return up.to(torch.float32).mul_(2 * rate).sub_(rate).view_as(master).add_(master)


def measure(shape: str, device: torch.device, rate: float) -> Iterator[dict[str, Any]]:
    """The row so far, after each master."""
    config, found, sink = model_shape(shape), Measured(device), Sink()
    decoder = build_decoder(config)
    described = decoder.masters()
    presets: tuple[Preset, ...] = ("fp8", "int8")
    flows = [build_flow(PrecisionConfig(preset=preset), decoder.shape) for preset in presets]
    generator = torch.Generator(device).manual_seed(1)
    together: dict[str, torch.Tensor] = {}
    for at, (name, master) in enumerate(random_masters(config, 0, device), 1):
        new = moved(master, rate, generator)
        together[name] = arrived(name, master, new, found, sink)
        if at == len(described) or sum(one.nbytes for one in together.values()) > TOGETHER:
            found.timed("digest", lambda: digest_of(together))
            together.clear()
        found.count("bf16", *(one.to(torch.bfloat16) for one in (master, new)))
        if described[name].kind == "matrix":
            for flow in flows:
                found.count(*quantised(flow, name, master, new))
        yield {
            "shape": shape,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "rate": rate,
            "masters": at,
            "of_masters": len(described),
            **found.row(),
        }


def arrived(
    name: str, master: torch.Tensor, new: torch.Tensor, found: Measured, sink: Sink
) -> torch.Tensor:
    """A master as it stands at a server after an update."""
    held, _ = found.timed("round", lambda: rounded(master, torch.bfloat16))
    with found.clock("find"):
        sent, change = rounded(new, torch.bfloat16, held)
        delta = {f"{name}.{suffix}" if suffix else name: one for suffix, one in change.items()}
        files = list(files_of(delta))
    for kind, bodies in (("delta", files), ("whole", list(files_of({name: sent})))):
        with found.clock(f"send_{kind}"):
            for body in bodies:
                sink.send(body)
                found.sent[kind] += sum(map(len, body))
    body = bytearray(b"".join(piece for one in files for piece in one))
    with found.clock("apply"):
        for owner, parts in parted_names(read_file(body)).items():
            if "" in parts:
                held = parts[""]
            else:
                apply_change(held, parts, owner)
    assert torch.equal(held.view(torch.int16), sent.view(torch.int16)), name
    return held


def quantised(
    flow: PrecisionFlow, name: str, master: torch.Tensor, new: torch.Tensor
) -> tuple[str, torch.Tensor, torch.Tensor]:
    """The name of a format, and a matrix in it before and after."""
    site, backend = flow.rollout.site(name.rpartition(".")[0]), backend_of(master.device)
    before, after = (backend.publish(site, one) for one in (master, new))
    assert isinstance(before, QuantTensor | Int8Rows)
    assert isinstance(after, QuantTensor | Int8Rows)
    return "e4m3" if site.forward == "e4m3" else "int8", before.values, after.values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rate", type=float, default=1e-6)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    row, told_at = {}, perf_counter()
    for row in measure(arguments.shape, torch.device(arguments.device), arguments.rate):
        if perf_counter() - told_at > EVERY_S:
            told_at = perf_counter()
            write_json(arguments.out, printed(row))
    print(json_text(row, indent=2))
    write_json(arguments.out, row)


if __name__ == "__main__":
    main()
