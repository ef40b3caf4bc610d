"""A run's directory as files, without a run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """Write a run's directory from the contents of its files; None leaves a file out."""

    def write(
        metrics: list[dict[str, Any]] | None,
        completions: list[dict[str, Any]] | None = None,
        run: dict[str, Any] | None = None,
        finished: bool = True,
        name: str = "my-run",
        ending: dict[str, Any] | None = None,
    ) -> Path:
        root = tmp_path / name
        root.mkdir()
        for name, lines in (("metrics.jsonl", metrics), ("completions.jsonl", completions)):
            if lines is not None:
                (root / name).write_text(
                    "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
                )
        if run is not None:
            (root / "run.json").write_text(json.dumps(run), encoding="utf-8")
        if ending is not None:
            (root / "ending.json").write_text(json.dumps(ending), encoding="utf-8")
        if finished:
            (root / "summary.json").write_text("{}", encoding="utf-8")
        return root

    return write
