"""What stands in the environment is written nowhere: in no file of the run, on none of its lines,
not in its report.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from isobit.cli.main import main
from isobit.config.run import RunConfig
from isobit.run.rl.loop import train

SECRETS = {
    name: f"secret-{number}-of-{name.lower()}"
    for number, name in enumerate(
        ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN")
    )
}


def test_the_environment_is_written_nowhere(
    make_config: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    run = make_config(training={"steps": 1}).output
    train(make_config(training={"steps": 1}))
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    said = "".join(capfd.readouterr())
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"run.json", "metrics.jsonl", "manifest.json", "page.html"} <= {
        path.name for path in written
    }
    for name, value in SECRETS.items():
        assert value not in said, name
        for path in written:
            assert value.encode() not in path.read_bytes(), f"{name} in {path}"
