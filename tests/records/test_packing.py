"""Bins of sequences: every one of them once, the budget respected, and little room left over.

Packing: every token once, the budget respected, and each row in front of the token it
predicts.
"""

from dataclasses import replace
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from isobit.records.packing import (
    TOKENS_A_ROW,
    answers_within,
    first_fit_decreasing,
    pack,
    sequences_of,
)
from isobit.records.sequence import GIVEN, TokenSequence
from isobit.records.text import Completion, Group, Prompt
from tests.sequences import turns_of

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


@st.composite
def samples(draw: st.DrawFn) -> list[TokenSequence]:
    """Samples whose tokens are all different, so that each can be traced through packing."""
    made, token = [], 0
    for prompt, completion in draw(
        st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), max_size=20)
    ):
        ids = tuple(range(token, token + prompt + completion))
        token += prompt + completion
        made.append(
            TokenSequence.of_answer(
                ids[:prompt],
                ids[prompt:],
                tuple(-float(i) for i in ids[prompt:]),
                temperature=1.0 + len(made),
            ).with_columns(advantages=float(ids[0]))
        )
    return made


@given(samples(), budgets)
def test_every_token_once_with_its_companions(samples: list[TokenSequence], budget: int) -> None:
    batches = pack(samples, budget)
    by_first_token = {sample.token_ids[0]: sample for sample in samples}
    for batch in batches:
        assert len(batch.lengths) == 1 or sum(batch.lengths) <= budget
        first = 0
        for index, length in enumerate(batch.lengths):
            sample = by_first_token.pop(int(batch.token_ids[first]))
            mine = batch.sequence == index
            response = sample.of_response(sample.token_ids).tolist()
            assert batch.token_ids[first : first + length].tolist() == list(sample.token_ids)
            assert batch.positions[first : first + length].tolist() == list(range(length))
            assert batch.targets[mine].tolist() == response
            assert batch.token_ids[batch.rows[mine] + 1].tolist() == response
            recorded = sample.of_response(sample.log_probs).tolist()
            assert batch.recorded_log_probs[mine].tolist() == recorded
            assert batch.old_log_probs[mine].tolist() == recorded
            assert batch.advantages[mine].tolist() == [float(sample.token_ids[0])] * len(response)
            assert batch.temperatures[mine].tolist() == [sample.temperature] * len(response)
            first += length
        assert first == batch.token_ids.numel()
        assert torch.equal(batch.rows, batch.rows.sort().values)
    assert not by_first_token, "samples were lost"


@given(samples(), budgets)
def test_packing_is_deterministic(samples: list[TokenSequence], budget: int) -> None:
    for a, b in zip(pack(samples, budget), pack(samples, budget), strict=True):
        assert a.lengths == b.lengths
        assert torch.equal(a.token_ids, b.token_ids)


@st.composite
def grouped(draw: st.DrawFn) -> list[TokenSequence]:
    """Completions of a few prompts, in any order; each ends with a token of its own."""
    prompts = [[10 * prompt + 7] * draw(st.integers(1, 20)) for prompt in range(3)]
    chosen = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12)), max_size=16))
    return [
        TokenSequence.of_answer(prompts[prompt], [5] * (length - 1) + [1000 + number])
        for number, (prompt, length) in enumerate(chosen)
    ]


@given(grouped(), budgets)
def test_shared_prompts_have_their_rows_once_within_both_budgets(
    samples: list[TokenSequence], budget: int
) -> None:
    left = {int(one.token_ids[-1]): one for one in samples}
    for batch in pack(samples, budget, shared_prefix=True):
        rows = list(range(len(batch.token_ids)))
        if batch.row_of is not None:
            rows = batch.row_of.tolist()
            assert len(batch.lengths) > 1
        assert batch.num_rows == len(set(rows)) == max(rows) + 1
        if len(batch.lengths) > 1:
            assert batch.num_rows <= budget
            assert len(batch.token_ids) <= TOKENS_A_ROW * budget
        seen, first = dict[tuple[int, ...], int](), 0
        for length in batch.lengths:
            ids = batch.token_ids[first : first + length].tolist()
            sample = left.pop(ids[-1])
            assert ids == sample.token_ids.tolist()
            prompt = int(sample.loss_mask.argmax())
            for place in range(length):
                # one row for a place of each prompt, and for each token behind it
                key = (*ids[:prompt], place) if place < prompt else (ids[-1], place)
                assert seen.setdefault(key, rows[first + place]) == rows[first + place]
            first += length
        assert len(set(seen.values())) == len(seen), "others have rows of their own"
        learnt = batch.predicting_rows.tolist()
        assert learnt == [rows[place] for place in batch.rows.tolist()]
    assert not left, "samples were lost"


@given(samples(), budgets)
def test_without_a_common_prompt_the_batches_are_those_that_share_nothing(
    samples: list[TokenSequence], budget: int
) -> None:
    plain, sharing = pack(samples, budget), pack(samples, budget, shared_prefix=True)
    assert [one.lengths for one in plain] == [one.lengths for one in sharing]
    for one, other in zip(plain, sharing, strict=True):
        assert torch.equal(one.token_ids, other.token_ids) and other.row_of is None


def test_a_prompt_is_repeated_where_its_completions_exceed_the_budget() -> None:
    """Longest first, each in the first micro-batch with space for it."""
    samples = [TokenSequence.of_answer([7] * 10, [5] * n) for n in (3, 9, 6, 8, 1)]
    lengths = [one.lengths for one in pack(samples, 28, shared_prefix=True)]
    assert lengths == [(19, 18, 11), (16, 13)]
    many = [TokenSequence.of_answer([7] * 100, [number]) for number in range(9)]
    assert [len(one.lengths) for one in pack(many, 110, shared_prefix=True)] == [4, 4, 1]
    assert [len(one.lengths) for one in pack(many, 110)] == [1] * 9


@given(st.integers(1, 300), st.integers(1, 60), st.integers(1, 20))
def test_the_number_of_answers_in_a_micro_batch_is_known_before(
    budget: int, prompt: int, answer: int
) -> None:
    samples = [TokenSequence.of_answer([7] * prompt, [5] * answer) for _ in range(200 // answer)]
    most = answers_within(budget, prompt, answer)
    counts = [len(one.lengths) for one in pack(samples, budget, shared_prefix=True)]
    assert counts[0] == min(most, len(samples))
    assert sum(counts) == len(samples) and len(counts) == -(-len(samples) // most)


def test_dtypes() -> None:
    (batch,) = pack([TokenSequence.of_answer((1, 2), (3,), (-0.5,))], 8)
    integers = (batch.token_ids, batch.positions, batch.rows, batch.targets, batch.sequence)
    floats = (
        batch.temperatures,
        batch.recorded_log_probs,
        batch.old_log_probs,
        batch.advantages,
    )
    assert {tensor.dtype for tensor in integers} == {torch.int64}
    assert {tensor.dtype for tensor in floats} == {torch.float32}


def test_several_turns_with_an_advantage_for_each_token() -> None:
    """Two answers with a tool's words between them, the second drawn from newer weights."""
    turns = turns_of(
        token_ids=(1, 2, 3, 4, 5, 6, 7, 8),
        loss_mask=(False, False, True, True, False, False, True, False),
        log_probs=(0.0, 0.0, -0.3, -0.4, 0.0, 0.0, -0.7, 0.0),
        weights_versions=(GIVEN, GIVEN, 1, 1, GIVEN, GIVEN, 2, GIVEN),
        advantages=(0.0, 0.0, 3.0, 4.0, 0.0, 0.0, 7.0, 0.0),
        temperature=0.5,
    )
    recomputed = replace(turns, old_log_probs=turns.spread((-3.0, -4.0, -7.0)), temperature=2.0)
    (batch,) = pack([turns, TokenSequence.of_answer((1,), (9,)), recomputed], 32)
    assert batch.lengths == (8, 8, 2)
    assert batch.rows.tolist() == [1, 2, 5, 9, 10, 13, 16]
    assert batch.targets.tolist() == [3, 4, 7, 3, 4, 7, 9]
    assert batch.sequence.tolist() == [0, 0, 0, 1, 1, 1, 2]
    recorded = torch.tensor([-0.3, -0.4, -0.7])
    old = torch.tensor([-3.0, -4.0, -7.0])
    assert torch.equal(batch.recorded_log_probs, torch.cat([recorded, recorded, torch.zeros(1)]))
    assert torch.equal(batch.old_log_probs, torch.cat([recorded, old, torch.zeros(1)]))
    assert batch.advantages.tolist() == [3.0, 4.0, 7.0, 3.0, 4.0, 7.0, 0.0]
    assert batch.temperatures.tolist() == [0.5, 0.5, 0.5, 2.0, 2.0, 2.0, 1.0]


def test_excluded_and_empty_completions_are_left_out() -> None:
    def completion(*ids: int) -> Completion:
        return Completion(TokenSequence.of_answer((1, 2), ids, temperature=0.7), "", "stop")

    group = Group(
        Prompt("p/0", "", (1, 2)), 0, [completion(3), completion(4, 5), completion(), completion(6)]
    )
    made = sequences_of([group], [[0.5, None, 1.0, -0.5]])
    columns = [(one.token_ids.tolist(), one.advantages.tolist(), one.temperature) for one in made]
    assert columns == [([1, 2, 3], [0.0, 0.0, 0.5], 0.7), ([1, 2, 6], [0.0, 0.0, -0.5], 0.7)]
