"""Run in Triton's interpreter by test_interpreted.py: the portable backward of attention is as
accurate as PyTorch's in BF16, and a sequence's bits do not depend on what is packed with it.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from isobit.kernels.triton.attention import PackedKeys
from isobit.kernels.triton.attention_backward import attention_backward, sinks_backward
from isobit.kernels.triton.attention_prefill import prefill_attention
from isobit.precision.quant_tensor import Format
from tests.kernels.comparison import relative_error
from tests.kernels.triton.interpreted_attention import FORMATS, SINKS, Case, ints, prepare, take

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def gradients(
    case: Case, d_output: torch.Tensor, lengths: list[int], window: int | None
) -> Gradients:
    """Of packed sequences."""
    counts = ints(lengths)
    starts, longest = (counts.cumsum(0) - counts).int(), max(lengths)
    packed = case.queries, case.query_scales, case.packed
    places = starts, counts, starts, counts, longest, longest
    output, sums = prefill_attention(*packed, *places, window)
    return attention_backward(*packed, output, sums, d_output, starts, counts, longest, window)


def alone(case: Case, rows: slice) -> Case:
    """One of its sequences; pages are not looked at."""
    index = torch.arange(rows.start, rows.stop)
    keys = case.packed
    packed = PackedKeys(
        take(keys.keys, index), take(keys.key_scales, index), take(keys.values, index),
        take(keys.value_scales, index),
    )  # fmt: skip
    heads = [x.map(lambda y: y[rows].contiguous()) for x in case.heads]
    return Case(
        heads, take(case.queries, index), take(case.query_scales, index), packed, case.pages
    )


def autograd(
    case: Case, d_output: torch.Tensor, window: int | None, dtype: torch.dtype
) -> Gradients:
    """PyTorch's gradients of one sequence, computed in ``dtype``."""
    q, k, v = (x.dequantised().to(dtype).transpose(0, 1)[None].requires_grad_() for x in case.heads)
    group = q.shape[1] // k.shape[1]
    place = torch.arange(q.shape[2])
    behind = place[:, None] - place[None, :]
    seen = (behind >= 0) & (behind < (window or len(place)))
    output = scaled_dot_product_attention(
        q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), attn_mask=seen
    )
    made = torch.autograd.grad(output, (q, k, v), d_output.transpose(0, 1)[None].to(dtype))
    dq, dk, dv = (x[0].transpose(0, 1) for x in made)
    return dq, dk, dv


def check(format: Format, dim: int, lengths: list[int], window: int | None) -> None:
    case = Case.random(format, sum(lengths), dim)
    d_output = torch.randn(case.queries.shape).bfloat16()
    made = gradients(case, d_output, lengths, window)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    parts = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    one = parts[-1]
    by_itself = gradients(alone(case, one), d_output[one], lengths[-1:], window)
    assert all(torch.equal(x[one], y) for x, y in zip(made, by_itself, strict=True))
    theirs, exact = (
        [autograd(alone(case, rows), d_output[rows], window, dtype) for rows in parts]
        for dtype in (torch.bfloat16, torch.float64)
    )
    for which, ours in enumerate(made):
        wanted = torch.cat([one[which] for one in exact])
        yardstick = relative_error(torch.cat([one[which] for one in theirs]), wanted)
        error = relative_error(ours, wanted)
        assert error <= 1.1 * yardstick, (which, error, yardstick)
        # No short sequence drowns in the long ones; of one token the gradients of q and k are zero.
        for rows in parts:
            norm = wanted[rows].norm()
            assert relative_error(ours[rows], wanted[rows]) < 0.01 or norm < 1e-9


def check_sinks() -> None:
    """With autograd's gradients of sinks, and of what they take a part of."""
    lengths, window = [70, 1, 20], 40
    case = Case.random("bf16", sum(lengths), 64)
    d_output = torch.randn(case.queries.shape).bfloat16()
    counts = ints(lengths)
    starts, longest = (counts.cumsum(0) - counts).int(), max(lengths)
    packed = case.queries, case.query_scales, case.packed
    places = starts, counts, starts, counts, longest, longest
    output, sums = prefill_attention(*packed, *places, window, SINKS)
    made = attention_backward(*packed, output, sums, d_output, starts, counts, longest, window)
    before = torch.tensor([1.0, 2.0, -3.0, 0.0])
    grad = before.clone()
    sinks_backward(SINKS, output, sums, d_output, grad)

    q, k, v = (x.dequantised().double().requires_grad_() for x in case.heads)
    sinks, wide = SINKS.double().requires_grad_(), []
    for rows in (slice(0, 70), slice(70, 71), slice(71, 91)):
        place = torch.arange(rows.start, rows.stop)
        behind = place[:, None] - place[None, :]
        keys, values = (x[rows].repeat_interleave(2, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) / 8
        scores = scores.masked_fill((behind < 0) | (behind >= window), -torch.inf)
        last = sinks[:, None, None].expand(-1, len(place), 1)
        weights = torch.cat([scores, last], 2).softmax(2)[:, :, :-1]
        wide.append(torch.einsum("hqk,khd->qhd", weights, values))
    exact = torch.autograd.grad(torch.cat(wide), (q, k, v, sinks), d_output.double())
    for ours, wanted in zip((*made, grad - before), exact, strict=True):
        assert relative_error(ours, wanted) < 0.01


def quick() -> None:
    prepare()
    check_sinks()
    check("int8", 64, [1, 70], 40)


def whole() -> None:
    prepare()
    for format in FORMATS:
        for dim in (64, 96, 128, 256):
            check(format, dim, [63, 1, 140], None if dim < 128 else 65)
    check("bf16", 64, [129, 64], 1)
