"""The table of planted faults fits the tree, and a fault is planted in a copy alone."""

from pathlib import Path

import pytest

from tools.mutants import ROOT, Mutant, read_table

PACKAGE = ROOT / "src" / "isobit"


@pytest.mark.parametrize("mutant", read_table(), ids=lambda mutant: mutant.name)
def test_a_fault_can_be_planted_and_names_tests_that_exist(mutant: Mutant, tmp_path: Path) -> None:
    text = (PACKAGE / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    copy = tmp_path / mutant.file
    copy.parent.mkdir(parents=True)
    copy.write_text(text)
    mutant.plant(tmp_path)
    compile(copy.read_text(), mutant.file, "exec")
    assert copy.read_text() != text
    assert (PACKAGE / mutant.file).read_text() == text
    files = [word.partition("::")[0] for word in mutant.tests if word.startswith("tests/")]
    assert files
    assert all((ROOT / file).exists() for file in files)


def test_names_are_unique() -> None:
    names = [mutant.name for mutant in read_table()]
    assert len(set(names)) == len(names)


def test_text_that_has_gone_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"a fault: a\.py has 0 x 'y = 1'"):
        Mutant("a fault", "a.py", "y = 1", "y = 2", ("tests",)).plant(tmp_path)
