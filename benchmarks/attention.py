"""FP8 attention on one Hopper GPU: decode in TB/s of KV and scale bytes, prefill in TFLOP/s (causal), beside the card's copy bandwidth.

    python benchmarks/attention.py [--out benchmarks/results/attention.json]

32 query heads, 8 KV heads of 128, random data, medians, one build of the kernels: the one that tests/gpu/test_attention.py passes with.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from isobit.kernels.hopper.attention import TILE, PackedKeys, PagedKeys, decode_attention, prefill_attention
from isobit.precision.formats import E4M3

HEADS, KV_HEADS, DIM = 32, 8, 128
DECODE = [(64, 4096), (256, 2048), (16, 32768)]
PREFILL = [(8, 4096), (2, 16384)]


def seconds(work: Callable[[], object]) -> float:
    milliseconds = triton.testing.do_bench(work, warmup=20, rep=50, return_mode="median")
    assert isinstance(milliseconds, float)
    return milliseconds * 1e-3


def random_e4m3(*shape: int) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * 60).clamp(-448, 448).to(E4M3)


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(118, 122, shape, dtype=torch.uint8, device="cuda")


def decode_row(batch: int, length: int) -> dict[str, object]:
    pages = batch * length // TILE
    table = torch.randperm(pages, device="cuda").int().view(batch, -1)
    keys, values = random_e4m3(pages, KV_HEADS, TILE, DIM), random_e4m3(pages, KV_HEADS, DIM, TILE)
    paged = PagedKeys(keys, random_bytes(pages, KV_HEADS, TILE), values, random_bytes(pages, KV_HEADS, TILE))
    queries, scales = random_e4m3(batch, HEADS, DIM), torch.full((batch, HEADS), 2.0**-8, device="cuda")
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    taken = seconds(lambda: decode_attention(queries, scales, paged, table, lengths, length))
    moved = 2 * batch * length * KV_HEADS * (DIM + 1)
    return {"decode": [batch, length], "us": taken * 1e6, "tb_per_s": moved / taken / 1e12}


def prefill_row(batch: int, length: int) -> dict[str, object]:
    tokens = batch * length
    keys, values = random_e4m3(tokens, KV_HEADS, DIM), random_e4m3(tokens, KV_HEADS, DIM).half()
    packed = PackedKeys(keys, random_bytes(tokens, KV_HEADS), values, random_bytes(tokens, KV_HEADS))
    queries, scales = random_e4m3(tokens, HEADS, DIM), torch.full((tokens, HEADS), 2.0**-8, device="cuda")
    starts = torch.arange(batch, dtype=torch.int32, device="cuda") * length
    full = torch.full_like(starts, length)
    taken = seconds(lambda: prefill_attention(queries, scales, packed, starts, full, starts, full, length, length))
    return {"prefill": [batch, length], "ms": taken * 1e3, "tflop_per_s": 2 * batch * length**2 * HEADS * DIM / taken / 1e12}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.numel() / seconds(lambda: target.copy_(source)) / 1e12
    card = torch.cuda.get_device_properties(0)
    rows: list[dict[str, object]] = [
        {"card": card.name, "uuid": str(card.uuid), "torch": torch.__version__, "triton": triton.__version__, "copy_tb_per_s": copy}
    ]
    print(json.dumps(rows[0]), flush=True)
    for work, shapes in ((decode_row, DECODE), (prefill_row, PREFILL)):
        for shape in shapes:
            rows.append(work(*shape))
            print(json.dumps(rows[-1]), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
