"""``benchmarks.memory``: its tables are those of the page, and its two steps run, small, on a
CPU.
"""

from pathlib import Path

from tests.forked import ran

ROOT = Path(__file__).parents[2]


def test_the_page_holds_the_tables(tmp_path: Path) -> None:
    done = ran("tests.forked:be_module", tmp_path, "benchmarks.memory", "plan")
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    for table in done.stdout.strip().split("\n\n"):
        assert table in page, (
            f"docs/memory.md has another table than benchmarks.memory plan:\n{table}"
        )
