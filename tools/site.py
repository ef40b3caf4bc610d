"""What the documentation's site has beyond docs/: pages that lie elsewhere in the repository, the
page of all keys of a recipe, the names of other frameworks, and a reference page for each package.
MkDocs calls these functions (``mkdocs.yml``, hooks).

Pages are written for GitHub, so their links are paths in the repository.  Here a link to a page of
the site leads to where the site has it, and a link to anything else to the repository on the web.
"""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "isobit"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
ADDED = {
    "README.md": "README.md",
    "docs/README.md": "documentation.md",
    "recipes/README.md": "recipes.md",
    "src/isobit/starter/README.md": "starter.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
"""Path in the repository -> path on the site, whose home is README.md."""
CONFIGURATION = "configuration.md"
"""The page of all keys, which the site alone has: ``isobit schema --markdown`` prints it."""
INSTEAD = {"docs/README.md#configuration": CONFIGURATION}
"""Place in the repository that stands for a page of the site alone -> that page."""
NAMES = "<!-- names -->"
"""Where docs/coming_from.md has the tables of other frameworks' names."""
NAMES_SAY = (
    "verl's names leave out `actor_rollout_ref.`, and those of OpenRLHF, of which there are two "
    "sets, the dashes. A name that ends in `.*` is a table: it stands for each key below it that "
    "has no row of its own."
)
ORIGINS = {uri: path for path, uri in ADDED.items()}
ASSETS = ("iframe-worker.js", "site.css")
SEARCHED = {"CHANGELOG.md": {"boost": 0.5}}
"""How the search takes a page that names everything and explains nothing."""
LINK = re.compile(r"(?P<image>!?)\[(?P<words>[^\]]+)\]\((?P<target>[^)\s]+)\)")
FRONT_MATTER = re.compile(r"\A---\n.*?^---\n", re.DOTALL | re.MULTILINE)


def rooms() -> list[str]:
    """The packages that have Python in them, and the modules of the root."""
    found = [path.parent.name for path in PACKAGE.glob("*/__init__.py")]
    found += [path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"]
    return sorted(found)


@cache
def public_names() -> dict[str, str]:
    """Name of ``import isobit`` -> where it is defined."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    return {
        one.name: f"{node.module}.{one.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("isobit.")
        for one in node.names
    }


def source_of(module: str) -> ast.Module:
    """The code of ``isobit.x.y``, which is not imported."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def first_sentence(node: Any) -> str:
    """Of a docstring, on one line, for a cell of a table."""
    text = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[.:])\s", text.replace("``", "`"))[0].rstrip(":").replace("|", r"\|")


def described(full: str) -> str:
    """The first sentence on a public name, by the class or function that it is."""
    module, _, name = full.rpartition(".")
    for node in source_of(module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return first_sentence(node)
    return ""


def modules(room: str) -> list[str]:
    """Every module of a package: its own, those with public names, the others."""
    folder = PACKAGE / room
    paths = sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{room}.py"]
    parts = [path.relative_to(PACKAGE.parent).with_suffix("").parts for path in paths]
    names = {".".join(p[:-1] if p[-1] == "__init__" else p) for p in parts}
    public = {full.rpartition(".")[0] for full in public_names().values()}
    return sorted(names, key=lambda name: (name.count(".") > 1, name not in public, name))


def reference_page(room: str) -> str:
    """Markdown that mkdocstrings fills: a heading a module, with its public names."""
    parts = [f"---\nsearch: {{ boost: 0.5 }}\n---\n# {room}\n"]  # behind the written pages
    parts += [
        f"::: {module}\n    options:\n      show_submodules: false\n" for module in modules(room)
    ]
    return "\n".join(parts)


def tables_of_names() -> str:
    """The names of other frameworks (``isobit.config.foreign``), a table for each section."""
    from isobit.config.foreign import FRAMEWORKS, foreign_rows

    head = f"| {' | '.join(FRAMEWORKS.values())} | here |\n|{'---|' * (len(FRAMEWORKS) + 1)}\n"
    return f"## All names\n\n{NAMES_SAY}\n\n" + "\n".join(
        f"### {title}\n\n{head}{''.join(map(row_of_names, rows))}"
        for title, rows in foreign_rows().items()
    )


def row_of_names(row: Any) -> str:
    """A ``ForeignRow`` as a line of such a table."""
    from isobit.config.foreign import FRAMEWORKS

    names = [", ".join(f"`{name}`" for name in row.names.get(key, ())) for key in FRAMEWORKS]
    if row.key:
        here = f"`{row.key}`{row.say and f': {row.say}'}"
    else:
        here = f"{'not here' if row.needed else 'nothing to set'}: {row.say}"
    return f"| {' | '.join([*names, here])} |\n"


def public_page() -> str:
    """The names of ``import isobit`` and the packages, each with a sentence."""
    names = "\n".join(
        f"| [`{name}`][{full}] | {described(full)} |"
        for name, full in sorted(public_names().items(), key=lambda one: (one[0][0].isupper(), one))
    )
    packages = "\n".join(
        f"| [`isobit.{room}`]({room}.md) | {first_sentence(source_of(f'isobit.{room}'))} |"
        for room in rooms()
    )
    return (
        "# Reference\n\nThe public names, which `import isobit` loads when they are first used; "
        f"[Python](../api.md) shows them at work.\n\n| name | |\n|---|---|\n{names}\n\n"
        f"## Packages\n\n| package | |\n|---|---|\n{packages}\n"
    )


def on_config(config: Any) -> Any:
    """Put the reference behind the written pages, and say where the repository is."""
    pages = [{room: f"reference/{room}.md"} for room in rooms()]
    config.nav.append({"Reference": ["reference/index.md", *pages]})
    config.repo_url, config.repo_name = REPOSITORY, PROJECT["name"]
    code = (PACKAGE / "__init__.py").read_text(encoding="utf-8")
    config.copyright = "Isobit " + re.findall(r'^__version__ = "(.+)"$', code, re.MULTILINE)[0]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from elsewhere, the recipes themselves, the reference, and the home page."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    from isobit.cli.schema import configuration_page

    files.remove(files.get_file_from_path("README.md"))  # which is documentation.md there
    for path, uri in ADDED.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for name in ASSETS:
        path = ROOT / "packaging" / name
        files.append(File.generated(config, f"assets/{name}", abs_src_path=str(path)))
    for path in sorted((ROOT / "recipes").iterdir()):
        if path.suffix in {".toml", ".py", ".jsonl"}:
            files.append(File.generated(config, f"recipes/{path.name}", abs_src_path=str(path)))
    files.append(File.generated(config, CONFIGURATION, content=configuration_page()))
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
    if uri in SEARCHED:
        page.meta["search"] = SEARCHED[uri]
    if NAMES in markdown:
        markdown = markdown.replace(NAMES, tables_of_names())
    there = set(files.src_uris)
    return LINK.sub(lambda link: turned(link, uri, there), FRONT_MATTER.sub("", markdown))


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Without the mark by which a page asks the repository's host for its stars."""
    return output.replace(' data-md-component="source"', "")


def turned(link: re.Match[str], uri: str, there: set[str]) -> str:
    """A link of the page at ``uri``, which names a path in the repository, as the site has it."""
    target, _, anchor = link["target"].partition("#")
    if "://" in target:
        return link[0]
    origin = PurePosixPath(ORIGINS.get(uri, f"docs/{uri}"))
    path = normpath(str(origin.parent / target)) if target else str(origin)
    if page := INSTEAD.get(f"{path}#{anchor}"):
        path, anchor = page, ""
    elif not target:
        return link[0]
    found = ADDED.get(path, path.removeprefix("docs/"))
    if found in there:
        where = relpath(found, str(PurePosixPath(uri).parent))
    elif (ROOT / path).exists():
        where = f"{REPOSITORY}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}"
    else:
        return link[0]
    return f"{link['image']}[{link['words']}]({where}{'#' + anchor if anchor else ''})"
