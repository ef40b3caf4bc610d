"""Bytes of the operands on Hopper (``isobit.kernels.operands``); needs no Triton.

They are those of every GPU (``isobit.kernels.triton.sizes``), but for products in INT8, whose
kernels are others, and experts of few tokens:

    product      INT8 of 33 to 128 tokens: INT32 sums of up to 8 parts of K, in fewer than twice as
                 many tiles of 64 columns as ``SPLIT_PROGRAMS``
    DGrad        sums of parts of the tiles that are made at once, instead of whole ones
    experts      in the masked layout each has space for all tokens
"""

from isobit.kernels.sizes import ExpertBytes, ExpertsShape
from isobit.kernels.triton import sizes
from isobit.kernels.triton.sizes import (
    MOST_SPLITS,
    SPLIT_PROGRAMS,
    attention_gradients,
    batched_tokens,
    carry_bytes,
    delta,
    encoded,
    expert_bytes,
    head_copy,
    held,
    joined_parts,
    logits_at_once,
    matrix,
    page_bytes,
    page_tokens,
    read,
    saved,
    split_sums,
    workspaces,
)
from isobit.precision.flow import Site

__all__ = [
    "MOST_SPLITS",
    "SPLIT_PROGRAMS",
    "attention_gradients",
    "batched_tokens",
    "carry_bytes",
    "delta",
    "encoded",
    "head_copy",
    "joined_parts",
    "logits_at_once",
    "matrix",
    "page_bytes",
    "page_tokens",
    "read",
    "saved",
    "workspaces",
]

MASKED_TOKENS = 256
"""Up to so many tokens, DeepGEMM's masked kernel is faster; each expert has space for all."""
PROGRAMS = 132  # multiprocessors of a Hopper card
UNSPLIT_ROWS = 32  # up to which an INT8 product reads K in one part
MOST_SPLIT_ROWS = 128  # beyond which it does so again
_SUMS = 2 * PROGRAMS * 4 * 128**2


def gradient(site: Site, numbers: int, inputs: int) -> int:
    """What is held, and both sides transposed, which WGrad in INT8 makes."""
    return held(site, numbers) + (numbers + inputs if site.wgrad == "int8" else 0)


def transposed(site: Site, columns: int) -> int:
    """The turned matrix and, in INT8, the sums of parts of the tiles that are made at once."""
    return sizes.transposed(site, columns) + (_SUMS if site.dgrad == "int8" else 0)


def experts(shape: ExpertsShape, gate_up: Site, down: Site) -> ExpertBytes:
    return expert_bytes(shape, gate_up, down, gradient, transposed, MASKED_TOKENS)


def product_sums(site: Site, tokens: int) -> int:
    """INT32 sums of the parts of K in INT8, where few tokens leave multiprocessors idle."""
    return split_sums(site, tokens) if UNSPLIT_ROWS < tokens <= MOST_SPLIT_ROWS else 0
