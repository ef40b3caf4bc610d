"""Bins of sequences: every one of them once, the budget respected, and little room left over."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from isobit.records.bins import first_fit_decreasing

lengths = st.lists(st.integers(1, 60), max_size=40)
budgets = st.integers(1, 100)


@given(lengths, budgets)
def test_every_index_stands_in_one_bin_and_bins_keep_the_budget(
    lengths: list[int], budget: int
) -> None:
    bins = first_fit_decreasing(lengths, budget)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    assert all(len(members) == 1 or sum(lengths[i] for i in members) <= budget for members in bins)


@given(lengths, budgets)
def test_bins_are_full(lengths: list[int], budget: int) -> None:
    totals = sorted(
        sum(lengths[i] for i in members) for members in first_fit_decreasing(lengths, budget)
    )
    assert all(a + b > budget for a, b in pairwise(totals)), "two bins would fit into one"


@given(st.lists(st.integers(0, 60), max_size=40), budgets)
def test_each_goes_into_the_first_bin_with_room(lengths: list[int], budget: int) -> None:
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for members in bins:
            if sum(lengths[i] for i in members) + lengths[index] <= budget:
                members.append(index)
                break
        else:
            bins.append([index])
    assert first_fit_decreasing(lengths, budget) == bins


def test_similar_lengths_sit_together_and_ties_keep_their_order() -> None:
    assert first_fit_decreasing([5, 9, 5, 9, 5], 18) == [[1, 3], [0, 2, 4]]
    assert first_fit_decreasing([4, 30, 6], 10) == [[1], [2, 0]]
