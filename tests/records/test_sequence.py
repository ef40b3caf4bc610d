"""The one record from sampling to the loss: its columns, and what may import it."""

import subprocess
import sys

import pytest

from isobit.records.sequence import GIVEN, TokenSequence
from isobit.records.text import Completion


def test_an_answer_fills_the_columns_behind_its_prompt() -> None:
    made = TokenSequence.of_answer((7, 8), (3, 4), (-0.5, -0.25), (5, 6), 0.7, (-0.4, -0.2))
    assert made == TokenSequence(
        token_ids=(7, 8, 3, 4),
        loss_mask=(False, False, True, True),
        log_probs=(0.0, 0.0, -0.5, -0.25),
        weights_versions=(GIVEN, GIVEN, 5, 6),
        advantages=(0.0, 0.0, 0.0, 0.0),
        temperature=0.7,
        truncated_log_probs=(0.0, 0.0, -0.4, -0.2),
    )
    assert TokenSequence.of_answer((7,), (3,)).weights_versions == (GIVEN, GIVEN)


def test_the_response_is_what_the_mask_says() -> None:
    turns = TokenSequence(
        token_ids=(1, 2, 3, 4, 5),
        loss_mask=(False, True, False, True, True),
        log_probs=(0.0, -2.0, 0.0, -4.0, -5.0),
        weights_versions=(GIVEN, 1, GIVEN, 1, 2),
        advantages=(0.0,) * 5,
    )
    assert turns.length == 5
    assert turns.response_ids == (2, 4, 5)
    assert turns.of_response(turns.log_probs) == (-2.0, -4.0, -5.0)
    assert turns.spread((0.1, 0.2, 0.3)) == (0.0, 0.1, 0.0, 0.2, 0.3)
    assert turns.with_advantages(1.5).advantages == (0.0, 1.5, 0.0, 1.5, 1.5)
    completion = Completion(turns, "", "stop")
    assert completion.token_ids == (2, 4, 5)
    assert completion.weights_versions == (1, 1, 2)
    assert completion.truncated_log_probs is None


def test_columns_of_another_length_and_a_first_token_to_learn_are_mistakes() -> None:
    with pytest.raises(AssertionError, match="one entry a token"):
        TokenSequence.of_answer((1,), (2, 3), (-1.0,))
    with pytest.raises(AssertionError, match="predict the first token"):
        TokenSequence.of_answer((), (2, 3))
    for values in ((1.0,), (1.0, 2.0, 3.0)):
        with pytest.raises(AssertionError, match="one value a token"):
            TokenSequence.of_answer((1,), (2, 3)).spread(values)


def test_what_rewards_and_data_import_holds_no_torch() -> None:
    code = "import sys, isobit.records.text, isobit.data.sampler, isobit.rewards.grading"
    subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"], check=True)
