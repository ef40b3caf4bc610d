"""What of a line fits into a terminal, and how long a run will still take."""

import pytest

from isobit.observe.step_line import Part, TimeLeft, fit, time_left

PARTS = [
    Part("first"),
    Part("second one", shorter=((2, "2nd"), (3, ""))),
    Part("third", "", ((1, ""),)),
]


def text(width: int | None) -> str:
    return "  ".join(part.text for part in fit(PARTS, width))


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (None, "first  second one  third"),
        (24, "first  second one  third"),
        (23, "first  second one"),
        (16, "first  2nd"),
        (9, "first"),
        (1, "first"),
    ],
)
def test_a_line_is_cut_in_the_order_of_its_parts_until_it_fits(
    width: int | None, line: str
) -> None:
    assert text(width) == line


def test_a_part_keeps_its_style_when_it_is_cut() -> None:
    assert fit([Part("long", "green", ((1, "s"),))], 1) == [Part("s", "green")]


def test_the_first_step_warms_up_and_the_last_ten_set_the_pace() -> None:
    ends = [0.0, 100.0, 102.0, *(102.0 + 4.0 * step for step in range(1, 20))]
    left = TimeLeft(30, iter(ends).__next__)
    assert left.after(1) == 100.0 * 29
    assert left.after(2) == 2.0 * 28
    assert left.after(3) == 3.0 * 27
    assert [left.after(step) for step in range(4, 14)][-1] == 4.0 * 17


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (54.4, "54 s left"),
        (600, "10 min left"),
        (36_000, "10 h left"),
        (864_000, "10 days left"),
        (0.0, "done"),
    ],
)
def test_the_time_that_is_left_in_words(seconds: float, said: str) -> None:
    assert time_left(seconds) == Part(said)
