"""Run in Triton's interpreter by test_interpreted.py: AdamW and squares."""

from itertools import pairwise

import torch

from isobit.kernels.noise import AdamWFactors, noise_key
from isobit.kernels.spec import optimiser as specification
from isobit.kernels.spec.optimiser import gradient_squares as specified_squares
from isobit.kernels.triton import optimiser as ours
from isobit.kernels.triton.optimiser import gradient_squares
from tests.kernels.moments import zero_moments

ROWS, WIDTH = 300, 64
KEY = noise_key(1, 1, 2)
FACTORS = AdamWFactors.of(1e-3, 0.9, 0.999, 1e-8, 0.01, 1, 0.5)


def updated(kind: str, module: object, first: int, last: int) -> list[torch.Tensor]:
    """Rows of a master and of its moments after the first update, as bytes."""
    generator = torch.Generator().manual_seed(0)
    w, g = (torch.randn(ROWS, WIDTH, generator=generator)[first:last].clone() for _ in range(2))
    m, v, *scales = zero_moments(w.shape, kind)
    key = None if kind == "fp32" else KEY
    module.adamw_step(w, g, m, v, FACTORS, key, tuple(scales) or None, first * WIDTH)  # type: ignore[attr-defined]
    return [x.view(torch.uint8) for x in (w, m, v, *scales)]


def check_slices(kind: str) -> None:
    """They move as in the whole, to the specification's bits."""
    whole = updated(kind, specification, 0, ROWS)
    for cuts in ((0, ROWS), (0, 128, ROWS), (0, 256, ROWS)):
        parts = [updated(kind, ours, first, last) for first, last in pairwise(cuts)]
        for x, made in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.equal(torch.cat(made), x), kind


def check_squares(shape: tuple[int, ...]) -> None:
    """Near the specification's, the same beside other tensors and in slices."""
    grad, other = torch.randn(shape), torch.randn(3, 5000)
    made, expected = gradient_squares([grad]), specified_squares([grad])
    for one, exact in zip(made, expected, strict=True):
        assert abs(one - exact) <= 1e-13 * exact
    beside = gradient_squares([torch.empty(0, 7), grad[:128].clone(), other, grad[128:].clone()])
    assert beside == [*made[:1], *gradient_squares([other]), *made[1:]]


def main() -> None:
    """Every format of the moments; blocks of one piece and of several, whole and short."""
    torch.manual_seed(0)
    for kind in ("fp32", "bf16", "fp8"):
        check_slices(kind)
    for shape in ((1,), (200,), (256, 128), (300, 70), (257, 130), (130, 1000)):
        check_squares(shape)
