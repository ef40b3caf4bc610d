"""The backward of attention on one Hopper GPU, in TFLOP/s (causal, 5 products), beside PyTorch's
flash backward made deterministic.

    python -m benchmarks.attention_backward [--out benchmarks/results/attention_backward.json]

32 query heads, 8 KV heads of 128, random data, medians.  Ours is timed whole: delta, the
dequantised copies and both kernels.  PyTorch's takes K and V with the query heads already repeated,
and leaves their gradients apart.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch.profiler import ProfilerActivity, profile

from isobit.kernels.hopper.attention import PackedKeys, prefill_attention
from isobit.kernels.hopper.attention_backward import attention_backward
from isobit.precision.quant_tensor import E4M3

HEADS, KV_HEADS, DIM = 32, 8, 128
SHAPES = [(4, 4096), (1, 16384)]
PRODUCTS = {"_keys_kernel": 4, "_queries_kernel": 3, "_prepare_kernel": 0}
PROFILED = 10


def seconds(work: Callable[[], object]) -> float:
    milliseconds = triton.testing.do_bench(work, warmup=20, rep=100, return_mode="median")
    assert isinstance(milliseconds, float)
    return milliseconds * 1e-3


def kernel_rows(work: Callable[[], object], product: float) -> dict[str, dict[str, float]]:
    """Mean milliseconds of each kernel, and the rate of the products that it really computes, of
    ``product`` FLOPs each.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(PROFILED):
            work()
        torch.cuda.synchronize()
    taken = {
        event.key: event.self_device_time_total / PROFILED * 1e-6
        for event in recorded.key_averages()
    }
    return {
        name: {"ms": taken[name] * 1e3, "tflop_per_s": products * product / taken[name] / 1e12}
        for name, products in PRODUCTS.items()
    }


def backward_row(form: str, batch: int, length: int) -> dict[str, object]:
    tokens = batch * length

    def normal(heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, DIM, device="cuda", dtype=torch.bfloat16)

    queries, keys, values, d_output = (
        normal(HEADS),
        normal(KV_HEADS),
        normal(KV_HEADS),
        normal(HEADS),
    )
    scales, packed = None, PackedKeys(keys, None, values, None)
    if form == "fp8":
        queries, scales = (
            (queries * 64).to(E4M3),
            torch.full((tokens, HEADS), 2.0**-6, device="cuda"),
        )
        byte = torch.full((tokens, KV_HEADS), 127 - 6, dtype=torch.uint8, device="cuda")
        packed = PackedKeys((keys * 64).to(E4M3), byte, (values * 64).to(E4M3).half(), byte)
    starts = torch.arange(batch, dtype=torch.int32, device="cuda") * length
    lengths = torch.full_like(starts, length)
    output, lse = prefill_attention(
        queries, scales, packed, starts, lengths, starts, lengths, length, length
    )

    def work() -> object:
        return attention_backward(
            queries, scales, packed, output, lse, d_output, starts, lengths, length
        )

    product = batch * length**2 * HEADS * DIM
    taken = seconds(work)
    row: dict[str, object] = {
        "form": form,
        "backward": [batch, length],
        "ms": taken * 1e3,
        "tflop_per_s": 5 * product / taken / 1e12,
    }
    return row | kernel_rows(work, product)


def flash_row(batch: int, length: int) -> dict[str, object]:
    q, k, v, d_output = (
        torch.randn(batch, HEADS, length, DIM, device="cuda", dtype=torch.bfloat16)
        for _ in range(4)
    )
    output, lse, start_q, start_k, longest_q, longest_k, seed, offset, _ = (
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    )
    saved = output, lse, start_q, start_k, longest_q, longest_k, 0.0, True, seed, offset
    torch.use_deterministic_algorithms(True)
    taken = seconds(
        lambda: torch.ops.aten._scaled_dot_product_flash_attention_backward(
            d_output, q, k, v, *saved
        )
    )
    torch.use_deterministic_algorithms(False)
    flops = 5 * batch * length**2 * HEADS * DIM
    return {
        "form": "torch flash, deterministic",
        "backward": [batch, length],
        "ms": taken * 1e3,
        "tflop_per_s": flops / taken / 1e12,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    card = torch.cuda.get_device_properties(0)
    rows: list[dict[str, object]] = [
        {
            "card": card.name,
            "uuid": str(card.uuid),
            "torch": torch.__version__,
            "triton": triton.__version__,
        }
    ]
    for shape in SHAPES:
        rows += [backward_row("fp8", *shape), backward_row("bf16", *shape), flash_row(*shape)]
    for row in rows:
        print(json.dumps(row), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
