"""AdamW against torch's in FP64, and the rounding of its moments against counting; thousands of
steps: tests/benchmarks/test_moments.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.kernels.adamw import FIRST, GROUP, SECOND, AdamWFactors, noise_key, num_groups
from isobit.kernels.spec import adamw, moments
from isobit.kernels.spec.adamw import adamw_step, round_stochastically

MASK = (1 << 64) - 1
PLAIN: dict[str, Any] = {
    "rate": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "epsilon": 1e-8,
    "weight_decay": 0.01,
    "clip": 1.0,
}


def update(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    noise: tuple[int, int] | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    **settings: Any,
) -> None:
    """One update by the settings of ``PLAIN`` and others; ``noise`` is a seed and the number of the
    tensor.
    """
    factors = AdamWFactors.of(step=step, **PLAIN | settings)
    key = None if noise is None else noise_key(noise[0], step, noise[1])
    adamw_step(master, grad, exp_avg, exp_avg_sq, factors, key, scales)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def zeros(like: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(like, dtype=dtype), torch.zeros_like(like, dtype=dtype)


def eight_bits(count: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(count, dtype=FIRST), torch.zeros(count, dtype=SECOND)


def scales_of(count: int) -> tuple[Tensor, Tensor]:
    groups = num_groups(count)
    return torch.zeros(groups, dtype=torch.uint8), torch.zeros(groups, dtype=torch.uint8)


def splitmix64_of_integers(seed: int, index: int) -> int:
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def test_steps_are_those_of_torch_in_fp64():
    master, moments = randn(40, 30), zeros(randn(40, 30))
    exact = torch.nn.Parameter(master.double())
    optimiser = torch.optim.AdamW([exact], betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1)
    for step in range(1, 31):
        grad, clip, rate = (
            randn(40, 30, seed=step) * 10.0 ** -(step % 5),
            1 / (1 + step % 3),
            0.01 / step,
        )
        optimiser.param_groups[0]["lr"] = rate
        exact.grad = grad.double() * clip
        optimiser.step()
        before = grad.clone()
        update(
            master,
            grad,
            *moments,
            rate=rate,
            beta1=0.8,
            beta2=0.99,
            epsilon=1e-6,
            weight_decay=0.1,
            step=step,
            clip=clip,
        )
        assert torch.equal(grad, before)
        torch.testing.assert_close(master.double(), exact.detach(), rtol=0, atol=2e-6)
    for ours, theirs in zip(moments, ("exp_avg", "exp_avg_sq"), strict=True):
        torch.testing.assert_close(
            ours.double(), optimiser.state[exact][theirs], rtol=1e-5, atol=1e-7
        )


def test_a_decay_too_small_for_a_factor_of_its_own_is_not_lost():
    start, steps, ends = 0.02 + 0.002 * randn(4096), 2000, []
    for decay in (0.0, 0.01):
        master, moments = start.clone(), zeros(start)
        for step in range(1, steps + 1):
            update(master, randn(4096, seed=step), *moments, step, rate=1e-6, weight_decay=decay)
        ends.append(master.double().mean())
    assert 1 - torch.tensor(1e-8) == 1
    assert (ends[0] - ends[1]).item() == pytest.approx(0.02 * steps * 1e-8, rel=0.05)


@pytest.mark.parametrize("noise", [None, (3, 5)])
def test_an_element_depends_on_its_number_and_on_no_other(
    noise: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
):
    dtype = torch.float32 if noise is None else torch.bfloat16
    start, grad = randn(1000), randn(1000, seed=1)

    def after_two_steps(count: int) -> tuple[Tensor, ...]:
        master, moments = start[:count].clone(), zeros(start[:count], dtype)
        for step in (1, 2):
            update(master, grad[:count].clone(), *moments, step=step, noise=noise)
        return master, *moments

    whole, part = after_two_steps(1000), after_two_steps(37)
    assert all(torch.equal(a[:37], b) for a, b in zip(whole, part, strict=True))
    monkeypatch.setattr(adamw, "_PIECE", 17)
    assert all(torch.equal(a, b) for a, b in zip(whole, after_two_steps(1000), strict=True))


def test_a_group_of_8_bit_moments_depends_on_no_other(monkeypatch: pytest.MonkeyPatch):
    start, grad = randn(1000), randn(1000, seed=1)

    def after_two_steps(count: int) -> tuple[Tensor, ...]:
        master, state, scales = start[:count].clone(), eight_bits(count), scales_of(count)
        for step in (1, 2):
            update(
                master,
                grad[:count].clone(),
                *state,
                step=step,
                noise=(3, 5),
                scales=scales,
            )
        return master, *state, *(scale.repeat_interleave(GROUP)[:count] for scale in scales)

    whole, part = after_two_steps(1000), after_two_steps(256)
    assert all(torch.equal(a[:256], b) for a, b in zip(whole, part, strict=True))
    monkeypatch.setattr(adamw, "_PIECE", 2 * GROUP)
    assert all(torch.equal(a, b) for a, b in zip(whole, after_two_steps(1000), strict=True))


def test_rounding_goes_up_as_often_as_the_distance_says():
    noise = torch.arange(1 << 16, dtype=torch.int32)
    for bits in (
        0x3F801234,
        0x3F80FFFF,
        0x3F800000,
        -0x407FEDCC,
        0x00000001,
        0x7F000001,
        -0x80000000,
    ):
        x = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
        rounded = round_stochastically(x.expand(1 << 16).contiguous(), noise)
        low, values = bits & 0xFFFF, rounded.view(torch.int16).int()
        assert values.unique().tolist() == sorted({bits >> 16, (bits + 0xFFFF) >> 16})
        assert int((values != bits >> 16).sum()) == low


def test_what_is_not_finite_stays_so_whatever_the_noise():
    bits = torch.tensor(
        [0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, 0x7F800000, -0x00800000], dtype=torch.int32
    )
    for noise in (0, 1, 0x8000, 0xFFFF):
        rounded = round_stochastically(bits.view(torch.float32), torch.full_like(bits, noise))
        assert rounded.isnan().tolist() == [True] * 4 + [False] * 2
        assert rounded[4:].tolist() == [float("inf"), float("-inf")]


def test_noise_is_splitmix64_of_seed_step_tensor_and_element():
    seed, step, tensor = 2**40 + 1, 7, 290
    key = splitmix64_of_integers(splitmix64_of_integers(seed, step), tensor)
    assert noise_key(seed, step, tensor) & MASK == key
    first, second = adamw._noise(noise_key(seed, step, tensor), 100, 50)
    outputs = [splitmix64_of_integers(key, element) for element in range(100, 150)]
    assert first.tolist() == [output & 0xFFFF for output in outputs]
    assert second.tolist() == [output >> 16 & 0xFFFF for output in outputs]
    keys = {
        noise_key(seed, step, tensor)
        for seed in range(4)
        for step in range(1, 40)
        for tensor in range(40)
    }
    assert len(keys) == 4 * 39 * 40


def test_bf16_moments_are_the_rounded_fp32_ones():
    master, grad = randn(5000), randn(5000, seed=1)
    wide, narrow = zeros(master), zeros(master, torch.bfloat16)
    other = master.clone()
    update(master, grad, *wide, step=1)
    update(other, grad, *narrow, step=1, noise=(1, 2))
    assert torch.equal(
        master, other
    )  # the step is taken with the moments as they were before their rounding
    noises = adamw._noise(noise_key(1, 1, 2), 0, 5000)
    for exact, rounded, noise in zip(wide, narrow, noises, strict=True):
        assert torch.equal(rounded, round_stochastically(exact, noise))
        assert not torch.equal(rounded, exact.bfloat16())


def test_8_bit_moments_are_the_rounded_fp32_ones():
    master, grad = randn(5000), randn(5000, seed=1)
    wide, codes, scales = zeros(master), eight_bits(5000), scales_of(5000)
    other = master.clone()
    update(master, grad, *wide, step=1)
    update(other, grad, *codes, step=1, noise=(1, 2), scales=scales)
    assert torch.equal(master, other)
    noises = adamw._noise(noise_key(1, 1, 2), 0, 5000)
    expected = (
        moments.encode_first(wide[0], noises[0]),
        moments.encode_second(wide[1].double().sqrt().float(), noises[1]),
    )
    for code, scale, (expected_code, expected_scale) in zip(codes, scales, expected, strict=True):
        assert torch.equal(code, expected_code) and torch.equal(scale, expected_scale)
    read = moments.decode_first(codes[0], scales[0]), moments.decode_second(codes[1], scales[1])
    assert all(
        float((a - b).abs().max() / b.abs().max()) < 1 / 8 for a, b in zip(read, wide, strict=True)
    )
