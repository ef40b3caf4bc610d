"""The backward of attention on one Hopper GPU, in TFLOP/s (causal, 5 products), beside PyTorch's
flash backward made deterministic.

    python -m benchmarks.attention_backward [--out benchmarks/results/attention_backward.json]

32 query heads, 8 KV heads of 128, random data, medians.  Ours is timed whole: delta, the
dequantised copies and both kernels.  PyTorch's takes K and V with the query heads already repeated,
and leaves their gradients apart.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import Row, card_row, make_parser, printed, write_json
from benchmarks.common import seconds as median_seconds
from isobit.kernels.hopper.attention import prefill_attention
from isobit.kernels.hopper.attention_backward import attention_backward
from isobit.kernels.triton.attention import PackedKeys
from isobit.precision.quant_tensor import E4M3

HEADS, KV_HEADS, DIM = 32, 8, 128
SHAPES = [(4, 4096), (1, 16384)]
PRODUCTS = {"_keys_kernel": 4, "_queries_kernel": 3, "_prepare_kernel": 0}
PROFILED = 10


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


def seconds(work: Callable[[], object]) -> float:
    return median_seconds(work, repeats_ms=100)


def backward_row(form: str, batch: int, length: int) -> Row:
    tokens = batch * length

    def normal(heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, DIM, device="cuda", dtype=torch.bfloat16)

    queries, keys, values, d_output = map(normal, (HEADS, KV_HEADS, KV_HEADS, HEADS))
    scales, packed = None, PackedKeys(keys, None, values, None)
    if form == "fp8":
        queries = (queries * 64).to(E4M3)
        scales = torch.full((tokens, HEADS), 2.0**-6, device="cuda")
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

    row = _row(form, batch, length, seconds(work))
    return row | kernel_rows(work, batch * length**2 * HEADS * DIM)


def _row(form: str, batch: int, length: int, taken: float) -> Row:
    rate = 5 * batch * length**2 * HEADS * DIM / taken / 1e12
    return {"form": form, "backward": [batch, length], "ms": taken * 1e3, "tflop_per_s": rate}


def flash_row(batch: int, length: int) -> Row:
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
    return _row("torch flash, deterministic", batch, length, taken)


def rows() -> Iterator[Row]:
    yield card_row()
    for shape in SHAPES:
        yield backward_row("fp8", *shape)
        yield backward_row("bf16", *shape)
        yield flash_row(*shape)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    write_json(arguments.out, list(map(printed, rows())))


if __name__ == "__main__":
    main()
