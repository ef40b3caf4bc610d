"""What a public repository promises: one version, dependencies that agree wherever they are listed,
a workflow for every Python that is supported, pages whose links lead somewhere.
"""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import isobit

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)


def pins(file: str) -> dict[str, str]:
    text = (ROOT / file).read_text(encoding="utf-8")
    return {name.lower().replace("_", "-"): version for name, version in PIN.findall(text)}


def test_the_version_stands_in_one_place() -> None:
    assert "version" not in PROJECT["project"]
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "src/isobit/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", isobit.__version__)


def test_the_lock_has_the_versions_of_the_constraints_and_a_hash_for_each() -> None:
    locked, tested = pins("requirements.lock"), pins("constraints.txt")
    assert {name: locked.get(name) for name in tested if name in locked} == {
        name: version for name, version in tested.items() if name in locked
    }, "make lock writes it anew"
    direct = PROJECT["project"]["dependencies"] + [
        need
        for extra in ("dev", "docs")
        for need in PROJECT["project"]["optional-dependencies"][extra]
    ]
    for need in direct:
        match = re.match(r"[A-Za-z0-9-]+", need)
        assert match is not None
        assert match[0] in locked and match[0] in tested, need
    blocks = re.split(r"\n(?=[A-Za-z])", (ROOT / "requirements.lock").read_text(encoding="utf-8"))
    assert [block for block in blocks if PIN.match(block) and "--hash=sha256:" not in block] == []


def test_pre_commit_runs_the_same_ruff() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    needs = {
        need
        for repository in config["repos"]
        for hook in repository["hooks"]
        for need in hook.get("additional_dependencies", [])
    }
    assert needs == {f"ruff=={pins('constraints.txt')['ruff']}"}


def test_the_workflow_lints_first_and_tests_every_python() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    jobs = workflow["jobs"]
    assert all(job.get("needs") == "lint" for name, job in jobs.items() if name != "lint")
    supported = [
        line.rsplit(" ", 1)[1]
        for line in PROJECT["project"]["classifiers"]
        if re.search(r"Python :: 3\.\d+$", line)
    ]
    assert jobs["test"]["strategy"]["matrix"]["python"] == supported
    assert {step.get("run") for job in jobs.values() for step in job["steps"]} >= {
        "make lint",
        "make test",
        "make test-all",
        "make docs",
        ".ci/wheel",
    }


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 100
