"""How long a model folder takes to its first token, and how much of the host's memory.

    python -m benchmarks.loading [--shape qwen3-8b] [--folder DIR] [--precision fp8] [--trainable]
        [--format fp8]

A folder of the shape is written first, where none is there: random weights, in BF16 or in blocks of
FP8, in shards of 5 GB.
What was written is in the system's cache, and stays there where it fits.  Then a fresh process
reads it, publishes it and draws one token.  A JSON line each:

folder     bytes of the files, of the largest of them, and of the largest tensor as it is stored
phase      seconds: ``imports`` from the start of the process, ``weights`` (files to published
           weights on the device), ``first_token`` (the engine made, kernels compiled or found, one
           token drawn), and ``total``
memory     anonymous memory of the host, what no file backs: before the weights, the largest while
           they are read (looked at every millisecond), and what the policy holds on the host
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isobit.models.config import ModelConfig
    from isobit.models.policy import Policy

_SAMPLE_S = 0.001


def write_folder(
    config: "ModelConfig", folder: Path, shard_bytes: int, format: str = "bf16", writers: int = 4
) -> None:
    """Random weights: matrices of some N(0, 0.02), all else ones; with the format ``fp8`` what
    linears read is E4M3 with scales that are powers of two. A shard is drawn by its name, and so
    many are written at a time.
    """
    import torch

    from isobit.models.decoder import checkpoint_shapes
    from isobit.models.quantised_checkpoint import fp8_config
    from isobit.models.safetensors import INDEX_FILE, plan_shards, total_bytes, write_tensors
    from isobit.precision.quant_tensor import num_blocks

    device = "cuda" if torch.cuda.is_available() else "cpu"
    layout: dict[str, torch.Tensor] = {}
    for name, shape in checkpoint_shapes(config).items():
        in_fp8 = format == "fp8" and name.endswith("_proj.weight")
        dtype = torch.float8_e4m3fn if in_fp8 else torch.bfloat16
        layout[name] = torch.empty(shape, dtype=dtype, device="meta")
        if in_fp8:
            blocks = [num_blocks(side) for side in shape]
            layout[f"{name}_scale_inv"] = torch.empty(blocks, device="meta")

    def write(file: str, names: list[str]) -> None:
        generator = torch.Generator(device).manual_seed(int.from_bytes(file.encode()) % (1 << 63))

        def value(name: str) -> torch.Tensor:
            one = layout[name]
            if one.dtype == torch.float32:
                return torch.full(one.shape, 2.0**-12)
            if one.dim() == 1:
                return torch.ones(one.shape, dtype=one.dtype)
            drawn = torch.randn(one.shape, generator=generator, device=device, dtype=torch.bfloat16)
            in_fp8 = one.dtype == torch.float8_e4m3fn
            return drawn.mul_(80.0 if in_fp8 else 0.02).clamp_(-448, 448).to(one.dtype)

        write_tensors(folder / file, {name: layout[name] for name in names}, value)

    folder.mkdir(parents=True, exist_ok=True)
    shards = plan_shards(layout, shard_bytes)
    with ThreadPoolExecutor(writers) as pool:
        list(pool.map(write, shards, shards.values()))
    if len(shards) > 1:
        places = {name: file for file, names in shards.items() for name in names}
        index = {"metadata": {"total_size": total_bytes(layout)}, "weight_map": places}
        (folder / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
    described = config.to_hf()
    if format == "fp8":
        described["quantization_config"] = fp8_config(["lm_head"])
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")


def measure(
    folder: Path, precision: str, trainable: bool, started_at: float
) -> Iterator[dict[str, Any]]:
    """The lines of one process that began at ``started_at`` (``time.time``)."""
    import torch

    from isobit.config.precision import PrecisionConfig
    from isobit.config.rollout import RolloutConfig
    from isobit.models.checkpoint import open_checkpoint
    from isobit.models.folder import load_policy
    from isobit.records.text import Prompt, SamplingParams
    from isobit.rollout.engine import generate
    from isobit.rollout.native import NativeEngine
    from isobit.rollout.requests import Request

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.zeros(1, device=device)  # the device's own start counts as an import
    flow = PrecisionConfig.model_validate(precision)
    tensors = open_checkpoint(folder).values()
    files = {tensor.file.path.stat().st_size for tensor in tensors}
    yield {
        "line": "folder",
        "bytes": sum(tensor.mapped.nbytes for tensor in tensors),
        "largest_file": max(files),
        "largest_tensor": max(tensor.mapped.nbytes for tensor in tensors),
    }
    yield {"line": "phase", "phase": "imports", "seconds": time() - started_at}
    before = anonymous_bytes()
    began = perf_counter()
    with peak_anonymous_bytes() as peak:
        policy = load_policy(folder, flow, device, trainable)
        policy.backend.synchronize()
    yield {"line": "phase", "phase": "weights", "seconds": perf_counter() - began}
    yield {
        "line": "memory",
        "before": before,
        "peak": peak[0],
        "policy": policy_bytes(policy) if device == "cpu" else 0,
    }
    began = perf_counter()
    # A cache of its own size: a test shares the device, and may find no more than that free.
    rollout = RolloutConfig(max_sequences=16, max_batched_tokens=2048, kv_memory_gib=1)
    engine = NativeEngine(policy, rollout, None, seed=0)
    sampling = SamplingParams(max_new_tokens=1, temperature=1.0)
    generate(engine, [Request(Prompt("first", "", (1, 2, 3)), 0, 1, sampling)])
    yield {"line": "phase", "phase": "first_token", "seconds": perf_counter() - began}
    yield {"line": "phase", "phase": "total", "seconds": time() - started_at}


def policy_bytes(policy: "Policy") -> int:
    """The bytes of masters and published tensors, each counted once."""
    from benchmarks.common import published_tensors

    held = {id(master): master.nbytes for master in policy.masters.values()}
    for side in ("rollout", "training"):
        weights = policy.weights(side)
        rope = (weights.rope.cos, weights.rope.sin)
        tensors = (*published_tensors(weights).values(), *rope)
        held |= {id(tensor): tensor.nbytes for tensor in tensors}
    return sum(held.values())


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


@contextmanager
def peak_anonymous_bytes() -> Iterator[list[int]]:
    """The largest of ``anonymous_bytes`` within the block, in a list of one."""
    peak, over = [anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not over.wait(_SAMPLE_S):
            peak[0] = max(peak[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()


def read_in_fresh_process(
    folder: Path, precision: str, trainable: bool
) -> Iterator[dict[str, Any]]:
    """The lines of ``measure``, as they come; raises CalledProcessError where it fails."""
    command = [sys.executable, "-m", __spec__.name, "--read", str(folder)]
    command += ["--precision", precision, "--started-at", repr(time())]
    command += ["--trainable"] * trainable
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603 (ourselves)
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, command)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--precision", default="fp8")
    parser.add_argument("--format", default="bf16", choices=("bf16", "fp8"))
    parser.add_argument("--trainable", action="store_true")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--started-at", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read is not None:
        lines = measure(options.read, options.precision, options.trainable, options.started_at)
    else:
        from isobit.models.safetensors import SHARD_BYTES
        from isobit.models.shapes import model_shape

        folder = options.folder or Path(tempfile.mkdtemp(prefix=f"isobit-{options.shape}-"))
        if not (folder / "config.json").is_file():
            write_folder(model_shape(options.shape), folder, SHARD_BYTES, options.format)
        lines = read_in_fresh_process(folder, options.precision, options.trainable)
    for line in lines:
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
