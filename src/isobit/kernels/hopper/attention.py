"""The forward of attention on Hopper: the kernels of ``isobit.kernels.triton.attention`` in tiles
for its shared memory and for ``wgmma``.

A product's bits depend on the order of its inner sum only, and wgmma's is the same with keys on the
M side (decode: 16 queries fill the N side) as with queries there (prefill: P stays in registers).
Both need at least 64 rows, or Triton takes another instruction.  In 8 bits a tile is a page, but of
heads of 256, whose sums of 64 queries are kept by two warpgroups.

Measured on one H200 (32 query heads, 8 KV heads of 128): benchmarks/results/attention.json.
"""

from functools import partial

import torch

from isobit.kernels.triton import attention_decode, attention_prefill
from isobit.kernels.triton.attention import Build, Form
from isobit.precision.quant_tensor import E4M3

_BITS8 = Form(
    tile=128, decode_stages=3, decode_registers=128, queries=64, prefill_warps=4, prefill_stages=2,
    few_stages=5,
)  # fmt: skip
_BF16 = Form(
    tile=64, decode_stages=5, decode_registers=None, queries=128, prefill_warps=8, prefill_stages=3
)
_WIDE = Form(
    tile=64, decode_stages=3, decode_registers=None, queries=64, prefill_warps=8, prefill_stages=2
)


def form(dtype: torch.dtype, dim: int) -> Form:
    """The form for the dtype of K and a head size."""
    if dim > 128:
        return _WIDE
    return _BITS8 if dtype in (E4M3, torch.int8) else _BF16


HOPPER = Build(form, is_portable=False)
decode_attention = partial(attention_decode.decode_attention, build=HOPPER)
prefill_attention = partial(attention_prefill.prefill_attention, build=HOPPER)
