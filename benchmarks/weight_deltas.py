"""Updates of weights as deltas against whole weights: bytes and seconds, master by master, so that
a shape of any size fits.

    python -m benchmarks.weight_deltas [--shape qwen3-8b] [--device cuda] [--rate 1e-6] [--out FILE]

Masters are random (N(0, 0.02), norms 1).  An update moves each number by the learning rate, up or
down, as AdamW's first one does.

    bf16           what ``rollout.engine = "http"`` sends: masters rounded to BF16
    e4m3, int8     the bytes that a publication makes of the linears, without scales, for comparison
    numbers        how many change; of pages of 4 KiB, how many hold one that does
    delta          its bytes (``isobit.models.policy_share``), over those of all

Seconds, in all: ``round`` (to BF16 and to the host), ``find`` (what changed, and its encoding),
``digest`` (of all weights, which each side takes), ``apply`` (read and written into a copy), and
``send_delta`` and ``send_whole`` through a socket of this machine.
"""

import argparse
import json
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch

from benchmarks.common import write_json
from isobit.config.tables import PrecisionConfig, Preset
from isobit.kernels.backend import backend_of
from isobit.models.config import model_shape
from isobit.models.decoder import build_decoder
from isobit.models.policy import random_masters
from isobit.models.policy_share import (
    apply_change,
    change_of,
    digest_of,
    files_of,
    parted_names,
    read_file,
)
from isobit.precision.flow import build_flow
from isobit.precision.quant_tensor import Int8Rows, QuantTensor

PAGE = 4096
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
        """The bytes of a format before and after."""
        before, after = (one.reshape(-1).view(torch.uint8) for one in (old, new))
        width = old.element_size()
        differs = (before != after).view(-1, width).any(1)
        changed, numbers = int(differs.sum()), differs.numel()
        pages = torch.nn.functional.pad(differs, (0, -numbers % (PAGE // width)))
        touched = pages.view(-1, PAGE // width).any(1)
        self.formats.setdefault(name, Counter()).update(
            numbers=numbers,
            changed=changed,
            pages=touched.numel(),
            changed_pages=int(touched.sum()),
            whole_bytes=numbers * width,
            delta_bytes=numbers // 128 + changed * (1 + width),
        )

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def moved(master: torch.Tensor, rate: float, generator: torch.Generator) -> torch.Tensor:
    """A master after an update."""
    up = torch.rand(master.shape, generator=generator, device=master.device) < 0.5
    return master + torch.where(up, rate, -rate)


def measure(shape: str, device: torch.device, rate: float) -> dict[str, Any]:
    config, found, sink = model_shape(shape), Measured(device), Sink()
    decoder, backend = build_decoder(config), backend_of(device)
    described = decoder.masters()
    presets: tuple[Preset, ...] = ("fp8", "int8")
    flows = [build_flow(PrecisionConfig(preset=preset), decoder.shape) for preset in presets]
    generator = torch.Generator(device).manual_seed(1)
    sent: Counter[str] = Counter()
    for name, master in random_masters(config, 0, device):
        new = moved(master, rate, generator)
        held = master.to(torch.bfloat16).cpu()
        rounded = found.timed("round", lambda new=new: new.to(torch.bfloat16).cpu())
        change = found.timed("find", lambda held=held, rounded=rounded: change_of(held, rounded))
        found.count("bf16", held, rounded)
        delta = {f"{name}.{suffix}" if suffix else name: one for suffix, one in change.items()}
        files = found.timed("find", lambda delta=delta: list(files_of(delta)))
        whole = list(files_of({name: rounded}))
        for kind, bodies in (("delta", files), ("whole", whole)):
            found.timed(f"send_{kind}", lambda bodies=bodies: [*map(sink.send, bodies)])
            sent[kind] += sum(len(piece) for body in bodies for piece in body)
        body = bytearray(b"".join(piece for one in files for piece in one))
        with found.clock("apply"):
            for owner, parts in parted_names(read_file(body)).items():
                if "" in parts:
                    held = parts[""]
                else:
                    apply_change(held, parts, owner)
        assert torch.equal(held, rounded), name
        found.timed("digest", lambda name=name, held=held: digest_of({name: held}))
        if described[name].kind == "matrix":
            path = name.rpartition(".")[0]
            for flow in flows:
                site = flow.rollout.site(path)
                before, after = (backend.publish(site, one) for one in (master, new))
                kind = "e4m3" if site.forward == "e4m3" else "int8"
                assert isinstance(before, QuantTensor | Int8Rows)
                assert isinstance(after, QuantTensor | Int8Rows)
                found.count(kind, before.values, after.values)
    formats = {
        name: {
            **counts,
            "changed_share": counts["changed"] / counts["numbers"],
            "changed_pages_share": counts["changed_pages"] / counts["pages"],
            "delta_share": counts["delta_bytes"] / counts["whole_bytes"],
        }
        for name, counts in found.formats.items()
    }
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {
        "shape": shape,
        "device": name,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "rate": rate,
        "sent_delta_bytes": sent["delta"],
        "sent_whole_bytes": sent["whole"],
        "seconds": {name: round(value, 4) for name, value in found.seconds.items()},
        "formats": formats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rate", type=float, default=1e-6)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments.shape, torch.device(arguments.device), arguments.rate)
    print(json.dumps(result, indent=2))
    write_json(arguments.out, result)


if __name__ == "__main__":
    main()
