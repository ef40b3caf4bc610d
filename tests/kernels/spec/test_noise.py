"""Noise as a pure function of key, position and vocabulary entry."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from isobit.kernels.spec.noise import gumbel, uniforms

MASK = (1 << 64) - 1
int64 = st.integers(-(1 << 63), (1 << 63) - 1)


def splitmix64_of_integers(seed: int, index: int) -> int:
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


@given(key=int64, position=st.integers(0, 1 << 20))
def test_uniforms_are_odd_multiples_of_2_to_the_minus_53(key: int, position: int):
    values = uniforms(torch.tensor([key]), torch.tensor([position]), 7)[0].tolist()
    seed = splitmix64_of_integers(key, position)
    assert values == [
        ((splitmix64_of_integers(seed, entry) >> 11) | 1) / 2**53 for entry in range(7)
    ]
    assert all(0 < value < 1 for value in values)


def test_the_smallest_and_the_largest_uniform_have_finite_noise():
    extremes = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    assert torch.isfinite(-(-extremes.log()).log()).all()


def test_gumbel_noise_has_the_mean_and_variance_of_its_distribution():
    noise = gumbel(torch.tensor([11, 12]), torch.tensor([0, 5]), 100_000)
    assert abs(noise.mean().item() - 0.5772156649) < 0.012
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.04


@given(
    st.lists(st.tuples(int64, st.integers(0, 1 << 20)), min_size=1, max_size=70),
    st.integers(1, 130),
)
def test_a_row_of_noise_is_the_same_in_every_batch_and_a_prefix_of_any_larger_vocabulary(
    rows: list[tuple[int, int]], vocab_size: int
):
    keys, positions = (torch.tensor(column) for column in zip(*rows, strict=True))
    noise = gumbel(keys, positions, vocab_size)
    for row in {0, len(rows) // 2, len(rows) - 1}:
        alone = gumbel(keys[row : row + 1], positions[row : row + 1], vocab_size + 37)
        assert torch.equal(noise[row], alone[0, :vocab_size])
