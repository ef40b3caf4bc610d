"""What a release is checked for, by ``.github/workflows/release.yml`` and by hand.

    python -m tools.release check v0.1.0 https://github.com/OWNER/isobit  # may it be released?
    python -m tools.release notes                                         # its changes
    python -m tools.release description dist/isobit-0.1.0-*.whl           # do its links lead away?

To release: set ``__version__``, date the first heading of CHANGELOG.md, commit, and push a tag
``v`` + version.  Changes are written under the first heading as they are made.
"""

import email
import re
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HEADING = re.compile(
    r"^## \[(?P<version>\d+\.\d+\.\d+)\] - (?P<date>\d{4}-\d{2}-\d{2}|Unreleased)$", re.MULTILINE
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)")


@dataclass(frozen=True, slots=True)
class Changes:
    """A version's part of the changelog."""

    version: str
    date: str
    """YYYY-MM-DD, or Unreleased."""
    text: str


def changes(text: str) -> list[Changes]:
    """The versions of a changelog, newest first.  Raises ValueError for another heading."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    found = []
    for part in parts:
        heading, _, body = part.partition("\n")
        match = HEADING.match(heading)
        if match is None:
            raise ValueError(
                f"CHANGELOG.md has the heading {heading!r}; it should be like "
                "'## [1.2.3] - 2026-01-31' or '## [1.2.3] - Unreleased'"
            )
        found.append(Changes(match["version"], match["date"], body.strip()))
    return found


def problems(
    tag: str, repository: str, version: str, changelog: list[Changes], project: dict[str, Any]
) -> list[str]:
    """Why this may not be released from there; empty if it may."""
    found = []
    if tag != f"v{version}":
        found.append(f"the tag is {tag!r}, and __version__ says it should be 'v{version}'")
    newest = changelog[0]
    if newest.version != version:
        found.append(f"CHANGELOG.md begins with {newest.version}, and the version is {version}")
    if newest.date == "Unreleased":
        found.append(f"CHANGELOG.md says {newest.version} is unreleased; write the date there")
    hooks = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    urls = dict(project["project"]["urls"])
    urls |= {
        f"substitution {number}": one["replacement"]
        for number, one in enumerate(hooks["substitutions"], 1)
    }
    for name, url in urls.items():
        if re.search(re.escape(repository) + r"(?![\w.-])", url) is None:
            found.append(
                f"pyproject.toml has {url!r} ({name}), and this is {repository}; put the "
                "repository's address there, in all of [project.urls] and the substitutions"
            )
    return found


def relative_links(wheel: Path) -> list[str]:
    """Links and pictures of a wheel's description that lead nowhere on the package index."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
        description = email.message_from_bytes(archive.read(name)).get_payload(decode=True)
    assert isinstance(description, bytes)
    return leading_nowhere(description.decode())


def leading_nowhere(description: str) -> list[str]:
    """Targets that are neither addresses nor headings of the text."""
    return [
        target
        for target in LINK.findall(description)
        if not target.startswith(("https://", "http://", "#"))
    ]


def version_of(source: str) -> str:
    """What ``__version__`` says in the package's code."""
    (found,) = re.findall(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    return found


def main(arguments: list[str]) -> int:
    """-> 1 if something is wrong, which is printed."""
    changelog = changes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    match arguments:
        case ["notes"]:
            print(changelog[0].text)
            return 0
        case ["check", tag, repository]:
            version = version_of((ROOT / "src/isobit/__init__.py").read_text(encoding="utf-8"))
            project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
            wrong = problems(tag, repository, version, changelog, project)
        case ["description", wheel]:
            wrong = [f"{one} leads nowhere" for one in relative_links(Path(wheel))]
        case _:
            wrong = [str(__doc__)]
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
