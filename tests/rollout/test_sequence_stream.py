"""Text told as it grows: never taken back, and whole at the end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from isobit.rollout.sample_stream import GrowingAnswer
from isobit.rollout.sequence import cut, decode
from tests.rollout.test_sequence import (
    BYTES,
    FALLBACK,
    FALLBACK_SIZE,
    WORD_PIECES,
    WORDS,
    characters,
    first_stop,
    some_stops,
)
from tests.suites import examples


def told_and_final(
    tokenizer: PreTrainedTokenizerBase,
    token_ids: list[int],
    stops: list[str],
    special: bool = False,
) -> tuple[list[str], str]:
    """What is told after each token that does not end the sample, then the rest; and the text that
    the completion has.
    """
    end = first_stop(tokenizer, token_ids, stops, special) or len(token_ids)
    answer = GrowingAnswer(tokenizer, stops, special)
    pieces = [answer.feed([token_id]) for token_id in token_ids[: max(0, end - 1)]]
    final, _ = cut(decode(tokenizer, token_ids[:end], special), stops)
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


@settings(max_examples=examples(500))
@given(
    token_ids=st.lists(
        st.integers(0, FALLBACK_SIZE - 1) | st.sampled_from([4 + 0xC8, 4 + 0x50, 4 + 0x0A]),
        max_size=25,
    ),
    stops=st.lists(st.sampled_from(["a", "\n", "é ", " b", "P"]), max_size=2),
    special=st.booleans(),
)
def test_runs_of_bytes_add_up(token_ids: list[int], stops: list[str], special: bool) -> None:
    """With byte fallback a whole run becomes U+FFFD where one byte of it is wrong, and special
    tokens that are hidden do not end it.
    """
    pieces, final = told_and_final(FALLBACK, token_ids, stops, special)
    assert "".join(pieces) == final


@pytest.mark.parametrize(
    ("tokens", "pieces"),
    [
        (["<0x50>", "<0xC8>", "é"], ["", "", "\ufffd\ufffdé"]),
        (["<0xC3>", "<0xA9>", "a"], ["", "", "éa"]),
        (["a", "<0x0A>", "<s>", "<0xC8>", "b"], ["a", "", "", "", "\ufffd\ufffdb"]),
        (["a", "▁b", "<s>", "a"], ["a", " b", "", "a"]),
    ],
)
def test_bytes_are_held_back_until_their_run_ends(tokens: list[str], pieces: list[str]) -> None:
    answer = GrowingAnswer(FALLBACK, [])
    ids = [FALLBACK.get_vocab()[token] for token in tokens]
    assert [answer.feed([token]) for token in ids] == pieces
    assert answer.rest(decode(FALLBACK, ids)) == ""


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
