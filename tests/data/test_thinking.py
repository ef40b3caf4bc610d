"""Thinking between tags, told from the answer however a turn arrives."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from isobit.data.thinking import Portions, TaggedReader

TAGS = ["<think>", "</think>", "[THINK]", "[/THINK]"]
PARTS = st.lists(st.sampled_from([*TAGS, "<thi", "[/TH", "INK]", "\n", " ", "a", "<"]), max_size=9)


def told(pieces: Sequence[str], is_thinking: bool, begun: str) -> Portions:
    reader = TaggedReader(is_thinking, begun)
    found = [*(reader.feed(one, False) for one in pieces), reader.feed("", True)]
    return Portions("".join(one.thinking for one in found), "".join(one.answer for one in found))


@given(parts=PARTS, ahead=PARTS, is_thinking=st.booleans(), cuts=st.lists(st.integers(0, 40)))
def test_every_cut_says_the_same(
    parts: list[str], ahead: list[str], is_thinking: bool, cuts: list[int]
) -> None:
    text, begun = "".join(parts), "".join(ahead)
    places = [0, *sorted(min(one, len(text)) for one in cuts), len(text)]
    pieces = [text[one:other] for one, other in pairwise(places)]
    whole = told([text], is_thinking, begun)
    assert told(pieces, is_thinking, begun) == told([*text], is_thinking, begun) == whole
