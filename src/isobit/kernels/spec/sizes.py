"""Bytes of the specification's operands (``isobit.kernels.operands``).

a is the bytes of an activation (2, or 4 in fp32), f those of a number of Q, K, V or the cache.

    matrix       N K and 4 per 128x128 block in E4M3 or row in INT8, otherwise 2 or 4 N K
    KV page      2 * 64 G (D f + 1)                             one byte of scale per vector, 4 of
                                                                INT8
    carry        of a delta rule, a (63 + width) channels + 4 H (64 (dk + dv + 1) + dk dv)
    encoded      (H + 2 G) (D f + 1) + 4 H                      and one log-sum-exp per query
    workspaces   the largest of these, which are never alive together:
      GEMM       8 T K + 8 N K + 16 T N                         operands and product in FP64, of
                                                                one expert
      attention  24 W H D + 1536 W H + 12 T H D                 forward, for groups of B sequences
                                                                with W tokens in all
                 4 T (3 H + 4 G) D, and the larger of 8 T H D   backward, S the longest sequence
                 and 4 W (6 H + 7 G) D + 13 B H min(S, 512) S
      delta rule 16 chunks in FP64, or three times in FP32
      logits     8 V C + 16 max(2^22, V)                        the head in FP64, or in FP32 with
                                                                its gradient, and one chunk of
                                                                logits in all its forms
      score head 8 T C                                          without lm_head
Workspaces are upper estimates of short-lived tensors.
"""

from collections.abc import Mapping

from isobit.kernels.operands import DeltaShape, KvShape, kv_formats
from isobit.kernels.sizes import (
    AttentionShape,
    DeltaBytes,
    ExpertBytes,
    ExpertsShape,
    WorkShape,
    delta_carry_bytes,
)
from isobit.kernels.spec.attention import GROUP_TOKENS, QUERY_BLOCK, TILE
from isobit.kernels.spec.delta_rule import SEQUENCES
from isobit.kernels.spec.head import CHUNK
from isobit.precision.flow import PrecisionFlow, Site
from isobit.precision.quant_tensor import DTYPES, Format, block_sizes, num_blocks

page_tokens = TILE
batched_tokens = 2048
logits_at_once = CHUNK


def page_bytes(shape: KvShape, flow: PrecisionFlow) -> int:
    vectors = 2 * page_tokens * shape.num_kv_heads
    return sum(vectors * _vector(shape.head_dim, one) for one in kv_formats(shape, flow).values())


carry_bytes = delta_carry_bytes


def _vector(head_dim: int, format: Format) -> int:
    """An encoded vector of Q, K or V and its scale."""
    return head_dim * DTYPES[format].itemsize + (4 if format == "int8" else 1)


def matrix(site: Site, columns: int) -> int:
    numbers = sum(site.parts) * columns
    if site.forward == "e4m3":
        return numbers + 4 * len(block_sizes(site.parts)) * num_blocks(columns)
    if site.forward == "int8":
        return numbers + 4 * sum(site.parts)
    return DTYPES[site.forward].itemsize * numbers


def head_copy(site: Site, rows: int, columns: int) -> int:
    """The copy of lm_head on the grid of the exact GEMM, or in INT8."""
    if site.forward == "int8":
        return rows * columns + 4 * rows
    return _itemsize(site) * rows * columns


def read(site: Site, numbers: int) -> int:
    """Bytes of an input as it is read: in E4M3 with one scale per 128 numbers, in INT8 with one a
    row, or snapped to the grid.
    """
    if site.forward == "int8":
        return numbers + 4
    return _quantised(numbers) if site.forward == "e4m3" else _itemsize(site) * numbers


def saved(site: Site, numbers: int, is_kept: bool = False) -> int:
    """Bytes of an input as it is saved: in E4M3 with one scale per 128 tokens, or the input
    itself.
    """
    if site.wgrad == "e4m3":
        return _quantised(numbers)
    return 0 if is_kept else _itemsize(site) * numbers


def gradient(site: Site, numbers: int, inputs: int) -> int:
    """Both copies in E4M3, or the gradient itself; in INT8 DGrad's with a scale a part, WGrad's
    within the GEMM workspace.
    """
    rows = 0
    if site.dgrad == "int8":
        rows = numbers + 4 * len(site.parts)
    elif site.dgrad == "e4m3":
        rows = _quantised(numbers)
    return rows + (_quantised(numbers) if site.wgrad == "e4m3" else 0)


def transposed(site: Site, columns: int) -> int:
    """DGrad multiplies by the dequantised matrix; of INT8, the transform takes three more."""
    return (16 if site.forward == "int8" else 4) * sum(site.parts) * columns


def experts(shape: ExpertsShape, gate_up: Site, down: Site) -> ExpertBytes:
    """Experts are computed one after another; in the worst case one expert has all the tokens."""
    a, k = _itemsize(gate_up), shape.top_k
    stream, width = a * shape.hidden_size, 2 * a * shape.intermediate_size
    outputs, sums = k * stream, 12 * k * shape.hidden_size
    activation = a * shape.intermediate_size + _input(down, shape.intermediate_size)
    forward = _input(gate_up, shape.hidden_size) + activation + stream
    backward = (
        2 * (stream + width)
        + activation
        + gradient(down, shape.hidden_size, shape.intermediate_size)
        + gradient(gate_up, 2 * shape.intermediate_size, shape.hidden_size)
        + saved(gate_up, shape.hidden_size)
    )
    return ExpertBytes(
        saved=outputs + k * width,
        made=outputs + k * width + max(forward, sums),
        kept=max(forward, sums),
        gradients=outputs + max(backward, sums),
        once=max(
            transposed(site, columns) // shape.count
            for site, columns in (
                (gate_up, shape.hidden_size),
                (down, shape.intermediate_size),
            )
        ),
    )


def delta(shape: DeltaShape) -> DeltaBytes:
    """States in FP32, one for each 64 tokens that stand before others."""
    states = 4 * shape.value_heads * shape.key_dim * shape.value_dim // page_tokens
    rows = 4 * (2 * shape.value_heads * shape.key_dim + shape.values + 2 * shape.value_heads)
    mixed = 4 * (shape.width + 3) * shape.channels
    return DeltaBytes(
        saved=states, made=rows + mixed + 4 * shape.values, gradients=2 * rows + 2 * mixed
    )


def encoded(shape: AttentionShape, format: Format) -> int:
    heads = shape.num_heads + 2 * shape.num_kv_heads
    return heads * _vector(shape.head_dim, format) + 4 * shape.num_heads


def attention_gradients(shape: AttentionShape, format: Format) -> int:
    """0: they are counted in the workspace."""
    return 0


def joined_parts(shape: AttentionShape, sequences: int, longest: int) -> int:
    """0: keys are added up in order."""
    return 0


def product_sums(site: Site, tokens: int) -> int:
    """0: they are counted in the GEMM workspace."""
    return 0


def workspaces(shape: WorkShape) -> Mapping[str, int]:
    return {
        "GEMM workspace": _gemm(shape),
        "attention workspace": _attention(
            shape.attention, max(shape.tokens, shape.attended), shape.longest
        ),
        **_head(shape),
        **({} if shape.delta is None else {"delta rule": _delta(shape.delta)}),
    }


def _delta(shape: DeltaShape) -> int:
    """Chunks in FP64 and their sums, or in the backward three times in FP32."""
    key, value = shape.key_dim, shape.value_dim
    rows = page_tokens * (3 * key + 3 * value + 6 * page_tokens)
    head = 8 * (page_tokens * (3 * key + value) + key * value) + 4 * (rows + key * value)
    return SEQUENCES * shape.value_heads * max(head, 12 * (rows + 2 * key * value))


def _head(shape: WorkShape) -> Mapping[str, int]:
    if not shape.vocab_size:
        return {"score head": 8 * shape.tokens * shape.hidden_size}
    chunk = 16 * max(CHUNK, shape.vocab_size)
    return {"logits chunk": 8 * shape.vocab_size * shape.hidden_size + chunk}


def _gemm(shape: WorkShape) -> int:
    tokens = shape.tokens
    return max(
        8 * tokens * linear.in_features
        + 8 * linear.out_features // linear.experts * linear.in_features
        + 16 * tokens * linear.out_features // linear.experts
        for linear in shape.linears
    )


def _attention(heads: AttentionShape, tokens: int, longest: int) -> int:
    """Bytes of attention for all tokens, with one padded group of the longest sequences."""
    sequences = max(1, GROUP_TOKENS // longest)
    rows = sequences * longest
    query, key = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    forward = rows * (24 * query + 1536 * heads.num_heads) + 12 * tokens * query
    scores = 13 * sequences * heads.num_heads * min(longest, QUERY_BLOCK) * longest
    group = 4 * rows * (6 * query + 7 * key) + scores
    return max(forward, 4 * tokens * (3 * query + 4 * key) + max(group, 8 * tokens * query))


def _input(site: Site, numbers: int) -> int:
    """The bytes of an input and of its copy that FProp reads."""
    return _itemsize(site) * numbers + read(site, numbers)


def _itemsize(site: Site) -> int:
    return DTYPES["fp32" if site.forward == "fp32" else "bf16"].itemsize


def _quantised(numbers: int) -> int:
    return numbers + 4 * num_blocks(numbers)
