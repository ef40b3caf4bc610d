"""What a run prints, with and without a terminal.

What of a line fits into a terminal, and how long a run will still take.
"""

from contextlib import suppress
from io import StringIO

import pytest
from rich.console import Console as Terminal

from isobit.observe.console import (
    GOOD,
    Console,
    Part,
    TimeLeft,
    describe_result,
    fit,
    printable,
    silent,
    stacked,
    time_left,
)
from isobit.observe.evaluation import EvalResult
from isobit.rollout.engine_stats import Progress


def test_lines_are_plain_and_there_is_no_bar_without_a_terminal() -> None:
    out = StringIO()
    console = Console(Terminal(file=out, width=40))
    with console.busy("training"), console.counting("matrices") as on_matrix:
        assert on_matrix is None
    console.lines(["a line that is longer than the width of the terminal", "[bold]b[/bold]"])
    assert out.getvalue() == (
        "a line that is longer than the width of the terminal\n[bold]b[/bold]\n"
    )


def test_a_bar_is_not_there_before_its_first_number() -> None:
    """Seen before: the bar of a command that could not begin stood above its error."""
    out = StringIO()
    console = Console(Terminal(file=out, width=80, force_terminal=True))
    with suppress(ValueError), console.counting("matrices"):
        raise ValueError
    assert out.getvalue() == ""
    with console.counting("matrices") as on_matrix:
        assert on_matrix is not None
        on_matrix(1, 2)
    assert "1/2" in out.getvalue()


def test_in_a_notebook_lines_are_one_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen before: a display of its own for each line, with a blank line between."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *_: pytest.fail("a display of its own"))
    monkeypatch.setenv("FORCE_COLOR", "1")  # as ipykernel does
    console = Console()
    console.line("step 1")
    with console.busy("training"):
        console.line("step 2", "green")
    assert capsys.readouterr().out == "step 1\nstep 2\n"


def test_without_a_terminal_a_line_now_and_then_stands_in_the_place_of_the_bar() -> None:
    out = StringIO()
    with Console(Terminal(file=out)).generating("rollout") as progress:
        assert progress is not None
        for seconds in (10.0, 31.0, 59.0, 62.0):
            progress(Progress(3, 5, 1000, generated_tokens=2480, seconds=seconds))
    assert out.getvalue() == (
        "  rollout: 3 of 1,000 completions, 80 tokens/s, 31 s\n"
        "  rollout: 3 of 1,000 completions, 40 tokens/s, 62 s\n"
    )
    with silent().generating("rollout") as progress:
        assert progress is None


def test_a_line_of_parts_has_colours_and_a_width_on_a_terminal_alone() -> None:
    parts = [Part("step 1"), Part("differing 0 of 3", GOOD, ((1, "0 differ"),))]
    terminal, pipe = StringIO(), StringIO()
    coloured = Terminal(file=terminal, force_terminal=True, width=20, color_system="standard")
    for out in (coloured, Terminal(file=pipe, width=20)):
        Console(out).parts(parts)
    assert terminal.getvalue() == "step 1  \x1b[32m0 differ\x1b[0m\n"
    assert pipe.getvalue() == "step 1  differing 0 of 3\n"


def test_a_narrow_terminal_breaks_a_line_between_words_alone() -> None:
    out = StringIO()
    path = "/a/path/that-is/longer-than/the/terminal"
    Console(Terminal(file=out, force_terminal=True, width=20)).line(
        f"  note: written to {path} now"
    )
    assert out.getvalue() == f"  note: written to\n      {path}\n      now\n"


def test_a_terminal_shows_tokens_per_second_while_generating() -> None:
    out = StringIO()
    console = Console(Terminal(file=out, force_terminal=True, width=120))
    with console.generating("rollout") as progress:
        assert progress is not None
        progress(Progress(finished=3, running=5, total=8, generated_tokens=2500, seconds=2.0))
    assert "1,250 tokens/s" in out.getvalue()
    assert "3/8" in out.getvalue()


def test_a_terminal_shows_what_takes_its_time_and_elsewhere_nothing_is_printed() -> None:
    terminal, pipe = StringIO(), StringIO()
    for out in (Terminal(file=terminal, force_terminal=True, width=80), Terminal(file=pipe)):
        with Console(out).busy("training"):
            pass
    assert "training" in terminal.getvalue() and "0:00:0" in terminal.getvalue()
    assert pipe.getvalue() == ""


def test_control_characters_and_markup_do_not_reach_the_terminal() -> None:
    out = StringIO()
    Console(Terminal(file=out, force_terminal=True)).line("a\x1b[31mb\x07 [bold]c[/bold]")
    assert out.getvalue() == "a[31mb [bold]c[/bold]\n"
    assert printable("\u202egnihton\t\n") == "gnihton\t\n"


def test_an_evaluation_set_in_one_line() -> None:
    result = EvalResult(0.5, (0.4, 0.6), 200, 4, 3, {1: 0.5, 2: 0.75, 4: 0.9}, 17.5, 0.0)
    assert describe_result("sums", result) == (
        "sums accuracy 50.0% (95% interval 40.0 to 60.0) on 200 problems, 4 samples each, pass@2 "
        "75.0%, pass@4 90.0%, length 17.5, "
        "3 rewards failed"
    )


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


ROWS = [("", "speed", "bytes"), ("a", "10", "1,000"), ("longest", "9", "20")]
BLOCKS = """\
         speed
a           10
longest      9

         bytes
a        1,000
longest     20"""


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (21, ["         speed  bytes", "a           10  1,000", "longest      9     20"]),
        (20, BLOCKS.splitlines()),
        (13, ["a", "  speed  10", "  bytes  1,000", "longest", "  speed  9", "  bytes  20"]),
    ],
)
def test_columns_that_do_not_fit_follow_below(width: int, expected: list[str]) -> None:
    assert stacked(ROWS, width) == expected
