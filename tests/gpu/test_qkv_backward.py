"""From attention's gradients to the qkv GEMM's on the GPU: the CPU's bits without norms, within its
own rounding of them with norms.
"""

import pytest
import torch

from isobit.kernels.operands import QkvGradients, QkvTransform, RopeTable
from isobit.kernels.spec.qkv import qkv_backward as qkv_backward_on_cpu
from isobit.kernels.triton.qkv_backward import HEADS, N, qkv_backward

LAYOUTS = [
    (32, 8, 128), (14, 2, 64), (5, 5, 128), (16, 1, 64), (2 * HEADS + 2, HEADS + 1, 64), (8, 8, 96),
    (4, 1, 256),
]  # fmt: skip
POSITIONS = 5000
MANY = 20 * N + 13
EPSILON = 1e-6


class Case:
    """Random gradients of T tokens, the forward's input, and a layer's constants, on the CPU."""

    def __init__(
        self,
        tokens: int,
        layout: tuple[int, int, int],
        norms: bool = True,
        bias: bool = True,
        hadamard: bool = True,
    ) -> None:
        generator = torch.Generator().manual_seed(tokens)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        heads, kv_heads, dim = layout
        vectors = heads + 2 * kv_heads
        self.layout, self.norms, self.hadamard = layout, norms, hadamard
        self.gradients = [
            (normal(tokens, n, dim) * torch.exp(2 * normal(tokens, n, 1))).bfloat16()
            for n in (heads, kv_heads, kv_heads)
        ]
        self.qkv = (
            (normal(tokens, vectors, dim) * torch.exp(2 * normal(tokens, vectors, 1)))
            .bfloat16()
            .view(tokens, -1)
        )
        self.positions = torch.randint(0, POSITIONS, (tokens,), generator=generator)
        self.rope = RopeTable.build(
            10000.0 ** -(torch.arange(dim // 2, dtype=torch.float64) / (dim // 2)), POSITIONS
        )
        self.q_norm, self.k_norm = (
            (1 + 0.3 * normal(dim)).bfloat16() if norms else None for _ in range(2)
        )
        self.bias = normal(vectors * dim).bfloat16() if bias else None
        self.start = [
            normal(dim) if norms else None,
            normal(dim) if norms else None,
            normal(vectors * dim) if bias else None,
        ]

    def transform(self, device: str) -> QkvTransform:
        q_norm, k_norm, bias = (
            None if w is None else w.to(device) for w in (self.q_norm, self.k_norm, self.bias)
        )
        cos, sin = self.rope.cos.to(device), self.rope.sin.to(device)
        weights = q_norm, k_norm, bias
        return QkvTransform(*self.layout, cos, sin, EPSILON, *weights, hadamard=self.hadamard)

    def run(self, rows: slice = slice(None)) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """-> d_qkv, and the gradients that there are of norms and bias, which were ``start``
        before.
        """
        grads = [None if grad is None else grad.clone().cuda() for grad in self.start]
        dq, dk, dv = (x[rows].cuda() for x in self.gradients)
        qkv, positions = self.qkv[rows].cuda(), self.positions[rows].cuda()
        d_qkv = qkv_backward(
            dq, dk, dv, qkv, self.transform("cuda"), positions, QkvGradients(*grads)
        )
        return d_qkv, [grad for grad in grads if grad is not None]

    def specification(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The CPU's d_qkv, and its gradients of norms and bias, to be added to ``start``."""
        grads = [None if grad is None else torch.zeros_like(grad) for grad in self.start]
        dq, dk, dv = self.gradients
        transform = self.transform("cpu")
        d_qkv = qkv_backward_on_cpu(
            dq, dk, dv, self.qkv, transform, self.positions, QkvGradients(*grads)
        )
        return d_qkv, [grad for grad in grads if grad is not None]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 37, MANY])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("hadamard", [True, False])
def test_without_norms_the_bits_are_those_of_the_specification(
    tokens: int, layout: tuple[int, int, int], bias: bool, hadamard: bool
) -> None:
    case = Case(tokens, layout, norms=False, bias=bias, hadamard=hadamard)
    (d_qkv, _), (expected, _) = case.run(), case.specification()
    assert d_qkv.dtype == torch.bfloat16 and torch.equal(d_qkv.cpu(), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 37, MANY])
@pytest.mark.parametrize("bias", [True, False])
def test_with_norms_they_differ_only_where_a_sum_rounds_differently(
    tokens: int, layout: tuple[int, int, int], bias: bool
) -> None:
    case = Case(tokens, layout, bias=bias)
    (d_qkv, _), (expected, _) = case.run(), case.specification()
    assert (d_qkv.cpu() != expected).sum() <= 4 + 1e-3 * expected.numel()
    heads = (
        d_qkv.cpu().double().view(tokens, -1, layout[2]),
        expected.double().view(tokens, -1, layout[2]),
    )
    largest = heads[1].abs().amax(-1, keepdim=True)
    assert ((heads[0] - heads[1]).abs() <= heads[1].abs() * 2.0**-7 + 1e-5 * largest).all()
    values = layout[1] * layout[2]
    assert torch.equal(d_qkv[:, -values:].cpu(), expected[:, -values:])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("norms", [True, False])
def test_gradients_of_norms_and_bias(layout: tuple[int, int, int], norms: bool) -> None:
    case = Case(MANY, layout, norms=norms)
    (d_qkv, got), (_, yardstick) = case.run(), case.specification()
    start = [grad for grad in case.start if grad is not None]
    assert len(got) == len(start) == len(yardstick)
    for grad, before, cpu in zip(got[:-1], start[:-1], yardstick[:-1], strict=True):
        assert (grad.cpu() - before - cpu).norm() <= 1e-5 * cpu.norm()
    columns = d_qkv.cpu().double()
    bound = 2.0**-20 * (columns.abs().sum(0) + start[-1].abs())
    assert ((got[-1].cpu().double() - start[-1] - columns.sum(0)).abs() <= bound).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_repeats_its_bits_and_a_row_does_not_depend_on_the_batch(
    layout: tuple[int, int, int],
) -> None:
    case = Case(MANY, layout)
    d_qkv, grads = case.run()
    for _ in range(3):
        again, again_grads = case.run()
        assert torch.equal(again, d_qkv) and all(map(torch.equal, again_grads, grads))
    for rows in (slice(0, 1), slice(5, 6), slice(1, N + 2), slice(MANY - 3, MANY)):
        assert torch.equal(case.run(rows)[0], d_qkv[rows])


def test_a_bad_vector_stays_a_vector() -> None:
    case = Case(40, (14, 2, 64))
    clean, _ = case.run()
    case.qkv.view(40, 18, 64)[3, 5, 7] = torch.nan
    case.gradients[1][9, 1, 3] = torch.inf
    bad = torch.zeros(40, 18, dtype=torch.bool)
    bad[3, 5] = bad[9, 15] = True
    d_qkv, (q_grad, k_grad, _) = case.run()
    vectors, before = (x.cpu().view(40, 18, 64) for x in (d_qkv, clean))
    assert torch.equal(vectors[~bad], before[~bad]) and not vectors[bad].isfinite().any(-1).any()
    assert not q_grad[7].isfinite() and not k_grad[3].isfinite()


def test_no_tokens_change_nothing() -> None:
    case = Case(3, (14, 2, 64))
    d_qkv, grads = case.run(slice(0, 0))
    assert d_qkv.shape == (0, 18 * 64)
    for grad, before in zip(grads, case.start, strict=True):
        assert before is not None and torch.equal(grad.cpu(), before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_frozen_norms_have_no_gradients_and_the_rest_the_same_bits(
    layout: tuple[int, int, int],
) -> None:
    case = Case(MANY, layout, norms=True, bias=True, hadamard=True)
    expected, _ = case.run()
    case.start[:] = [None] * len(case.start)
    assert torch.equal(case.run()[0], expected)
