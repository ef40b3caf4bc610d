"""Bytes of the operands on Hopper (``isobit.kernels.sizes``); needs no Triton.

q(n) = n + n / 32 bytes are n numbers in E4M3 with an FP32 scale for each 128.

    encoded      H D + 4 H + 3 G D + 2 G in E4M3, with V as FP16 copies; or 2 (H + 2 G) D in BF16;
                 and 4 H of log-sum-exps
    attention's  4 H D + 4 G D + 8 H of copies in which every sequence is whole tiles
    backward
    lm_head      6 C T + 4 V rows forward, 6 C T + (6 V + 4 C) rows backward: a part of the logits
                 of about 1 GiB; logits and their gradient of 2 GiB
    score head   6 C T, of a model without lm_head
"""

from collections.abc import Mapping

from isobit.errors import ConfigError
from isobit.kernels.operands import KvShape, kv_formats
from isobit.kernels.sizes import AttentionShape, WorkShape
from isobit.precision.flow import PrecisionFlow, Site
from isobit.precision.formats import BLOCK, DTYPES, Format
from isobit.precision.quant_tensor import block_sizes, num_blocks

page_tokens = 128
batched_tokens = 16384

FORWARD_LOGITS = 1 << 28
BACKWARD_BYTES = 2 << 30
BYTES_A_LOGIT = 6
"""In lm_head's backward: the logit in FP32, and its gradient in BF16."""
_TILE = 128


def forward_rows(vocab_size: int) -> int:
    """Rows of a part of lm_head's forward, about a gigabyte of FP32 logits: whole tiles of the
    GEMM.
    """
    return _rows(FORWARD_LOGITS, vocab_size)


def backward_rows(vocab_size: int) -> int:
    """Rows of a part of lm_head's backward, about 2 GiB."""
    return _rows(BACKWARD_BYTES // BYTES_A_LOGIT, vocab_size)


def page_formats(shape: KvShape, flow: PrecisionFlow) -> tuple[Format, ...]:
    """The format of each layer's pages.  Raises ConfigError for FP32, which attention on a GPU does
    not take.
    """
    formats = kv_formats(shape, flow)
    if "fp32" in formats:
        raise ConfigError("the fp32 flow runs on the CPU: attention on a GPU takes e4m3 and bf16")
    return formats


def page_bytes(shape: KvShape, flow: PrecisionFlow) -> int:
    """See ``Sizes``."""
    vectors = 2 * page_tokens * shape.num_kv_heads
    return sum(
        vectors * (shape.head_dim * DTYPES[format].itemsize + (format == "e4m3"))
        for format in page_formats(shape, flow)
    )


def matrix(site: Site, columns: int) -> int:
    """See ``Sizes``."""
    numbers = sum(site.parts) * columns
    if site.forward != "e4m3":
        return 2 * numbers
    return numbers + 4 * len(block_sizes(site.parts)) * num_blocks(columns)


def head_copy(numbers: int, itemsize: int) -> int:
    """lm_head is multiplied with as it is."""
    return 0


def read(site: Site, numbers: int) -> int:
    """In E4M3 with a scale for 128; or the input itself."""
    return _quantised(numbers) if site.forward == "e4m3" else 0


def saved(site: Site, numbers: int, is_kept: bool = False) -> int:
    """In E4M3 with a scale for 128 tokens; or the input itself."""
    if site.wgrad == "e4m3":
        return _quantised(numbers)
    return 0 if is_kept else 2 * numbers


def gradient(site: Site, numbers: int) -> int:
    """Both copies in E4M3, from one read; or one of them beside the gradient itself.  DGrad's is in
    whole blocks of the parts.
    """
    if site.forward != "e4m3":
        return 2 * numbers
    rows = _quantised(-(-numbers * _whole(site) // sum(site.parts)))
    return rows + (_quantised(numbers) if site.wgrad == "e4m3" else 2 * numbers)


def transposed(site: Site, columns: int) -> int:
    """The matrix's bytes, which FP8 tensor cores want along the contraction, each part in whole
    blocks.
    """
    if site.forward != "e4m3":
        return 0
    return _whole(site) * columns


def encoded(shape: AttentionShape, format: Format) -> int:
    """See above."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sums = 4 * shape.num_heads
    if format != "e4m3":
        return 2 * (queries + 2 * keys) + sums
    return queries + 4 * shape.num_heads + 3 * keys + 2 * shape.num_kv_heads + sums


def attention_gradients(shape: AttentionShape) -> int:
    """See above."""
    numbers = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    return 4 * numbers + 8 * shape.num_heads


def workspaces(shape: WorkShape) -> Mapping[str, int]:
    """See above."""
    hidden, vocabulary, tokens = shape.hidden_size, shape.vocab_size, shape.tokens
    if not vocabulary:
        return {"score head": 6 * hidden * tokens}
    logits = (BYTES_A_LOGIT * vocabulary + 4 * hidden) * min(tokens, backward_rows(vocabulary))
    return {
        "lm_head, forward": 6 * hidden * tokens
        + 4 * vocabulary * min(tokens, forward_rows(vocabulary)),
        "lm_head, backward": 6 * hidden * tokens + logits,
    }


def _rows(logits: int, vocab_size: int) -> int:
    return max(1, logits // vocab_size // _TILE) * _TILE


def _whole(site: Site) -> int:
    """Rows of the matrix, each part in whole blocks."""
    return BLOCK * len(block_sizes(site.parts))


def _quantised(numbers: int) -> int:
    return numbers + 4 * num_blocks(numbers)
