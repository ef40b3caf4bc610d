"""The one record from sampling to the loss: its columns, and what may import it."""

import subprocess
import sys
from dataclasses import MISSING, fields, replace

import numpy as np
import pytest

from isobit.records.batch import PackedBatch
from isobit.records.sequence import COLUMN, COLUMNS, GIVEN, TokenSequence
from isobit.records.text import Completion
from tests.sequences import turns_of


def test_an_answer_fills_the_columns_behind_its_prompt() -> None:
    made = TokenSequence.of_answer(
        (7, 8), (3, 4), (-0.5, -0.25), (5, 6), 0.7, truncated_log_probs=(-0.4, -0.2)
    )
    assert made == turns_of(
        token_ids=(7, 8, 3, 4),
        loss_mask=(False, False, True, True),
        log_probs=(0.0, 0.0, -0.5, -0.25),
        weights_versions=(GIVEN, GIVEN, 5, 6),
        temperature=0.7,
        truncated_log_probs=(0.0, 0.0, -0.4, -0.2),
    )
    assert TokenSequence.of_answer((7,), (3,)).weights_versions.tolist() == [GIVEN, GIVEN]


def test_the_table_declares_every_column_of_a_sequence_and_of_a_batch() -> None:
    beside = {"token_ids", "loss_mask", "temperature", "fresh", "drawn"}
    assert {one.name for one in COLUMNS} == {one.name for one in fields(TokenSequence)} - beside
    packed = {one.packed for one in COLUMNS if one.packed is not None}
    rows = {"token_ids", "positions", "lengths", "rows", "row_of", "targets", "sequence"}
    assert packed == {one.name for one in fields(PackedBatch)} - rows - {"temperatures", "fresh"}
    for one in COLUMNS:
        required = {x.name for x in fields(TokenSequence) if x.default is MISSING}
        assert (one.name in required) != one.optional
        assert one.stand_in is None or not COLUMN[one.stand_in].optional


def test_the_response_is_what_the_mask_says() -> None:
    turns = turns_of(
        token_ids=(1, 2, 3, 4, 5),
        loss_mask=(False, True, False, True, True),
        log_probs=(0.0, -2.0, 0.0, -4.0, -5.0),
        weights_versions=(GIVEN, 1, GIVEN, 1, 2),
    )
    assert (turns.length, turns.response_length) == (5, 3)
    assert turns.of_response(turns.log_probs).tolist() == [-2.0, -4.0, -5.0]
    assert turns.spread((0.5, 0.25, 0.125)).tolist() == [0.0, 0.5, 0.0, 0.25, 0.125]
    routed = turns.with_columns(routings=(1 << 62, 2, -3))
    assert routed.routings is not None and routed.routings.tolist() == [0, 1 << 62, 0, 2, -3]
    assert turns.with_columns(advantages=1.5).advantages.tolist() == [0.0, 1.5, 0.0, 1.5, 1.5]
    assert turns.with_columns(advantages=-0.1) == turns.with_columns(advantages=(-0.1, -0.1, -0.1))
    completion = Completion(turns, "", "stop")
    assert completion.token_ids == (2, 4, 5) and {type(one) for one in completion.token_ids} == {
        int
    }
    assert completion.weights_versions == (1, 1, 2)
    assert completion.truncated_log_probs is None


def test_equal_is_equal_bit_for_bit() -> None:
    made = TokenSequence.of_answer((1,), (2, 3), (-0.0, -1.0))
    same = TokenSequence.of_answer((1,), (2, 3), (-0.0, -1.0))
    assert made == same and hash(made) == hash(same)
    assert made != TokenSequence.of_answer((1,), (2, 3), (0.0, -1.0))
    assert made != replace(made, importance=made.spread((1.0, 1.0)))
    assert made != replace(made, fresh=False) and made != "a sequence"
    nan = replace(made, values=made.spread((float("nan"), 0.0)))
    assert nan == replace(made, values=made.spread((float("nan"), 0.0)))


def test_nobody_writes_to_a_column() -> None:
    made = TokenSequence.of_answer((1,), (2, 3), (-0.5, -1.0))
    with pytest.raises(ValueError, match="read-only"):
        made.log_probs[1] = 0.0
    with pytest.raises(AssertionError, match="log_probs has entries of float32"):
        replace(made, log_probs=np.zeros(3))


def test_columns_of_another_length_and_a_first_token_to_learn_are_mistakes() -> None:
    with pytest.raises(AssertionError, match="one entry a token"):
        TokenSequence.of_answer((1,), (2, 3), (-1.0,))
    with pytest.raises(AssertionError, match="predict the first token"):
        TokenSequence.of_answer((), (2, 3))
    for values in ((1.0,), (1.0, 2.0, 3.0)):
        with pytest.raises(AssertionError, match="one entry a token"):
            TokenSequence.of_answer((1,), (2, 3)).spread(values)


def test_what_rewards_and_data_import_holds_no_torch() -> None:
    code = "import sys, isobit.records.text, isobit.data.sampler, isobit.rewards.grading"
    subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"], check=True)
