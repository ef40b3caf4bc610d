"""Several runs on one page."""

from collections.abc import Callable
from pathlib import Path

import pytest

import isobit
from isobit.errors import ConfigError
from isobit.observe.report.comparison import write_comparison
from tests.observe.pages import Page, assert_self_contained

from .run_files import evaluation_line, manifest, step_line

WriteRun = Callable[..., Path]


def runs(write_run: WriteRun, *names: str) -> list[Path]:
    """Runs that differ in their learning rate and in where they end."""
    return [
        write_run(
            [step_line(1), step_line(2 + place), evaluation_line(2, 0.5 + place / 10)],
            [],
            manifest(config={"output": name, "training": {"learning_rate": place}}),
            name=name,
        )
        for place, name in enumerate(names)
    ]


def test_each_chart_has_a_curve_of_each_run(write_run: WriteRun, tmp_path: Path) -> None:
    page = Page(write_comparison(runs(write_run, "one", "<b>two"), tmp_path / "both.html"))
    assert_self_contained(page)
    assert "one against <b>two" in page.text
    assert "training.learning_rate" in page.text and "\noutput" not in page.text
    assert "50.0%" in page.text and "60.0%" in page.text
    for heading in ("Reward", "held_out", "Entropy", "Throughput", "Time a step"):
        assert heading in page.text, heading
    assert "one 1, <b>two 1" in page.text.replace("\n", " ") or "step 1, one" in page.source


def test_a_run_keeps_its_colour_where_another_has_no_figure(
    write_run: WriteRun, tmp_path: Path
) -> None:
    one, two = (
        write_run([{**step_line(1), "entropy": None if name == "one" else 1.0}], [], name=name)
        for name in ("one", "two")
    )
    source = write_comparison([one, two], tmp_path / "both.html").read_text(encoding="utf-8")
    entropy = source[source.index("<h3>Entropy</h3>") :].partition("</figure>")[0]
    assert 'class="k2"' in entropy and 'class="k1"' not in entropy


def test_intervals_of_several_runs_are_bands_that_do_not_hide_each_other(
    write_run: WriteRun, tmp_path: Path
) -> None:
    names = [
        write_run([step_line(1), evaluation_line(1, 0.5), evaluation_line(2, 0.6)], [], name=name)
        for name in ("one", "two")
    ]
    source = write_comparison(names, tmp_path / "both.html").read_text(encoding="utf-8")
    assert 'class="band"' in source and 'class="whisker"' not in source


def test_runs_of_one_name_are_told_apart_and_equal_recipes_are_said_to_be(
    write_run: WriteRun, tmp_path: Path
) -> None:
    root = write_run([step_line(1)], [], manifest())
    text = Page(write_comparison([root, root], tmp_path / "both.html")).text
    assert f"1: {root} against 2: {root}" in text
    assert "Their recipes are the same" in text


def test_one_run_or_eight_are_refused(write_run: WriteRun, tmp_path: Path) -> None:
    root = write_run([step_line(1)], [], manifest())
    for number in (1, 8):
        with pytest.raises(ConfigError, match=f"{number} runs cannot be compared; name 2 to 7"):
            write_comparison([root] * number, tmp_path / "all.html")


def test_python_has_the_command(write_run: WriteRun, tmp_path: Path) -> None:
    one, two = runs(write_run, "one", "two")
    assert isobit.report(str(one)) == one / "report.html"
    assert isobit.report(one, two, out=tmp_path / "x.html") == tmp_path / "x.html"
    with pytest.raises(ConfigError, match="--watch shows one run"):
        isobit.report(one, two, watch=True)
