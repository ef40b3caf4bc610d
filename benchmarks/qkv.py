"""Microseconds of what lies between the qkv GEMM and attention in ``fp8``, forward into pages and
packed, and backward (``isobit.kernels.hopper.qkv``, ``qkv_backward``), on a Hopper GPU.

    python -m benchmarks.qkv [--plain]        # --plain: without the Hadamard matrix

Decoding batches have a page each, so their K and V go to places far apart, as in an engine.
"""

import argparse
import json
from collections.abc import Callable

import torch
import triton.testing

from isobit.kernels.hopper.attention import TILE, PagedKeys
from isobit.kernels.hopper.qkv import encode_packed, encode_paged
from isobit.kernels.hopper.qkv_backward import qkv_backward
from isobit.kernels.operands import QkvGradients, QkvTransform, RopeTable
from isobit.precision.quant_tensor import E4M3

LAYOUTS = {"qwen3-8b": (32, 8, 128, True), "smollm2-135m": (9, 3, 64, False)}
"""Heads of Q, of K, their size, and whether they have norms."""
TOKENS = (32, 128, 256, 1024, 16_384)
MOST_DECODED = 1024
POSITIONS = 4096


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--plain", action="store_true")
    return parser


def make_pages(count: int, keys: int, dim: int) -> PagedKeys:
    values = torch.zeros(2, count, keys, TILE * dim, dtype=torch.uint8, device="cuda").unbind()
    scales = torch.zeros(2, count, keys, TILE, dtype=torch.uint8, device="cuda").unbind()
    return PagedKeys(
        values[0].view(count, keys, TILE, dim).view(E4M3),
        scales[0],
        values[1].view(count, keys, dim, TILE).view(E4M3),
        scales[1],
    )


def measure(layout: tuple[int, int, int, bool], tokens: int, hadamard: bool) -> dict[str, float]:
    heads, keys, dim, has_norms = layout
    frequencies = 10000.0 ** -(torch.arange(dim // 2, dtype=torch.float64) / (dim // 2))
    rope = RopeTable.build(frequencies, POSITIONS).to(torch.device("cuda"))
    q_norm, k_norm = (torch.randn(dim).bfloat16().cuda() if has_norms else None for _ in range(2))
    transform = QkvTransform(
        heads, keys, dim, rope.cos, rope.sin, 1e-6, q_norm, k_norm, None, hadamard=hadamard
    )
    qkv = torch.randn(tokens, (heads + 2 * keys) * dim).bfloat16().cuda()
    rows = torch.arange(tokens).cuda()
    positions, is_decoding = rows % POSITIONS, tokens <= MOST_DECODED
    slots = rows * TILE if is_decoding else rows
    pages = make_pages(tokens if is_decoding else -(-tokens // TILE), keys, dim)
    counts = (heads, keys, keys)
    dq, dk, dv = (torch.randn(tokens, count, dim).bfloat16().cuda() for count in counts)
    q_sum, k_sum = (torch.zeros(dim).cuda() if has_norms else None for _ in range(2))
    grads = QkvGradients(q_sum, k_sum, None)
    calls = {
        "paged": lambda: encode_paged(qkv, transform, positions, slots, pages),
        "packed": lambda: encode_packed(qkv, transform, positions, "e4m3"),
        "backward": lambda: qkv_backward(dq, dk, dv, qkv, transform, positions, grads),
    }
    return {name: microseconds(call) for name, call in calls.items()}


def microseconds(call: Callable[[], object]) -> float:
    """The mean of replays of a CUDA graph."""
    milliseconds = triton.testing.do_bench_cudagraph(call, rep=50)
    assert isinstance(milliseconds, float)
    return round(1e3 * milliseconds, 2)


def main() -> None:
    hadamard = not make_parser().parse_args().plain
    card = torch.cuda.get_device_name()
    for name, layout in LAYOUTS.items():
        for tokens in TOKENS:
            row = {"card": card, "shape": name, "tokens": tokens, "hadamard": hadamard}
            print(json.dumps(row | {"us": measure(layout, tokens, hadamard)}), flush=True)


if __name__ == "__main__":
    main()
