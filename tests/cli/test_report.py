import json
import subprocess
import sys
from pathlib import Path

import pytest

from isobit.cli.main import main


def test_it_writes_the_page_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "loss": 0.5}) + "\n", encoding="utf-8"
    )
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").is_file()
    assert capsys.readouterr().out.startswith(str(tmp_path / "report.html"))
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").read_bytes() == (tmp_path / "report.html").read_bytes()


def test_several_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [tmp_path / name for name in ("one", "two")]
    for run in runs:
        run.mkdir()
        (run / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n', encoding="utf-8")
    out = tmp_path / "both.html"
    assert main(["report", *map(str, runs), "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith(str(out))
    assert "one against two" in out.read_text(encoding="utf-8")
    assert main(["report", *map(str, runs), "--watch"]) == 2
    assert "--watch shows one run" in capsys.readouterr().err


def test_it_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("", encoding="utf-8")
    code = (
        "import sys; from isobit.cli.main import main; "
        f"main(['report', {str(tmp_path)!r}]); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
