"""AdamW on the GPU gives the bits of its CPU specification, for every format of the moments and every size."""

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from isobit.kernels.adamw import adamw_step, noise_key, round_stochastically
from isobit.kernels.noise import splitmix64

SETTINGS = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.01}
NOISES = [None, (2**40 + 3, 290)]
SHAPES = [(1,), (17,), (1000, 37), (513, 1024)]


def some_state(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Master, exp_avg and exp_avg_sq as they are before the first step, on the host."""
    master = 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    return [master, torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)]


def some_gradient(shape: tuple[int, ...], step: int) -> torch.Tensor:
    """Of all magnitudes from below FP32's normal numbers to 1e15, with zeros in between."""
    generator = torch.Generator().manual_seed(step)
    exponents = torch.randint(-44, 16, shape, generator=generator)
    return torch.randn(shape, generator=generator) * 10.0**exponents * (torch.rand(shape, generator=generator) > 0.1)


def take_steps(state: list[torch.Tensor], steps: range, noise: tuple[int, int] | None, gradients: list[torch.Tensor]) -> None:
    master, exp_avg, exp_avg_sq = state
    for step in steps:
        grad = gradients[step - 1].to(master.device)
        adamw_step(master, grad, exp_avg, exp_avg_sq, **SETTINGS, rate=1e-3 / step, step=step, clip=1 / (1 + step % 3), noise=noise)
        assert torch.equal(grad.cpu().view(torch.int32), gradients[step - 1].view(torch.int32))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("noise", NOISES)
def test_bits_are_those_of_the_cpu(noise: tuple[int, int] | None, shape: tuple[int, ...]) -> None:
    ours = some_state(shape, torch.float32 if noise is None else torch.bfloat16)
    theirs = [x.cuda() for x in ours]
    gradients = [some_gradient(shape, step) for step in range(1, 7)]
    for step in range(1, 7):
        take_steps(ours, range(step, step + 1), noise, gradients)
        take_steps(theirs, range(step, step + 1), noise, gradients)
        for cpu, gpu in zip(ours, theirs, strict=True):
            assert torch.equal(gpu.cpu(), cpu)
    assert all(x.isfinite().all() for x in ours)


@pytest.mark.parametrize("noise", NOISES)
def test_an_element_depends_on_its_number_and_on_no_other(noise: tuple[int, int] | None) -> None:
    dtype = torch.float32 if noise is None else torch.bfloat16
    whole = [x.cuda() for x in some_state((1 << 22,), dtype)]
    again = [x.clone() for x in whole]
    part = [x[:12345].clone() for x in whole]
    gradients = [some_gradient((1 << 22,), step) for step in range(1, 4)]
    take_steps(whole, range(1, 4), noise, gradients)
    take_steps(again, range(1, 4), noise, gradients)
    take_steps(part, range(1, 4), noise, [x[:12345] for x in gradients])
    for a, b, c in zip(whole, again, part, strict=True):
        assert torch.equal(a, b) and torch.equal(a[:12345], c)


@pytest.mark.parametrize("noise", NOISES)
def test_what_is_not_finite_is_not_hidden(noise: tuple[int, int] | None) -> None:
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, 1.0])
    state = [x.cuda() for x in some_state((5,), torch.float32 if noise is None else torch.bfloat16)]
    take_steps(state, range(1, 2), noise, [bad])
    master, exp_avg, exp_avg_sq = (x.cpu() for x in state)
    assert master.isnan().tolist() == [True] * 3 + [False] * 2
    assert exp_avg.isfinite().tolist() == [False] * 3 + [True] * 2
    assert exp_avg_sq.isfinite().tolist() == [False] * 4 + [True]
    assert exp_avg[0].isnan() and exp_avg_sq[0].isnan()


def test_more_elements_than_32_bits_count() -> None:
    size, tail = (1 << 31) + 4096, 8192
    master, grad = torch.zeros(size, device="cuda"), torch.ones(size, device="cuda")
    moments = [torch.zeros(size, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    adamw_step(master, grad, *moments, **SETTINGS, rate=1.0, step=1, clip=1.0, noise=(1, 2))
    assert torch.equal(master[-tail:], master[:tail]) and master[0] < -0.99
    noise = splitmix64(torch.tensor([noise_key(1, 1, 2)]), torch.arange(size - tail, size))
    for moment, exact, shift in zip(moments, (1 - 0.9, 1 - 0.999), (0, 16), strict=True):
        rounded = round_stochastically(torch.full((tail,), exact), (noise >> shift & 0xFFFF).int())
        assert torch.equal(moment[-tail:].cpu(), rounded) and rounded.unique().numel() == 2
