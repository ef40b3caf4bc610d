"""AdamW on the GPU gives the bits of its CPU specification, for every format of the moments and
every size.
"""

from collections.abc import Callable

import pytest
import torch

from isobit.kernels.backend import backend_of
from isobit.kernels.noise import FIRST, SECOND, AdamWFactors, noise_key, num_groups, splitmix64
from isobit.kernels.spec import optimiser
from isobit.kernels.spec.optimiser import round_stochastically
from tests.kernels.comparison import bits
from tests.kernels.moments import zero_moments

SETTINGS = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.01}
NOISE = (2**40 + 3, 290)
FORMATS = ["fp32", "bf16", "fp8"]
SHAPES = [(1,), (17,), (128,), (1000, 37), (513, 1024)]


def some_state(shape: tuple[int, ...], kind: str) -> list[torch.Tensor]:
    """Master, exp_avg, exp_avg_sq and the scales that 8-bit ones have, as they are before the first
    step, on the host.
    """
    master = 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    return [master, *zero_moments(shape, kind)]


def update(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    rate: float,
    step: int,
    clip: float,
    noise: tuple[int, int] | None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    first_element: int = 0,
) -> None:
    """One update by the back end of the tensors' device; ``noise`` is a seed and the number of the
    tensor.
    """
    factors = AdamWFactors.of(rate, **SETTINGS, step=step, clip=clip)
    key = None if noise is None else noise_key(noise[0], step, noise[1])
    backend_of(master.device).adamw_step(
        master, grad, exp_avg, exp_avg_sq, factors, key, scales, first_element
    )


def some_gradient(shape: tuple[int, ...], step: int) -> torch.Tensor:
    """Of all magnitudes from below FP32's normal numbers to 1e15, with zeros in between."""
    generator = torch.Generator().manual_seed(step)
    exponents = torch.randint(-44, 16, shape, generator=generator)
    return (
        torch.randn(shape, generator=generator)
        * 10.0**exponents
        * (torch.rand(shape, generator=generator) > 0.1)
    )


def even_gradient(shape: tuple[int, ...], step: int) -> torch.Tensor:
    """Of magnitudes near each other, which fall a hundredfold midway."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(step)) * (
        1.0 if step < 4 else 0.01
    )


def take_steps(
    state: list[torch.Tensor], steps: range, gradients: list[torch.Tensor], first_element: int = 0
) -> None:
    master, exp_avg, exp_avg_sq, *scales = state
    noise = None if exp_avg.dtype == torch.float32 else NOISE
    pair = (scales[0], scales[1]) if scales else None
    for step in steps:
        grad = gradients[step - 1].to(master.device)
        rate, clip = 1e-3 / step, 1 / (1 + step % 3)
        update(master, grad, exp_avg, exp_avg_sq, rate, step, clip, noise, pair, first_element)
        assert torch.equal(grad.cpu().view(torch.int32), gradients[step - 1].view(torch.int32))


@pytest.mark.parametrize("gradient", [some_gradient, even_gradient])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", FORMATS)
def test_bits_are_those_of_the_cpu(
    kind: str, shape: tuple[int, ...], gradient: Callable[..., torch.Tensor]
) -> None:
    ours = some_state(shape, kind)
    theirs = [x.cuda() for x in ours]
    gradients = [gradient(shape, step) for step in range(1, 7)]
    for step in range(1, 7):
        take_steps(ours, range(step, step + 1), gradients)
        take_steps(theirs, range(step, step + 1), gradients)
        for cpu, gpu in zip(ours, theirs, strict=True):
            assert torch.equal(bits(gpu), bits(cpu))
    assert all(x.float().isfinite().all() for x in ours)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_group_depends_on_its_number_and_on_no_other(kind: str) -> None:
    whole = [x.cuda() for x in some_state((1 << 22,), kind)]
    again = [x.clone() for x in whole]
    count = 12345 if kind != "fp8" else 96 * optimiser.GROUP
    part = [x.cuda() for x in some_state((count,), kind)]
    part[0].copy_(whole[0][:count])
    gradients = [some_gradient((1 << 22,), step) for step in range(1, 4)]
    take_steps(whole, range(1, 4), gradients)
    take_steps(again, range(1, 4), gradients)
    take_steps(part, range(1, 4), [x[:count] for x in gradients])
    for a, b, c in zip(whole, again, part, strict=True):
        assert torch.equal(bits(a), bits(b)) and torch.equal(bits(a)[: c.numel()], bits(c))


@pytest.mark.parametrize("shape", [(512, 64), (300, 64), (200,), (2560, 1000)])
@pytest.mark.parametrize("kind", FORMATS)
def test_rows_move_as_they_do_in_the_whole(kind: str, shape: tuple[int, ...]) -> None:
    whole = [x.cuda() for x in some_state(shape, kind)]
    start = [x.clone() for x in whole]
    gradients = [some_gradient(shape, step) for step in range(1, 4)]
    take_steps(whole, range(1, 4), gradients)
    width, made = whole[0][0].numel(), []
    for rows in torch.arange(shape[0]).split(128):
        first, last = int(rows[0]), int(rows[-1]) + 1
        groups = slice(first * width // optimiser.GROUP, num_groups(last * width))
        part = [x[groups if i > 2 else slice(first, last)].clone() for i, x in enumerate(start)]
        take_steps(part, range(1, 4), [x[first:last] for x in gradients], first * width)
        made.append(part)
    for i, x in enumerate(whole):
        assert torch.equal(torch.cat([bits(part[i]) for part in made]), bits(x))


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_what_is_not_finite_is_not_hidden(kind: str) -> None:
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, 1.0])
    state = [x.cuda() for x in some_state((5,), kind)]
    take_steps(state, range(1, 2), [bad])
    master, exp_avg, exp_avg_sq = (x.cpu() for x in state)
    assert master.isnan().tolist() == [True] * 3 + [False] * 2
    assert exp_avg.isfinite().tolist() == [False] * 3 + [True] * 2
    assert exp_avg_sq.isfinite().tolist() == [False] * 4 + [True]
    assert exp_avg[0].isnan() and exp_avg_sq[0].isnan()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_8_bit_moments_of_a_group_that_is_not_finite_are_nan(bad: float) -> None:
    grad = torch.ones(300)
    grad[130] = bad
    ours = some_state((300,), "fp8")
    theirs = [x.cuda() for x in ours]
    for state in (ours, theirs):
        take_steps(state, range(1, 2), [grad])
    assert ours[0].isnan().nonzero().view(-1).tolist() == ([] if bad == 1e30 else [130])
    assert torch.equal(theirs[0].cpu().isnan(), ours[0].isnan())
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(theirs[1:], ours[1:], strict=True))
    assert ours[4][1] == optimiser.NOT_FINITE and (
        bad == 1e30 or ours[3][1] == optimiser.NOT_FINITE
    )
    assert optimiser.NOT_FINITE not in (*ours[3][::2], *ours[4][::2])


@pytest.mark.usefixtures("large")
def test_more_elements_than_32_bits_count() -> None:
    size, tail = (1 << 31) + 4096, 8192
    master, grad = torch.zeros(size, device="cuda"), torch.ones(size, device="cuda")
    state = [torch.zeros(size, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    update(master, grad, state[0], state[1], rate=1.0, step=1, clip=1.0, noise=(1, 2))
    assert torch.equal(master[-tail:], master[:tail]) and master[0] < -0.99
    noise = splitmix64(torch.tensor([noise_key(1, 1, 2)]), torch.arange(size - tail, size))
    for moment, exact, shift in zip(state, (1 - 0.9, 1 - 0.999), (0, 16), strict=True):
        rounded = round_stochastically(torch.full((tail,), exact), (noise >> shift & 0xFFFF).int())
        assert torch.equal(moment[-tail:].cpu(), rounded) and rounded.unique().numel() == 2


@pytest.mark.usefixtures("large")
def test_more_elements_than_32_bits_count_with_8_bit_moments() -> None:
    size, tail = (1 << 31) + 4096, 8192
    master, grad = torch.zeros(size, device="cuda"), torch.ones(size, device="cuda")
    first = torch.zeros(size, dtype=FIRST, device="cuda")
    second = torch.zeros(size, dtype=SECOND, device="cuda")
    scales = [torch.zeros(num_groups(size), dtype=torch.uint8, device="cuda") for _ in range(2)]
    update(
        master,
        grad,
        first,
        second,
        rate=1.0,
        step=1,
        clip=1.0,
        noise=(1, 2),
        scales=(scales[0], scales[1]),
    )
    assert torch.equal(master[-tail:], master[:tail]) and master[0] < -0.99
    noise = splitmix64(torch.tensor([noise_key(1, 1, 2)]), torch.arange(size - tail, size))
    root = torch.full((tail,), 1 - 0.999).double().sqrt().float()
    expected = (
        optimiser.encode_first(torch.full((tail,), 1 - 0.9), (noise & 0xFFFF).int()),
        optimiser.encode_second(root, (noise >> 16 & 0xFFFF).int()),
    )
    for codes, found, (rounded, scale) in zip((first, second), scales, expected, strict=True):
        assert (
            torch.equal(bits(codes[-tail:]), bits(rounded)) and bits(rounded).unique().numel() == 2
        )
        assert torch.equal(found[-len(scale) :].cpu(), scale)
