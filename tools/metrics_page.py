"""The tables of ``docs/metrics.md``, from the table of metrics (``isobit.records.metrics``).

    python -m tools.metrics_page     # write them again, between their markers (make schema)

The prose around the tables is the page's own.  A table stands between ``<!-- metrics: SECTION -->``
and ``<!-- end -->``.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from isobit.records.metrics import TABLE, Metric

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
_MARKED = re.compile(r"(<!-- metrics: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
_COMMANDS = {
    ("train",): "",
    ("sft",): " (`sft`)",
    ("preference",): " (`sft`, pairs)",
    ("sft", "preference"): " (`sft`)",
}
"""What follows a name that not every run writes."""


def with_tables(page: str) -> str:
    """The page with its tables as the rows have them.  Raises KeyError for a section that the table
    of metrics lacks, and ValueError for one that the page lacks.
    """
    found = [match[1] for match in re.finditer(r"<!-- metrics: (.+?) -->", page)]
    if sorted(found) != sorted(TABLE):
        raise ValueError(f"the page has the sections {found}, the table {list(TABLE)}")
    return _MARKED.sub(lambda match: match[1] + _table(TABLE[match[2]]) + match[3], page)


def _table(metrics: Sequence[Metric]) -> str:
    rows = [_row(metric) for metric in metrics]
    return "\n".join(["| metric | unit | meaning | healthy |", "|---|---|---|---|", *rows, ""])


def _row(metric: Metric) -> str:
    healthy = metric.healthy
    if metric.exact is not None:
        exact = f"exact flow: {metric.exact:g}"
        healthy = f"{exact}; {healthy}" if healthy else exact
    name = f"`{metric.name}`{_COMMANDS.get(metric.runs, '')}"
    return f"| {name} | {metric.unit} | {metric.help} | {healthy} |"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
