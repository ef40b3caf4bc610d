"""reasoning-gym's own scorers: rebuilt from a row, refused where they execute what the model wrote,
and none that an answer of ill will hangs, breaks or wins.
"""

import ast
import inspect
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isobit.config.data import ReasoningGymData
from isobit.data.sources import load_rows
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Prompt
from isobit.rewards import counts
from isobit.rewards.graders import reasoning_gym as grader
from isobit.rewards.graders.reasoning_gym import (
    EXECUTES_ANSWERS,
    EXPANDS_ANSWERS,
    FORMS,
    LONGEST,
    PAYS_FOR_ANY_ANSWER,
)
from isobit.util.errors import RewardError

EVALUATING = {"eval", "exec", "parse_expr", "sympify", "S"}


def prompts(task: str, size: int, **options: Any) -> list[Prompt]:
    rows = load_rows(ReasoningGymData(task=task, size=size, options=options))
    return [
        Prompt(f"train/{index}", str(row.prompt), (1,), row.columns)
        for index, row in enumerate(rows)
    ]


def prompt(task: str, **options: Any) -> Prompt:
    return prompts(task, 1, **options)[0]


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    counts.take()
    yield
    counts.take()


def score(prompt: Prompt, text: str) -> float:
    return grader.score(prompt, Completion(TokenSequence.of_answer((1,), (2,)), text, "stop"))


@pytest.mark.parametrize("task", ["chain_sum", "spell_backward", "decimal_arithmetic"])
def test_the_tasks_own_answer_scores_one(task: str) -> None:
    made = prompt(task)
    assert score(made, f"I think <answer>{made.row['answer']}</answer>.") == 1.0
    assert score(made, made.row["answer"]) == 1.0
    assert score(made, "<answer>nothing of the kind</answer>") < 1.0


def test_answers_inside_thinking_score_nothing() -> None:
    made = prompt("chain_sum")
    answer = f"<answer>{made.row['answer']}</answer>"
    assert score(made, f"<think>{answer}") == score(made, f"<think>{answer}</think>") == 0.0
    assert counts.take() == {"reasoning_gym: unfinished thinking": 1}
    assert score(made, f"<think>1?</think>{answer}") == 1.0
    completion = Completion(TokenSequence.of_answer((1,), (2,)), f"<think>{answer}", "stop")
    assert grader.score(made, completion, read_thinking=True) == 1.0


def test_the_scorer_sees_the_options_of_the_task() -> None:
    """decimal_arithmetic accepts an error of one unit in the last place of its own precision."""
    coarse = prompt("decimal_arithmetic", min_num_decimal_places=2, max_num_decimal_places=2)
    fine = prompt("decimal_arithmetic", min_num_decimal_places=6, max_num_decimal_places=6)
    for made, expected in ((coarse, 1.0), (fine, 0.0)):
        assert score(made, str(float(made.row["answer"]) + 0.009)) == expected


def test_a_row_survives_json() -> None:
    made = prompt("chain_sum")
    row = json.loads(json.dumps(dict(made.row)))
    assert score(Prompt(made.id, made.text, made.token_ids, row), row["answer"]) == 1.0


def test_a_prompt_of_no_task_is_an_error() -> None:
    with pytest.raises(RewardError, match="prompt train/0 comes from no reasoning-gym task"):
        score(Prompt("train/0", "1+1=", (1,), {"answer": "2"}), "2")


def test_a_scorer_that_executes_answers_is_refused() -> None:
    with pytest.raises(
        RewardError, match="scorer of 'countdown' executes the model's answer as Python"
    ):
        score(prompt("countdown"), "1+1")
    mixed = {
        "datasets": [
            {"name": "chain_sum", "weight": 1, "config": {}},
            {"name": "n_queens", "weight": 1, "config": {}},
        ]
    }
    made = Prompt(
        "train/0",
        "",
        (1,),
        {
            "answer": "",
            "reasoning_gym": {"task": "composite", "size": 1, "seed": 0, "options": mixed},
        },
    )
    with pytest.raises(RewardError, match="scorer of 'n_queens' executes"):
        score(made, "1+1")


def test_a_scorer_that_expands_answers_is_refused() -> None:
    with pytest.raises(
        RewardError, match="scorer of 'rubiks_cube' expands the model's answer without a bound"
    ):
        score(prompt("rubiks_cube"), "R999999999")


def executes_answer(task: str) -> bool:
    """Whether the task's ``score_answer`` calls an evaluating function with ``answer`` among its
    arguments.
    """
    from reasoning_gym.factory import DATASETS

    tree = ast.parse(textwrap.dedent(inspect.getsource(DATASETS[task][0].score_answer)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    evaluating = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] in EVALUATING]
    names = {
        node.id
        for call in evaluating
        for argument in call.args
        for node in ast.walk(argument)
        if isinstance(node, ast.Name)
    }
    return "answer" in names


def test_the_list_of_executing_scorers_is_complete() -> None:
    from reasoning_gym.factory import DATASETS

    assert {task for task in DATASETS if executes_answer(task)} == EXECUTES_ANSWERS


@pytest.mark.parametrize("task", sorted(PAYS_FOR_ANY_ANSWER))
def test_a_scorer_that_pays_for_any_answer_is_refused(task: str) -> None:
    with pytest.raises(RewardError, match=f"'{task}' gives full marks for wrong answers"):
        score(prompt(task), "banana")


def test_the_refused_ones_do_pay() -> None:
    """What would show that a newer library has mended them."""
    from reasoning_gym.factory import DATASETS

    for task, wrong in (("coin_flip", "0"), ("game_of_life_halting", "banana")):
        made = DATASETS[task][0](DATASETS[task][1](size=20, seed=0))
        entries = [made[index] for index in range(20)]
        paid = [made.score_answer(wrong, entry) for entry in entries if entry["answer"] != wrong]
        assert paid.count(1.0) > 5, task


@pytest.mark.parametrize("task", sorted(FORMS))
def test_the_tasks_own_answers_have_its_form(task: str) -> None:
    for made in prompts(task, 12):
        answer = made.row["answer"] or made.row["metadata"].get("example_answer")
        if answer is not None:
            assert score(made, str(answer)) == 1.0, (made.row["question"], answer)
    assert counts.take() == {}


@pytest.mark.parametrize(
    ("task", "answer", "kind"),
    [
        ("complex_arithmetic", "nan", "form"),
        ("complex_arithmetic", "NaN+1i", "form"),
        ("complex_arithmetic", "inf-infj", "form"),
        ("gsm_symbolic", "9**9**9**9", "form"),
        ("gsm_symbolic", "-28080", "form"),
        ("polynomial_equations", "banana", "form"),
        ("polynomial_equations", ",", "form"),
        ("polynomial_equations", "nan", "form"),
        ("propositional_logic", "banana", "form"),
        ("propositional_logic", "0", "form"),
        ("propositional_logic", "(" * 5000 + "P", "form"),
        ("rush_hour", "F+1000000000", "form"),
        ("rush_hour", "A-1 F+100 A-2", "form"),
        ("rush_hour", "F+1 " * 1000, "form"),
        ("prime_factorization", "banana", "scorer raised"),
        ("boxnet", "null", "scorer raised"),
        ("game_of_life", "{}", "scorer raised"),
        ("chain_sum", "1" * (LONGEST + 100), "length"),
    ],
)
def test_hostile_answers_score_zero_and_are_counted(task: str, answer: str, kind: str) -> None:
    for made in prompts(task, 3):
        assert score(made, answer) == 0.0
        assert counts.take() == {f"reasoning_gym: {kind}": 1}


def test_moves_of_a_car_are_still_moves() -> None:
    assert 0.0 < score(prompt("rush_hour"), "F+1 K+1 M-1 C+3") < 0.1


def test_a_scorer_that_takes_too_long_scores_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
            while True:
                try:
                    sum(range(10**6))
                except Exception:
                    continue

    made = prompt("chain_sum")
    monkeypatch.setattr(grader, "_task", lambda identity: Slow())
    completion = Completion(TokenSequence.of_answer((1,), (2,)), "5", "stop")
    assert grader.score(made, completion, seconds=0.1) == 0.0
    assert counts.take() == {"reasoning_gym: time limit": 1}


def test_a_task_whose_own_answer_raises_is_no_wrong_answer() -> None:
    made = prompt("prime_factorization")
    broken = Prompt(made.id, made.text, (1,), {**made.row, "answer": "broken"})
    with pytest.raises(ValueError, match="invalid literal"):
        score(broken, "2 x 3")


def test_a_scorer_leaves_the_row_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """knight_swap's writes into the entry it is given."""

    class Writes:
        def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
            entry["metadata"]["answers"] = [answer]
            return 1.0

    made = prompt("chain_sum")
    before = json.dumps(dict(made.row))
    monkeypatch.setattr(grader, "_task", lambda identity: Writes())
    assert score(made, "5") == 1.0
    assert json.dumps(dict(made.row)) == before


PARTIAL = {
    "calendar_arithmetic": 0.13,  # by the distance to the right number
    "figlet_font": 0.21,
    "futoshiki": 0.06,
    "mini_sudoku": 0.06,
    "spell_backward": 0.43,
    "time_intervals": 0.97,  # by the distance to the right number of days
    "tsumego": 0.23,  # by the share of the text that is the answer, in capitals
}
"""What some scorers give for a part of the answer, or for an answer near it, in 20 entries each.
The rest give at most 0.05 for anything that they can read, and the share of the text that is the
answer where a text holds it.
"""


@pytest.mark.exhaustive
def test_no_hostile_answer_hangs_breaks_or_wins_a_task() -> None:
    """Every task of the library against every answer of `hostile_answers`, in another process."""
    from reasoning_gym.factory import DATASETS

    script = Path(__file__).with_name("hostile_answers.py")
    source = Path(grader.__file__).parents[3]
    swept = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(source)},
        check=True,
    )
    results = [json.loads(line) for line in swept.stdout.splitlines()]
    refused = EXECUTES_ANSWERS | EXPANDS_ANSWERS | PAYS_FOR_ANY_ANSWER
    assert {result["task"] for result in results} == set(DATASETS) - refused - {"composite"}
    assert [
        (result["task"], entry, answer, given)
        for result in results
        for entry, answer, given in result["paid"]
        if not isinstance(given, float) or given > PARTIAL.get(result["task"], 0.05)
    ] == []
    assert [result["task"] for result in results if "time limit" in str(result["counts"])] == []
    assert [result["task"] for result in results if result["own answers not 1"]] == []
    assert not Path("/tmp/isobit-executed").exists()
