"""Print the figures of one source tree, or of several side by side.

    python -m tools.house                                         # src/isobit
    python -m tools.house ../before/src/isobit src/isobit         # before and after
    python -m tools.house --list                                  # and what was counted
    python -m tools.house --json > house.json

What each line counts is said in ``tools.house.passes`` and ``tools.house.source``.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.house import source

ROOT = Path(__file__).parents[2]
Figures = dict[str, tuple[str, Any]]
"""Line of the table -> its figure as text, and what was counted."""


def figures_of(tree: Path) -> Figures:
    """All figures of a package's folder."""
    sources, passed = source.read_tree(tree), measure_passes(tree)
    token_files, weight_files = passed["token_files"], passed["weight_files"]
    above = [file for file in token_files if not file.startswith("kernels")]
    code, prose = source.device_files(sources)
    known = [file for file, words in code.items() if source.OWN_CODE.search(" ".join(words))]
    climbs, upward = source.climbs(sources), source.upward_imports(sources)
    (file, file_lines), (function, function_lines) = source.largest(sources)
    typed, documented = source.typed(sources), source.documented(sources)
    rooms = ", ".join(f"{room} {len(names)}" for room, names in sorted(climbs.items()))
    return {
        "files": (f"{len(sources)}", None),
        "lines": (f"{sum(len(one.lines) for one in sources):,}", None),
        "files from prompt to gradient": (f"{len(token_files)}", token_files),
        "  of these above kernels/": (f"{len(above)}", None),
        "  of these that hand a container over": (
            f"{len(passed['hand_overs'])}",
            passed["hand_overs"],
        ),
        "containers from prompt to gradient": (
            f"{len(passed['containers'])}",
            passed["containers"],
        ),
        "files from safetensors to GEMM": (f"{len(weight_files)}", weight_files),
        "files above kernels/ that name a device": (f"{len(code)}", code),
        "  of these that know its own code": (f"{len(known)}", known),
        "  besides: in prose alone": (
            f"{len(prose.keys() - code.keys())}",
            {file: prose[file] for file in sorted(prose.keys() - code.keys())},
        ),
        "functions that take the whole configuration": (
            f"{sum(map(len, climbs.values()))} ({rooms})",
            climbs,
        ),
        "imports that go up": (f"{len(upward)}", upward),
        "largest file, lines": (f"{file_lines} ({file})", None),
        "largest function, lines": (f"{function_lines} ({function})", None),
        "functions with full types": (_share(typed), typed.missing),
        "public names with docstrings": (_share(documented), documented.missing),
    }


def measure_passes(tree: Path) -> dict[str, Any]:
    """What ``tools.house.passes`` prints, from a process that imports the tree."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(tree.parent), str(ROOT))),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tools.house.passes", str(tree)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise SystemExit(f"{tree}: its step cannot be watched:\n{done.stderr.strip()}")
    return json.loads(done.stdout.splitlines()[-1])


def table(names: list[str], trees: list[Figures]) -> str:
    """A line a figure, a column a tree, in Markdown."""
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for name in trees[0]:
        text = name.replace("  ", "\N{NO-BREAK SPACE}" * 3)
        lines.append(f"| {text} | " + " | ".join(tree[name][0] for tree in trees) + " |")
    return "\n".join(lines)


def _share(share: source.Share) -> str:
    return f"{share.there / max(1, share.of):.1%} of {share.of}"


def _listing(figures: Figures) -> str:
    parts = [
        f"{name.strip()}\n{json.dumps(counted, indent=2)}"
        for name, (_, counted) in figures.items()
        if counted
    ]
    return "\n\n".join(parts)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.house", description="Count the house.")
    parser.add_argument(
        "trees", nargs="*", type=Path, default=[ROOT / "src" / "isobit"], metavar="TREE"
    )
    parser.add_argument("--json", action="store_true", help="figures and lists as JSON")
    parser.add_argument("--list", action="store_true", help="what was counted, below the table")
    options = parser.parse_args()
    trees = [tree.resolve() for tree in options.trees]
    figures = [figures_of(tree) for tree in trees]
    if options.json:
        found = {
            str(tree): {
                name.strip(): {"figure": text, "counted": counted}
                for name, (text, counted) in one.items()
            }
            for tree, one in zip(trees, figures, strict=True)
        }
        print(json.dumps(found, indent=2))
        return
    print(table([str(tree) for tree in options.trees], figures))
    if options.list:
        for tree, one in zip(options.trees, figures, strict=True):
            print(f"\n## {tree}\n\n{_listing(one)}")


if __name__ == "__main__":
    main()
