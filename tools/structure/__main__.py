"""Print the figures of the source tree, hold them to their limits, and write them into the pages.

    python -m tools.structure                 # src/isobit, as a table
    python -m tools.structure ../before/src/isobit src/isobit         # two trees side by side
    python -m tools.structure --json          # with the names that were counted
    python -m tools.structure --check         # `make lint`: exit code 1 where a gate is passed
    python -m tools.structure --write         # `make figures`: docs/architecture.md, and the limits

``tools.structure.trace`` and ``tools.structure.source`` say what each figure counts.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.structure import source, subjects

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "isobit"
GATES = Path(__file__).with_name("gates.toml")
EXCEPTIONS = Path(__file__).with_name("exceptions.toml")
PAGE = ROOT / "docs" / "architecture.md"
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, and the names that make it where they can be listed."""

    value: int
    counted: Any = None


Figures = dict[str, Figure]


@dataclass(frozen=True, slots=True)
class Gate:
    """The limit of one figure."""

    name: str
    limit: int
    goal: int
    is_minimum: bool

    def allows(self, value: int) -> bool:
        return value >= self.limit if self.is_minimum else value <= self.limit

    def tightened(self, value: int) -> int:
        """The limit that the measured value allows: towards the goal, not beyond it or back."""
        if self.is_minimum:
            return max(self.limit, min(value, self.goal))
        return min(self.limit, max(value, self.goal))


def figures_of(tree: Path) -> Figures:
    """All figures of the package's folder."""
    sources, traced = source.read_tree(tree), trace(tree)
    above = [file for file in traced["token_files"] if not file.startswith("kernels")]
    return {
        "modules": Figure(sum(one.is_module for one in sources)),
        "lines": Figure(sum(len(one.lines) for one in sources)),
        "median module, lines": Figure(source.median_module(sources)),
        **figures_of_text(tree, sources, subjects.Exceptions.read(EXCEPTIONS.read_text())),
        "files from prompt to gradient": counted(traced["token_files"]),
        "of these above kernels/": counted(above),
        "of these that hand a container over": counted(traced["hand_overs"]),
        "the same, with an environment": counted(traced["environment_files"]),
        "the same, with a lag": counted(traced["lag_files"]),
        "containers from prompt to gradient": counted(traced["containers"]),
        "files of a run's configuration": counted(traced["config_files"]),
        "climbs of a run's configuration": counted(traced["climbs"]),
        "files from safetensors to GEMM": counted(traced["weight_files"]),
        "files of a checkpoint write": counted(traced["checkpoint_files"]),
        "files of a logged step": counted(traced["log_files"]),
        "files of a reward collection": counted(traced["reward_files"]),
    }


def counted(names: Any) -> Figure:
    """The number of names."""
    return Figure(len(names), names)


def figures_of_text(
    tree: Path, sources: list[source.Source], exceptions: subjects.Exceptions
) -> Figures:
    """The figures that are read, without running anything."""
    modules = subjects.unconnected_modules(sources)
    classes = subjects.repeated_classes(sources)
    margin = range(source.LARGE - source.MARGIN, source.LARGE + 1)
    return {
        "modules with two subjects": counted(
            [f"{path} ({parts})" for path, parts in modules.items() if path not in exceptions.parts]
        ),
        "class names that stand for two things": counted(
            [f"{name}: {paths}" for name, paths in classes.items() if name not in exceptions.words]
        ),
        "docstrings that begin with a preposition": counted(subjects.fragments(sources)),
        "commands without a file of their name": counted(subjects.commands_elsewhere(sources)),
        "modules under 40 lines": counted(
            source.modules_sized(sources, lambda n: n < source.SMALL)
        ),
        "modules over 600 lines": counted(
            source.modules_sized(sources, lambda n: n > source.LARGE)
        ),
        "modules of 580 to 600 lines": counted(
            source.modules_sized(sources, lambda n: n in margin)
        ),
        "functions over 60 lines": counted(source.long_functions(sources)),
        "lines of prose over 100 columns": counted(source.wide_prose(tree.parents[1], sources)),
    }


def trace(tree: Path) -> dict[str, Any]:
    """What ``tools.structure.trace`` prints, from a process that imports the tree."""
    path = os.pathsep.join((str(tree.parent), str(ROOT)))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    order = json.dumps(list(layers().values()))
    command = [sys.executable, "-m", "tools.structure.trace", str(tree), order]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise SystemExit(f"{tree}: its step cannot be traced:\n{done.stderr.strip()}")
    return json.loads(done.stdout.splitlines()[-1])


def read_gates(text: str) -> list[Gate]:
    """The gates of ``gates.toml``."""
    tables = tomllib.loads(text)
    return [
        Gate(name, gate["limit"], gate["goal"], table == "at_least")
        for table in ("at_most", "at_least")
        for name, gate in tables[table].items()
    ]


def failures(gates: list[Gate], figures: Figures) -> list[str]:
    """A message for each figure that its gate does not allow, with the names that were counted."""
    found = []
    for gate in gates:
        figure = figures[gate.name]
        if not gate.allows(figure.value):
            side = "at least" if gate.is_minimum else "at most"
            found.append(f"{gate.name}: {figure.value}, should be {side} {gate.limit}")
            found += [f"    {name}" for name in figure.counted or ()]
    return found


def tightened(text: str, gates: list[Gate], figures: Figures) -> str:
    """``gates.toml`` with each limit as near to its goal as the figures allow."""
    for gate in gates:
        limit = gate.tightened(figures[gate.name].value)
        text = re.sub(rf'(?m)^("{re.escape(gate.name)}" = {{ limit = )\d+', rf"\g<1>{limit}", text)
    return text


def with_figures(page: str, figures: Figures, gates: list[Gate]) -> str:
    """docs/architecture.md with what stands between its markers written anew."""
    blocks: dict[str, Callable[[], str]] = {
        "packages": lambda: package_table(page),
        "gates": lambda: gate_table(gates, figures),
        "token": lambda: walk(figures["files from prompt to gradient"]),
        "weight": lambda: walk(figures["files from safetensors to GEMM"]),
        "config": lambda: walk(figures["files of a run's configuration"]),
        "reward": lambda: walk(figures["files of a reward collection"]),
        "checkpoint": lambda: walk(figures["files of a checkpoint write"]),
        "log": lambda: walk(figures["files of a logged step"]),
    }
    return BLOCK.sub(lambda found: f"{found[1]}\n{blocks[found[2]]()}\n\n{found[3]}", page)


def package_table(page: str) -> str:
    """Each package of the four layers with its modules and lines, and the words that the page has
    for it.
    """
    sizes = source.packages(source.read_tree(PACKAGE))
    words = dict(
        re.findall(r"^\|.*\| `([\w.]+)/?` \| \d+ \| [\d.]+k \| (.*) \|$", page, re.MULTILINE)
    )
    lines = ["| layer | package | modules | lines | what it is |", "|---|---|---:|---:|---|"]
    for layer, names in layers().items():
        for name in names:
            modules, size = sizes.pop(name)
            shown = f"{name}/" if (PACKAGE / name).is_dir() else f"{name}.py"
            about = words.get(shown.rstrip("/"), "(describe it here)")
            lines.append(f"| {layer} | `{shown}` | {modules} | {size / 1000:.1f}k | {about} |")
            layer = ""
    if sizes:
        raise SystemExit(f"no layer of pyproject.toml names {', '.join(sizes)}; add them there")
    return "\n".join(lines)


def layers() -> dict[str, list[str]]:
    """The packages of each layer, from the contract that import-linter checks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    (contract,) = (one for one in contracts if one["name"].startswith("Four layers"))
    names = contract["name"].partition(": ")[2].split(", ")
    modules = [layer.replace("isobit.", "").split(" : ") for layer in contract["layers"]]
    return dict(zip(names, modules, strict=True))


def gate_table(gates: list[Gate], figures: Figures) -> str:
    """A line a gate: today's value, the limit and the goal."""
    lines = ["| | today | limit | goal |", "|---|---:|---:|---:|"]
    for gate in gates:
        value, sign = figures[gate.name].value, "≥ " if gate.is_minimum else ""
        lines.append(f"| {gate.name} | {value} | {sign}{gate.limit} | {sign}{gate.goal} |")
    return "\n".join(lines)


def walk(figure: Figure) -> str:
    """The files of a walk in the order of their first call, neighbours in one folder together."""
    steps: list[tuple[str, list[str]]] = []
    for file in figure.counted:
        folder, slash, name = file.removesuffix(".py").rpartition("/")
        if not steps or steps[-1][0] != folder + slash:
            steps.append((folder + slash, []))
        steps[-1][1].append(name)
    words = [
        folder + (names[0] if len(names) == 1 else "{" + ",".join(names) + "}")
        for folder, names in steps
    ]
    return f"{figure.value} files:\n\n```text\n{source.filled(words, ' > ')}\n```"


def table(names: list[str], trees: list[Figures]) -> str:
    """A line a figure, a column a tree, in Markdown."""
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for name in trees[0]:
        values = " | ".join(f"{tree[name].value:,}" for tree in trees)
        lines.append(f"| {name} | {values} |")
    return "\n".join(lines)


def check() -> int:
    """Print what passes a gate, and where the pages do not have today's figures -> exit code."""
    figures, gates = figures_of(PACKAGE), read_gates(GATES.read_text())
    problems = failures(gates, figures)
    exceptions = subjects.Exceptions.read(EXCEPTIONS.read_text())
    problems += [
        f"{EXCEPTIONS.name}: {name} is no exception any more; make figures"
        for name in exceptions.stale(source.read_tree(PACKAGE))
    ]
    page = PAGE.read_text(encoding="utf-8")
    if with_figures(page, figures, gates) != page:
        problems.append(f"{PAGE.relative_to(ROOT)} has other figures than the code; make figures")
    print("\n".join(problems) or "structure: every figure is within its limit")
    return int(bool(problems))


def write() -> None:
    """Tighten the limits, drop stale exceptions, and write the figures into the pages."""
    named = EXCEPTIONS.read_text()
    stale = subjects.Exceptions.read(named).stale(source.read_tree(PACKAGE))
    EXCEPTIONS.write_text(subjects.without(named, stale))
    figures, text = figures_of(PACKAGE), GATES.read_text()
    GATES.write_text(tightened(text, read_gates(text), figures))
    gates = read_gates(GATES.read_text())
    page = with_figures(PAGE.read_text(encoding="utf-8"), figures, gates)
    PAGE.write_text(page, encoding="utf-8")


def show(trees: list[Path], as_json: bool) -> None:
    """Print the figures of trees."""
    figures = {str(tree): figures_of(tree.resolve()) for tree in trees}
    if as_json:
        print(json.dumps(figures, default=asdict, indent=2))
    else:
        print(table(list(figures), list(figures.values())))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.structure")
    parser.add_argument("trees", nargs="*", type=Path, default=[PACKAGE], metavar="TREE")
    parser.add_argument("--json", action="store_true", help="figures and names as JSON")
    parser.add_argument("--check", action="store_true", help="fail where a gate is passed")
    parser.add_argument("--write", action="store_true", help="write limits and pages anew")
    options = parser.parse_args()
    if options.check:
        return check()
    if options.write:
        write()
    else:
        show(options.trees, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
