"""FP8 and BF16 attention on one Hopper GPU: decode in TB/s of KV and scale bytes, prefill in
TFLOP/s (causal), and the copy bandwidth.

    python -m benchmarks.attention [--out benchmarks/results/attention.json]

32 query heads and 8 KV heads of 128, random data, medians, with the kernels that pass
tests/gpu/test_attention.py.

Where vLLM can be imported, FlashAttention 3 is measured beside them as vLLM 0.25 ships and calls
it.  Decode has one query a sequence and a block table of pages of 16 tokens (vLLM's own size) or
128; its schedule is made beforehand, as vLLM makes one for all layers of a step.  Prefill has whole
sequences end to end.  In FP8, Q, K and V are E4M3 with one FP32 scale for each sequence and KV
head, too few to count as bytes.  A case that fails gets a row that says why.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from isobit.kernels.hopper.attention import (
    TILE,
    PackedKeys,
    PagedKeys,
    decode_attention,
    prefill_attention,
)
from isobit.precision.quant_tensor import E4M3

HEADS, KV_HEADS, DIM = 32, 8, 128
PAGES = (16, 128)
PEER_FORMS = {"FA3 BF16": torch.bfloat16, "FA3 FP8": E4M3}
Seconds = Callable[[Callable[[], object]], float]
Row = dict[str, object]


def peer_rows(
    decode: Sequence[tuple[int, int]], prefill: Sequence[tuple[int, int]], seconds: Seconds
) -> Iterator[Row]:
    """A row a case (batch, length) and form, or one row that says why there is none; ``seconds``
    times a call.
    """
    try:
        from vllm import vllm_flash_attn as library  # pyright: ignore[reportMissingImports]

        if reason := library.fa_version_unsupported_reason(3):
            raise RuntimeError(reason)
    except (
        Exception
    ) as error:  # vllm's import may fail in any way: it is another package's set of binaries
        yield {"form": "FA3", "skipped": _said(error)}
        return
    for form, dtype in PEER_FORMS.items():
        for batch, length in decode:
            for page in PAGES:
                row: Row = {"form": form, "decode": [batch, length], "page": page}
                yield row | _guarded(partial(_decode, library, dtype, batch, length, page, seconds))
        for batch, length in prefill:
            row = {"form": form, "prefill": [batch, length]}
            yield row | _guarded(partial(_prefill, library, dtype, batch, length, seconds))


def _decode(
    library: Any, dtype: torch.dtype, batch: int, length: int, page: int, seconds: Seconds
) -> Row:
    pages = batch * length // page
    queries, scales = _random(dtype, batch, HEADS, DIM), _scales(dtype, batch)
    keys, values = (_random(dtype, pages, page, KV_HEADS, DIM) for _ in range(2))
    table = torch.randperm(pages, device="cuda").int().view(batch, -1)
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    schedule = library.get_scheduler_metadata(
        batch_size=batch,
        max_seqlen_q=1,
        max_seqlen_k=length,
        num_heads_q=HEADS,
        num_heads_kv=KV_HEADS,
        headdim=DIM,
        cache_seqlens=lengths,
        qkv_dtype=dtype,
        cu_seqlens_q=starts,
        page_size=page,
        causal=True,
    )
    out = torch.empty((batch, HEADS, DIM), dtype=torch.bfloat16, device="cuda")

    def work() -> object:
        return library.flash_attn_varlen_func(
            queries,
            keys,
            values,
            max_seqlen_q=1,
            cu_seqlens_q=starts,
            max_seqlen_k=length,
            seqused_k=lengths,
            causal=True,
            block_table=table,
            out=out,
            scheduler_metadata=schedule,
            fa_version=3,
            **scales,
        )

    taken = seconds(work)
    moved = 2 * batch * length * KV_HEADS * DIM * dtype.itemsize
    return {"us": taken * 1e6, "tb_per_s": moved / taken / 1e12}


def _prefill(library: Any, dtype: torch.dtype, batch: int, length: int, seconds: Seconds) -> Row:
    tokens = batch * length
    queries, keys, values = (
        _random(dtype, tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    scales = _scales(dtype, batch)
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * length
    out = torch.empty((tokens, HEADS, DIM), dtype=torch.bfloat16, device="cuda")

    def work() -> object:
        return library.flash_attn_varlen_func(
            queries,
            keys,
            values,
            max_seqlen_q=length,
            cu_seqlens_q=starts,
            max_seqlen_k=length,
            cu_seqlens_k=starts,
            causal=True,
            out=out,
            fa_version=3,
            **scales,
        )

    taken = seconds(work)
    return {"ms": taken * 1e3, "tflop_per_s": 2 * batch * length**2 * HEADS * DIM / taken / 1e12}


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    numbers = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    return numbers if dtype == torch.bfloat16 else (numbers * 60).clamp_(-448, 448).to(dtype)


def _scales(dtype: torch.dtype, batch: int) -> dict[str, torch.Tensor]:
    """One number, seen as [batch, KV heads], as vLLM hands it over."""
    if dtype == torch.bfloat16:
        return {}
    scale = torch.tensor(2.0**-6, device="cuda").expand(batch, KV_HEADS)
    return {"q_descale": scale, "k_descale": scale, "v_descale": scale}


def _guarded(work: Callable[[], Row]) -> Row:
    try:
        return work()
    except Exception as error:
        return {"error": _said(error)}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


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
