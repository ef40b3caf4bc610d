"""The scorers of reasoning-gym's tasks.

A prompt's row holds the task's entry and, under ``reasoning_gym``, the name, size, seed and options
of its task; the scorer is built again from those.  The answer that is scored is what stands in the
last ``<answer>...</answer>`` of the completion, or the whole completion where there is none,
without white space around it.

Some of the library's scorers run the model's answer as Python, through ``eval`` or sympy's parser,
and one builds a list as long as the answer asks for.  Those are refused: text that a model wrote
must neither be executed nor decide how much memory a run takes.
"""

import json
import re
from functools import cache
from typing import Any

from isobit.data.tasks import TASK_COLUMN, Task, create_task
from isobit.errors import RewardError
from isobit.records.text import Completion, Prompt

ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)

EXECUTES_ANSWERS = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Tasks whose ``score_answer`` hands the answer to ``eval`` or to sympy's ``parse_expr``, which
executes it; true of 0.1.25.
"""

EXPANDS_ANSWERS = frozenset({"rubiks_cube"})
"""Tasks whose ``score_answer`` repeats a part of the answer as often as the answer says:
``R999999999`` is a billion moves.
"""


def final_answer(text: str) -> str:
    """The answer a completion gives: the last ``<answer>...</answer>``, or all of it; stripped."""
    answers = ANSWER.findall(text)
    return (answers[-1] if answers else text).strip()


def score_task(prompt: Prompt, completion: Completion) -> float:
    """The task's own score of the completion's final answer, in most tasks within 0 and 1.

    Raises ``RewardError`` for a prompt that comes from no reasoning-gym task and for a task whose
    scorer executes or expands answers.
    """
    identity = prompt.row.get(TASK_COLUMN)
    if identity is None:
        raise RewardError(
            f"prompt {prompt.id} comes from no reasoning-gym task; name a reward function of your "
            "own in reward.function"
        )
    entry = {name: value for name, value in prompt.row.items() if name != TASK_COLUMN}
    return _task(json.dumps(identity, sort_keys=True)).score_answer(
        final_answer(completion.text), entry
    )


@cache
def _task(identity: str) -> Task:
    fields: dict[str, Any] = json.loads(identity)
    tasks = {fields["task"], *(part.get("name") for part in fields["options"].get("datasets", ()))}
    dangers = {
        "executes the model's answer as Python": EXECUTES_ANSWERS,
        "expands the model's answer without a bound": EXPANDS_ANSWERS,
    }
    for danger, dangerous in dangers.items():
        if refused := sorted(tasks & dangerous):
            raise RewardError(
                f"reasoning-gym's scorer of {', '.join(map(repr, refused))} {danger}; "
                "write a reward function that only reads it, and name it in reward.function"
            )
    return create_task(
        fields["task"], size=fields["size"], seed=fields["seed"], options=fields["options"]
    )
