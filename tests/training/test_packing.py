"""Packing: every token once, the budget respected, and each row in front of the token it
predicts.
"""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from isobit.records import Completion, Group, Prompt
from isobit.training.packing import TrainingSample, first_fit_decreasing, pack, samples_of

lengths = st.lists(st.integers(1, 60), max_size=40)
budgets = st.integers(1, 100)


@st.composite
def samples(draw: st.DrawFn) -> list[TrainingSample]:
    """Samples whose tokens are all different, so that each can be traced through packing."""
    made, token = [], 0
    for prompt, completion in draw(
        st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), max_size=20)
    ):
        ids = tuple(range(token, token + prompt + completion))
        token += prompt + completion
        made.append(
            TrainingSample(
                ids[:prompt],
                ids[prompt:],
                tuple(-float(i) for i in ids[prompt:]),
                float(ids[0]),
                1.0 + len(made),
            )
        )
    return made


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


def test_similar_lengths_sit_together_and_ties_keep_their_order() -> None:
    assert first_fit_decreasing([5, 9, 5, 9, 5], 18) == [[1, 3], [0, 2, 4]]
    assert first_fit_decreasing([4, 30, 6], 10) == [[1], [2, 0]]


@given(samples(), budgets)
def test_every_token_once_with_its_companions(samples: list[TrainingSample], budget: int) -> None:
    batches = pack(samples, budget)
    by_first_token = {sample.prompt_ids[0]: sample for sample in samples}
    for batch in batches:
        assert len(batch.lengths) == 1 or sum(batch.lengths) <= budget
        first = 0
        for index, length in enumerate(batch.lengths):
            sample = by_first_token.pop(int(batch.token_ids[first]))
            mine = batch.sequence == index
            count = len(sample.completion_ids)
            assert batch.token_ids[first : first + length].tolist() == [
                *sample.prompt_ids,
                *sample.completion_ids,
            ]
            assert batch.positions[first : first + length].tolist() == list(range(length))
            assert batch.targets[mine].tolist() == list(sample.completion_ids)
            assert batch.token_ids[batch.rows[mine] + 1].tolist() == list(sample.completion_ids)
            assert batch.recorded_log_probs[mine].tolist() == list(sample.log_probs)
            assert batch.advantages[mine].tolist() == [sample.advantage] * count
            assert batch.temperatures[mine].tolist() == [sample.temperature] * count
            first += length
        assert first == batch.token_ids.numel()
        assert torch.equal(batch.rows, batch.rows.sort().values)
    assert not by_first_token, "samples were lost"


@given(samples(), budgets)
def test_packing_is_deterministic(samples: list[TrainingSample], budget: int) -> None:
    for a, b in zip(pack(samples, budget), pack(samples, budget), strict=True):
        assert a.lengths == b.lengths
        assert torch.equal(a.token_ids, b.token_ids)


def test_dtypes() -> None:
    (batch,) = pack([TrainingSample((1, 2), (3,), (-0.5,), 1.0, 1.0)], 8)
    integers = (batch.token_ids, batch.positions, batch.rows, batch.targets, batch.sequence)
    floats = (batch.temperatures, batch.recorded_log_probs, batch.advantages)
    assert {tensor.dtype for tensor in integers} == {torch.int64}
    assert {tensor.dtype for tensor in floats} == {torch.float32}


def test_excluded_and_empty_completions_are_left_out() -> None:
    def completion(*ids: int, temperature: float = 0.7) -> Completion:
        return Completion(ids, tuple(-1.0 for _ in ids), "", "stop", temperature, 1)

    group = Group(
        Prompt("p/0", "", (1, 2)),
        0,
        [completion(3), completion(4, 5), completion(), completion(6, temperature=0.0)],
    )
    made = samples_of([group], [[0.5, None, 1.0, -0.5]])
    assert [(sample.completion_ids, sample.advantage, sample.temperature) for sample in made] == [
        ((3,), 0.5, 0.7),
        ((6,), -0.5, 1.0),
    ]
