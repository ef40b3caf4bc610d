"""What the documentation's site has beyond docs/: pages that lie elsewhere in the repository, and a
reference page for each room of the package.  MkDocs calls these functions (``mkdocs.yml``, hooks).

Pages are written for GitHub, so their links are paths in the repository.  Here a link to a page of
the site is turned to where the site has it; a link to anything else keeps its words alone.
"""

import ast
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "isobit"
ADDED = {
    "recipes/README.md": "recipes.md",
    "src/isobit/starter/README.md": "starter.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
"""Path in the repository -> path on the site."""
ORIGINS = {uri: path for path, uri in ADDED.items()}
LINK = re.compile(r"(?<!!)\[(?P<words>[^\]]+)\]\((?P<target>[^)\s]+)\)")
FRONT_MATTER = re.compile(r"\A---\n.*?^---\n", re.DOTALL | re.MULTILINE)


def rooms() -> list[str]:
    """The rooms of the package that have Python in them, and the modules of its root."""
    found = [path.parent.name for path in PACKAGE.glob("*/__init__.py")]
    found += [path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"]
    return sorted(found)


def modules(room: str) -> list[str]:
    """Every module of a room, its own first."""
    folder = PACKAGE / room
    paths = sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{room}.py"]
    parts = [path.relative_to(PACKAGE.parent).with_suffix("").parts for path in paths]
    return sorted({".".join(p[:-1] if p[-1] == "__init__" else p) for p in parts})


def reference_page(room: str) -> str:
    """Markdown that mkdocstrings fills: a heading a module, with its public names."""
    parts = [f"# {room}\n"]
    parts += [
        f"::: {module}\n    options:\n      show_submodules: false\n" for module in modules(room)
    ]
    return "\n".join(parts)


def public_page() -> str:
    """The names of ``import isobit``, each with where it is described."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    names = sorted(
        (one.name, f"{node.module}.{one.name}")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("isobit.")
        for one in node.names
    )
    lines = "\n".join(f"| `isobit.{name}` | [{full}][] |" for name, full in names)
    return (
        "# Reference\n\nThe public names, which `import isobit` loads when they are first used; "
        "[Python](../api.md) shows them at work. Everything else is described by room.\n\n"
        f"| name | described as |\n|---|---|\n{lines}\n"
    )


def on_config(config: Any) -> Any:
    """Put the reference behind the written pages."""
    pages = [{room: f"reference/{room}.md"} for room in rooms()]
    config.nav.append({"Reference": ["reference/index.md", *pages]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from elsewhere, the recipes themselves, and the reference."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    for path, uri in ADDED.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for path in sorted((ROOT / "recipes").iterdir()):
        if path.suffix in {".toml", ".py", ".jsonl"}:
            files.append(File.generated(config, f"recipes/{path.name}", abs_src_path=str(path)))
    files.append(File.generated(config, "reference/index.md", content=public_page()))
    for room in rooms():
        uri = f"reference/{room}.md"
        files.append(File.generated(config, uri, content=reference_page(room)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page as the site needs it: links turned, a model card's header left out."""
    uri = page.file.src_uri
    if uri.startswith("reference/"):
        return markdown
    there = set(files.src_uris)
    return LINK.sub(lambda link: turned(link, uri, there), FRONT_MATTER.sub("", markdown))


def turned(link: re.Match[str], uri: str, there: set[str]) -> str:
    """A link of the page at ``uri``, which names a path in the repository, as the site has it."""
    target, _, anchor = link["target"].partition("#")
    if "://" in target or not target:
        return link[0]
    origin = PurePosixPath(ORIGINS.get(uri, f"docs/{uri}"))
    path = normpath(str(origin.parent / target))
    found = ADDED.get(path, path.removeprefix("docs/"))
    if found not in there:
        return link["words"]
    where = relpath(found, str(PurePosixPath(uri).parent))
    return f"[{link['words']}]({where}{'#' + anchor if anchor else ''})"
