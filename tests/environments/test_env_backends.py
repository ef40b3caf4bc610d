"""Environments of verifiers of another version than what is installed: what the user is told."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from isobit.environments.tasksets import load_taskset
from isobit.environments.verifiers_classic import defines, load_verifiers
from isobit.util.errors import ToolError

CLASSIC = "import verifiers as vf\ndef load_environment(**options):\n    return vf.ToolEnv()\n"
TASKSET = "import verifiers.v1 as vf\n__all__ = ['Sums']\nclass Sums: ...\n"


def module(name: str, monkeypatch: pytest.MonkeyPatch, **content: Any) -> None:
    made = ModuleType(name)
    made.__dict__.update(content, __path__=[])
    monkeypatch.setitem(sys.modules, name, made)


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """verifiers 0.4, as far as a taskset is loaded that exports none."""

    def refuse(name: str, harness: str) -> None:
        raise AttributeError(f"taskset module {name!r} defines no `__all__`")

    for name in ("verifiers", "verifiers.v1", "verifiers.v1.utils", "verifiers.v1.configs"):
        module(name, monkeypatch)
    module("verifiers.v1.utils.loaders", monkeypatch, env_config_type=refuse)
    module("verifiers.v1.configs.agent", monkeypatch, agent_config_fields=None)


@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize(
    ("text", "told"),
    [
        (CLASSIC, r"has load_environment, .* pip install 'isobit\[verifiers-classic\]'"),
        ("from other import load_environment\n", "verifiers 0.2 or 0.3"),
        ("x = 1\n", "cannot be loaded: AttributeError: taskset module"),
        ("def load_environment(:\n", "cannot be loaded: AttributeError: taskset module"),
    ],
)
def test_a_classic_environment_is_known_by_the_newer_verifiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, told: str
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    (tmp_path / "my_sums.py").write_text(text)
    with pytest.raises(ToolError, match=told):
        load_taskset(str(tmp_path / "my_sums.py"), {})


def test_an_installed_environment_is_known_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_words").mkdir()
    (tmp_path / "my_words" / "__init__.py").write_text("from .game import load_environment\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert defines("my-words", "load_environment") and not defines("my-words", "__all__")
    assert not defines("no-such-package", "load_environment")


def test_a_taskset_is_known_by_an_older_verifiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "my_tasks.py"
    path.write_text(TASKSET)
    module("verifiers", monkeypatch, load_environment=None)
    with pytest.raises(ToolError, match=r"of verifiers 0\.4, and an older one"):
        load_verifiers(str(path), {})
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ToolError, match=r"pip install 'isobit\[verifiers\]'"):
        load_verifiers(str(path), {})
    path.write_text(CLASSIC)
    with pytest.raises(ToolError, match=r"pip install 'isobit\[verifiers-classic\]'"):
        load_verifiers(str(path), {})
