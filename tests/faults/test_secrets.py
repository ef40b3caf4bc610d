"""What stands in the environment is written nowhere: in no file of the run, on none of its lines,
not in its report; nor does a reward that is called with it bring it there.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from isobit.cli.main import main
from isobit.config.recipes import RunConfig
from isobit.rewards.grade import Failure, failure_of, outcome_of
from isobit.run.loop import train
from isobit.util import option_secrets
from isobit.util.errors import RewardError

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


JUDGE = """
def judge(prompt, completion, api_key, url="none"):
    assert api_key == "sk-0123456789", "the value arrives"
    if sum(completion.token_ids) % 3 == 0:
        raise PermissionError(f"401 from https://judge?key={api_key}")
    return float(len(completion.token_ids))
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("in_process", [False, True])
def test_a_key_of_a_reward_stands_in_the_environment_alone(
    in_process: bool,
    make_config: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A reward that shows its key in what it raises; the run is resumed with the key of then."""
    secret = "sk-0123456789"
    (tmp_path / "judge.py").write_text(JUDGE)
    reward = {
        "function": f"{tmp_path / 'judge.py'}:judge",
        "options": {"api_key": "env:JUDGE_KEY"},
        "in_process": in_process,
        "max_failed_fraction": 1.0,
    }
    config = make_config(
        reward=reward, data={"eval": {}}, training={"steps": 2, "schedule": "constant"}
    )
    with pytest.raises(RewardError, match="environment variable JUDGE_KEY is not set"):
        train(config)
    monkeypatch.setenv("JUDGE_KEY", secret)
    train(config)
    longer = {"steps": 3, "schedule": "constant"}
    train(make_config(reward=reward, data={"eval": {}}, training=longer), resume=True)
    assert main(["report", str(config.output), "--out", str(tmp_path / "page.html")]) == 0
    said = "".join(capfd.readouterr())
    assert "401 from https://judge?key=env:JUDGE_KEY" in said
    assert "is written to run.json" not in said
    (tmp_path / "judge.py").unlink()
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path
    assert secret not in said


def test_a_message_is_shortened_after_a_key_in_it_is_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = "sk-" + "0123456789" * 16
    monkeypatch.setenv("JUDGE_KEY", key)
    monkeypatch.setattr(option_secrets, "_shown", {})
    option_secrets.from_environment({"api_key": "env:JUDGE_KEY"}, "judge")
    failures = [outcome_of(key), outcome_of({key: 1}), failure_of(ValueError(1700 * "x" + key))]
    for failure in failures:
        assert isinstance(failure, Failure)
        assert "sk-" not in failure.message and "env:JUDGE_KEY" in failure.message


def test_a_key_that_stands_in_the_recipe_is_told_of(
    make_config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "judge.py").write_text(JUDGE.replace("0123456789", "9876543210"))
    reward = {
        "function": f"{tmp_path / 'judge.py'}:judge",
        "options": {"api_key": "sk-9876543210", "url": "https://judge"},
        "max_failed_fraction": 1.0,
    }
    train(make_config(reward=reward, data={"eval": {}}, training={"steps": 1}))
    said = capsys.readouterr().out
    assert said.count("is written to run.json and to every checkpoint as it stands") == 1
    assert "note: reward.options.api_key is written" in said
    assert "api_key=.., url='https://judge'" in said
