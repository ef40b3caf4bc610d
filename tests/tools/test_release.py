"""What a release is checked for, and that the repository keeps to it between releases."""

import re
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import isobit
from tools import release
from tools.release import Changes

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
README = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
HERE = PROJECT["project"]["urls"]["Repository"]
CHANGELOG = release.changes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))


def test_the_changelog_begins_with_the_version_and_goes_back() -> None:
    assert CHANGELOG[0].version == isobit.__version__
    versions = [tuple(map(int, one.version.split("."))) for one in CHANGELOG]
    assert versions == sorted(set(versions), reverse=True)
    assert [one.version for one in CHANGELOG[1:] if one.date == "Unreleased"] == []


def test_changes_are_read_by_a_user_in_a_minute() -> None:
    for one in CHANGELOG:
        headings = re.findall(r"^### (.+)$", one.text, re.MULTILINE)
        assert len(headings) == len(set(headings)) > 0
        assert len(one.text.splitlines()) <= 90
        assert max(map(len, one.text.splitlines())) <= 100


def test_a_heading_of_another_form_is_refused() -> None:
    text = "# Changelog\n\n## [0.2.0] - 2026-12-01\n- b\n\n## [0.1.0] - Unreleased\n- a\n"
    assert release.changes(text) == [
        Changes("0.2.0", "2026-12-01", "- b"),
        Changes("0.1.0", "Unreleased", "- a"),
    ]
    with pytest.raises(ValueError, match=r"0\.3 .* should be like"):
        release.changes("## 0.3 (soon)\n- c\n")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"tag": "v0.1.1"}, "the tag is 'v0.1.1'"),
        ({"tag": "0.1.0"}, "should be 'v0.1.0'"),
        ({"changelog": [Changes("0.1.0", "Unreleased", "")]}, "write the date"),
        ({"changelog": [Changes("0.0.9", "2026-01-01", "")]}, "begins with 0.0.9"),
        ({"repository": "https://github.com/fork/isobit"}, "this is https://github.com/fork"),
    ],
)
def test_a_release_is_refused_for(changed: dict[str, Any], words: str | None) -> None:
    given: dict[str, Any] = {
        "tag": "v0.1.0",
        "repository": HERE,
        "version": "0.1.0",
        "changelog": [Changes("0.1.0", "2026-12-01", "")],
        "project": PROJECT,
    }
    found = release.problems(**given | changed)
    assert found == [] if words is None else found and words in found[0]


def test_every_address_is_that_of_one_repository() -> None:
    wrong = release.problems("v1", "https://elsewhere.org/x/isobit", "1", CHANGELOG, PROJECT)
    named = [one for one in wrong if one.startswith("pyproject.toml has")]
    assert len(named) == len(PROJECT["project"]["urls"]) + len(README["substitutions"])
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("docs", "src", "tools", ".github", "packaging")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".md", ".py", ".yml", ".Dockerfile"}
    )
    assert HERE not in text, "the address stands in pyproject.toml only"


def description(text: str) -> str:
    """What the build makes of README.md, by the rules of hatch-fancy-pypi-readme."""
    for one in README["substitutions"]:
        text = re.sub(one["pattern"], one["replacement"], text)
    return text.replace("$HFPR_VERSION", isobit.__version__)


def test_the_description_has_no_link_that_the_package_index_cannot_follow() -> None:
    assert [one["path"] for one in README["fragments"]] == ["README.md"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(release.leading_nowhere(text)) > 5
    built = description(text)
    assert release.leading_nowhere(built) == []
    version = isobit.__version__
    assert f"({HERE}/blob/v{version}/docs/exactness.md)" in built
    more = "![p](docs/pictures/loop.svg) [a](https://x.org) [b](#install) [c](docs/x.md#y)"
    assert description(more) == (
        f"![p]({HERE}/raw/v{version}/docs/pictures/loop.svg) [a](https://x.org) [b](#install) "
        f"[c]({HERE}/blob/v{version}/docs/x.md#y)"
    )


def test_a_wheel_with_a_relative_link_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "isobit-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("isobit-1.dist-info/METADATA", "Name: isobit\n\n[x](docs/x.md) [y](#y)\n")
    assert release.relative_links(wheel) == ["docs/x.md"]
    assert release.main(["description", str(wheel)]) == 1
    assert release.main(["notes"]) == 0


def test_the_release_is_tested_checked_and_published_without_a_password() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as true
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    assert jobs["test"]["uses"] == "./.github/workflows/ci.yml"
    ci = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert "workflow_call" in ci[True]
    runs = "\n".join(step.get("run", "") for step in jobs["build"]["steps"])
    for command in ("tools.release check", "twine check --strict", "tools.release description"):
        assert command in runs
    assert set(jobs["publish"]["needs"]) == {"test", "build"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    steps = [step.get("uses", "") for step in jobs["publish"]["steps"]]
    assert any(step.startswith("pypa/gh-action-pypi-publish@") for step in steps)
    assert "password" not in str(jobs) and "secrets." not in str(jobs)


def test_issue_forms_ask_for_what_is_needed() -> None:
    folder = ROOT / ".github/ISSUE_TEMPLATE"
    forms = [path for path in sorted(folder.glob("*.yml")) if path.name != "config.yml"]
    assert [path.stem for path in forms] == ["bug", "idea"]
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= form.keys()
        asked = [part for part in form["body"] if part["type"] != "markdown"]
        assert len({part["id"] for part in asked}) == len(asked)
        assert any(part.get("validations", {}).get("required") for part in asked)
    assert "isobit doctor" in (folder / "bug.yml").read_text(encoding="utf-8")


def test_updates_are_looked_for_wherever_versions_are_pinned() -> None:
    config = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text(encoding="utf-8"))
    assert config["version"] == 2
    assert {(one["package-ecosystem"], one["directory"]) for one in config["updates"]} == {
        ("github-actions", "/"),
        ("docker", "/packaging"),
        ("pip", "/"),
    }
