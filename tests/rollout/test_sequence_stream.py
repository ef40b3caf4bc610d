"""Text told as it grows: never taken back, and whole at the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from isobit.rollout.sequence import GrowingAnswer, cut, decode
from tests.rollout.test_sequence import (
    BYTES,
    WORD_PIECES,
    WORDS,
    characters,
    first_stop,
    some_stops,
)


def told_and_final(
    tokenizer: PreTrainedTokenizerBase, token_ids: list[int], stops: list[str]
) -> tuple[list[str], str]:
    """What is told after each token that does not end the sample, then the rest; and the text that
    the completion has.
    """
    end = first_stop(tokenizer, token_ids, stops) or len(token_ids)
    answer = GrowingAnswer(tokenizer, stops)
    pieces = [answer.feed([token_id]) for token_id in token_ids[: max(0, end - 1)]]
    final = cut(decode(tokenizer, token_ids[:end]), stops)
    return [*pieces, answer.rest(final)], final


@given(text=characters, stops=some_stops)
def test_bytes_add_up(text: str, stops: list[str]) -> None:
    pieces, final = told_and_final(BYTES, BYTES.encode(text), stops)
    assert "".join(pieces) == final


@given(token_ids=st.lists(st.integers(0, 255), max_size=25), stops=some_stops)
def test_bytes_that_are_no_characters_add_up(token_ids: list[int], stops: list[str]) -> None:
    pieces, final = told_and_final(BYTES, token_ids, stops)
    assert "".join(pieces) == final


@given(
    token_ids=st.lists(st.integers(1, len(WORDS) - 1), max_size=25),
    stops=st.lists(st.sampled_from(["end", " end", "s.", "s en", "the end of it"])),
)
def test_words_add_up(token_ids: list[int], stops: list[str]) -> None:
    pieces, final = told_and_final(WORD_PIECES, token_ids, stops)
    assert "".join(pieces) == final


@pytest.mark.parametrize(
    ("text", "stops", "pieces"),
    [
        ("é!", [], ["", "é", "!"]),
        ("abcd", ["bcx"], ["a", "", "", "bcd"]),
        ("aab!", ["ab!"], ["", "a", "", ""]),
    ],
)
def test_what_may_still_change_is_held_back(text: str, stops: list[str], pieces: list[str]) -> None:
    assert told_and_final(BYTES, BYTES.encode(text), stops)[0] == pieces
