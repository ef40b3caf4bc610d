"""FlashAttention 3 as vLLM 0.25 ships and calls it, for ``benchmarks.attention``: the same
shapes, BF16 and FP8.

    decode     one query a sequence over pages in BF16 or E4M3, through a block table; the schedule
               is made beforehand, as vLLM makes one for all layers of a step; pages of 16 tokens,
               which is vLLM's own size, and of 128
    prefill    whole sequences laid end to end, causal

FP8 is Q, K and V in E4M3 with one FP32 scale a sequence and KV head, and BF16 output.  Bytes and
FLOPs are counted as for our kernels; its scales are too few to count.  A case that fails gets a row
that says why, and the next one is measured.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from isobit.precision.quant_tensor import E4M3

HEADS, KV_HEADS, DIM = 32, 8, 128
PAGES = (16, 128)
FORMS = {"FA3 BF16": torch.bfloat16, "FA3 FP8": E4M3}
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
    for form, dtype in FORMS.items():
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
