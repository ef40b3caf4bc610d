"""The 8-bit moments: their codes, their rounding by counting, and what they do over thousands of
steps.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.kernels.adamw import FIRST, GROUP, SECOND, AdamWFactors, noise_key, num_groups
from isobit.kernels.spec import moments
from isobit.kernels.spec.adamw import adamw_step
from isobit.kernels.spec.moments import (
    decode_first,
    decode_second,
    encode_first,
    encode_second,
)

NOISES = torch.arange(1 << 16, dtype=torch.int32)
SCALES = [1, 2, 100, 127, 200, 246]


def some_noise(count: int, seed: int = 0) -> Tensor:
    return torch.randint(
        1 << 16, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32
    )


def all_codes() -> tuple[Tensor, Tensor]:
    """Of m, without the two NaNs, and of sqrt(v): two groups each, which hold the largest code."""
    codes = torch.arange(256).to(torch.uint8)
    first = codes.clone()
    first[[0x7F, 0xFF]] = 0x7E
    return first.view(FIRST), torch.cat([codes[:128], codes[128:]])


def roots(codes: Tensor, scales: Tensor) -> Tensor:
    """sqrt(v) in FP64 by the definition of the format: exponent of 4 bits with a bias of 7,
    mantissa of 4 bits.
    """
    exponent, mantissa = (codes.long() >> 4).double(), (codes.long() & 15).double()
    values = torch.where(
        exponent > 0, (1 + mantissa / 16) * 2 ** (exponent - 7), mantissa / 16 * 2.0**-6
    )
    return values * 2.0 ** (scales.double().repeat_interleave(GROUP)[: codes.numel()] - 127)


def with_every_noise(value: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """A number 2^16 times, 64 in each group beside the largest, and noise that is another each
    time.
    """
    x, noise = torch.zeros(1 << 10, GROUP), torch.zeros(1 << 10, GROUP, dtype=torch.int32)
    x[:, 0], x[:, 1:65], noise[:, 1:65] = largest, value, NOISES.view(1 << 10, 64)
    return x.view(-1), noise.view(-1)


def of_every_noise(x: Tensor) -> Tensor:
    """Of what was made from ``with_every_noise``, what became of the number."""
    return x.view(-1, GROUP)[:, 1:65].flatten()


@pytest.mark.parametrize("scale", SCALES)
def test_every_code_is_the_number_of_its_format(scale: int) -> None:
    scales = torch.full((2,), scale, dtype=torch.uint8)
    first, second = all_codes()
    exact = first.float().double() * 2.0 ** (scale - 127)
    assert torch.equal(decode_first(first, scales).double(), exact)
    if scale < 180:  # a root of 2^64 is that of FP32's largest numbers
        assert torch.equal(decode_second(second, scales), roots(second, scales).square().float())


@pytest.mark.parametrize("scale", SCALES)
def test_what_has_not_changed_stays_whatever_the_noise(scale: int) -> None:
    scales = torch.full((2,), scale, dtype=torch.uint8)
    first, second = all_codes()
    second = torch.cat([second[:127], second[-1:], second[128:]])  # the largest code in each group
    for noise in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        drawn = torch.full((256,), noise, dtype=torch.int32)
        codes, found = encode_first(first.float() * 2.0 ** (scale - 127), drawn)
        assert torch.equal(codes.view(torch.uint8), first.view(torch.uint8)) and torch.equal(
            found, scales
        )
        if scale < 180:
            codes, found = encode_second(roots(second, scales).float(), drawn)
            assert torch.equal(codes, second) and torch.equal(found, scales)


@pytest.mark.parametrize(
    "largest", [1e-44, 1e-38, 3e-20, 0.9, 1.0, 447.9, 448.0, 448.1, 496.0, 497.0, 1e19, 3.4e38]
)
def test_the_scale_is_the_least_that_holds_the_largest(largest: float) -> None:
    x = torch.full((GROUP,), largest / 7)
    x[5] = largest
    for encode, most in ((encode_first, 448.0), (encode_second, 496.0)):
        (scale,) = encode(x, some_noise(GROUP))[1].tolist()
        assert x[5].double() <= most * 2.0 ** (scale - 127)
        assert scale == 1 or x[5].double() > most * 2.0 ** (scale - 128)


@pytest.mark.parametrize(
    "x", [300.3, 256.01, 17.77, 0.3, 0.015626, 0.0151, 0.002, 0.0011, 1e-5, -300.3, -0.0011]
)
def test_m_is_rounded_to_neighbours_and_right_in_the_mean(x: float) -> None:
    value = torch.tensor(x)
    codes, scales = encode_first(*with_every_noise(value, 448.0))
    rounded = of_every_noise(decode_first(codes, scales))
    near = rounded.unique()
    assert len(near) <= 2 and near.min() <= value <= near.max()
    assert rounded.double().mean().item() == pytest.approx(
        x, abs=float(near.max() - near.min()) / (1 << 16)
    )


@pytest.mark.parametrize("root", [490.1, 256.01, 17.77, 0.3, 0.015626, 0.0151, 0.002, 0.0011])
def test_v_not_its_root_is_right_in_the_mean(root: float) -> None:
    value = torch.tensor(root)
    codes, scales = encode_second(*with_every_noise(value, 496.0))
    rounded = of_every_noise(decode_second(codes, scales)).double()
    low, high = rounded.unique().tolist()
    exact = float(value.double() ** 2)
    assert low < exact < high and int(of_every_noise(codes).int().unique().diff()) == 1
    assert rounded.mean().item() == pytest.approx(exact, abs=(high - low) / (1 << 16))


def test_v_above_zero_never_becomes_zero_and_zero_stays() -> None:
    root = torch.logspace(0, -30, GROUP)
    root[7] = 0.0
    for seed in range(20):
        codes, scales = encode_second(root, some_noise(GROUP, seed))
        assert ((codes == 0) == (root == 0)).all()
        assert ((codes == 1) | (root > 2.0**-18) | (root == 0)).all()
        assert (decode_second(codes, scales) > 0).sum() == GROUP - 1


def test_the_last_group_may_be_short_and_groups_do_not_meet() -> None:
    x = torch.randn(5 * GROUP, generator=torch.Generator().manual_seed(0)).abs()
    noise = some_noise(x.numel())
    for encode, decode in ((encode_first, decode_first), (encode_second, decode_second)):
        whole, scales = encode(x, noise)
        for count in (1, 127, 128, 129, 300):
            codes, part = encode(x[:count], noise[:count])
            full = count // GROUP
            assert len(codes) == count and len(part) == num_groups(count)
            assert torch.equal(codes[: full * GROUP], whole[: full * GROUP]) and torch.equal(
                part[:full], scales[:full]
            )
            assert decode(codes, part).shape == (count,)


def test_a_group_that_is_not_finite_is_nan_as_a_whole_and_alone() -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = torch.ones(3 * GROUP)
        x[GROUP + 3] = bad
        for encode, decode in ((encode_first, decode_first), (encode_second, decode_second)):
            back = decode(*encode(x, some_noise(x.numel())))
            assert back.isnan().view(3, GROUP).all(1).tolist() == [False, True, False]
            assert back.isfinite().view(3, GROUP).all(1).tolist() == [True, False, True]


def nearest(root: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The mutant that rounds v to nearest: with noise of a half."""
    return encode_second(root, torch.full_like(noise, 1 << 15))


def of_the_root(root: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The mutant that is right in the mean of the root: up with (root - lo) / (hi - lo), whose v is
    too large by the variance.
    """
    down, scales = encode_second(root, torch.full_like(noise, 0xFFFF))
    high = (down.int() + 1).clamp_(max=255).to(torch.uint8)
    low_root, high_root = decode_second(down, scales).sqrt(), decode_second(high, scales).sqrt()
    up = (noise + 0.5) / (1 << 16) < (root - low_root) / (high_root - low_root)
    return torch.where(up & (root > low_root), high, down), scales


def with_zeros(root: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The mutant that lets v become 0: below half of the smallest root it always does."""
    codes, scales = encode_second(root, noise)
    smallest = 2.0**-10 * torch.exp2(scales.double() - 127).repeat_interleave(GROUP)[: root.numel()]
    return torch.where(root < smallest / 2, torch.zeros_like(codes), codes), scales


def train(
    gradient: Callable[[int], Tensor], steps: int, **settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """-> how far the masters have moved, in learning rates; their longest step, in learning rates;
    and v's mean over the last half.
    """
    count, beta2 = gradient(1).numel(), settings.get("beta2", 0.999)
    master, longest, second = torch.zeros(count), torch.zeros(count), torch.zeros(count)
    scales = tuple(torch.zeros(2, num_groups(count), dtype=torch.uint8))
    state = torch.zeros(count, dtype=FIRST), torch.zeros(count, dtype=SECOND)
    if settings.get("wide"):
        state = torch.zeros(count), torch.zeros(count)
    for step in range(1, steps + 1):
        before = master.clone()
        factors = AdamWFactors.of(1.0, 0.9, beta2, 1e-12, 0.0, step, clip=1.0)
        eight: dict[str, Any] = {"key": noise_key(1, step, 2), "scales": scales}
        if settings.get("wide"):
            eight = {}
        adamw_step(master, gradient(step), *state, factors, **eight)
        longest = torch.maximum(longest, (master - before).abs())
        if step > steps // 2:
            second += (state[1] if settings.get("wide") else decode_second(state[1], scales[1])) / (
                steps - steps // 2
            )
    return master, longest, second


@cache
def second_moment(every: int, mutant: str = "", wide: bool = False) -> Tensor:
    """Its mean over the last 600 of 1,200 steps, of 2,048 elements; a gradient in one step of so
    many.
    """
    sizes = torch.logspace(0, -2, GROUP).repeat(16)

    def gradient(step: int) -> Tensor:
        return sizes if step % every == 0 else torch.zeros_like(sizes)

    return train(gradient, 1200, wide=wide)[2].double()


def error_of_the_second_moment(every: int, mutant: str = "") -> float:
    """Of v against that in FP32, in the mean of all elements."""
    share = second_moment(every, mutant) / second_moment(every, wide=True)
    return share.mean().item() - 1


def test_v_stays_in_the_mean_what_it_is_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    for every in (1, 4):
        assert abs(error_of_the_second_moment(every)) < 0.01
    monkeypatch.setattr(moments, "encode_second", of_the_root)
    assert error_of_the_second_moment(4, "of the root") > 0.02
    monkeypatch.setattr(moments, "encode_second", nearest)
    assert error_of_the_second_moment(1, "nearest") < -0.5


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_a_group_with_gradients_of_a_millionfold_range_makes_no_leaps(
    beta2: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = torch.logspace(0, -6, GROUP).repeat(32)

    def noisy(step: int) -> Tensor:
        return sizes * (
            0.5 + torch.randn(sizes.numel(), generator=torch.Generator().manual_seed(step))
        )

    exact, exact_step, _ = train(noisy, 500, beta2=beta2, wide=True)
    moved, step, _ = train(noisy, 500, beta2=beta2)
    share = (moved.view(-1, GROUP).mean(0) / exact.view(-1, GROUP).mean(0)).double()
    held = sizes[:GROUP] > 2.0**-15
    assert exact_step.max() < 2 and step.max() < 10
    assert share[held].sub(1).abs().max() < 0.1 and share[held].mean().item() == pytest.approx(
        1, abs=0.03
    )
    assert (
        share.max() < 1.6 and share.min() > 0.2
    )  # in the right direction, and at the end of the range more slowly
    monkeypatch.setattr(moments, "encode_second", with_zeros)
    _, step, _ = train(noisy, 500, beta2=beta2)
    assert step.max() > 1e4
