"""The backward of attention on a Hopper GPU: as accurate as PyTorch's, the same bits again and in
any company.
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from isobit.kernels.spec.qkv import Heads, factors
from isobit.kernels.triton.attention import PackedKeys
from isobit.kernels.triton.attention_backward import sinks_backward
from isobit.precision.quant_tensor import Format
from tests.gpu.kernels import attention_backward, prefill_attention
from tests.kernels.comparison import relative_error

LAYOUTS = [
    (32, 8, 128), (16, 1, 128), (8, 8, 128), (14, 2, 64), (16, 1, 64), (4, 4, 64), (4, 4, 96),
    (4, 1, 256),
]  # fmt: skip
LENGTHS = [1, 63, 64, 65, 127, 128, 129, 700, 3000]
FORMATS: list[Format] = ["e4m3", "int8", "bf16"]
WINDOWED = [
    *((layout, None) for layout in LAYOUTS),
    *((LAYOUTS[0], window) for window in (20, 100, 1024)),
    *((LAYOUTS[3], window) for window in (20, 1024)),
    *((LAYOUTS[7], window) for window in (20, 512)),
]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class Case:
    """Packed sequences: what the kernels read, and the numbers that it stands for, exactly (q, k, v
    in BF16; in FP32 for INT8).
    """

    lengths: list[int]
    queries: torch.Tensor
    query_scales: torch.Tensor | None
    keys: PackedKeys
    dequantised: Gradients
    d_output: torch.Tensor
    window: int | None = None

    def gradients(self) -> Gradients:
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device="cuda")
        starts, longest = (lengths.cumsum(0) - lengths).int(), max(self.lengths)
        packed = self.queries, self.query_scales, self.keys
        output, lse = prefill_attention(
            *packed, starts, lengths, starts, lengths, longest, longest, self.window
        )
        return attention_backward(
            *packed, output, lse, self.d_output, starts, lengths, longest, self.window
        )

    def autograd(self, dtype: torch.dtype) -> Gradients:
        """PyTorch's gradients, computed in ``dtype``."""
        group = self.queries.shape[1] // self.keys.keys.shape[1]
        parts: list[tuple[torch.Tensor, ...]] = []
        for rows in self.rows():
            q, k, v = (
                x[rows].transpose(0, 1)[None].to(dtype).requires_grad_() for x in self.dequantised
            )
            k_all, v_all = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            if self.window is None:
                output = scaled_dot_product_attention(q, k_all, v_all, is_causal=True)
            else:
                place = torch.arange(q.shape[2], device="cuda")
                behind = place[:, None] - place[None, :]
                seen = (behind >= 0) & (behind < self.window)
                output = scaled_dot_product_attention(q, k_all, v_all, attn_mask=seen)
            parts.append(
                torch.autograd.grad(
                    output, (q, k, v), self.d_output[rows].transpose(0, 1)[None].to(dtype)
                )
            )
        dq, dk, dv = (
            torch.cat([part[0].transpose(0, 1) for part in gradients])
            for gradients in zip(*parts, strict=True)
        )
        return dq, dk, dv

    def rows(self) -> list[slice]:
        ends = torch.tensor(self.lengths).cumsum(0).tolist()
        return [slice(end - n, end) for n, end in zip(self.lengths, ends, strict=True)]

    def alone(self, rows: slice) -> "Case":
        def cut(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x[rows]

        keys = self.keys
        q, k, v = self.dequantised
        packed = PackedKeys(
            keys.keys[rows], cut(keys.key_scales), keys.values[rows], cut(keys.value_scales)
        )
        length, scales = rows.stop - rows.start, cut(self.query_scales)
        return Case(
            [length],
            self.queries[rows],
            scales,
            packed,
            (q[rows], k[rows], v[rows]),
            self.d_output[rows],
            self.window,
        )


def make(
    lengths: list[int], layout: tuple[int, int, int], format: Format, magnitude: float = 1.0
) -> Case:
    heads, kv_heads, dim = layout
    generator = torch.Generator().manual_seed(0)

    def normal(n: int) -> torch.Tensor:
        return torch.randn(sum(lengths), n, dim, generator=generator)

    q, k, v = (Heads.encode(normal(n).bfloat16(), format) for n in (heads, kv_heads, kv_heads))
    exact = torch.float32 if format == "int8" else torch.bfloat16
    q_values, k_values, v_values = (x.dequantised().to(exact).cuda() for x in (q, k, v))
    values = q_values, k_values, v_values
    d_output = (normal(heads) * magnitude).bfloat16().cuda()
    if format == "bf16":
        return Case(
            lengths, q_values, None, PackedKeys(k_values, None, v_values, None), values, d_output
        )
    packed = PackedKeys(k.values.cuda(), k.scales.cuda(), v.values.half().cuda(), v.scales.cuda())
    return Case(lengths, q.values.cuda(), factors(q.scales).cuda(), packed, values, d_output)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("layout", "window"), WINDOWED)
def test_values_against_fp64(
    layout: tuple[int, int, int], window: int | None, format: Format
) -> None:
    case = replace(make(LENGTHS, layout, format), window=window)
    for name, got, theirs, exact in zip(
        ("dq", "dk", "dv"),
        case.gradients(),
        case.autograd(torch.bfloat16),
        case.autograd(torch.float64),
        strict=True,
    ):
        ours, reference = relative_error(got, exact), relative_error(theirs, exact)
        print(
            f"{format} {layout} {window} {name}: relative error {ours:.5f}, PyTorch's BF16 "
            f"{reference:.5f}"
        )
        assert ours <= 1.1 * reference
        # no short sequence drowns in the long ones; the gradients of q and k of a single token are
        # zero
        for rows in case.rows():
            assert relative_error(got[rows], exact[rows]) < 0.01 or exact[rows].norm() < 1e-9


@pytest.mark.parametrize("tokens", [1, 63, 3000])
def test_the_gradient_of_sinks(tokens: int) -> None:
    """Against FP64, with the log-sum-exps of the forward; added once, and repeated."""
    heads, dim = 16, 64
    case = make([tokens], (heads, 2, dim), "bf16")
    sinks = torch.linspace(-3, 8, heads).bfloat16().cuda()
    ends = torch.tensor([tokens], dtype=torch.int32, device="cuda")
    first = torch.zeros_like(ends)
    places = first, ends, first, ends
    packed = case.queries, case.query_scales, case.keys
    output, lse = prefill_attention(*packed, *places, tokens, tokens, 100, sinks)
    delta = (case.d_output.double() * output.double()).sum(-1)
    weights = torch.exp(sinks.double() - lse.double() * math.log(2.0))
    exact = 1.0 - (weights * delta).sum(0)
    grads = [torch.ones(heads, device="cuda") for _ in range(3)]
    for grad in grads:
        sinks_backward(sinks, output, lse, case.d_output, grad)
    assert relative_error(grads[0], exact) < 1e-5
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("window", [2, 63, 64, 65, 66, 100, 128, 129, 700, 2999])
@pytest.mark.parametrize("layout", [(32, 8, 128), (14, 2, 64)])
def test_a_window_masks_what_it_should(layout: tuple[int, int, int], window: int) -> None:
    """Each sequence as accurate as PyTorch's, the edge's tiles included."""
    case = replace(make(LENGTHS, layout, "bf16"), window=window)
    exact = case.autograd(torch.float64)
    for got, wanted in zip(case.gradients(), exact, strict=True):
        for rows in case.rows():
            assert relative_error(got[rows], wanted[rows]) < 0.01 or wanted[rows].norm() < 1e-9


@pytest.mark.parametrize("format", FORMATS)
def test_a_window_that_covers_everything_changes_no_bit(format: Format) -> None:
    case = make(LENGTHS, (32, 8, 128), format)
    covering = replace(case, window=max(LENGTHS))
    assert all(map(torch.equal, case.gradients(), covering.gradients()))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("layout", [(32, 8, 128), (14, 2, 64)])
def test_bits_repeat_and_do_not_depend_on_the_company(
    layout: tuple[int, int, int], window: int | None, format: Format
) -> None:
    case = replace(make(LENGTHS, layout, format), window=window)
    once, again = case.gradients(), case.gradients()
    assert all(map(torch.equal, once, again))
    for rows in case.rows():
        assert all(
            torch.equal(alone, together[rows])
            for alone, together in zip(case.alone(rows).gradients(), once, strict=True)
        )


def test_a_nan_stays_in_its_sequence() -> None:
    case = make([100, 200, 70], (8, 2, 128), "bf16")
    clean = case.gradients()
    case.d_output[150] = torch.nan
    for dirty, before in zip(case.gradients(), clean, strict=True):
        assert dirty[100:300].isnan().any()
        assert torch.equal(dirty[:100], before[:100]) and torch.equal(dirty[300:], before[300:])


@pytest.mark.parametrize("format", ["e4m3", "int8"])
@pytest.mark.parametrize("layout", [(32, 8, 128), (14, 2, 64)])
def test_tiny_gradients_survive(layout: tuple[int, int, int], format: Format) -> None:
    case = make([700, 65], layout, format, magnitude=1e-12)
    for got, exact in zip(case.gradients(), case.autograd(torch.float64), strict=True):
        assert exact.abs().median() < 1e-12
        assert relative_error(got, exact) < 5e-3


def test_it_runs_in_the_thread_of_autograd() -> None:
    case = make([300, 65], (8, 2, 128), "e4m3")
    seen: list[Gradients] = []

    def collect(_: torch.Tensor) -> None:
        seen.append(case.gradients())

    leaf = torch.zeros(1, device="cuda", requires_grad=True)
    product = leaf * 2
    product.register_hook(collect)
    product.sum().backward()
    assert len(seen) == 1 and all(map(torch.equal, seen[0], case.gradients()))


def test_inputs_that_are_not_supported_are_refused() -> None:
    case = make([10], (4, 2, 64), "bf16")
    case.d_output = case.d_output.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match="contiguous"):
        case.gradients()
    case = make([10], (4, 2, 64), "bf16")
    case.queries = case.queries[..., :32].contiguous()
    case.keys = PackedKeys(
        case.keys.keys[..., :32].contiguous(), None, case.keys.values[..., :32].contiguous(), None
    )
    with pytest.raises(ValueError, match="head sizes 64"):
        case.gradients()
