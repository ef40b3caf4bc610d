"""Whatever begins a run begins it alike: a run of each kind, done once, is replayed, resumed and
compared.
"""

import json
import random
import shutil
import string
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from isobit.commands.diff import diff
from isobit.commands.replay import replay
from isobit.config.recipes import RunConfig
from isobit.data.tool_calls import ToolCall
from isobit.environments.pool import Environments
from isobit.models.folder import read_config
from isobit.observe.console import silent
from isobit.rollout import episodes
from isobit.run.loop import train
from isobit.store.reward_record import LineRecord
from tests.rollout.served import served
from tests.run import acting
from tests.tiny import json_lines, with_sections

TOOLS = Path(__file__).parents[1] / "environments" / "tools.py"
STARTER = {"type": "jsonl", "limit": 16}
LORA = {"lora": {"rank": 4, "targets": "all-linear"}}
ACTING = {
    "environment": {"class": f"{TOOLS}:Paced", "max_turns": 3},
    "reward": {"function": "environment"},
    "rollout": {"max_new_tokens": 30, "stop_tokens": list(string.ascii_letters[:40])},
}
KINDS: dict[str, dict[str, Any]] = {
    "lora, value head, lag, buffer": {
        **LORA,
        "algorithm": {"name": "ppo"},
        "async": {"lag": 1},
        "replay": {"fraction": 0.5},
    },
    "all weights": {"training": {"updates_per_batch": 2}},
    "lora": {**LORA, "training": {"updates_per_batch": 2}},
    "teacher": {"teacher": {"kl": "reverse"}},
    "value head": {"algorithm": {"name": "ppo"}},
    "buffer": {"replay": {"fraction": 0.5}},
    "lag": {"async": {"lag": 1}},
    "lora, scales a tensor": {
        **LORA,
        "precision": {"preset": "fp8", "kv_scales": "per_tensor", "kv_calibration": "engine"},
    },
    "lora, environment": {**LORA, **ACTING},
    "http": {"rollout": {"engine": "http"}},
}
STEPS = 3
RECORDED = list[str]()
"""With an entry, no reward may be asked for."""


def recipe(model: Path, output: Path, **sections: Any) -> RunConfig:
    values: dict[str, Any] = {
        "model": str(model),
        "output": output,
        "threads": 1,
        "data": {
            "train": {**STARTER, "path": "starter:train.jsonl"},
            "eval": {"held_out": {**STARTER, "path": "starter:held_out.jsonl", "limit": 3}},
        },
        "reward": {"function": "tests.run.test_starts:drawn", "in_process": True},
        "rollout": {"max_new_tokens": 3},
        "training": {
            "steps": STEPS,
            "prompts_per_step": 2,
            "samples_per_prompt": 4,
            "learning_rate": 1e-2,
        },
        "evaluation": {"every": 2},
        "checkpoint": {"every": 1, "keep_last": STEPS},
    }
    return RunConfig.model_validate(with_sections(values, sections))


def drawn(prompt: Any, completion: Any) -> float:
    return float(completion.token_ids[0] % 3)


def never_twice(prompt: Any, completion: Any) -> float:
    assert not RECORDED, "what is recorded was not taken"
    return random.SystemRandom().random()


@pytest.fixture(scope="module", params=KINDS)
def run(
    request: pytest.FixtureRequest, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A finished run with a checkpoint after each step."""
    output, sections = tmp_path_factory.mktemp("starts") / "run", KINDS[request.param]
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(episodes, "read_turn", acting.reading(acting.parse))
        if request.param == "http":
            server = stack.enter_context(served(config=read_config(tiny_folder)))
            sections = {"precision": "fp8", "rollout": {"engine": "http", "servers": [server]}}
        train(recipe(tiny_folder, output, **sections), silent())
        yield output


@pytest.fixture
def other(run: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"


def quiet(line: str) -> None:
    """Prints nothing."""


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("what is recorded was not taken")


@pytest.mark.few(1)
@pytest.mark.parametrize("step", [None, STEPS], ids=["whole", "from a checkpoint"])
def test_it_is_replayed(step: int | None, run: Path) -> None:
    result = replay(run, step, quiet)
    assert result.differences == []
    assert result.steps == range(step or 0, STEPS + 1)


@pytest.mark.few(1)
@pytest.mark.parametrize("done", [0, STEPS - 1], ids=["without a checkpoint", "from the last"])
def test_it_is_resumed_to_the_same_files(
    done: int, run: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that it was given before it ended."""
    for step in range(done + 1, STEPS + 1):
        shutil.rmtree(other / "checkpoints" / f"step_{step:06}")
    shutil.rmtree(other / "model")
    values = json.loads((other / "run.json").read_text(encoding="utf-8"))["config"]
    monkeypatch.setattr(LineRecord, "_drop", refuse)
    train(RunConfig.model_validate({**values, "output": other}), silent(), resume=True)
    resumed = json.loads((other / "run.json").read_text(encoding="utf-8"))["resumed"]
    assert [one["step"] for one in resumed] == [done]
    found = diff(run, other)
    assert found.differences == []
    assert [line.partition(":")[0] for line in found.equal][-2:] == ["checkpoints", "model"]


@pytest.mark.few(2)  # of the kinds that the quick suite runs above
def test_a_reward_that_differs_is_of_the_step_that_it_is_of(run: Path, other: Path) -> None:
    """The version of the weights that the record names is another number."""
    lines = json_lines(other / "rewards.jsonl")
    of_training = [line for line in lines if line["prompts"][0][0].startswith("train/")]
    second = sorted({line["weights_version"] for line in of_training})[1]
    for line in of_training:
        if line["weights_version"] == second:
            line["rewards"][0][0] = 77.5
    (other / "rewards.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (difference,) = diff(run, other).differences
    assert (difference.step, difference.file) == (2, "rewards.jsonl")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["reward", "environment"])
def test_what_does_not_repeat_is_taken_from_the_record(
    kind: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run of adapters, whose first step has another version of the weights than its first
    evaluation.
    """
    monkeypatch.setattr(episodes, "read_turn", acting.reading(lambda _: [ToolCall("now", {})]))
    reward = {"function": "tests.run.test_starts:never_twice"}
    sections = {**LORA, "reward": reward, "training": {"steps": 2}, "evaluation": {"every": 0}}
    if kind == "environment":
        environment = {"environment": {"class": f"{TOOLS}:Moody", "max_turns": 2}}
        sections |= {**environment, "rollout": {**ACTING["rollout"], "max_new_tokens": 20}}
    config = recipe(tiny_folder, tmp_path / "run", **sections)
    train(config, silent())
    monkeypatch.setattr(Environments, "ask", refuse)
    monkeypatch.setattr("tests.run.test_starts.RECORDED", ["rewards"])
    for step in (None, 2) if kind == "reward" else (None,):
        assert replay(config.output, step, quiet, recorded_rewards=True).differences == []
