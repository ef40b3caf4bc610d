"""The page and the picture of the proof: every arm in every chart in its own colour, nothing to
load, both readable as XML or HTML.
"""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks import proof
from benchmarks.arms import page
from benchmarks.arms.curves import charts, places_of, series_of
from benchmarks.arms.repeats import Repeats
from benchmarks.arms.suite import ARMS
from isobit.util.errors import ConfigError
from tests.benchmarks.made_up_rows import made_up_row
from tests.benchmarks.test_proof_rows import small
from tests.observe.pages import Page, assert_self_contained


def test_a_point_is_the_mean_of_its_steps_and_the_last_one_of_what_is_left() -> None:
    row = small("fp8")
    row["steps"] = {
        **row["steps"],
        "step": list(range(1, 8)),
        "entropy": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, None],
        "log_prob_diff/tokens_differing": [0, 1, 0, 0, 0, None, 0],
        "log_prob_diff/tokens_compared": [10, 10, 10, 10, 10, None, 0],
    }
    assert series_of(row, "entropy") == {5: 3.0, 7: 6.0}
    assert series_of(row, "differing share") == {5: pytest.approx(0.02)}
    assert series_of(row, "accuracy").keys() == {0, 25}


def test_curves_are_means_of_seeds_between_the_lowest_and_the_highest() -> None:
    found = [small("fp8-rollout", seed) for seed in range(3)]
    drawn = {chart.panel.title: chart for chart in charts([*found, small("bf16")])}
    accuracy = drawn["Held-out accuracy"]
    assert [(mark.label, mark.place) for mark in accuracy.marks] == [
        ("bf16", 1),
        ("fp8-rollout", 1 + list(ARMS).index("fp8-rollout")),
    ]
    assert accuracy.columns == ("step", "bf16", "fp8-rollout", "low", "high")
    last = [sum(row["evaluations"][-1]["rewards"]) / 20 for row in found]
    texts = [f"{100 * value:.1f}%" for value in (sum(last) / 3, min(last), max(last))]
    assert list(accuracy.rows[-1][2:]) == texts
    assert accuracy.marks[1].band and not accuracy.marks[0].band
    assert len(drawn) == 8


def test_no_arm_is_without_a_colour() -> None:
    """An arm of its own takes one that is free; eight at once are refused."""
    assert places_of([small("fp8")])["fp8"] == 1 + list(ARMS).index("fp8")
    assert places_of([small("mine"), small("fp8")])["mine"] == 1 + len(ARMS)
    few = [small(arm) for arm in ("mine", "fp8", "yours")]
    assert places_of(few) == {"fp8": 1, "mine": 2, "yours": 3}
    with pytest.raises(ValueError, match=r"8 arms .*draw the rows of fewer"):
        places_of([small(arm) for arm in (*ARMS, "mine", "yours")])


def test_the_page_stands_for_itself(tmp_path: Path) -> None:
    found = [small(arm, seed) for arm in ("bf16", "fp8", "<b>") for seed in range(2)]
    stress = {**small("fp8"), "task": "stress-lr"}
    out = page.write_html([*found, stress], Repeats([small("fp8")]), {}, tmp_path / "proof.html")
    read = Page(out)
    assert_self_contained(read)
    for words in ("gsm", "stress-lr", "a harsher setting", "<b>", "Gradient norm", "Settings"):
        assert words in read.text, words
    assert "1 of 1 the same bytes" in read.text
    assert "start.model.safetensors" in read.text
    first = out.read_bytes()
    page.write_html([*found, stress], Repeats([small("fp8")]), {}, out)
    assert out.read_bytes() == first


def test_the_picture_has_a_chart_a_task_and_no_stress(tmp_path: Path) -> None:
    found = [
        *(small(arm) for arm in ARMS),
        made_up_row("multiply", "fp8-rollout", 0, steps=25, problems=20),
        {**small("fp8"), "task": "stress-lr"},
    ]
    out = page.write_picture(found, tmp_path / "proof.svg")
    text = out.read_text(encoding="utf-8")
    root = ET.fromstring(text)
    assert root.get("width") == "780"
    labels = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"gsm: held-out accuracy", "multiply: held-out accuracy", *ARMS} <= set(labels)
    assert "stress" not in text and "prefers-color-scheme: dark" in text
    place = 1 + list(ARMS).index("fp8-rollout")
    assert len(re.findall(rf'<g class="k{place}"', text)) == 3  # both charts and the legend


def test_nothing_is_drawn_of_nothing_and_nothing_else_overwritten(tmp_path: Path) -> None:
    arguments = proof.make_parser().parse_args(["table", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"no finished run in .*: name the folder that has rows"):
        proof.report(arguments)
    with pytest.raises(ValueError, match="no finished run of the proof's tasks"):
        page.write_picture([{**small("fp8"), "task": "stress-lr"}], tmp_path / "proof.svg")
    mine = tmp_path / "mine.svg"
    mine.write_text("<svg/>")
    with pytest.raises(ConfigError, match="there already"):
        page.write_picture([small("fp8")], mine)
    assert mine.read_text() == "<svg/>"
