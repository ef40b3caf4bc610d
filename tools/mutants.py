"""Plant faults of one line, one at a time, and see whether the tests find them.

    python -m tools.mutants                  # all of tools/mutants.toml
    python -m tools.mutants NAME ...         # these
    python -m tools.mutants --list
    python -m tools.mutants --all            # by the tests of `make test-all`, not of `make test`

A fault is planted in a copy of ``src``, never in the tree.  Its tests run until one fails; a fault
that none of them finds is printed, and the exit code is 1.  Each entry of the table is

    [[mutant]]
    name = "what is wrong then"
    file = "models/safetensors.py"           # below src/isobit
    old = 'a piece of text that stands in the file once'
    new = 'what stands there instead'
    tests = ["tests/store/test_ranks.py"]    # what pytest is given, with -k or :: where it helps
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import pytest

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("mutants.toml")
LIMIT_S = 900
"""Of the tests of one fault; longer counts as found, since a test that hangs fails in the end."""


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def plant(self, package: Path) -> None:
        """Change a copy of the package. Raises ValueError where the text does not stand there
        once.
        """
        path = package / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has {text.count(self.old)} x {self.old!r}")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


def read_table(path: Path = TABLE) -> list[Mutant]:
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def is_found(mutant: Mutant, words: Sequence[str] = ()) -> tuple[bool, str]:
    """Whether a test fails with the fault, and the last line of pytest. Raises RuntimeError where
    pytest cannot run its tests. ``words`` are further ones for pytest.
    """
    with tempfile.TemporaryDirectory(prefix="isobit-mutant-") as made:
        source = Path(made) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        mutant.plant(source / "isobit")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(  # noqa: S603
                [*command, *words, *mutant.tests],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return True, f"no end within {LIMIT_S} s"
    last = done.stdout.strip().splitlines()[-1:] or [done.stderr.strip()[-200:]]
    if done.returncode not in (0, 1, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"{mutant.name}: pytest ended with {done.returncode}: {last[0]}")
    return done.returncode == 1, last[0]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="of the table; all by default")
    parser.add_argument("--list", action="store_true", help="print the names, run nothing")
    parser.add_argument("--all", action="store_true", help="with the tests of `make test-all`")
    options = parser.parse_args(words)
    table = read_table()
    if unknown := set(options.names) - {mutant.name for mutant in table}:
        parser.error(f"not in {TABLE.name}: {', '.join(sorted(unknown))}")
    wanted = [mutant for mutant in table if not options.names or mutant.name in options.names]
    if options.list:
        print("\n".join(mutant.name for mutant in wanted))
        return 0
    missed = 0
    for mutant in wanted:
        began = perf_counter()
        found, last = is_found(mutant, ["--all"] if options.all else [])
        missed += not found
        how = "found" if found else "NOT FOUND"
        print(f"{how}  {mutant.name} ({mutant.file}; {perf_counter() - began:.0f} s; {last})")
        sys.stdout.flush()
    print(f"{len(wanted) - missed} of {len(wanted)} found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
