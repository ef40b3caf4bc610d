"""reasoning-gym's own scorers: rebuilt from a row, and refused where they execute what the model
wrote.
"""

import ast
import inspect
import json
import textwrap
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from isobit.config.data import ReasoningGymData
from isobit.data.sources import load_rows
from isobit.errors import RewardError
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Prompt
from isobit.rewards.task_scorer import EXECUTES_ANSWERS, final_answer, score_task

EVALUATING = {"eval", "exec", "parse_expr", "sympify", "S"}


def prompt(task: str, **options: Any) -> Prompt:
    (row,) = load_rows(ReasoningGymData(task=task, size=1, options=options))
    return Prompt("train/0", str(row.prompt), (1,), row.columns)


def score(prompt: Prompt, text: str) -> float:
    return score_task(prompt, Completion(TokenSequence.of_answer((1,), (2,)), text, "stop"))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 22\n", "22"),
        ("so <answer> 22 </answer> it is", "22"),
        ("<answer>21</answer> no, <answer>22</answer>", "22"),
        ("<answer>2\n2</answer>", "2\n2"),
        ("<answer>22", "<answer>22"),
        ("<answer><answer>22</answer>", "22"),
        ("<answer></answer>", ""),
        ("", ""),
    ],
)
def test_final_answer(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize("task", ["chain_sum", "spell_backward", "decimal_arithmetic"])
def test_the_tasks_own_answer_scores_one(task: str) -> None:
    made = prompt(task)
    assert score(made, f"I think <answer>{made.row['answer']}</answer>.") == 1.0
    assert score(made, made.row["answer"]) == 1.0
    assert score(made, "<answer>nothing of the kind</answer>") < 1.0


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
    assert {task for task in DATASETS if executes_answer(task)} == EXECUTES_ANSWERS
