"""``isobit serve`` before it serves, and with a run."""

import json
import socket
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isobit.cli import listening, serve
from isobit.cli.main import main
from isobit.cli.served_run import served_settings
from isobit.config.recipes import RunConfig
from isobit.config.rollout import RolloutConfig
from isobit.models.folder import load_model
from isobit.records.text import Prompt
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.run.loop import train
from tests.serve.servers import choices, serving
from tests.tiny import save_tiny, tiny_model

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(listening, "find_spec", lambda name: None if name == "uvicorn" else name)
    assert main(["serve", "starter"]) == 2
    assert "needs uvicorn, which the extra `serve` brings: pip install 'isobit[serve]'" in (
        capsys.readouterr().err
    )
    needs = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]["serve"]
    assert {need.partition(">")[0].replace("-", "_") for need in needs} == set(serve.PACKAGES)


def test_what_cannot_be_served_is_said_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "starter", "--api-key", "secret"])
    assert "name the variable that holds the key, as env:NAME" in capsys.readouterr().err
    assert main(["serve", "starter", "--api-key", "env:NO_SUCH_KEY"]) == 2
    assert "the environment has no variable NO_SUCH_KEY" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "no/folder/at/all", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot be listened at" in capsys.readouterr().err
    assert main(["serve", str(tmp_path), "--follow"]) == 2
    assert "--follow is for a run's directory" in capsys.readouterr().err


def test_a_run_is_served_in_its_flow_and_by_its_back_end(tmp_path: Path) -> None:
    began = {"model": "m", "precision": {"preset": "bf16"}, "back_end": "triton"}
    (tmp_path / "run.json").write_text(json.dumps({"config": began}))
    (tmp_path / "model").mkdir()
    for more, back_end in (([], "triton"), (["--back_end", "hopper"], "hopper")):
        settings = served_settings(
            serve._COMMAND, *serve._COMMAND.read_some([str(tmp_path), *more])
        )
        assert (settings.precision.preset, settings.back_end) == ("bf16", back_end)


@pytest.mark.parametrize(
    ("began", "message"),
    [
        ({"from_scratch": {"family": "qwen3"}}, "a run that began with a model; this one had none"),
        ({"lora": {"rank": 8}}, "trains all weights, and this one trains adapters"),
        ({"objective": "preference"}, "trains a reward model (objective = "),
    ],
)
def test_a_run_whose_checkpoints_are_no_model_that_writes_is_not_followed(
    began: dict[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its checkpoints would be passed over, and the model that it began with served as the run."""
    monkeypatch.setattr(serve, "_serve", lambda *_: 0)
    record = {"model": "starter", "precision": {"preset": "bf16"}, "back_end": "auto", **began}
    (tmp_path / "run.json").write_text(json.dumps({"config": record}))
    assert main(["serve", str(tmp_path), "--follow", "--port", "0"]) == 2
    assert message in capsys.readouterr().err


def test_a_run_that_began_with_another_model_than_is_there_now_is_not_followed(
    make_config: Callable[..., RunConfig],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "_serve", lambda *_: 0)
    config = make_config(training={"steps": 1})
    train(config)
    path = config.output / "run.json"
    record = json.loads(path.read_text())
    record["config"]["model"] = str(save_tiny(tmp_path / "other", tiny_model(hidden_size=256)))
    path.write_text(json.dumps(record))
    assert main(["serve", str(config.output), "--follow", "--port", "0"]) == 2
    assert "that is another model now" in capsys.readouterr().err


def test_a_followed_run_is_served_as_its_newest_checkpoint(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The answers are those of the model that the run has ended with."""
    config = make_config()
    train(config)
    model = load_model(config.output / "model", config.precision, trainable=False)
    ids = tuple(model.tokenizer("1+1=")["input_ids"])
    sampling = model.sampling(RolloutConfig(max_new_tokens=12))
    request = Request(Prompt("x", "", ids), 0, 2, sampling, 3)
    engine = NativeEngine(model.policy, RolloutConfig(), model.tokenizer, 0)
    (expected,) = generate(engine, [request])
    asked = {"model": "run", "prompt": "1+1=", "n": 2, "seed": 3, "max_tokens": 12, "logprobs": 0}
    for arguments in (["--follow"], []):
        with serving(config.output, tmp_path, "--name", "run", *arguments) as server:
            made = server.answer(asked)
            assert server.end() == 0
        for choice, completion in zip(choices(made), expected, strict=True):
            assert choice["text"] == completion.text
            assert choice["logprobs"]["token_logprobs"] == list(completion.log_probs)
        version = 2 if arguments else 1
        assert made["system_fingerprint"] == f"{config.precision.preset}-{version}"
