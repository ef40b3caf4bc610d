"""Thinking between tags, told from the answer however a turn arrives."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from isobit.data.thinking import Portions, TaggedReader

TAGS = ["<think>", "</think>", "[THINK]", "[/THINK]"]
PARTS = st.lists(st.sampled_from([*TAGS, "<thi", "[/TH", "INK]", "\n", " ", "a", "<"]), max_size=9)


def told(pieces: Sequence[str], is_thinking: bool, begun: str, unseen: Sequence[str]) -> Portions:
    reader = TaggedReader(is_thinking, begun, unseen)
    found = [*(reader.feed(one, False) for one in pieces), reader.feed("", True)]
    return Portions("".join(one.thinking for one in found), "".join(one.answer for one in found))


@given(
    parts=PARTS,
    ahead=PARTS,
    is_thinking=st.booleans(),
    unseen=st.sampled_from([[], TAGS, TAGS[2:]]),
    cuts=st.lists(st.integers(0, 40)),
)
def test_every_cut_says_the_same(
    parts: list[str], ahead: list[str], is_thinking: bool, unseen: list[str], cuts: list[int]
) -> None:
    text, turn = "".join(parts), (is_thinking, "".join(ahead), unseen)
    places = [0, *sorted(min(one, len(text)) for one in cuts), len(text)]
    pieces = [text[one:other] for one, other in pairwise(places)]
    assert told(pieces, *turn) == told([*text], *turn) == told([text], *turn)


def test_unseen_tags_stand_nowhere() -> None:
    text = "[THINK]a[THINK]b[/THINK]4[/THINK] [THI</think>"
    assert told([text], False, "", TAGS[2:]) == Portions("ab", "4 [THI</think>")
    assert told([text[7:]], False, "", TAGS) == Portions("", "ab4 [THI")
