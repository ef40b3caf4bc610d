"""Bytes of the operands on a GPU (``isobit.kernels.operands``); needs no Triton.

q(n) = n + n / 32 bytes are n numbers in E4M3 with an FP32 scale for each 128; an INT8 matrix has n
and 4 a row.

    encoded      H D + 4 H + 3 G D + 2 G in E4M3, or 8 G in INT8, with V as FP16 copies; or
                 2 (H + 2 G) D in BF16; and 4 H of log-sum-exps
    attention's  4 H R + 4 G R + 8 H of copies in which every sequence is whole tiles, and
    backward     8 H + 4 G of scales in INT8; R is D, or the next power of two
    joined       4 H (D + 2) of each part of the keys of all sequences, up to 4,096
    parts
    product      INT8 of 33 to 64 tokens: INT32 sums of up to 8 parts of K, in fewer than twice as
                 many tiles of 64 columns as keep cards busy
    lm_head      2 C T + 4 V rows scoring, 6 C T + 4 V rows forward, 6 C T + (6 V + 4 C) rows
                 backward: a part of the logits of about 1 GiB; logits and their gradient of 2 GiB
    score head   6 C T, of a model without lm_head
    delta rule   a token: q, k, v, decay and beta in FP32; in the backward their gradients, of each
                 value head, and those of the convolution's output.  Once: factors of the chains of
                 u and o of some chunks, and as many chunks' G and u, however many tokens there are;
                 in the backward what is made of 32 chunks, and sums of the convolution's gradient
                 by blocks of tokens
    experts      rows of k choices a token and 127 more an expert, each like a token of the dense
                 linears; the transposed matrices of all experts of one linear
"""

from collections.abc import Callable, Mapping

from isobit.kernels.operands import (
    DELTA_CHUNK,
    LOGITS_CHUNK,
    DeltaShape,
    KvShape,
    kv_formats,
)
from isobit.kernels.sizes import (
    AttentionShape,
    DeltaBytes,
    ExpertBytes,
    ExpertsShape,
    WorkShape,
    delta_carry_bytes,
)
from isobit.kernels.triton.heads import MOST_APART, PAGE_TOKENS, PART_TOKENS
from isobit.precision.flow import PrecisionFlow, Site
from isobit.precision.quant_tensor import (
    BLOCK,
    DTYPES,
    EIGHT_BITS,
    Format,
    block_sizes,
    num_blocks,
)
from isobit.util.errors import ConfigError

page_tokens = PAGE_TOKENS
batched_tokens = 16384
logits_at_once = 1 << 26

FORWARD_LOGITS = 1 << 28
BACKWARD_BYTES = 2 << 30
BYTES_A_LOGIT = 6  # in lm_head's backward: the logit in FP32, and its gradient in BF16
_LABELS = 12
"""Bytes of an expert's row: its place and its expert, and the counts of a block of tokens."""
_SCALES = 1024  # a lower bound for the bytes of a transposed matrix to one of its scales
FACTORS = 1 << 24
"""FP32 factors of the delta rule's chains that exist at once; more where one chunk has more."""
DELTA_CHUNKS = 32  # that the backward of the delta rule takes at once
DELTA_TOKENS = 256  # of a sum of its convolution's gradient
HEAD_ROWS = 64  # the fastest products take lm_head's rows in whole tiles of so many
_TILE = 128
SPLIT_ROWS = 33, 64  # of an INT8 product that reads K in parts, the fewest and the most
MOST_SPLITS = 8  # parts of K,
SPLIT_PROGRAMS = 96  # until so many programs, which keep most cards busy, have 64 columns each
_SCORED = 48  # ids, positions and figures of a token
_SCALE: dict[Format, int] = {"e4m3": 1, "int8": 4}
"""Bytes of the scale of a vector of K or V."""


def forward_rows(vocab_size: int) -> int:
    """Rows of a part of lm_head's forward, whole tiles of about a gigabyte of FP32 logits."""
    return _rows(FORWARD_LOGITS, vocab_size)


def backward_rows(vocab_size: int) -> int:
    """Rows of a part of lm_head's backward, about 2 GiB."""
    return _rows(BACKWARD_BYTES // BYTES_A_LOGIT, vocab_size)


def page_formats(shape: KvShape, flow: PrecisionFlow) -> dict[int, Format]:
    """The format of the pages of each layer with attention.  Raises ConfigError for FP32."""
    formats = kv_formats(shape, flow)
    if "fp32" in formats.values():
        raise ConfigError("the fp32 flow runs on the CPU: attention on a GPU takes e4m3 and bf16")
    return formats


def delta(shape: DeltaShape) -> DeltaBytes:
    key, value, heads = shape.key_dim, shape.value_dim, shape.value_heads
    rows = 4 * (2 * shape.key_heads * key + shape.values + 2 * heads)
    of_heads = 4 * heads * (2 * key + value + 2)
    mixed = 4 * shape.channels + 64 * heads
    sums = 4 * shape.width * shape.channels
    # 64 rows of q, k, o and the like, six pairs of rows, five numbers a row, three states
    chunk = DELTA_CHUNK * (2 * key + 5 * value + 6 * DELTA_CHUNK + 5) + 3 * key * value
    factors = 2 * DELTA_CHUNK * DELTA_CHUNK * heads  # of a chunk
    at_once = max(1, FACTORS // factors)
    return DeltaBytes(
        saved=4 * heads * key * value // DELTA_CHUNK,
        made=rows,
        gradients=rows + of_heads + mixed + sums // DELTA_TOKENS,
        made_once=4 * at_once * (factors + DELTA_CHUNK * (heads + shape.values)),
        gradients_once=4 * DELTA_CHUNKS * heads * chunk + 2 * sums,
    )


def page_bytes(shape: KvShape, flow: PrecisionFlow) -> int:
    vectors = 2 * page_tokens * shape.num_kv_heads
    return sum(
        vectors * (shape.head_dim * DTYPES[format].itemsize + _SCALE.get(format, 0))
        for format in page_formats(shape, flow).values()
    )


carry_bytes = delta_carry_bytes


def matrix(site: Site, columns: int) -> int:
    numbers = sum(site.parts) * columns
    if site.forward == "int8":
        return numbers + 4 * sum(site.parts)
    if site.forward != "e4m3":
        return 2 * numbers
    return numbers + 4 * len(block_sizes(site.parts)) * num_blocks(columns)


def head_copy(site: Site, rows: int, columns: int) -> int:
    """lm_head is used as it is, or copied in INT8."""
    return rows * columns + 4 * rows if site.forward == "int8" else 0


def read(site: Site, numbers: int) -> int:
    return _operand(site, numbers) if site.forward in EIGHT_BITS else 0


def saved(site: Site, numbers: int, is_kept: bool = False) -> int:
    if site.wgrad == "e4m3":
        return _quantised(numbers)
    return 0 if is_kept else 2 * numbers


def gradient(site: Site, numbers: int, inputs: int) -> int:
    """What is held, and the larger of both sides transposed, which WGrad in INT8 makes, and FP32
    sums of DGrad in INT8, of a matrix of several parts.
    """
    turned = numbers + inputs if site.wgrad == "int8" else 0
    sums = 4 * inputs if site.dgrad == "int8" and len(site.parts) > 1 else 0
    return held(site, numbers) + max(turned, sums)


def held(site: Site, numbers: int) -> int:
    """Two copies in 8 bits, or one of them beside the gradient itself; DGrad's is in whole
    blocks.
    """
    if site.dgrad not in EIGHT_BITS:
        return 2 * numbers
    whole = -(-numbers * _whole(site) // sum(site.parts))
    rows = _quantised(whole)
    if site.dgrad == "int8":  # a scale of each part, perhaps of one expert, and its largest number
        rows = whole + 8 * (len(site.parts) * numbers // sum(site.parts))
    return rows + (_quantised(numbers) if site.wgrad == "e4m3" else 2 * numbers)


def transposed(site: Site, columns: int) -> int:
    """The matrix in 8 bits, each part in whole blocks; in INT8 also scales and largest numbers."""
    if site.dgrad not in EIGHT_BITS:
        return 0
    more = 8 * len(site.parts) * columns if site.dgrad == "int8" else 0
    return _whole(site) * columns + more


def experts(shape: ExpertsShape, gate_up: Site, down: Site) -> ExpertBytes:
    return expert_bytes(shape, gate_up, down, gradient, transposed)


def expert_bytes(
    shape: ExpertsShape,
    gate_up: Site,
    down: Site,
    gradient: Callable[[Site, int, int], int],
    transposed: Callable[[Site, int], int],
    masked_tokens: int = 0,
) -> ExpertBytes:
    """Bytes from a back end's ``gradient`` and ``transposed``; up to ``masked_tokens`` tokens use
    the masked layout, in which each expert has space for all.
    """
    hidden, width = shape.hidden_size, shape.intermediate_size
    gathered, activation = (_operand(site, n) for site, n in ((gate_up, hidden), (down, width)))
    kept = 4 * width + 2 * hidden + _LABELS
    made = _LABELS + max(gathered + 4 * width, 4 * width + activation + 2 * hidden)
    from_down, from_gate_up = gradient(down, hidden, width), gradient(gate_up, 2 * width, hidden)
    d_outputs = 2 * hidden if down.wgrad == "e4m3" else 0  # else in what is from down
    gradients = max(
        d_outputs + from_down + saved(down, width) + 2 * width,
        held(down, hidden) + 2 * width + held(gate_up, 2 * width),
        from_gate_up + 2 * width + 2 * hidden + saved(gate_up, hidden, is_kept=True),
        from_gate_up + 2 * hidden,
    )
    turned = max(
        transposed(site, columns) or 2 * sum(site.parts) * columns
        for site, columns in ((gate_up, hidden), (down, width))
    )
    padding, masked = (BLOCK - 1) * shape.count, masked_tokens * shape.count
    return ExpertBytes(
        saved=shape.top_k * kept, saved_once=padding * kept, made=shape.top_k * made,
        kept=shape.top_k * max(gathered, activation), gradients=shape.top_k * (gradients + 4),
        once=max(masked * made, padding * gradients + turned + turned // _SCALES),
    )  # fmt: skip


def encoded(shape: AttentionShape, format: Format) -> int:
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sums = 4 * shape.num_heads
    if format not in EIGHT_BITS:
        return 2 * (queries + 2 * keys) + sums
    scales = 4 * shape.num_heads + 2 * shape.num_kv_heads * _SCALE[format]
    return queries + 3 * keys + scales + sums


def attention_gradients(shape: AttentionShape, format: Format) -> int:
    row = 1 << (shape.head_dim - 1).bit_length()
    numbers = (shape.num_heads + shape.num_kv_heads) * row
    scales = 8 * shape.num_heads + 4 * shape.num_kv_heads if format == "int8" else 0
    return 4 * numbers + 8 * shape.num_heads + scales


def joined_parts(shape: AttentionShape, sequences: int, longest: int) -> int:
    """FP32 sums, a maximum and a sum of weights of each head and part."""
    parts = -(-longest // PART_TOKENS)
    if parts == 1:
        return 0
    return 4 * min(sequences * parts, MOST_APART) * shape.num_heads * (shape.head_dim + 2)


def product_sums(site: Site, tokens: int) -> int:
    """INT32 sums of the parts of K in INT8, where few tokens leave multiprocessors idle."""
    fewest, most = SPLIT_ROWS
    return split_sums(site, tokens) if fewest <= tokens <= most else 0


def split_sums(site: Site, tokens: int) -> int:
    """The same for tokens of which so many may be split."""
    rows = sum(site.parts)
    if site.forward != "int8" or rows >= 64 * SPLIT_PROGRAMS:
        return 0
    return 4 * tokens * min(MOST_SPLITS * rows, 2 * SPLIT_PROGRAMS * 64)


def workspaces(shape: WorkShape) -> Mapping[str, int]:
    hidden, tokens = shape.hidden_size, shape.tokens
    if not shape.vocab_size:
        return {"score head": 6 * hidden * tokens}
    vocabulary = -(-shape.vocab_size // HEAD_ROWS) * HEAD_ROWS
    quantised = hidden + 4 if shape.int8_head else 0
    row = 4 * vocabulary + max(12 * -(-vocabulary // LOGITS_CHUNK), quantised)
    forward = row * min(tokens, forward_rows(vocabulary))
    part = BYTES_A_LOGIT * vocabulary + 4 * hidden
    logits = part * min(tokens, backward_rows(vocabulary))
    return {
        "lm_head, scoring": (2 * hidden + _SCORED) * tokens + forward,  # without the stream
        "lm_head, forward": 6 * hidden * tokens + forward,
        "lm_head, backward": 6 * hidden * tokens + logits,
    }


def _rows(logits: int, vocab_size: int) -> int:
    return max(1, logits // vocab_size // _TILE) * _TILE


def _operand(site: Site, numbers: int) -> int:
    """An input of the forward, in E4M3, INT8 or BF16."""
    if site.forward == "int8":
        return numbers + 4
    return _quantised(numbers) if site.forward == "e4m3" else 2 * numbers


def _whole(site: Site) -> int:
    """Rows of the matrix, each part in whole blocks."""
    return BLOCK * len(block_sizes(site.parts))


def _quantised(numbers: int) -> int:
    return numbers + 4 * num_blocks(numbers)
