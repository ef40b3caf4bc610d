"""FP8 and BF16 attention on one Hopper GPU: decode in TB/s of KV and scale bytes, prefill in
TFLOP/s (causal), and the copy bandwidth.

    python -m benchmarks.attention [--out benchmarks/results/attention.json]

32 query heads and 8 KV heads of 128, random data, medians, with the kernels that pass
tests/gpu/test_attention.py.

Where vLLM can be imported, its FlashAttention 3 is measured too, called as vLLM 0.25 calls it.
Decode has one query per sequence and a block table of pages of 16 tokens (vLLM's own size) or 128;
its schedule is made beforehand, as vLLM makes one for all layers of a step.  Prefill has whole
sequences end to end.  In FP8, Q, K and V are E4M3 with one FP32 scale for each sequence and KV
head, too few to count as bytes.  A case that fails gets a row that says why.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import (
    Row,
    card_row,
    copy_tb_per_s,
    make_parser,
    printed,
    seconds,
    write_json,
)
from isobit.kernels.hopper.attention import decode_attention, prefill_attention
from isobit.kernels.triton.attention import PackedKeys, PagedKeys
from isobit.kernels.triton.heads import PAGE_TOKENS
from isobit.precision.quant_tensor import E4M3

FORMS = {"fp8": E4M3, "bf16": torch.bfloat16}
HEADS, KV_HEADS, DIM = 32, 8, 128
DECODE = [(64, 4096), (256, 2048), (16, 32768)]
PREFILL = [(8, 4096), (2, 16384)]
PAGES = (16, 128)


def peer_rows() -> Iterator[Row]:
    """A row for each case and form of FlashAttention 3, or one row that says why there is none."""
    try:
        from vllm import vllm_flash_attn as library  # pyright: ignore[reportMissingImports]

        if reason := library.fa_version_unsupported_reason(3):
            raise RuntimeError(reason)
    except Exception as error:  # the import of another package's binaries may fail in any way
        yield {"form": "FA3", "skipped": _text(error)}
        return
    for form in reversed(FORMS):
        name = f"FA3 {form.upper()}"
        for shape in DECODE:
            for page in PAGES:
                work = partial(_peer_decode, library, form, *shape, page)
                yield {"form": name, "decode": list(shape), "page": page} | _guarded(work)
        for shape in PREFILL:
            work = partial(_peer_prefill, library, form, *shape)
            yield {"form": name, "prefill": list(shape)} | _guarded(work)


def _peer_decode(library: Any, form: str, batch: int, length: int, page: int) -> Row:
    pages, dtype = batch * length // page, FORMS[form]
    queries = random_heads(form, batch, HEADS, DIM)
    keys, values = (random_heads(form, pages, page, KV_HEADS, DIM) for _ in range(2))
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
    work = partial(
        library.flash_attn_varlen_func,
        queries,
        keys,
        values,
        max_seqlen_q=1,
        cu_seqlens_q=starts,
        max_seqlen_k=length,
        seqused_k=lengths,
        block_table=table,
        scheduler_metadata=schedule,
        **_peer_options(form, batch, queries),
    )
    return _decode_rate(work, 2 * batch * length * KV_HEADS * DIM * dtype.itemsize)


def _peer_prefill(library: Any, form: str, batch: int, length: int) -> Row:
    heads = (HEADS, KV_HEADS, KV_HEADS)
    queries, keys, values = (random_heads(form, batch * length, n, DIM) for n in heads)
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * length
    work = partial(
        library.flash_attn_varlen_func,
        queries,
        keys,
        values,
        max_seqlen_q=length,
        cu_seqlens_q=starts,
        max_seqlen_k=length,
        cu_seqlens_k=starts,
        **_peer_options(form, batch, queries),
    )
    return _prefill_rate(work, batch, length)


def _peer_options(form: str, batch: int, queries: torch.Tensor) -> dict[str, Any]:
    """The output, and the scales: one number, expanded to [batch, KV heads], as vLLM passes it."""
    out = torch.empty(queries.shape, dtype=torch.bfloat16, device="cuda")
    options: dict[str, Any] = {"causal": True, "out": out, "fa_version": 3}
    if form == "fp8":
        scale = torch.tensor(2.0**-6, device="cuda").expand(batch, KV_HEADS)
        options |= {"q_descale": scale, "k_descale": scale, "v_descale": scale}
    return options


def _guarded(work: Callable[[], Row]) -> Row:
    try:
        return work()
    except Exception as error:
        return {"error": _text(error)}


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _decode_rate(work: Callable[[], object], moved: int) -> Row:
    taken = seconds(work)
    return {"us": taken * 1e6, "tb_per_s": moved / taken / 1e12}


def _prefill_rate(work: Callable[[], object], batch: int, length: int) -> Row:
    taken = seconds(work)
    return {"ms": taken * 1e3, "tflop_per_s": 2 * batch * length**2 * HEADS * DIM / taken / 1e12}


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(118, 122, shape, dtype=torch.uint8, device="cuda")


def random_heads(form: str, *shape: int) -> torch.Tensor:
    if form == "bf16":
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    return (torch.randn(shape, device="cuda") * 60).clamp(-448, 448).to(E4M3)


def query_scales(form: str, *shape: int) -> torch.Tensor | None:
    return torch.full(shape, 2.0**-8, device="cuda") if form == "fp8" else None


def decode_row(form: str, batch: int, length: int) -> Row:
    pages = batch * length // PAGE_TOKENS
    table = torch.randperm(pages, device="cuda").int().view(batch, -1)
    keys, values = (
        random_heads(form, pages, KV_HEADS, *page)
        for page in ((PAGE_TOKENS, DIM), (DIM, PAGE_TOKENS))
    )
    if form == "fp8":
        scales = [random_bytes(pages, KV_HEADS, PAGE_TOKENS) for _ in range(2)]
        paged = PagedKeys(keys, scales[0], values, scales[1])
    else:
        paged = PagedKeys(keys, None, values.view_as(keys), None)
    queries, scales = random_heads(form, batch, HEADS, DIM), query_scales(form, batch, HEADS)
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    moved = 2 * batch * length * KV_HEADS * (DIM + 1 if form == "fp8" else 2 * DIM)

    def work() -> object:
        return decode_attention(queries, scales, paged, table, lengths, length)

    return {"form": form, "decode": [batch, length]} | _decode_rate(work, moved)


def prefill_row(form: str, batch: int, length: int) -> Row:
    tokens = batch * length
    keys, values = (random_heads(form, tokens, KV_HEADS, DIM) for _ in range(2))
    packed = PackedKeys(keys, None, values, None)
    if form == "fp8":
        k_bytes, v_bytes = (random_bytes(tokens, KV_HEADS) for _ in range(2))
        packed = PackedKeys(keys, k_bytes, values.half(), v_bytes)
    queries, scales = random_heads(form, tokens, HEADS, DIM), query_scales(form, tokens, HEADS)
    starts = torch.arange(batch, dtype=torch.int32, device="cuda") * length
    full = torch.full_like(starts, length)

    def work() -> object:
        return prefill_attention(
            queries, scales, packed, starts, full, starts, full, length, length
        )

    return {"form": form, "prefill": [batch, length]} | _prefill_rate(work, batch, length)


def rows() -> Iterator[Row]:
    yield card_row() | {"copy_tb_per_s": copy_tb_per_s()}
    for form in FORMS:
        yield from (decode_row(form, *shape) for shape in DECODE)
        yield from (prefill_row(form, *shape) for shape in PREFILL)
    yield from peer_rows()  # last, since a fault of theirs may leave the card unusable


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    write_json(arguments.out, list(map(printed, rows())))


if __name__ == "__main__":
    main()
