"""FP8 and BF16 attention on one Hopper GPU: decode in TB/s of KV and scale bytes, prefill in
TFLOP/s (causal), and the copy bandwidth.

    python -m benchmarks.attention [--out benchmarks/results/attention.json]

32 query heads, 8 KV heads of 128, random data, medians, one build of the kernels: the one that
tests/gpu/test_attention.py passes with. Beside them FlashAttention 3 as vLLM has it, in BF16 and in
FP8, where vllm is importable (``attention_peer``).
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from benchmarks.attention_peer import peer_rows
from isobit.kernels.hopper.attention import (
    TILE,
    PackedKeys,
    PagedKeys,
    decode_attention,
    prefill_attention,
)
from isobit.precision.quant_tensor import E4M3

FORMS = ("fp8", "bf16")
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


def random_heads(form: str, *shape: int) -> torch.Tensor:
    return (
        random_e4m3(*shape)
        if form == "fp8"
        else torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    )


def query_scales(form: str, *shape: int) -> torch.Tensor | None:
    return torch.full(shape, 2.0**-8, device="cuda") if form == "fp8" else None


def decode_row(form: str, batch: int, length: int) -> dict[str, object]:
    pages = batch * length // TILE
    table = torch.randperm(pages, device="cuda").int().view(batch, -1)
    keys, values = (
        random_heads(form, pages, KV_HEADS, *page) for page in ((TILE, DIM), (DIM, TILE))
    )
    if form == "fp8":
        paged = PagedKeys(
            keys, random_bytes(pages, KV_HEADS, TILE), values, random_bytes(pages, KV_HEADS, TILE)
        )
    else:
        paged = PagedKeys(keys, None, values.view_as(keys), None)
    queries, scales = random_heads(form, batch, HEADS, DIM), query_scales(form, batch, HEADS)
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    taken = seconds(lambda: decode_attention(queries, scales, paged, table, lengths, length))
    moved = 2 * batch * length * KV_HEADS * (DIM + 1 if form == "fp8" else 2 * DIM)
    return {
        "form": form,
        "decode": [batch, length],
        "us": taken * 1e6,
        "tb_per_s": moved / taken / 1e12,
    }


def prefill_row(form: str, batch: int, length: int) -> dict[str, object]:
    tokens = batch * length
    keys, values = (
        random_heads(form, tokens, KV_HEADS, DIM),
        random_heads(form, tokens, KV_HEADS, DIM),
    )
    if form == "fp8":
        packed = PackedKeys(
            keys, random_bytes(tokens, KV_HEADS), values.half(), random_bytes(tokens, KV_HEADS)
        )
    else:
        packed = PackedKeys(keys, None, values, None)
    queries, scales = random_heads(form, tokens, HEADS, DIM), query_scales(form, tokens, HEADS)
    starts = torch.arange(batch, dtype=torch.int32, device="cuda") * length
    full = torch.full_like(starts, length)
    taken = seconds(
        lambda: prefill_attention(
            queries, scales, packed, starts, full, starts, full, length, length
        )
    )
    flops = 2 * batch * length**2 * HEADS * DIM
    return {
        "form": form,
        "prefill": [batch, length],
        "ms": taken * 1e3,
        "tflop_per_s": flops / taken / 1e12,
    }


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
        {
            "card": card.name,
            "uuid": str(card.uuid),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "copy_tb_per_s": copy,
        }
    ]
    print(json.dumps(rows[0]), flush=True)
    for form in FORMS:
        for work, shapes in ((decode_row, DECODE), (prefill_row, PREFILL)):
            for shape in shapes:
                rows.append(work(form, *shape))
                print(json.dumps(rows[-1]), flush=True)
    for row in peer_rows(
        DECODE, PREFILL, seconds
    ):  # last, since a fault of theirs may leave the card unusable
        rows.append(row)
        print(json.dumps(row), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
