"""Small runs with checkpoints, and what must come out of them whatever happened on the way."""

import copy
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from isobit.config.recipes import RunConfig
from isobit.run.loop import train
from isobit.store.state import read_digests
from isobit.util.files import file_sha256
from tests.tiny import json_lines, save_tiny, with_sections

REWARD = '''"""Rewards that teach an untrained model something, and a hook that grading calls."""
import itertools
from pathlib import Path

calls = itertools.count()

def reward(prompt, completion):
    hook = Path(__file__).with_name("hook.py")
    if hook.exists():
        exec(hook.read_text(), {"call": next(calls), "hook": hook})
    return float(completion.token_ids[0] % 3 + len(completion.token_ids) % 2)
'''


PROGRAM = str(Path(__file__).with_name("rank.py"))
HANG_S = 1800
"""A test of this folder that has not ended by then hangs.  No slow machine may come near: tests
start processes here, wait for what these do, and take minutes under load.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The limit of every test in this folder, instead of that of all others."""
    for item in items:
        if item.nodeid.startswith("tests/faults/"):
            item.add_marker(pytest.mark.timeout(HANG_S))


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``model/``, a random policy with the starter's tokenizer, and ``reward.py``."""
    folder = tmp_path_factory.mktemp("faults")
    save_tiny(folder / "model")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def shared_values(place: Path) -> dict[str, Any]:
    """A run of 6 steps of 4 x 4 samples in FP8, two updates a step, a cosine, a checkpoint every 2
    steps.
    """
    return {
        "model": str(place / "model"),
        "output": str(place / "uninterrupted"),
        "precision": {"preset": "fp8"},
        "threads": 1,
        "data": {
            "train": {"type": "jsonl", "path": "starter:train.jsonl", "limit": 10},
            "eval": {"held_out": {"type": "jsonl", "path": "starter:held_out.jsonl", "limit": 3}},
        },
        "reward": {"function": f"{place / 'reward.py'}:reward", "in_process": True},
        "rollout": {"max_new_tokens": 4},
        "training": {
            "steps": 6,
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "updates_per_batch": 2,
            "learning_rate": 1e-3,
            "schedule": "cosine",
            "warmup_updates": 2,
        },
        "evaluation": {"every": 3},
        "checkpoint": {"every": 2, "wait_for_space_s": 0},
    }


@pytest.fixture
def values(shared_values: dict[str, Any]) -> dict[str, Any]:
    """A copy of that run for one test, which may change it."""
    return copy.deepcopy(shared_values)


@pytest.fixture
def make_config(values: dict[str, Any], tmp_path: Path, place: Path) -> Callable[..., RunConfig]:
    """That run in a directory of the test's own; sections given replace keys.  A hook left by a
    test is removed.
    """
    (place / "hook.py").unlink(missing_ok=True)

    def make(**sections: Any) -> RunConfig:
        config = {**values, "output": tmp_path / "run"}
        return RunConfig.model_validate(with_sections(config, sections))

    return make


@pytest.fixture
def hook(place: Path) -> Callable[[str], None]:
    """Lines that run at every reward, with ``call`` counting; ``hook.unlink()`` in them is the last
    time.
    """

    def write(text: str) -> None:
        (place / "hook.py").write_text(text, encoding="utf-8")

    return write


@pytest.fixture(scope="session")
def outcome() -> Callable[[Path], dict[str, Any]]:
    """Everything that a run leaves and that no kill may change, times and rates aside; of files
    their SHA-256, so that what differs can be read.
    """

    def read(root: Path) -> dict[str, Any]:
        summary = json.loads((root / "summary.json").read_text())
        last = max((root / "checkpoints").glob("step_??????"))
        model = [one.name for one in (root / "model").iterdir() if one.suffix != ".md"]
        assert {"model.safetensors", "adapter_model.safetensors"} & set(model)
        bytewise = (
            "completions.jsonl",
            "rewards.jsonl",
            *(f"model/{name}" for name in sorted(model)),
        )
        return {
            **{name: file_sha256(root / name) for name in bytewise},
            "digests": read_digests(root),  # none of fine-tuning
            "last checkpoint": last.name,
            **{
                name: file_sha256(last / name)
                for name in ("masters.safetensors", "optimiser.safetensors")
            },
            "metrics": [
                {
                    name: value
                    for name, value in line.items()
                    if not name.startswith(("time/", "tokens_per_s/"))
                }
                for line in json_lines(root / "metrics.jsonl")
            ],
            "summary": {
                name: value
                for name, value in summary.items()
                if not name.endswith("_seconds") and name not in ("directory", "model")
            },
        }

    return read


@pytest.fixture(scope="session")
def uninterrupted(shared_values: dict[str, Any], place: Path) -> Path:
    """A run that nothing happens to, with the checkpoints of steps 4 and 6; it is not changed.  A
    hook left by a test is removed.
    """
    (place / "hook.py").unlink(missing_ok=True)
    config = RunConfig.model_validate(shared_values)
    train(config)
    return config.output


@pytest.fixture(scope="session")
def expected(uninterrupted: Path, outcome: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Its outcome."""
    return outcome(uninterrupted)


@pytest.fixture
def command(
    values: dict[str, Any], tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[dict[str, int]], list[str]]:
    """``rank.py`` with a run of one trainer and one rollouter, in ``tmp_path / "run"``, and with
    where the rollouter dies in each start.
    """
    (place / "hook.py").unlink(missing_ok=True)
    recipe = tmp_path / "recipe.toml"
    run = {"output": str(tmp_path / "run"), "async": {"lag": 1}, "cluster": {"rollouters": 1}}
    recipe.write_text(tomli_w.dumps({**values, **run}), encoding="utf-8")
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))

    def of(ends: dict[str, int]) -> list[str]:
        calls = ",".join(map(str, ends.values()))
        return [PROGRAM, ",".join(ends), calls, str(int(signal.SIGKILL)), "train", str(recipe)]

    return of
