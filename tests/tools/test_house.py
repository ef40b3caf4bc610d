"""The house's figures: small trees with one of each thing, and this tree's own path of a token."""

from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest

import isobit
from tests.forked import ran
from tools.house import __main__ as house
from tools.house import source

TREE = Path(str(isobit.__file__)).parent

FILES = {
    "__init__.py": '"""The package."""\n',
    "run/loop.py": '''"""The loop."""
from isobit.config.recipes import RunConfig


def train(config: RunConfig) -> None:
    """It."""


def _helper(section):
    # On a GPU.
    return section.is_cuda
''',
    "rollout/engine.py": '''"""Its pages fit the GPU."""
from isobit import run
from isobit.training.trainer import Trainer


class Engine:
    def generate(self, requests: list[str]) -> list[str]:
        raise ValueError("the GPU is too small")
''',
    "kernels/hopper/gemm.py": '"""On Hopper."""\nimport triton\n',
    "config/schema.py": '"""Tables."""\nclass RunConfig:\n    device: str = "cuda"\n',
}


def sources(folder: Path) -> list[source.Source]:
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return source.read_tree(folder)


def test_a_device_is_named_in_code_or_to_people(tmp_path: Path) -> None:
    code, prose = source.device_files(sources(tmp_path))
    assert code == {"config/schema.py": ["cuda"], "run/loop.py": ["is_cuda"]}
    assert prose == {"rollout/engine.py": 2, "run/loop.py": 1}, "a docstring, an error, a comment"


def test_whole_configurations_are_found_outside_their_room(tmp_path: Path) -> None:
    assert source.climbs(sources(tmp_path)) == {"run": ["run/loop.py: train"]}


def test_imports_go_down(tmp_path: Path) -> None:
    assert source.upward_imports(sources(tmp_path)) == [
        "rollout/engine.py -> isobit.run",
        "rollout/engine.py -> isobit.training.trainer",
    ]


def test_shares_name_what_is_missing(tmp_path: Path) -> None:
    read = sources(tmp_path)
    typed, documented = source.typed(read), source.documented(read)
    assert (typed.there, typed.of, typed.missing) == (2, 3, ["run/loop.py: _helper"])
    assert documented.missing == [
        "config/schema.py: RunConfig",
        "rollout/engine.py: Engine",
        "rollout/engine.py: Engine.generate",
    ]
    assert (documented.there, documented.of) == (6, 9)


def test_the_largest_file_and_function(tmp_path: Path) -> None:
    file, function = source.largest(sources(tmp_path))
    assert file == ("run/loop.py", 11)
    assert function == ("run/loop.py: _helper", 3)


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """This tree's step, watched once, by a process of its own, which is forked."""
    folder = tmp_path_factory.mktemp("passes")

    def run(words: list[str], **_: Any) -> CompletedProcess[str]:
        assert words[1] == "-m"
        return ran("tests.forked:be_module", folder, *words[2:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(house, "subprocess", SimpleNamespace(run=run))
        return house.measure_passes(TREE)


def test_a_token_is_followed_from_prompt_to_gradient(passed: dict[str, Any]) -> None:
    """Grader, packing and loss are on its way; console, journals and publishing are not."""
    rooms = {file.split("/")[0] for file in passed["token_files"]}
    assert {"data", "rollout", "models", "kernels", "rewards", "algorithms", "training"} <= rooms
    assert {"rewards/grading.py", "records/batch.py"} <= passed["token_files"].keys()
    assert not rooms & {"observe", "cli", "config", "proof"}
    assert "training/optimiser.py" not in passed["token_files"]
    assert {"Prompt", "Completion", "Group"} <= passed["containers"].keys()
    assert "SamplingParams" not in passed["containers"]
    assert any(file.endswith("spec/linear.py") for file in passed["weight_files"])
    assert any(file.startswith("models/") for file in passed["weight_files"])


def test_the_table_has_a_column_a_tree(
    passed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources(tmp_path)
    monkeypatch.setattr(house, "measure_passes", lambda tree: passed)
    figures = house.figures_of(tmp_path)
    lines = house.table(["before", "after"], [figures, figures]).splitlines()
    assert lines[0] == "| | before | after |"
    assert all(line.count("|") == 4 for line in lines)
    assert len(lines) == 2 + len(figures)
