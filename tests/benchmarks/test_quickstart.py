"""``benchmarks.quickstart``: what it asks of each run, and what its rows say; no run is made."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import quickstart
from benchmarks.comparison import native

SUMMARY = {
    "accuracy_before": 0.5,
    "accuracy_after": 0.9,
    "tokens_differing": 0,
    "tokens_compared": 30000,
    "train_seconds": 20.0,
}


@pytest.fixture
def measure(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., list[dict[str, Any]]]:
    """Its rows, with a double in the place of ``isobit train``, for options of the command."""
    monkeypatch.setattr(native, "measure_card", lambda: card)
    monkeypatch.setattr(native, "native_versions", lambda: {"torch": "2"})

    def train(command: Sequence[str], **_: Any) -> None:
        options = dict(zip(command[5::2], command[6::2], strict=True))
        output = Path(options["--output"])
        output.mkdir()
        (output / "summary.json").write_text(json.dumps(SUMMARY | {"asked": options}))

    monkeypatch.setattr(quickstart.subprocess, "run", train)

    def rows(*options: str) -> list[dict[str, Any]]:
        out = tmp_path / "results" / "quickstart.json"
        monkeypatch.setattr(sys, "argv", ["quickstart.py", *options, "--out", str(out)])
        quickstart.main()
        return json.loads(out.read_text())

    return rows


def test_runs_on_a_gpu_leave_rows_with_the_card(
    measure: Callable[..., list[dict[str, Any]]], card: dict[str, Any]
) -> None:
    rows = measure("--device", "cuda", "--precisions", "fp8", "--seeds", "2")
    assert [(row["precision"], row["seed"], row["card"], row["versions"]) for row in rows] == [
        ("fp8", 0, card, {"torch": "2"}),
        ("fp8", 1, card, {"torch": "2"}),
    ]
    assert [(row["asked"]["--device"], row["asked"]["--seed"]) for row in rows] == [
        ("cuda", "0"),
        ("cuda", "1"),
    ]
    assert all(row["tokens_compared"] == 30000 for row in rows)


def test_runs_on_a_cpu_name_it(
    measure: Callable[..., list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = measure("--seeds", "1")
    assert [(row["precision"], row["asked"]["--device"]) for row in rows] == [
        ("bf16", "cpu"),
        ("fp8", "cpu"),
    ]
    assert all(row["device"] and "card" not in row for row in rows)
    assert (
        "fp8          fp32        0   50.0%   90.0%               0 of 30000       20"
        in capsys.readouterr().out
    )


def test_runs_differ_in_their_moments_where_asked(
    measure: Callable[..., list[dict[str, Any]]],
) -> None:
    rows = measure("--seeds", "1", "--precisions", "fp8", "--moments", "fp32", "fp8")
    assert [(row["moments"], row["asked"]["--training.moments"]) for row in rows] == [
        ("fp32", "fp32"),
        ("fp8", "fp8"),
    ]
