"""The documentation's site: every page has its place, and links written for GitHub lead there."""

import re
from pathlib import Path

import pytest
import yaml

from tools import site
from tools.pictures import FOLDER, PICTURES

ROOT = Path(__file__).parents[2]
WEB = site.REPOSITORY


def nav_pages(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    assert isinstance(parts, (list, type({}.values())))
    return [page for part in parts for page in nav_pages(part)]


def test_the_navigation_names_every_page_and_no_other() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} | set(site.ADDED.values())
    pages.add(site.CONFIGURATION)
    assert sorted(nav_pages(config["nav"])) == sorted(pages)
    assert config["strict"] is True


def test_every_room_has_a_page_of_reference_with_all_its_modules() -> None:
    assert {"rollout", "training", "kernels", "util"} <= set(site.rooms())
    page = site.reference_page("rollout")
    assert "\n# rollout\n" in page
    assert "::: isobit.rollout\n" in page
    assert "::: isobit.rollout.native\n" in page
    for path in (site.PACKAGE / "rollout").rglob("*.py"):
        assert path.stem == "__init__" or f".{path.stem}\n" in page


def test_the_public_page_names_what_the_package_does_functions_first() -> None:
    page = site.public_page()
    assert re.search(r"^\| \[`train`\]\[isobit\.api\.train\] \| \w.+ \|$", page, re.MULTILINE)
    assert re.search(r"^\| \[`Policy`\]\[isobit\.models\.policy\.Policy\] \|", page, re.MULTILINE)
    assert page.index("[`verify`]") < page.index("[`Completion`]")
    assert re.search(r"^\| \[`isobit\.rollout`\]\(rollout\.md\) \| \w.+ \|$", page, re.MULTILINE)


def test_nothing_is_fetched_from_elsewhere() -> None:
    """The shim that searches from disk is in the repository; ``offline`` would name a copy of it on
    the web where the configuration names none.
    """
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    (shim,) = config["extra"]["polyfills"]
    assert "iframe-worker" in shim, "what the plugin `offline` looks for"
    for path in [shim, *config["extra_css"]]:
        assert path.removeprefix("assets/") in site.ASSETS
        assert (ROOT / "packaging" / path.removeprefix("assets/")).stat().st_size > 0
    assert config["theme"]["font"] is False
    page = '<a href="x" class="md-source" data-md-component="source">'
    assert site.on_post_page(page, None, None) == '<a href="x" class="md-source">'


def test_code_is_coloured_and_its_lines_are_not_cut() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert {"pymdownx.highlight": {"default_lang": "bash"}} in config["markdown_extensions"]
    style = (ROOT / "packaging" / "site.css").read_text(encoding="utf-8")
    assert re.search(r"pre > code \{\s+white-space: pre-wrap;", style)
    tutorial = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    commands = [line for line in tutorial.splitlines() if line.startswith("    isobit ")]
    assert len(commands) > 15 and max(map(len, commands)) <= 80


@pytest.mark.parametrize(
    ("uri", "link", "turned"),
    [
        ("tutorial.md", "[m](metrics.md)", "[m](metrics.md)"),
        ("tutorial.md", "[m](../src/isobit/starter/README.md)", "[m](starter.md)"),
        ("documentation.md", "[r](../recipes/README.md#top)", "[r](recipes.md#top)"),
        ("recipes.md", "[q](quickstart.toml)", "[q](recipes/quickstart.toml)"),
        ("CONTRIBUTING.md", "[g](docs/glossary.md)", "[g](glossary.md)"),
        (
            "performance.md",
            "[r](../benchmarks/results)",
            f"[r]({WEB}/tree/main/benchmarks/results)",
        ),
        ("README.md", "[docs](docs/README.md)", "[docs](documentation.md)"),
        ("documentation.md", "[s](../SECURITY.md)", "[s](SECURITY.md)"),
        ("README.md", "[m](docs/metrics.md#top)", "[m](metrics.md#top)"),
        ("README.md", "[l](LICENSE)", f"[l]({WEB}/blob/main/LICENSE)"),
        ("README.md", "![p](docs/pictures/loop.svg)", "![p](pictures/loop.svg)"),
        ("exactness.md", "![p](pictures/loop.svg)", "![p](pictures/loop.svg)"),
        ("memory.md", "[gone](nowhere.md)", "[gone](nowhere.md)"),
        ("exactness.md", "[a](https://arxiv.org/abs/1)", "[a](https://arxiv.org/abs/1)"),
        ("memory.md", "[below](#here)", "[below](#here)"),
        ("README.md", "[k](docs/README.md#configuration)", "[k](configuration.md)"),
        ("documentation.md", "[k](#configuration)", "[k](configuration.md)"),
        ("algorithms.md", "[k](README.md#configuration)", "[k](configuration.md)"),
    ],
)
def test_links_of_the_repository_are_turned_to_the_site(uri: str, link: str, turned: str) -> None:
    there = {*site.ADDED.values(), site.CONFIGURATION, "metrics.md", "glossary.md"}
    there |= {"recipes/quickstart.toml", "pictures/loop.svg"}
    (found,) = site.LINK.finditer(link)
    assert site.turned(found, uri, there) == turned


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
