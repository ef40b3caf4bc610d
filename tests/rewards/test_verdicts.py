"""A table of references and completions, each with the verdict that a person gave it, in the forms
of GSM8K, MATH, multiple choice and others.

Keys of ``verdicts.jsonl``: ``form``, ``reference``, ``completion``, ``verdict`` (1, 0, "missing" or
"unreadable"); where they are not the default, ``grader`` and ``options``; and the public ``report``
that a row comes from (experiments/field_reports.md).
"""

import json
from pathlib import Path
from typing import Any

import pytest

from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Prompt
from isobit.rewards.graders.text import (
    MissingReferenceError,
    UnreadableReferenceError,
    exact_match,
)

UNUSABLE = {"missing": MissingReferenceError, "unreadable": UnreadableReferenceError}
ROWS: list[dict[str, Any]] = [
    json.loads(line)
    for line in (Path(__file__).parent / "verdicts.jsonl").read_text(encoding="utf-8").splitlines()
]


def verdict(row: dict[str, Any]) -> Any:
    from isobit.rewards.graders.math import score

    graders = {"math_verify": score, "exact_match": exact_match}
    prompt = Prompt("train/0", "", (1,), {"answer": row["reference"]})
    completion = Completion(TokenSequence.of_answer((1,), (2,)), row["completion"], "stop")
    grader = graders[row.get("grader", "math_verify")]
    try:
        return grader(prompt, completion, **row.get("options", {}))
    except (MissingReferenceError, UnreadableReferenceError) as error:
        return error.kind


def test_the_table_has_the_forms() -> None:
    assert len(ROWS) >= 200
    counts = {form: sum(row["form"] == form for row in ROWS) for form in {r["form"] for r in ROWS}}
    assert min(counts["gsm8k"], counts["math"]) >= 50 and counts["multiple choice"] >= 20
    assert 80 < sum(row["verdict"] == 0 for row in ROWS) < len(ROWS) - 80


@pytest.mark.few(1)
@pytest.mark.parametrize("form", sorted({row["form"] for row in ROWS}))
def test_verdicts(form: str) -> None:
    wrong = [
        (row, found)
        for row in ROWS
        if row["form"] == form and (found := verdict(row)) != row["verdict"]
    ]
    assert wrong == []
