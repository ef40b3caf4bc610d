"""The documentation's site: every page has its place, and links written for GitHub lead there."""

import re
from pathlib import Path

import pytest
import yaml

from tools import site
from tools.pictures import FOLDER, PICTURES

ROOT = Path(__file__).parents[2]


def nav_pages(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    assert isinstance(parts, (list, type({}.values())))
    return [page for part in parts for page in nav_pages(part)]


def test_the_navigation_names_every_page_and_no_other() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} | set(site.ADDED.values())
    assert sorted(nav_pages(config["nav"])) == sorted(pages)
    assert config["strict"] is True


def test_every_room_has_a_page_of_reference_with_all_its_modules() -> None:
    assert {"rollout", "training", "kernels", "util"} <= set(site.rooms())
    page = site.reference_page("rollout")
    assert page.startswith("# rollout\n")
    assert "::: isobit.rollout\n" in page
    assert "::: isobit.rollout.native\n" in page
    for path in (site.PACKAGE / "rollout").rglob("*.py"):
        assert path.stem == "__init__" or f".{path.stem}\n" in page


def test_the_public_page_names_what_the_package_does() -> None:
    page = site.public_page()
    assert "| `isobit.train` | [isobit.api.train][] |" in page
    assert "| `isobit.Policy` | [isobit.models.policy.Policy][] |" in page


@pytest.mark.parametrize(
    ("uri", "link", "turned"),
    [
        ("tutorial.md", "[m](metrics.md)", "[m](metrics.md)"),
        ("tutorial.md", "[m](../src/isobit/starter/README.md)", "[m](starter.md)"),
        ("README.md", "[r](../recipes/README.md#top)", "[r](recipes.md#top)"),
        ("recipes.md", "[q](quickstart.toml)", "[q](recipes/quickstart.toml)"),
        ("CONTRIBUTING.md", "[g](docs/glossary.md)", "[g](glossary.md)"),
        ("performance.md", "[rows](../benchmarks/results)", "rows"),
        ("exactness.md", "[a](https://arxiv.org/abs/1)", "[a](https://arxiv.org/abs/1)"),
        ("memory.md", "[below](#here)", "[below](#here)"),
    ],
)
def test_links_of_the_repository_are_turned_to_the_site(uri: str, link: str, turned: str) -> None:
    there = {"metrics.md", "starter.md", "recipes.md", "recipes/quickstart.toml", "glossary.md"}
    (found,) = site.LINK.finditer(link)
    assert site.turned(found, uri, there) == turned


def test_pictures_are_not_taken_for_links() -> None:
    assert site.LINK.search("![a picture](pictures/loop.svg)") is None


@pytest.mark.parametrize("name", PICTURES)
def test_the_pictures_are_as_they_are_drawn(name: str) -> None:
    drawn = PICTURES[name]().svg()
    assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == drawn, (
        "make figures writes them anew"
    )


@pytest.mark.parametrize("name", PICTURES)
def test_nothing_is_drawn_beyond_the_edge(name: str) -> None:
    canvas = PICTURES[name]()
    for x, y, width, height in re.findall(
        r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', canvas.svg()
    ):
        assert float(x) + float(width) < canvas.width - 8
        assert float(y) + float(height) < canvas.height - 8
