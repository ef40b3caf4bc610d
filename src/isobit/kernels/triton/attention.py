"""Batch-invariant attention on every card since Ampere: decode over pages, prefill and training
over packed sequences.

The kernels have an E4M3, an INT8 and a BF16 form.  c = log2(e) / sqrt(D), M the running maximum of
s; a masked key has s = -inf:

    E4M3    s_j = (q . k_j) s_k (s_q c) + log2(s_v)    8-bit MMA, then one product and one fma in
            p_j = 2^(s_j - M)                          FP32
            l   = sum_j p_j / s_v                      FP32, along a fixed tree over the key index
            o   = sum_j FP16(p_j) FP16(v_j) / l        FP16 MMA; E4M3 -> FP16 is exact
    INT8    the same with an INT8 MMA, whose INT32 sums are exact in FP32, and with FP32 scales, of
            which log2(s_v) and 1 / s_v are rounded
    BF16    s_j = (q . k_j) c
            p_j = 2^fma(q . k_j, c, -M)
            l   = sum_j p_j
            o   = sum_j BF16(p_j) v_j / l

in tiles of keys.  The keys are cut into parts of 2048 at fixed positions.  A part starts from
nothing; parts are joined in ascending order:

    M' = max(M, m)    O' = o 2^(m - M') + O 2^(M - M')    L' = l 2^(m - M') + L 2^(M - M')

Decode runs up to ``MOST_APART`` parts in parallel and joins them in a second kernel; more of them,
and prefill's, come one after the other.  All do the same operations on the same numbers, because

  - Tiles and parts start at multiples of their size from the sequence's position 0.
  - A product's bits depend on the instruction and on the order of its inner sum only, which are the
    same with keys on the M side (decode: 16 queries fill the N side) as with queries there
    (prefill: P stays in registers).
  - Everything between the two products is one function, ``_weigh``: `max` has no order; the sums
    add two numbers at a time along a fixed tree (``_partial_sums``, ``_final_sum``) in any layout.
  - With ``enable_fp_fusion=False`` and explicit fma, the compiler cannot contract a multiplication
    and an addition in one kernel only.

A ``Build`` has the tiles of a generation.  The tile of keys belongs to the bits, so those of two
builds may differ; within one it depends on the format and the head size alone.

``PORTABLE`` is for ``mma.sync``, whose steps of K are 16 numbers, and takes at most 99 KiB of
shared memory.  Which 16 keys a step has is Triton's choice: it gives a thread four neighbours where
it sees that an operand was loaded in 8 bits, and two otherwise.  Prefill's P comes from registers
and its V is FP16, so V of decode is sealed against that look.  E4M3 is bytes
(``isobit.kernels.triton.e4m3``), multiplied as FP16: 2^-16 of q . k, which c takes back.  There
only the scale of a vector tells that it is NaN.

With a sliding window w a query at position p sees the keys p - w + 1 .. p.  A program begins with
the tile of the first key that its queries see, and earlier parts are skipped.  A query that has
seen no key yet has M = -inf, L = O = 0, which tiles of masked keys do not change: so prefill, whose
queries share tiles, and decode agree.

The sink of a head (``isobit.kernels.spec.attention``), a score z whose probability goes to no
value, comes behind all parts, where o is divided by l:

    M' = max(M, z log2(e))    l' = l 2^(M - M') + 2^(z log2(e) - M')    o' = o 2^(M - M') / l'

A NaN in K or V reaches the output of every query that sees it.  One in V also reaches the earlier
queries of its tile, since the weight of a masked key is multiplied too: beyond a sequence's length
pages may hold any finite numbers, and scales of zero.

Layouts.  Pages of 128 tokens: K [page, G, token, D]; V [page, G, D, token], transposed, because a
tile of 8 bits cannot be transposed on its way to the tensor cores; scales [page, G, token], E8M0
bytes in the E4M3 form and FP32 in the INT8 form.  Packed: K [T, G, D], V [T, G, D] as FP16 copies
of the 8-bit values, scales [T, G].  In the BF16 form K and V are both [page, G, token, D] or [T, G,
D], without scales.  Kernels count D to WIDTH, a power of two, with zeros.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from isobit.kernels.triton.e4m3 import PRODUCT_SCALE
from isobit.kernels.triton.heads import PART_TOKENS, heads_problem
from isobit.precision.quant_tensor import E4M3

PART = PART_TOKENS
"""Keys of a part."""
SCALES = {E4M3: torch.uint8, torch.int8: torch.float32}
"""The dtype of the scales of K and V, by that of K."""


@dataclass(frozen=True, slots=True)
class Form:
    """The build of the kernels for a format and a head size.  All but the tile affects only the
    time, as long as one instruction multiplies in decode and in prefill.
    """

    tile: int  # keys; divides a page
    decode_stages: int
    decode_registers: int | None
    """The most a thread may have, so that several programs fit a multiprocessor."""
    queries: int  # of one prefill program
    prefill_warps: int
    prefill_stages: int
    decode_warps: int = 4
    few_stages: int | None = None
    """Those of decode, if they are others, where each program has a multiprocessor to itself."""


@dataclass(frozen=True, slots=True)
class Build:
    """The kernels of a generation of cards."""

    form: Callable[[torch.dtype, int], Form]
    """Gives the form for the dtype of K and a head size."""
    is_portable: bool
    """Products are by ``mma.sync``, and E4M3 is bytes."""


@dataclass(frozen=True, slots=True)
class PagedKeys:
    """K and V pages of one layer (layouts above); without scales in the BF16 form."""

    keys: torch.Tensor
    key_scales: torch.Tensor | None
    values: torch.Tensor
    value_scales: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PackedKeys:
    """K and V of packed sequences (layouts above); without scales in the BF16 form."""

    keys: torch.Tensor
    key_scales: torch.Tensor | None
    values: torch.Tensor
    value_scales: torch.Tensor | None


def _portable(dtype: torch.dtype, dim: int) -> Form:
    """Tiles that every card since Ampere has the shared memory for, and registers where possible:
    the tensor cores take Q and the sums of a head from registers.  Tiles of 128 keys of INT8 spill
    some in prefill, which takes 1.18 of the time, and leave decode 0.6 to 0.7 of its own.
    """
    if dim > 128:
        return Form(
            tile=64, decode_stages=2, decode_registers=None, queries=32, prefill_warps=8,
            prefill_stages=2,
        )  # fmt: skip
    is_narrow = dim <= 64
    if dtype == torch.int8:
        return Form(
            tile=128, decode_stages=4, decode_registers=None, queries=128 if is_narrow else 64,
            prefill_warps=8 if is_narrow else 4, prefill_stages=2,
        )  # fmt: skip
    few_warps = dtype == torch.bfloat16 and not is_narrow
    return Form(
        tile=64, decode_stages=6 if dtype == E4M3 else 2 if few_warps else 3,
        decode_registers=None, queries=64 if is_narrow else 128,
        prefill_warps=4 if is_narrow else 8, prefill_stages=3 if dim == 64 else 2,
        decode_warps=2 if few_warps else 4,
    )  # fmt: skip


PORTABLE = Build(_portable, is_portable=True)


def checked(
    queries: torch.Tensor,
    query_scales: torch.Tensor | None,
    keys: PagedKeys | PackedKeys,
    build: Build,
) -> Form:
    """The form of these tensors; ValueError where there is none."""
    scale = SCALES.get(queries.dtype)
    wanted = [None if scale is None else torch.float32, scale, scale]
    scales = query_scales, keys.key_scales, keys.value_scales
    if [None if x is None else x.dtype for x in scales] != wanted or (
        keys.keys.dtype != queries.dtype
    ):
        raise ValueError(
            f"queries of {queries.dtype} over keys of {keys.keys.dtype}: attention on a GPU takes "
            "E4M3 with scales and bytes, INT8 with FP32 scales, or BF16 without"
        )
    _, heads, dim = queries.shape
    problem = heads_problem(heads, keys.keys.shape[1], dim)
    if problem is not None:
        raise ValueError(problem)
    return build.form(queries.dtype, dim)


def as_read(build: Build, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], float]:
    """Q, K and V as the kernels read them, and c, which takes back what bytes are too small by."""
    c = math.log2(math.e) / tensors[0].shape[-1] ** 0.5
    if not build.is_portable or tensors[0].dtype != E4M3:
        return list(tensors), c
    read = [x.view(torch.uint8) if x.dtype == E4M3 else x for x in tensors]
    return read, c * PRODUCT_SCALE.value
