"""RMSNorm's backward on the GPU: as near to the exact gradient as the CPU's, the same bits every
time, rows free of the batch.
"""

import pytest
import torch

from isobit.kernels.spec.pointwise import rms_norm_backward as rms_norm_backward_on_cpu
from isobit.kernels.triton.device_functions import add_block_sums
from isobit.kernels.triton.pointwise import BLOCKS, rms_norm_backward
from isobit.proof.cases import plain_norm

EPSILON = 1e-6
# One to 16 rows at once, with padding and without.
COLUMNS = [128, 896, 1024, 2560, 4096, 5120, 12288]
MANY = 2 * BLOCKS + 77  # several tokens a block, in the widest rows too


class Case:
    """Random gradients and inputs of T tokens, on the CPU."""

    def __init__(self, tokens: int, columns: int) -> None:
        generator = torch.Generator().manual_seed(tokens + columns)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        sizes = torch.exp(3 * normal(tokens, 1))
        self.dy = normal(tokens, columns).bfloat16()
        self.residual = normal(tokens, columns).bfloat16()
        self.h = (sizes * normal(tokens, columns)).bfloat16()
        self.h[::9, ::2] *= 30
        self.h[::11] *= 1e-4
        self.weight = (1 + 0.3 * normal(columns)).bfloat16()
        self.grad = normal(columns)

    def run(
        self, residual: bool = True, rows: slice = slice(None)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> dh, and the weight's gradient, which was ``grad`` before."""
        grad = self.grad.clone().cuda()
        past = self.residual[rows].cuda() if residual else None
        dh = rms_norm_backward(
            self.dy[rows].cuda(), self.h[rows].cuda(), self.weight.cuda(), EPSILON, past, grad
        )
        return dh, grad

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of h and of the weight in FP64, without the residual's."""
        h, weight = self.h.double().requires_grad_(), self.weight.double().requires_grad_()
        d_h, d_weight = torch.autograd.grad(plain_norm(h, weight), (h, weight), self.dy.double())
        return d_h, d_weight

    def specification(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The CPU's, which rounds before the residual's gradient is added."""
        d_weight = torch.zeros_like(self.grad)
        inputs = self.dy, self.h, self.weight, EPSILON, None
        return rms_norm_backward_on_cpu(*inputs, d_weight), d_weight


def row_errors(x: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Of each row, relative to its length."""
    return (x.double() - exact).norm(dim=-1) / exact.norm(dim=-1)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("tokens", [1, 37, MANY])
def test_against_the_exact_gradient(tokens: int, columns: int) -> None:
    case = Case(tokens, columns)
    (d_h, d_weight), (cpu_h, cpu_weight) = case.exact(), case.specification()
    alone, _ = case.run(residual=False)
    assert alone.dtype == torch.bfloat16
    assert (row_errors(alone.cpu(), d_h) <= 1.02 * row_errors(cpu_h, d_h) + 1e-5).all()
    assert (alone.cpu() != cpu_h).sum() <= 4 + 1e-3 * cpu_h.numel()
    dh, grad = case.run()
    total = d_h + case.residual.double()
    assert (
        (dh.cpu().double() - total).abs()
        <= total.abs() * 2.0**-8 + 1e-5 * d_h.abs().amax(-1, keepdim=True)
    ).all()
    assert row_errors(dh.cpu(), total).max() <= 2.0**-8
    expected = case.grad.double() + d_weight
    yardstick = (cpu_weight.double() - d_weight).norm() + 2.0**-24 * expected.norm()
    assert (grad.cpu().double() - expected).norm() <= 2 * yardstick + 1e-6 * d_weight.norm()


@pytest.mark.parametrize("columns", COLUMNS)
def test_it_repeats_its_bits_and_a_row_does_not_depend_on_the_batch(columns: int) -> None:
    case = Case(MANY, columns)
    for residual in (True, False):
        dh, grad = case.run(residual)
        for _ in range(3):
            again, again_grad = case.run(residual)
            assert torch.equal(again, dh) and torch.equal(again_grad, grad)
        for rows in (slice(0, 1), slice(5, 6), slice(1, 40), slice(MANY - 3, MANY)):
            assert torch.equal(case.run(residual, rows)[0], dh[rows])


def test_a_bad_row_stays_a_row() -> None:
    case = Case(70, 1024)
    clean, _ = case.run()
    case.h[3, 5], case.dy[40, 1000] = torch.nan, torch.inf
    dh, grad = case.run()
    good = torch.ones(70, dtype=torch.bool)
    good[[3, 40]] = False
    assert torch.equal(dh[good.cuda()], clean[good.cuda()])
    assert (
        not dh[3].isfinite().any()
        and not dh[40, 1000].isfinite()
        and not grad[5].isfinite()
        and not grad[1000].isfinite()
    )


def test_no_tokens_change_nothing() -> None:
    case = Case(8, 128)
    dh, grad = case.run(rows=slice(0, 0))
    assert dh.shape == (0, 128) and torch.equal(grad.cpu(), case.grad)


@pytest.mark.parametrize("shape", [(1, 64), (127, 33), (513, 100), (2048, 6144)])
def test_block_sums(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    sums = torch.randn(shape, generator=generator)
    start = torch.randn(shape[1], generator=generator)
    got = [start.clone().cuda() for _ in range(3)]
    for grad in got:
        add_block_sums(sums.cuda(), grad)
    exact = start.double() + sums.double().sum(0)
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])
    assert (got[0].cpu().double() - exact).abs().max() <= 2.0**-22 * sums.abs().sum(0).max()


@pytest.mark.parametrize("columns", [896, 4096])
def test_a_frozen_weight_has_no_gradient_and_the_rest_the_same_bits(columns: int) -> None:
    case = Case(MANY, columns)
    given = case.dy.cuda(), case.h.cuda(), case.weight.cuda(), EPSILON, case.residual.cuda()
    assert torch.equal(rms_norm_backward(*given, None), case.run()[0])
