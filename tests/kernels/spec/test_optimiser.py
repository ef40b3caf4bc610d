"""AdamW against torch's in FP64, and the rounding of its moments against counting; thousands of
steps: tests/experiments/test_learning.py.

The checksum of bytes: what it is by its formula in whole numbers, and that any changed byte
changes it.

A sum of squares for every 128 rows: near the exact one, and the same in any slice.

The 8-bit moments: their codes, their rounding by counting, and what they do over thousands of
steps.

A sum in the order of its addends, which another order does not give.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.kernels.noise import (
    FIRST,
    GROUP,
    AdamWFactors,
    Rows,
    noise_key,
    num_groups,
    splitmix64_of,
)
from isobit.kernels.spec import optimiser
from isobit.kernels.spec.optimiser import (
    adamw_step,
    add_in_order,
    checksum,
    decode_first,
    decode_second,
    encode_first,
    encode_second,
    gradient_squares,
    round_stochastically,
)
from isobit.proof.cases import splitmix64
from tests.kernels.moments import zero_moments

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


def test_steps_are_those_of_torch_in_fp64():
    master, moments = randn(40, 30), zero_moments((40, 30), "fp32")
    exact = torch.nn.Parameter(master.double())
    reference = torch.optim.AdamW([exact], betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1)
    for step in range(1, 31):
        grad = randn(40, 30, seed=step) * 10.0 ** -(step % 5)
        clip = 1 / (1 + step % 3)
        rate = 0.01 / step
        reference.param_groups[0]["lr"] = rate
        exact.grad = grad.double() * clip
        reference.step()
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
            ours.double(), reference.state[exact][theirs], rtol=1e-5, atol=1e-7
        )


def test_a_decay_too_small_for_a_factor_of_its_own_is_not_lost():
    start, steps, ends = 0.02 + 0.002 * randn(4096), 2000, []
    for decay in (0.0, 0.01):
        master, moments = start.clone(), zero_moments(start.shape, "fp32")
        for step in range(1, steps + 1):
            update(
                master, randn(4096, seed=step), *moments, step=step, rate=1e-6, weight_decay=decay
            )
        ends.append(master.double().mean())
    assert 1 - torch.tensor(1e-8) == 1
    assert (ends[0] - ends[1]).item() == pytest.approx(0.02 * steps * 1e-8, rel=0.05)


@pytest.mark.parametrize("noise", [None, (3, 5)])
def test_an_element_depends_on_its_number_and_on_no_other(
    noise: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
):
    kind = "fp32" if noise is None else "bf16"
    start, grad = randn(1000), randn(1000, seed=1)

    def after_two_steps(count: int) -> tuple[Tensor, ...]:
        master, moments = start[:count].clone(), zero_moments((count,), kind)
        for step in (1, 2):
            update(master, grad[:count].clone(), *moments, step=step, noise=noise)
        return master, *moments

    whole, part = after_two_steps(1000), after_two_steps(37)
    assert all(torch.equal(a[:37], b) for a, b in zip(whole, part, strict=True))
    monkeypatch.setattr(optimiser, "_PIECE", 17)
    assert all(torch.equal(a, b) for a, b in zip(whole, after_two_steps(1000), strict=True))


def test_a_group_of_8_bit_moments_depends_on_no_other(monkeypatch: pytest.MonkeyPatch):
    start, grad = randn(1000), randn(1000, seed=1)

    def after_two_steps(count: int) -> tuple[Tensor, ...]:
        master, (*state, m_scales, v_scales) = start[:count].clone(), zero_moments((count,), "fp8")
        scales = m_scales, v_scales
        for step in (1, 2):
            update(master, grad[:count].clone(), *state, step=step, noise=(3, 5), scales=scales)
        return master, *state, *(scale.repeat_interleave(GROUP)[:count] for scale in scales)

    whole, part = after_two_steps(1000), after_two_steps(256)
    assert all(torch.equal(a[:256], b) for a, b in zip(whole, part, strict=True))
    monkeypatch.setattr(optimiser, "_PIECE", 2 * GROUP)
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
    key = splitmix64(splitmix64(seed, step), tensor)
    assert noise_key(seed, step, tensor) & MASK == key
    first, second = optimiser._noise(noise_key(seed, step, tensor), 100, 50)
    outputs = [splitmix64(key, element) for element in range(100, 150)]
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
    wide, narrow = (zero_moments((5000,), kind) for kind in ("fp32", "bf16"))
    other = master.clone()
    update(master, grad, *wide, step=1)
    update(other, grad, *narrow, step=1, noise=(1, 2))
    # The step is taken with the moments as they were before their rounding.
    assert torch.equal(master, other)
    noises = optimiser._noise(noise_key(1, 1, 2), 0, 5000)
    for exact, rounded, noise in zip(wide, narrow, noises, strict=True):
        assert torch.equal(rounded, round_stochastically(exact, noise))
        assert not torch.equal(rounded, exact.bfloat16())


def test_8_bit_moments_are_the_rounded_fp32_ones():
    master, grad = randn(5000), randn(5000, seed=1)
    wide, (*codes, m_scales, v_scales) = (zero_moments((5000,), kind) for kind in ("fp32", "fp8"))
    scales = m_scales, v_scales
    other = master.clone()
    update(master, grad, *wide, step=1)
    update(other, grad, *codes, step=1, noise=(1, 2), scales=scales)
    assert torch.equal(master, other)
    noises = optimiser._noise(noise_key(1, 1, 2), 0, 5000)
    expected = (
        optimiser.encode_first(wide[0], noises[0]),
        optimiser.encode_second(wide[1].double().sqrt().float(), noises[1]),
    )
    for code, scale, (expected_code, expected_scale) in zip(codes, scales, expected, strict=True):
        assert torch.equal(code, expected_code) and torch.equal(scale, expected_scale)
    read = (
        optimiser.decode_first(codes[0], scales[0]),
        optimiser.decode_second(codes[1], scales[1]),
    )
    assert all(
        float((a - b).abs().max() / b.abs().max()) < 1 / 8 for a, b in zip(read, wide, strict=True)
    )


CHUNK = 8


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few words, so that small tensors have several."""
    monkeypatch.setattr(optimiser, "CHUNK", CHUNK)


def by_formula(data: bytes, first_byte: int, seed: int) -> int:
    """The same in Python's whole numbers."""
    data = bytes(first_byte % 4) + data
    data += bytes(-len(data) % 4)
    total = 0
    for place in range(0, len(data), 4):
        chunk, inside = divmod(first_byte // 4 + place // 4, CHUNK)
        word = int.from_bytes(data[place : place + 4], "little", signed=True)
        total += (splitmix64_of(seed, chunk) | 1) * (splitmix64_of(5, inside) | 1) * word
    return total % (1 << 64)


@pytest.mark.parametrize("first", [0, 1, 2, 4, 32, 12_347])
@pytest.mark.parametrize("size", [1, 3, 4, 31, 32, 33, 64, 65, 200])
def test_it_is_what_the_formula_says(size: int, first: int, short_chunks: None) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    expected = by_formula(bytes(data.tolist()), first, -7)
    assert checksum([Rows(data, first, -7)]) == expected


@pytest.mark.parametrize("count", [1, 2, 7])
def test_those_of_many_tensors_add_up(count: int, short_chunks: None) -> None:
    sizes = [1 + (29 * place) % 45 for place in range(count)]
    data = [torch.randint(0, 256, (size,)).byte() for size in sizes]
    expected = sum(by_formula(bytes(one.tolist()), 3, seed) for seed, one in enumerate(data))
    made = checksum([Rows(one, 3, seed) for seed, one in enumerate(data)])
    assert made == expected % (1 << 64)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_any_flipped_bit_of_any_byte_changes_it(dtype: torch.dtype, short_chunks: None) -> None:
    tensor = torch.randint(0, 256, (13 * 5 * 8,), dtype=torch.uint8).view(dtype)
    rows = [Rows(tensor, 0, 1)]
    whole, data = checksum(rows), tensor.view(torch.uint8)
    for place in range(len(data)):
        for bit in range(8):
            data[place] ^= 1 << bit
            assert checksum(rows) != whole, (place, bit)
            data[place] ^= 1 << bit
    assert checksum(rows) == whole


def test_a_flipped_bit_of_a_tensor_of_several_chunks_changes_it() -> None:
    """With chunks as they are: a byte in each, and the first and the last."""
    tensor = torch.randn(2_500_000)
    rows = [Rows(tensor, 0, 1)]
    whole, data = checksum(rows), tensor.view(torch.uint8)
    for place in (0, 3, 4_194_303, 4_194_304, 8_388_607, 8_388_608, len(data) - 1):
        data[place] ^= 0x80
        assert checksum(rows) != whole, place
        data[place] ^= 0x80


def test_numbers_mapped_behind_others_need_not_be_aligned() -> None:
    data = torch.randint(0, 256, (42,), dtype=torch.uint8)
    expected = checksum([Rows(data[2:].clone(), 0, 1)])
    assert checksum([Rows(data[2:], 0, 1)]) == expected
    assert checksum([Rows(data[2:].view(torch.bfloat16), 0, 1)]) == expected


SHAPES = [(1,), (200,), (128, 1), (300, 70), (512, 64), (5, 9000), (40, 3, 7)]


def gradient(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape) * torch.exp(8 * torch.randn(shape))


@pytest.mark.few(5)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_sum_for_every_128_rows(shape: tuple[int, ...]) -> None:
    grad = gradient(shape)
    made = gradient_squares([grad])
    exact = [sum(Fraction(x) ** 2 for x in some.flatten().tolist()) for some in grad.split(128)]
    assert made == pytest.approx([float(one) for one in exact], rel=1e-13)


def test_tensors_stand_one_behind_the_other_and_one_without_rows_has_none() -> None:
    grads = [gradient(shape) for shape in SHAPES]
    made = gradient_squares([grads[0], torch.empty(0, 8), *grads[1:]])
    assert made == [one for grad in grads for one in gradient_squares([grad])]
    assert gradient_squares([]) == gradient_squares([torch.empty(0)]) == []


@pytest.mark.parametrize("shape", [(1000,), (900, 70), (640, 5000), (257, 128)])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_slice_has_the_sums_of_the_whole(
    shape: tuple[int, ...], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grad = gradient(shape)
    whole = gradient_squares([grad])
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for cut in range(0, shape[0], 128):
            assert gradient_squares([grad[:cut].clone(), grad[cut:].clone()]) == whole
            assert gradient_squares([grad[cut : cut + 128]]) == [whole[cut // 128]]
        monkeypatch.setattr(optimiser, "_NUMBERS_AT_A_TIME", 1)
        assert gradient_squares([grad]) == whole
    finally:
        torch.set_num_threads(usual)


def test_what_is_not_finite_is_where_it_is_and_nothing_overflows() -> None:
    grad = torch.full((300, 3), 3e38)
    assert all(map(math.isfinite, gradient_squares([grad])))
    assert gradient_squares([torch.full((4,), 2.0**-149)]) == [4 * 2.0**-298]
    grad[130, 1], grad[299, 2] = torch.nan, -torch.inf
    made = gradient_squares([grad])
    assert math.isfinite(made[0]) and math.isnan(made[1]) and made[2] == math.inf


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
    m, v, *scales = zero_moments((count,), "fp32" if settings.get("wide") else "fp8")
    for step in range(1, steps + 1):
        before = master.clone()
        factors = AdamWFactors.of(1.0, 0.9, beta2, 1e-12, 0.0, step, clip=1.0)
        eight: dict[str, Any] = {"key": noise_key(1, step, 2), "scales": tuple(scales)}
        if settings.get("wide"):
            eight = {}
        adamw_step(master, gradient(step), m, v, factors, **eight)
        longest = torch.maximum(longest, (master - before).abs())
        if step > steps // 2:
            second += (v if settings.get("wide") else decode_second(v, scales[1])) / (
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


@pytest.mark.exhaustive
def test_v_stays_in_the_mean_what_it_is_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    for every in (1, 4):
        assert abs(error_of_the_second_moment(every)) < 0.01
    monkeypatch.setattr(optimiser, "encode_second", of_the_root)
    assert error_of_the_second_moment(4, "of the root") > 0.02
    monkeypatch.setattr(optimiser, "encode_second", nearest)
    assert error_of_the_second_moment(1, "nearest") < -0.5


@pytest.mark.exhaustive
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
    # In the right direction, and at the end of the range more slowly.
    assert share.max() < 1.6 and share.min() > 0.2
    monkeypatch.setattr(optimiser, "encode_second", with_zeros)
    _, step, _ = train(noisy, 500, beta2=beta2)
    assert step.max() > 1e4


def test_addends_are_added_one_after_the_other() -> None:
    total = torch.tensor([1e8, 1.0, -1e8])
    addends = [torch.tensor([4.0, 1e8, 3.0]), torch.tensor([4.0, -1e8, 3.0])]
    kept = total
    add_in_order(total, addends)
    assert kept is total
    assert total.tolist() == [1e8, 0.0, -1e8]
    assert (addends[0] + addends[1] + torch.tensor([1e8, 1.0, -1e8])).tolist() != total.tolist()
    add_in_order(total, [])
    assert total.tolist() == [1e8, 0.0, -1e8]
