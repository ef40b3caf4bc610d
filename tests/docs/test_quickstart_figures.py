"""The quickstart's figures in the pages are those of the stored run."""

import json
from pathlib import Path

import pytest

from tools import quickstart_figures as quickstart

FIGURES = json.loads(quickstart.STORED.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", quickstart.PAGES, ids=lambda page: page.name)
def test_a_page_has_the_figures_of_the_stored_run(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<!-- quickstart: " in text
    assert quickstart.with_figures(text, FIGURES) == text, "python -m tools.quickstart_figures"


def test_figures_are_taken_from_a_run(tmp_path: Path) -> None:
    """A run's files with the stored figures give these figures."""
    evaluations = [
        {"step": step} | {f"eval/held_out/{name}": value for name, value in FIGURES[key].items()}
        for step, key in ((0, "before"), (20, "after"))
    ]
    step = dict(FIGURES["step_20"])
    counts = {f"log_prob_diff/tokens_{name}": step.pop(name) for name in ("differing", "compared")}
    rows = [evaluations[0], {"step": 20, **step, **counts}, evaluations[1]]
    manifest = {
        "started": f"{FIGURES['date']}T00:00:00+00:00",
        "machine": {"processor": FIGURES["processor"]},
        "device": {name: FIGURES[name] for name in ("instructions", "threads")},
        "versions": {"torch": FIGURES["torch"]},
    }
    summary = {f"tokens_{name}": FIGURES[name] for name in ("differing", "compared")}
    summary |= {"steps": 20, "preset": "int8"}
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "run.json").write_text(json.dumps(manifest))
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert quickstart.figures_of(tmp_path) == FIGURES
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"steps": 2}))
    with pytest.raises(ValueError, match="no run of 20 steps"):
        quickstart.figures_of(tmp_path)
